"""Boards, their symmetries and splits, level files, and the solver."""

from __future__ import annotations

import hashlib
from collections import deque
from random import Random

import pytest

from envs.boards.board import MOVES, XSB, Board, board_of, canonical, split_of
from envs.boards.board_images import render
from envs.boards.generate import BoardSpec, draw_board, make_board
from envs.boards.levels import parse_level
from envs.boards.solver import optimal_first_moves, search, solve
from envs.sokoban import build_env
from envs.sokoban_data import read_boards
from shared.types import Sample
from tests.support.paths import DATA

FILE = DATA / "boxoban" / "medium_valid_000.txt"
LEVELS = read_boards(FILE).boards
UNSOLVABLE = ["######", "#$   #", "#    #", "#  . #", "#   @#", "######"]


def play(board: Board, moves: list[str]) -> tuple[Board, int]:
    """The board after the moves (each must move something) and the number of pushes."""
    pushes = 0
    for move in moves:
        after = board.moved(move)
        assert after != board
        pushes += after.boxes != board.boxes
        board = after
    return board, pushes


def fewest(board: Board, count_pushes: bool) -> int | None:
    """Fewest pushes or moves by trying everything: the naive reference of the solver."""
    best = {board: 0}
    queue = deque([(0, board)])
    while queue:
        cost, now = queue.popleft()
        if best[now] < cost:
            continue
        if now.solved:
            return cost
        for move in MOVES:
            after = now.moved(move)
            extra = int(after.boxes != now.boxes) if count_pushes else 1
            if cost + extra < best.get(after, 1 << 30):
                best[after] = cost + extra
                queue.append((cost + extra, after)) if extra else queue.appendleft((cost, after))
    return None


def turned(board: Board) -> Board:
    """The board rotated by a quarter."""
    codes, width = board.codes(), board.width
    columns = [codes[column::width][::-1] for column in range(width)]
    return board_of(width, board.height, b"".join(columns))


def test_one_box_solutions_are_as_short_as_possible():
    for seed in range(60):
        board = make_board(seed, BoardSpec(wall_chance=0.1))
        moves = optimal_first_moves(board)
        assert play(board, moves)[0].solved
        assert len(moves) == fewest(board, count_pushes=False)


def test_several_boxes_take_as_few_pushes_as_trying_everything_does():
    rng, solvable = Random(3), 0
    for _ in range(25):
        board = draw_board(rng, 5, 6, 2, 0.02)
        assert board is not None
        found, truth = search(board, weight=1.0), fewest(board, count_pushes=True)
        assert found.proven
        assert (found.moves is None) == (truth is None)
        if found.moves is not None:
            after, pushes = play(board, found.moves)
            assert after.solved
            assert pushes == truth
            solvable += 1
    assert solvable >= 3


def test_a_box_in_a_corner_is_unsolvable_and_a_solved_board_needs_no_move():
    assert search(parse_level(UNSOLVABLE)).proven
    assert solve(parse_level(UNSOLVABLE)) is None
    assert solve(parse_level(["#####", "#@ *#", "#####"])) == []


def test_the_solver_gives_up_at_its_limit_and_says_so():
    found = search(LEVELS[0], max_nodes=3)
    assert found.moves is None
    assert not found.proven


@pytest.mark.slow
def test_all_thousand_boxoban_levels_load_and_render_and_the_first_two_hundred_are_solved():
    assert len(LEVELS) == 1000
    for board in LEVELS:
        assert (board.height, board.width, len(board.boxes), len(board.targets)) == (10, 10, 4, 4)
        assert render(board.codes(), 10, 10, 16).size == (160, 160)
    unsolved = 0
    for board in LEVELS[:200]:
        moves = solve(board, max_nodes=20_000)
        unsolved += moves is None
        if moves is not None:
            sample = Sample("x", metadata={"env_config": board.env_config()})
            env = build_env(sample, {"pixels_per_cell": 16, "max_steps": 1000})
            for start in range(0, len(moves), 3):
                observation, done, _ = env.step(f"<answer>{' '.join(moves[start : start + 3])}</answer>")
            assert done
            assert env.success
            assert observation["multi_modal_data"]["image"][0].size == (160, 160)
    assert unsolved <= 10


