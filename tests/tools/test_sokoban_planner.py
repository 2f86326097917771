"""The perceptron that plans Sokoban from words read without a mistake."""

from __future__ import annotations

import pytest
import torch

from envs.boards.board import MOVES, Board, board_from_config
from envs.boards.generate import BoardSpec, make_board
from envs.boards.solver import optimal_first_moves
from envs.sokoban import OFF_TARGET_REWARD
from tests.bench.sokoban.best_return import measure
from tests.bench.sokoban.planner import Perceptron, Reader, play, solved, teach, update

WALL, FLOOR, TARGET = 0, 1, 2


def board(rows: list[list[int]], box: tuple[int, int], player: tuple[int, int]) -> Board:
    closed = [[WALL] * 6, *([WALL, *row, WALL] for row in rows), [WALL] * 6]
    return board_from_config({"initial_base_grid": closed, "initial_boxes": [box], "initial_player": player})


NEAR = board([[1, 1, 1, 1], [1, 1, 1, 2], [1, 1, 1, 1], [1, 0, 1, 1]], (2, 3), (2, 1))
ASKEW = board([[1, 1, 1, 2], [1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 1, 1]], (2, 3), (2, 1))
TURNED = board([[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 2]], (3, 3), (1, 3))


def test_a_turned_board_reads_alike_in_its_boxs_frame():
    reader = Reader()
    assert reader(ASKEW).words == reader(TURNED).words != reader(NEAR).words
    assert reader(ASKEW).moves[0] == "up" and reader(TURNED).moves[0] == "right"


def test_a_misread_position_is_always_taken_for_the_same_one_beside_it():
    reader, seen = Reader(), [make_board(seed, BoardSpec()) for seed in range(400)]
    taken = [reader.taken_for(each, 0.25) for each in seen]
    assert taken == [reader.taken_for(each, 0.25) for each in seen]
    assert all(other in {each, *map(each.moved, MOVES)} for each, other in zip(seen, taken, strict=True))
    share = sum(each != other for each, other in zip(seen, taken, strict=True)) / len(seen)
    assert 0.1 < share <= 0.3  # some moves lead nowhere
    assert [reader.taken_for(each, 0.0) for each in seen] == seen


@pytest.mark.slow
def test_what_was_taught_is_played_and_nothing_beyond_it():
    torch.manual_seed(0)
    policy, reader = Perceptron(4), Reader()
    assert 0 < len(optimal_first_moves(NEAR)) <= 3
    teach(policy, reader, count=300, steps=150)
    episodes = play(policy, reader, [NEAR, NEAR], greedy=True)
    assert solved(episodes).all()
    assert [step.turn for step in episodes[0]] == [0] * len(episodes[0])


def test_an_episode_of_two_boxes_has_won_where_both_are_on_targets():
    torch.manual_seed(0)
    starts = [make_board(seed, BoardSpec(num_boxes=(2,), max_solution=4)) for seed in range(40)]
    episodes, ends = play(Perceptron(4), Reader(), starts, greedy=False), []
    for position, episode in zip(starts, episodes, strict=True):
        for step in episode:
            position = position.moved(step.seen.moves[step.choice])
        ends.append(position.solved)
    assert solved(episodes).tolist() == ends
    assert 0 < sum(ends) < sum(any(step.reward > 0.5 for step in episode) for episode in episodes)


@pytest.mark.slow
def test_moves_that_won_become_likelier():
    torch.manual_seed(0)
    policy, critic, reader = Perceptron(4), Perceptron(1), Reader()
    episodes = play(policy, reader, [NEAR] * 64, greedy=False)
    won = solved(episodes)
    assert 0 < won.sum() < len(won)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], 3e-3)
    scale = 0.0
    for _ in range(20):
        loss, scale = update(policy, critic, episodes, scale, 0.95, 0.8, 0.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    good = reader(NEAR).moves.index(optimal_first_moves(NEAR)[0])
    assert policy([reader(NEAR)]).softmax(-1)[0, good] > 0.3


@pytest.mark.slow
def test_the_best_play_of_two_boxes_is_not_to_push_one_off_and_on_where_that_brings_nothing():
    juggled = [measure(8, 2, 0.97, reward) for reward in (OFF_TARGET_REWARD, -1.0)]
    assert juggled[0]["most"] > 0.3 > juggled[1]["most"] and juggled[1]["best_solves"] == juggled[1]["boards"] > 3
