"""Sliding puzzles: random ones, moves, and shortest solutions."""

from __future__ import annotations

from collections import deque
from itertools import permutations

import pytest

from envs.boards.board import MOVES
from envs.boards.place_words import place_words
from envs.boards.puzzle import (
    Puzzle,
    PuzzleSpec,
    can_be_solved,
    distance,
    make_puzzle,
    ordered,
    shortest,
    split_of_puzzle,
)
from envs.boards.puzzle_words import puzzle_words, reading


def walked(puzzle: Puzzle, moves: list[str]) -> Puzzle:
    for move in moves:
        puzzle = puzzle.moved(move)
    return puzzle


def moves_to_solve(height: int, width: int) -> dict[bytes, int]:
    """Fewest moves of every puzzle that can be solved, by a search from the solved one."""
    start = ordered(height, width)
    counts, queue = {start: 0}, deque([start])
    while queue:
        tiles = queue.popleft()
        gap = tiles.index(0)
        for other in range(len(tiles)):
            if abs(gap // width - other // width) + abs(gap % width - other % width) == 1:
                changed = bytearray(tiles)
                changed[gap], changed[other] = changed[other], changed[gap]
                if bytes(changed) not in counts:
                    counts[bytes(changed)] = counts[tiles] + 1
                    queue.append(bytes(changed))
    return counts


def test_solutions_of_all_small_puzzles_are_as_short_as_a_search_of_everything_finds() -> None:
    counts = moves_to_solve(2, 3)
    assert len(counts) == 360 and max(counts.values()) == 21
    for tiles, count in counts.items():
        way = shortest(Puzzle(2, 3, tiles))
        assert len(way) == count and walked(Puzzle(2, 3, tiles), way).solved


def test_half_of_all_orders_can_be_solved_and_are_told_from_the_others() -> None:
    for height, width in ((2, 3), (3, 2), (2, 2)):
        counts = moves_to_solve(height, width)
        orders = [bytes(order) for order in permutations(range(height * width))]
        assert [tiles for tiles in orders if can_be_solved(Puzzle(height, width, tiles))] == sorted(counts)
    swapped = Puzzle(2, 2, bytes((2, 1, 3, 0)))
    assert shortest(swapped) == []


@pytest.mark.parametrize("scramble", [1, 6, 40])
def test_a_random_puzzle_needs_no_more_moves_than_mixed_it(scramble: int) -> None:
    for seed in range(20):
        puzzle = make_puzzle(seed, PuzzleSpec(scramble=(scramble,)))
        assert 1 <= len(shortest(puzzle)) <= scramble
        assert distance(puzzle) <= len(shortest(puzzle))


def test_a_puzzle_fits_its_spec_and_its_split() -> None:
    spec = PuzzleSpec(sizes=((3, 3), (2, 4)), scramble=(12,), min_solution=5, max_solution=8, split="heldout")
    puzzles = [make_puzzle(seed, spec) for seed in range(20)]
    assert all(5 <= len(shortest(puzzle)) <= 8 for puzzle in puzzles)
    assert {split_of_puzzle(puzzle) for puzzle in puzzles} == {"heldout"}
    assert {(puzzle.height, puzzle.width) for puzzle in puzzles} == {(3, 3), (2, 4)}
    assert make_puzzle(3, spec) == make_puzzle(3, spec)


def test_the_gap_goes_where_the_move_says_and_stays_at_the_edge() -> None:
    puzzle = Puzzle(2, 3, bytes((1, 2, 3, 4, 0, 5)))
    assert puzzle.moved("up").tiles == bytes((1, 0, 3, 4, 2, 5))
    assert puzzle.moved("down") is puzzle
    solved = puzzle.moved("right")
    assert solved.solved and solved.moved("left") is solved


def test_a_reading_names_the_tiles_and_where_the_gaps_neighbours_belong() -> None:
    puzzle = Puzzle(3, 3, bytes((1, 2, 3, 4, 5, 0, 7, 8, 6)))
    assert reading(puzzle) == "1 2 3 4 5 . 7 8 6 : 3 +0+0 6 -1+0 5 +0+0 -"
    words = {*place_words(3, 3), *puzzle_words(9)}
    puzzle = make_puzzle(5, PuzzleSpec(scramble=(60,)))
    for move in MOVES * 10:
        puzzle = puzzle.moved(move)
        assert set(reading(puzzle).split()) <= words
