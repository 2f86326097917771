"""What Sokoban's model writes about a board from its box's frame, how it is measured, and what demonstrations show."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from envs.board_env import parse_actions
from envs.boards.board import MOVES, SYMBOLS, WALL, Board, board_from_config, board_of
from envs.boards.board_words import (
    FRAMES,
    TURNS,
    frame_of,
    inner_walls,
    moves_with_states,
    paired,
    reading,
    state,
    words,
)
from envs.sokoban import build_env
from launch.tiny_models.build import build_tokenizer
from launch.tiny_models.demonstrations import TASKS, Lesson, scattered, sokoban_answer
from launch.warm_start import main, weighted
from shared.types import Sample

TASK = TASKS["sokoban"]


def board_at(*rows: str) -> Board:
    return board_of(6, 6, bytes(SYMBOLS.index(symbol) for row in rows for symbol in row))


BOARD = board_at("######", "#P___#", "#_X#_#", "#__O_#", "#____#", "######")


def env_of(seed: int, **args: object):
    return build_env(Sample(str(seed), metadata={"seed": seed}), args)


def positions(board: Board) -> list[Board]:
    """All that there are of a board with one box."""
    free = [cell for cell, code in enumerate(board.cells) if code != WALL]
    return [replace(board, player=player, boxes=(box,)) for player in free for box in free if player != box]


def parts(told: str) -> tuple[list[str], str, str, str, str, list[str], str]:
    """Of a reading: the cells; the frame, the player, the target, the room behind; the walls with their cells and
    where they touch the player; the idle moves."""
    words = told.split()
    first = next(i for i, word in enumerate(words) if word[0] == "@")
    frame, near, ahead, room = words[first : first + 4]
    return words[:first], frame, near, ahead, room, words[first + 4 : -1], words[-1]


def boards() -> list[Board]:
    return [env_of(seed, wall_chance=chance).position for seed in range(3) for chance in (0.05, 0.3)]


def mirrored(board: Board, number: int) -> Board:
    """The image of a square board under one of the eight symmetries."""
    cells = np.arange(36).reshape(6, 6)
    cells = np.rot90(cells if number < 4 else cells.T, number % 4).flatten()  # the old cell that is now at each place
    places = {int(old): new for new, old in enumerate(cells)}
    moved = bytes(board.cells[old] for old in cells)
    return Board(6, 6, moved, (places[board.boxes[0]],), places[board.player])


@cache
def tokenizer():
    phrases = list(TASK.phrases) * 50 + ["system\n", "user\n", "assistant\n", "\n"] * 200
    return build_tokenizer(phrases, TASK.model["vocab_size"])


def test_a_reading_names_target_player_box_and_walls_as_cells_and_then_from_the_box() -> None:
    assert reading(BOARD) == "33 11 22 @dr -1-1 >11 =11 23 #+0+1 ~ !bi"


def test_a_state_has_no_cells() -> None:
    assert state(BOARD.moved("down")) == "@dr +0-1 >11 =11 #+0+1 ~ !io"


def test_a_wall_beside_the_player_is_marked_by_the_move_that_leads_into_it() -> None:
    assert state(BOARD.moved("right").moved("right")) == "@rd +1-1 >11 =11 #+1+0 ~o !io"


def test_moves_are_told_in_the_frame_and_as_they_are_with_states_between_them() -> None:
    told = moves_with_states(BOARD, ["down", "up"])
    assert told == f"fore down {state(BOARD.moved('down'))} back up"


def test_a_move_that_solves_is_followed_by_the_state_and_nothing_more() -> None:
    board = replace(BOARD, boxes=(20,), player=19)
    end = board.moved("right")
    assert end.solved
    assert moves_with_states(board, ["right", "up"]) == f"fore right {state(end)}"


@pytest.mark.parametrize("board", boards(), ids=range(6))
def test_every_position_can_be_had_back_from_its_words(board: Board) -> None:
    for position in positions(board):
        cells, frame, near, ahead, room, walls, idle = parts(reading(position))
        target, player, box = (int(cell[0]) * 6 + int(cell[1]) for cell in cells)
        inner = [int(cell[0]) * 6 + int(cell[1]) for cell in walls[::3]]
        assert (player, (box,), (target,), inner) == (
            position.player, position.boxes, position.targets, inner_walls(position)
        )  # fmt: skip
        used = next(f for f in FRAMES if f.word == frame)
        fore, _, _, out = (dict(zip(MOVES, (-6, 6, -1, 1), strict=True))[move] for move in used.moves)
        assert box + int(near[:2]) * fore + int(near[2:]) * out == player
        assert box + int(ahead[1]) * fore + int(ahead[2]) * out == target
        assert [box + int(wall[1:3]) * fore + int(wall[3:]) * out for wall in walls[1::3]] == inner
        beside = {player + step: "~" + turn[0] for turn, step in zip(TURNS, (fore, -fore, -out, out), strict=True)}
        assert walls[2::3] == [beside.get(wall, "~") for wall in inner]
        named = zip(TURNS, used.moves, strict=True)
        assert idle[1:] == "".join(turn[0] for turn, move in named if position.moved(move) == position)
        corner = box - int(room[1]) * fore - int(room[2]) * out
        assert corner in (7, 10, 25, 28) and position.cells[corner - fore] == position.cells[corner - out] == WALL


def test_positions_read_alike_however_the_board_is_turned_or_mirrored() -> None:
    """All words but cells and the frame's name, walls in any order. Where target and player both lie on an axis of
    symmetry of the box, two frames fit, and the words are those of either."""
    told = {False: 0, True: 0}
    for position in (p for board in boards()[::3] for p in positions(board)):
        found = {tuple(sorted(state(mirrored(position, i)).split()[1:])) for i in range(8)}
        told[symmetric(position)] += 1
        assert len(found) == 1 or (len(found) == 2 and symmetric(position))
    assert told[False] > 150 and told[True] > 30


def symmetric(board: Board) -> bool:
    """Whether target and player are the same in two frames of the box."""
    (box,), (target,) = board.boxes, board.targets
    ways = [(cell // 6 - box // 6, cell % 6 - box % 6) for cell in (target, board.player)]
    best = [frame_of(6, box, target, board.player).offset(*way) for way in ways]
    return sum([frame.offset(*way) for way in ways] == best for frame in FRAMES) > 1


def test_the_target_is_fore_and_out_and_no_nearer_fore_than_out() -> None:
    for position in (p for board in boards() for p in positions(board)):
        ahead = state(position).split()[2]
        assert int(ahead[1]) >= int(ahead[2]) >= 0


def test_every_word_is_one_token_and_a_turn_has_at_most_80() -> None:
    assert len(tokenizer()) <= 704
    rng, most = random.Random(0), 0
    for position in (scattered(board, rng) for board in boards() for _ in range(60)):
        answer = sokoban_answer(position, rng, Lesson(expertise=0.5)).text
        said = answer.replace("<think>", "").replace("</think><answer>", "").replace("</answer>", "").split()
        assert set(said) <= {*words(), *MOVES}
        count = len(tokenizer().encode(answer + "<|im_end|>", add_special_tokens=False))
        assert count == len(said) + 5  # <think>, </think>, <answer>, </answer>, the end
        most = max(most, count)
    assert 35 <= most <= 80


def test_no_word_stands_for_two_kinds_and_few_values_make_one() -> None:
    kinds: dict[str, int] = {}
    for word in set(words()):
        kind = "cells" if word.isdigit() else word[0]
        kinds[kind] = kinds.get(kind, 0) + 1
    assert all(kinds[kind] <= 16 for kind in ("cells", "@", ">", "=", "!"))


def test_frames_are_told_of_each_of_several_boxes() -> None:
    board = env_of(1, num_boxes=2, grid_size=(7, 7)).position
    assert len(state(board).split()) == 2 * (5 + 2 * len(inner_walls(board)) + 2)
    assert parse_actions(moves_with_states(board, ["up", "left"]), 3) == ["up", "left"]
    assert board_from_config(board.env_config()) == board


def test_each_box_has_the_other_boxes_told_after_the_walls_and_as_they_are() -> None:
    board = board_at("######", "#____#", "#XPX_#", "#__O_#", "#_O__#", "######")
    told = "33 42 22 21 23 @rd +1+0 >21 =01 23 #+2+0 ~f !b @dl +0+1 >21 =11 21 #+0+2 ~o !o"
    assert reading(board) == told


def test_a_box_on_a_target_keeps_it_and_comes_last() -> None:
    board = env_of(1, num_boxes=2).position
    first, second = board.targets
    for box, settled, free in ((second - 1, first, second), (first + 1, second, first), (first - 1, first, second)):
        position = replace(board, boxes=tuple(sorted((box, settled))))
        assert paired(position) == [(box, free), (settled, settled)]
    assert paired(replace(board, boxes=board.targets)) == [(first, first), (second, second)]


def test_only_words_that_chance_chose_are_marked_as_guesses() -> None:
    rng = random.Random(1)
    for board in boards():
        answer = sokoban_answer(board, rng, Lesson(expertise=0.0))
        guessed = [answer.text[a:b].strip() for a, b in answer.guesses]
        assert len(guessed) == len(parse_actions(answer.text, 3)) and set(guessed) <= {*TURNS}
    near = env_of(5, max_solution=3).position
    assert sokoban_answer(near, rng, Lesson(expertise=1.0)).guesses == ()


def test_the_choice_weight_is_of_the_tokens_that_choose_alone() -> None:
    answer = sokoban_answer(BOARD, random.Random(0), Lesson(expertise=0.0))
    ids, weights = weighted(answer, tokenizer(), 0.1, "<|im_end|>")
    light = [tokenizer().decode([i]).strip() for i, weight in zip(ids, weights, strict=True) if weight == 0.1]
    assert light == [answer.text[a:b].strip() for a, b in answer.guesses] and len(light) == 3
    assert set(weights) == {0.1, 1.0}
    assert set(weighted(answer, tokenizer(), 1.0, "<|im_end|>")[1]) == {1.0}


def test_scattered_positions_are_of_the_same_board_anywhere_and_not_solved() -> None:
    rng = random.Random(0)
    found = [scattered(BOARD, rng) for _ in range(600)]
    assert not any(board.solved for board in found)
    assert {board.cells for board in found} == {BOARD.cells}
    assert len({board.boxes for board in found}) == 14 and len({board.player for board in found}) == 15


def test_scattering_shows_positions_that_are_not_where_play_has_led() -> None:
    def cells(**lesson: float) -> list[str]:
        chosen = Lesson(expertise=0.0, turns=6, **lesson)
        return [answer.text.split()[2] for _, answer in TASK.demonstrate(5, random.Random(5), chosen)]

    assert len(set(cells(scatter=1.0))) > len(set(cells()))


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of the models that would have been made."""
    made: list[Path] = []
    monkeypatch.setattr("launch.warm_start.train", lambda _, options: made.append(options.out))
    return made


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sokoban", "--choice-weight", "0"], "--choice-weight 0.0: use a number above 0"),
        (["sokoban", "--scatter", "1.5"], "--scatter 1.5: it is a share"),
        (
            ["colour", "--tower-steps", "5"],
            "--tower-steps 5: only the tower of sokoban, games and scene_zoom is taught alone",
        ),
        (["colour", "--steps", "-1"], "--steps -1: at least 1"),
        (["colour", "--steps", "0"], "--steps 0: at least 1"),
        (["colour", "--batch", "0"], "--batch 0: at least 1"),
        (["colour", "--threads", "0"], "--threads 0: at least 1"),
        (["sokoban", "--tower-steps", "-1"], "--tower-steps -1: at least 0"),
    ],
)
def test_options_out_of_range_are_refused_before_anything_is_built(arguments, said, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        main([*arguments, "--out", str(tmp_path / "model")])
    assert said in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("inner", ["", "inner"])
def test_a_file_where_the_model_is_to_be_is_refused_before_anything_is_built(
    tmp_path, capsys, no_training, inner
) -> None:
    (tmp_path / "taken").write_text("mine")
    out = tmp_path / "taken" / inner
    with pytest.raises(SystemExit):
        main(["colour", "--out", str(out)])
    assert f"--out {out}: {tmp_path / 'taken'} is a file; name a folder" in capsys.readouterr().err


def test_a_folder_of_other_things_is_refused_and_a_model_is_said_to_be_replaced(tmp_path, capsys, no_training) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit):
        main(["colour", "--out", str(tmp_path)])
    assert f"--out {tmp_path}: it holds other things than a model" in capsys.readouterr().err
    assert no_training == []
    (tmp_path / "config.json").write_text("{}")
    main(["colour", "--out", str(tmp_path), "--threads", str(torch.get_num_threads())])
    assert f"the model in {tmp_path} is replaced" in capsys.readouterr().out
    assert no_training == [tmp_path]
