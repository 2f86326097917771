"""`launch/prepare.py`: what becomes of raw files, made boards and hub names, and that the two files share nothing."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from envs import geo3k
from envs.boards.board import Board, board_from_config, board_of, canonical
from envs.boards.generate import BoardSpec
from envs.boards.solver import solve
from envs.datasets import load_dataset
from envs.row_files import read_rows, write_rows
from envs.sokoban_data import make_boards, row_of
from launch.prepare import main, parser, sources
from tests.support.paths import DATA


def prepare(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The summary line of a run that succeeds."""
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out.splitlines()[-1]


def boards_in(path: Path) -> list[Board]:
    return [board_from_config(row["extra_info"]["env_config"]) for _, row in read_rows(path)]


def image(colour: object) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 40), colour).save(buffer, "PNG")
    return buffer.getvalue()


def mirrored(board: Board) -> Board:
    codes, width = board.codes(), board.width
    rows = [codes[start : start + width][::-1] for start in range(0, len(codes), width)]
    return board_of(board.height, width, b"".join(rows))


def test_boards_of_several_sizes_are_made_as_difficult_as_asked(tmp_path, capsys):
    sizes = ("--sizes", "6x6", "6x8", "--boxes", 1, 2, "--min-solution", 5, "--max-solution", 30)
    line = prepare(capsys, "sokoban", "--make", 30, *sizes, "--heldout", 6, "--out", tmp_path, "--jobs", 1)
    assert "24 to train on, 6 held out" in line
    train, heldout = boards_in(tmp_path / "train.parquet"), boards_in(tmp_path / "heldout.parquet")
    assert {(board.height, board.width) for board in train} == {(6, 6), (6, 8)}
    assert {len(board.boxes) for board in train} == {1, 2}
    assert all(5 <= len(solve(board) or []) <= 30 for board in (*train, *heldout))
    assert len({canonical(board) for board in (*train, *heldout)}) == 30


def test_a_held_out_board_takes_its_mirror_image_out_of_training(tmp_path, capsys):
    boards = make_boards(6, BoardSpec(), seed=9)
    for name, part in (("a", [*boards, boards[5]]), ("b", [mirrored(board) for board in boards[:2]])):
        write_rows(tmp_path / f"{name}.parquet", map(row_of, part))
    files = ("--from", tmp_path / "a.parquet", "--heldout-from", tmp_path / "b.parquet")
    line = prepare(capsys, "sokoban", *files, "--out", tmp_path / "out", "--jobs", 1)
    assert "4 to train on, 2 held out, 3 duplicate" in line
    assert boards_in(tmp_path / "out" / "heldout.parquet") == [mirrored(board) for board in boards[:2]]
    assert boards_in(tmp_path / "out" / "train.parquet") == boards[2:]


def test_level_files_are_read_solved_in_parallel_and_their_faults_counted(tmp_path, capsys):
    levels = (DATA / "boxoban" / "medium_valid_000.txt").read_text().split("\n\n")[:12]
    (tmp_path / "levels.txt").write_text("\n\n".join([*levels, levels[0], "; broken\n####\n#@.#\n####"]))
    line = prepare(capsys, "sokoban", "--from", tmp_path / "levels.txt", "--out", tmp_path, "--jobs", 2)
    assert "1 duplicate, 1 unreadable" in line
    assert "levels.txt level 13: a board needs" in line
    rows = load_dataset(tmp_path / "train.parquet").samples
    assert len(rows) >= 8


def test_raw_problems_are_converted_into_files_that_need_nothing_beside_them(tmp_path, capsys):
    good = {"problem": "<image>Find x.", "answer": "7", "images": [{"bytes": image("red"), "path": None}]}
    rows = [
        good,
        good,
        {**good, "images": [{"bytes": b"none", "path": None}]},
        {**good, "answer": "x" * 700},
        {**good, "problem": " "},
        *({**good, "images": [{"bytes": image((i, 0, 0)), "path": None}]} for i in range(8)),
    ]
    write_rows(tmp_path / "raw.parquet", rows)
    line = prepare(capsys, "geo3k", "--from", tmp_path / "raw.parquet", "--out", tmp_path / "out", "--heldout", 3)
    assert "6 to train on, 3 held out, 1 duplicate, 1 unreadable images, 1 empty, 1 labels that do not" in line
    assert "raw.parquet row 3: the label" in line
    train, heldout = (load_dataset(tmp_path / "out" / f"{name}.parquet").samples for name in ("train", "heldout"))
    images = [{sample.images[0].content_hash for sample in part} for part in (train, heldout)]
    assert (len(train), len(heldout)) == (6, 3)
    assert not images[0] & images[1]
    assert train[0].label == "7"


