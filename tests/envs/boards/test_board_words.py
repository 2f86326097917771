"""What Sokoban's model writes about a board, how it is measured, and what its demonstrations show."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from envs.board_env import length_classes, parse_actions
from envs.boards.board import MOVES, board_of
from envs.boards.board_words import moves_with_states, reading, state
from envs.boards.solver import optimal_first_moves
from envs.sokoban import build_env
from launch.tiny_models.demonstrations import TASKS, Lesson, sokoban_answer
from shared.types import Sample

TASK = TASKS["sokoban"]
ROWS = ("######", "#P___#", "#_X#_#", "#__O_#", "#____#", "######")
BOARD = board_of(6, 6, bytes("#_O√XPS".index(symbol) for row in ROWS for symbol in row))


def env_of(seed: int, **args: object):
    return build_env(Sample(str(seed), metadata={"seed": seed}), args)


def test_states_stand_between_moves_and_behind_the_last_one_only_if_it_solves() -> None:
    assert moves_with_states(BOARD, ["up", "up"]) == f"back up {state(BOARD)} back up"
    moves = optimal_first_moves(BOARD)
    solved = BOARD
    for move in moves:
        solved = solved.moved(move)
    assert moves_with_states(BOARD, [*moves, "up"]).endswith(f"{moves[-1]} {state(solved)}")


def test_an_answer_with_states_names_its_moves_to_the_environment() -> None:
    answer = f"<answer> {moves_with_states(BOARD, ['down', 'right', 'up'])}</answer>"
    assert parse_actions(answer, 3) == ["down", "right", "up"]


@pytest.mark.parametrize(
    ("moves", "classes"),
    [(1, ("1_3",)), (3, ("1_3",)), (4, ("4_6", "long")), (9, ("7_9", "long")), (10, ("10_up", "long"))],
)
def test_boards_have_classes_by_the_length_of_their_solution(moves: int, classes: tuple[str, ...]) -> None:
    assert length_classes(moves) == classes


def test_what_is_read_and_foreseen_is_measured_in_each_turn() -> None:
    env = env_of(7, diagnostics=True)
    right = f"<think> {reading(env.position)}</think><answer> {moves_with_states(env.position, ['up', 'up'])}</answer>"
    metrics = env.step(right)[2]["metrics"]
    turn = metrics["turn_metrics"]
    assert turn["read_accuracy"] and turn["read_accuracy_turn_1"] and turn["foresight_accuracy"]
    assert any(name in metrics["traj_metrics"] for name in ("success_1_3", "success_long"))
    turn = env.step("<think> 00</think><answer> back up 00 back up</answer>")[2]["metrics"]["turn_metrics"]
    assert not turn["read_accuracy"] and not turn["read_accuracy_turn_2"] and not turn["foresight_accuracy"]


def test_without_diagnostics_nothing_of_it_is_measured() -> None:
    metrics = env_of(7).step("<answer>up</answer>")[2]["metrics"]
    assert set(metrics["turn_metrics"]) == {"action_is_valid", "action_is_effective"}
    assert set(metrics["traj_metrics"]) == {"success"}


def test_demonstrated_moves_are_good_within_reach_and_random_elsewhere() -> None:
    rng, lesson = random.Random(0), Lesson(expertise=1.0, reach=3)
    chosen = dict.fromkeys(MOVES, 0)
    for board in (env_of(seed).position for seed in range(40) for _ in range(4)):
        for move in parse_actions(sokoban_answer(board, rng, lesson).text, 3):
            best = optimal_first_moves(board)
            if 0 < len(best) <= 3:
                assert len(best) - len(optimal_first_moves(board.moved(move))) == 1
            else:
                chosen[move] += board.player // 6 == 2  # where no wall around the board bars a way
            board = board.moved(move)
    assert min(chosen.values()) > 0.15 * sum(chosen.values())


def test_without_expertise_no_move_is_chosen_by_the_solver() -> None:
    best = 0
    for seed in range(60):
        board = env_of(seed, max_solution=3).position
        (first, *_) = parse_actions(sokoban_answer(board, random.Random(seed), Lesson(expertise=0.0)).text, 3)
        best += len(optimal_first_moves(board.moved(first))) < len(optimal_first_moves(board))
    assert best < 30


def test_a_jump_shows_a_board_to_which_no_answer_led() -> None:
    lesson = Lesson(expertise=1.0, jump=1.0, turns=4)
    answers = [answer for _, answer in TASK.demonstrate(3, random.Random(3), lesson)]
    assert len(answers) == 4
    targets = [answer.text.split()[1] for answer in answers]
    assert any(first != second for first, second in pairwise(targets))


def test_boards_that_begin_near_end_at_once() -> None:
    for seed in range(5):
        assert len(list(TASK.demonstrate(seed, random.Random(seed), Lesson(expertise=1.0, near=1.0)))) == 1