def test_a_level_shows_what_is_written():
    first = FILE.read_text(encoding="utf-8").split("\n\n")[0]
    rows = [row for row in first.splitlines() if row.startswith("#")]
    assert [XSB[symbol] for row in rows for symbol in row] == list(LEVELS[0].codes())


def test_ragged_levels_with_titles_are_read_and_broken_ones_are_named(tmp_path):
    good = tmp_path / "good.txt"
    first, second = ["  ####", "###@.#", "#  $ #", "#    #", "######"], ["#####", "#@$.#", "#####"]
    good.write_text("\n".join(["Title: small", *first, "", "; next", *second, ""]), encoding="utf-8")
    boards = read_boards(good).boards
    assert [board.height for board in boards] == [5, 3]
    assert all(solve(board) for board in boards)
    bad = tmp_path / "bad.txt"
    bad.write_text("#####\n#@$.#\n### #\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"1 unreadable, such as bad.txt level 0.*closed"):
        read_boards(bad)
    bad.write_text("nothing\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no level in it"):
        read_boards(bad)


def test_the_canonical_form_is_the_same_for_rotations_and_mirror_images_only():
    board = LEVELS[0]
    width, codes = board.width, board.codes()
    mirrored = board_of(board.height, width, b"".join(codes[i : i + width][::-1] for i in range(0, len(codes), width)))
    quarter = turned(board)
    assert canonical(board) == canonical(mirrored) == canonical(quarter) == canonical(turned(mirrored))
    assert canonical(board) != canonical(board.moved(next(m for m in MOVES if board.moved(m) != board)))


@pytest.mark.slow
def test_train_and_heldout_boards_never_share_a_form():
    def forms(split, seeds):
        boards = [make_board(seed, BoardSpec(split=split)) for seed in seeds]
        assert all(split_of(turned(board)) == split for board in boards)
        return {canonical(board) for board in boards}

    assert not forms("train", range(400)) & forms("heldout", range(400))


@pytest.mark.parametrize("num_boxes", [1, 2, 3, 4])
def test_every_made_board_is_solvable(num_boxes):
    for seed in range(10):
        board = make_board(seed, BoardSpec(sizes=((7, 7),), num_boxes=(num_boxes,)))
        moves = solve(board)
        assert moves
        assert play(board, moves)[0].solved


def test_sizes_box_numbers_and_difficulty_follow_the_settings():
    args = {"grid_size": [[6, 6], [7, 8]], "num_boxes": [1, 2], "min_solution": 6, "max_solution": 9}
    boards = [build_env(Sample("x", metadata={"seed": seed}), args).board for seed in range(40)]
    assert {(board.height, board.width) for board in boards} == {(6, 6), (7, 8)}
    assert {len(board.boxes) for board in boards} == {1, 2}
    assert all(6 <= len(solve(board) or []) <= 9 for board in boards)


@pytest.mark.slow
def test_a_difficulty_no_board_has_is_refused():
    with pytest.raises(ValueError, match="min_solution=500"):
        make_board(0, BoardSpec(min_solution=500))


def test_one_board_in_eight_is_held_out_by_the_first_byte_of_its_hash():
    first_bytes = {hashlib.sha256(canonical(board)).digest()[0]: board for board in walks(6000)}
    assert {31, 32} <= first_bytes.keys()
    held_out = {byte for byte, board in first_bytes.items() if split_of(board) == "heldout"}
    assert held_out == {byte for byte in first_bytes if byte < 32}


def walks(count: int):
    """Boards that differ in where two boxes stand."""
    rng = Random(0)
    for _ in range(count):
        cells = rng.sample(range(36), 5)
        codes = bytearray(
            XSB["#"] if row in (0, 7) or column in (0, 7) else XSB[" "] for row in range(8) for column in range(8)
        )
        for cell, sign in zip(cells, "@$$..", strict=True):
            codes[8 * (1 + cell // 6) + 1 + cell % 6] = XSB[sign]
        yield board_of(8, 8, bytes(codes))
