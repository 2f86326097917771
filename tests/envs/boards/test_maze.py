"""Mazes with key and door: random ones, moves, and shortest ways."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from envs.boards.board import MOVES, split_of
from envs.boards.maze_board import DOOR, FLOOR, GOAL, KEY, WALL, MazeBoard, MazeSpec, make_maze
from envs.boards.maze_words import free_cells, maze_words, reading
from envs.boards.place_words import place_words
from envs.boards.walks import shortest_way

ROWS = ("__#_G", "K_#__", "__D__", "__#__", "__#__")
MAZE = MazeBoard(
    5, 5, bytes({"#": WALL, "_": FLOOR, "K": KEY, "D": DOOR, "G": GOAL}[s] for row in ROWS for s in row), 20
)


def walked(maze: MazeBoard, moves: list[str]) -> MazeBoard:
    for move in moves:
        maze = maze.moved(move)
    return maze


def test_a_shortest_way_is_as_short_as_trying_every_way_finds() -> None:
    for seed in range(30):
        maze = make_maze(seed, MazeSpec(sizes=((3, 3), (3, 5)), walls=(1, 2), max_solution=7))
        way = shortest_way(maze)
        assert walked(maze, way).solved
        assert not any(walked(maze, list(moves)).solved for moves in product(MOVES, repeat=len(way) - 1))


def test_the_door_opens_for_the_key_alone() -> None:
    before = replace(MAZE, player=11)
    assert before.moved("right") is before
    with_key = walked(before, ["left", "up", "right", "down"])
    assert with_key.has_key and with_key.player == 11
    assert with_key.moved("right").player == 12
    assert KEY in MAZE.codes() and KEY not in with_key.codes()
    assert len(shortest_way(MAZE)) == 3 + 5 + 2


@pytest.mark.parametrize("walls", [1, 2, 3, 4, 40])
def test_every_maze_can_be_solved_and_only_with_the_key(walls: int) -> None:
    for seed in range(40):
        maze = make_maze(seed, MazeSpec(sizes=((5, 5), (7, 9)), walls=(walls,)))
        assert shortest_way(maze) and not maze.has_key
        assert [maze.cells.count(code) for code in (KEY, DOOR, GOAL)] == [1, 1, 1]
        locked = replace(maze, cells=maze.cells.replace(bytes([KEY]), bytes([FLOOR])))
        assert not shortest_way(locked)


def test_more_walls_make_more_corridors() -> None:
    counts = [
        sum(make_maze(seed, MazeSpec(sizes=((9, 9),), walls=(walls,))).cells.count(WALL) for seed in range(20))
        for walls in (1, 4, 40)
    ]
    assert counts == sorted(counts) and counts[0] < counts[1] < counts[2]


def test_a_maze_fits_its_spec_and_its_split() -> None:
    spec = MazeSpec(walls=(1, 3), min_solution=6, max_solution=9, split="heldout")
    mazes = [make_maze(seed, spec) for seed in range(20)]
    assert all(6 <= len(shortest_way(maze)) <= 9 for maze in mazes)
    assert {split_of(maze) for maze in mazes} == {"heldout"}
    assert make_maze(3, spec) == make_maze(3, spec)


def test_a_reading_names_what_is_ahead_and_has_words_alone_that_the_tokenizer_knows() -> None:
    assert reading(MAZE) == "40 key 10 -3+0 door 22 -2+2 goal 04 -4+4 u4 d0 l0 r1 !dl"
    words = {*place_words(5, 5), *maze_words()}
    for seed in range(30):
        maze = make_maze(seed, MazeSpec(walls=(1, 2, 3, 4)))
        for move in ["", *shortest_way(maze)]:
            maze = maze.moved(move) if move else maze
            assert set(reading(maze).split()) <= words
    assert "key" not in reading(replace(MAZE, has_key=True))
    assert free_cells(replace(MAZE, player=11), "right") == 0
    assert free_cells(replace(MAZE, player=11, has_key=True), "right") == 3