def test_the_five_real_problems_survive_the_conversion(tmp_path, capsys):
    source = DATA / "geometry3k" / "problems.jsonl"
    prepare(capsys, "geo3k_multi_turn", "--from", source, "--out", tmp_path, "--heldout", 1, "--format", "jsonl")
    made = [*load_dataset(tmp_path / "train.jsonl").samples, *load_dataset(tmp_path / "heldout.jsonl").samples]
    real = {sample.images[0].content_hash: sample for sample in load_dataset(source).samples}
    assert len(made) == 5
    for sample in made:
        twin = real[sample.images[0].content_hash]
        assert (sample.prompt, sample.label) == (twin.prompt, twin.label)


def test_drawn_problems_can_be_answered_and_share_no_question_between_the_files(tmp_path, capsys):
    assert "27 to train on, 3 held out" in prepare(capsys, "geo3k", "--make", 30, "--out", tmp_path)
    train, heldout = (load_dataset(tmp_path / f"{name}.parquet").samples for name in ("train", "heldout"))
    assert not {s.images[0].content_hash for s in train} & {s.images[0].content_hash for s in heldout}
    for sample in train:
        assert geo3k.build_env(sample).step(rf"\boxed{{{sample.label}}}")[2]["reward"] == 1.0


@pytest.mark.parametrize(
    ("task", "content", "words"),
    [
        ("geo3k", {"text": "x", "answer": "1"}, "no column problem; it has: text, answer"),
        ("geo3k", {"problem": "x", "label": "1"}, "no column answer; it has: problem, label"),
        ("sokoban", {"text": "x"}, "no column 'prompt' or 'extra_info'; it has: text"),
        ("sokoban", {"prompt": "no board"}, "holds no board: 1 unreadable, such as raw.jsonl row 0"),
    ],
)
def test_a_file_without_what_is_needed_is_one_line(tmp_path, capsys, task, content, words):
    (tmp_path / "raw.jsonl").write_text(json.dumps(content) + "\n")
    assert main([task, "--from", str(tmp_path / "raw.jsonl"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--make", "5", "--from", "x"], "leave out --from"),
        (["--make", "5", "--heldout", "5"], "leaves none to train on"),
        (["--from", "nowhere.xsb"], "no file 'nowhere.xsb'"),
        (["--make", "9", "--sizes", "3x3"], "no room for 1 boxes"),
        (["--make", "9", "--jobs", "0"], "--jobs 0: at least 1"),
        (["--dataset", "nothing"], "neither a folder here nor a hub name"),
    ],
)
def test_options_that_cannot_be_are_one_line(tmp_path, capsys, arguments, words):
    assert main(["sokoban", *arguments, "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("inner", ["", "inner"])
def test_a_file_where_the_folder_is_to_be_is_refused_before_anything_is_made(tmp_path, capsys, monkeypatch, inner):
    monkeypatch.setattr("launch.prepare.boards", None)
    (tmp_path / "taken").write_text("mine")
    out = tmp_path / "taken" / inner
    assert main(["sokoban", "--make", "9", "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"error: --out {out}: {tmp_path / 'taken'} is a file; name a folder\n"


@pytest.mark.parametrize("text", ["6x", "x6", "6x7x8", "-6", "six", ""])
def test_a_size_that_is_half_said_is_refused_with_the_form(capsys, text):
    with pytest.raises(SystemExit):
        parser().parse_args(["sokoban", f"--sizes={text}"])
    assert f"{text!r} is no size; write ROWSxCOLUMNS, such as 6x7" in capsys.readouterr().err


def test_a_size_of_one_number_is_a_square():
    assert parser().parse_args(["sokoban", "--sizes", "6", "6x8"]).sizes == [(6, 6), (6, 8)]


@pytest.mark.parametrize(
    ("files", "train", "held"),
    [
        ("data/train-0.parquet data/test-0.parquet", "train-0", "test-0"),
        ("train/0000.parquet test/0000.parquet", "train/0000", "test/0000"),
        ("main/train/0.parquet main/validation/0.parquet main/testmini/0.parquet", "train/0", "testmini/0"),
        ("latest.parquet contest.parquet", "contest latest", ""),
    ],
)
def test_splits_of_a_datasets_files_are_told_by_whole_words_of_their_paths(
    tmp_path, capsys, monkeypatch, files, train, held
):
    paths = sorted(tmp_path / name for name in files.split())
    monkeypatch.setattr("launch.prepare.local_dataset", lambda _: paths)
    found = sources(parser().parse_args(["geo3k"]))
    for part, wanted in zip(found, (train, held), strict=True):
        assert all(str(path).endswith(f"/{name}.parquet") for path, name in zip(part, wanted.split(), strict=True))
    assert "held out: " in capsys.readouterr().err
