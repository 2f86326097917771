"""Boards that are made by playing backwards: sound, solvable, and the farthest that the search reaches."""

from __future__ import annotations

from random import Random

import pytest

from envs.boards.board import FLOOR, TARGET, WALL, checked
from envs.boards.generate import BoardSpec, make_board
from envs.boards.reverse_play import BRUSHES, STEPS, carved, farthest, reverse_played
from envs.boards.solver import solve


@pytest.mark.parametrize(("size", "boxes"), [((6, 6), 1), ((7, 8), 1), ((8, 8), 2)])
def test_boards_are_sound_and_can_be_solved_and_nothing_starts_on_a_target(size, boxes):
    for seed in range(40):
        board = reverse_played(Random(seed), *size, boxes)
        if board is not None:
            checked(board)
            assert len(board.boxes) == len(board.targets) == boxes
            assert not {*board.boxes, board.player} & {*board.targets}
            assert solve(board) is not None


def test_rooms_are_one_piece_inside_the_edge():
    for seed in range(100):
        cells = carved(Random(seed), 6, 6)
        floor = {cell for cell, code in enumerate(cells) if code == FLOOR}
        assert floor and all(0 < cell // 6 < 5 and 0 < cell % 6 < 5 for cell in floor)
        assert set(cells) <= {WALL, FLOOR}
    assert all((0, 0) in brush for brush in BRUSHES)


def plain_farthest(cells, width, targets, player):
    """The same search as a recursion: pull before walk, up, down, left, right."""
    best, most, seen = None, 0, set()

    def visit(boxes, player, changes, last, depth):
        nonlocal best, most
        key = (tuple(sorted(boxes)), player)
        if depth >= 300 or key in seen:
            return
        seen.add(key)
        away = sum(
            abs(a // width - b // width) + abs(a % width - b % width) for a, b in zip(boxes, targets, strict=True)
        )
        if changes * away > most and not {*boxes, player} & {*targets}:
            best, most = (tuple(boxes), player), changes * away
        for pull in (True, False):
            for rows, columns in STEPS:
                step = rows * width + columns
                if cells[player + step] == WALL or player + step in boxes:
                    continue
                pulled = boxes.index(player - step) if pull and player - step in boxes else None
                if pulled is None:
                    visit(boxes, player + step, changes, last, depth + 1)
                else:
                    after = [player if number == pulled else box for number, box in enumerate(boxes)]
                    visit(after, player + step, changes + (pulled != last), pulled, depth + 1)

    visit(list(targets), player, 0, -1, 1)
    return best


@pytest.mark.parametrize("boxes", [1, 2])
def test_the_search_finds_what_a_plain_recursion_finds(boxes):
    compared = 0
    for seed in range(60):
        rng = Random(seed)
        cells = bytes(carved(rng, 6, 6))
        floor = [cell for cell, code in enumerate(cells) if code == FLOOR]
        if len(floor) <= boxes:
            continue
        player, *targets = rng.sample(floor, boxes + 1)
        found = farthest(cells, 6, tuple(targets), player)
        assert (found and (found.boxes, found.player)) == plain_farthest(cells, 6, targets, player)
        compared += found is not None
    assert compared > 20


def test_seeds_give_boards_of_the_lengths_that_are_asked_for():
    spec = BoardSpec(played_backwards=True, max_solution=5)
    boards = [make_board(seed, spec) for seed in range(100)]
    assert all(1 <= len(solve(board) or ()) <= 5 for board in boards)
    assert len({board.codes() for board in boards}) > 80
    assert boards[:5] == [make_board(seed, spec) for seed in range(5)]
    assert all(board.cells.count(TARGET) == 1 for board in boards)
