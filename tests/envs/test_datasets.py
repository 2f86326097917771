"""Datasets: what rows become, what is left out and counted, and the Sokoban files that the project writes."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from envs import geo3k_multi_turn, sokoban
from envs.boards.board import canonical
from envs.boards.generate import BoardSpec
from envs.boards.solver import solve
from envs.datasets import MAX_IMAGE_BYTES, data_uri, load_dataset, with_images
from envs.geo3k import build_env
from envs.row_files import write_rows
from envs.row_prompts import repair
from envs.sokoban_data import board_in_text, different, make_boards, read_boards, row_of, split_boards
from tests.support.paths import DATA


def image(colour="red") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(buffer, "PNG")
    return buffer.getvalue()


def write(path: Path, rows: list[dict]) -> Path:
    write_rows(path, rows)
    return path


def test_the_five_real_problems_load_render_and_are_graded():
    data = load_dataset(DATA / "geometry3k" / "problems.jsonl", system_prompt=geo3k_multi_turn.SYSTEM_PROMPT)
    assert len(data.samples) == 5
    assert (data.report.bad_images, data.report.bad_labels, data.report.duplicates) == (0, 0, 0)
    for sample in data.samples:
        system, user = with_images(sample)
        assert system["role"] == "system"
        assert [part["type"] for part in user["content"]] == ["image", "text"]
        assert user["content"][0]["image"].width > 50
        env = build_env(sample)
        env.reset()
        assert env.step(rf"\boxed{{{sample.label}}}")[2]["reward"] == 1.0


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_bad_rows_are_counted_and_left_out(tmp_path, suffix):
    good = {"problem": "<image>Find x.", "answer": "7", "images": [data_uri(image())]}
    rows = [
        good,
        good,
        {**good, "problem": ""},
        {**good, "answer": " "},
        {**good, "images": [data_uri(b"no image")]},
        {**good, "images": [data_uri(image()[:50])]},
        {**good, "images": []},
        {**good, "images": [data_uri(image("blue"))]},
        {**good, "problem": "<image>Answer: \x08oxed{$Answer}"},
        {**good, "answer": "x" * 700},
    ]
    path = write(tmp_path / f"rows{suffix}", rows)
    report = load_dataset(path, is_mathematics=True).report
    assert (report.rows, report.samples) == (10, 3)
    assert (report.duplicates, report.empty, report.bad_images) == (1, 2, 3)
    assert (report.bad_labels, report.repaired) == (1, 1)
    assert "row 1: the same as an earlier row" in report.summary()
    assert "\n" not in report.summary() and report.is_alarming
    report = load_dataset(path).report
    assert (report.samples, report.bad_labels) == (4, 0)  # another environment's labels may have any form


@pytest.mark.parametrize(
    "line",
    [
        b"[1, 2]",
        b"7",
        b"null",
        b'"text"',
        b"[" * 200_000,
        b'{"a":' * 50_000,
        b'{"problem": "x?", "answer": ' + b"9" * 5000 + b"}",
        b'{"problem": "x?", "answer": "1"',
        b"\xff\xfe",
        b'{"problem": [7], "answer": "1"}',
        b'{"problem": "x?", "answer": "1", "images": 7}',
        b'{"extra_info": {"env_config": {"seed": 99999999999999999999999}}}',
        b'{"extra_info": {"env_config": {"a": ' + b"[" * 100 + b"]" * 100 + b"}}}",
        b'{"extra_info": {"env_config": {"a": NaN}}}',
        b'{"problem": "\\ud800 x?", "answer": "1"}',
    ],
)
def test_a_row_that_cannot_be_used_ends_alone(tmp_path, line):
    good = [b'{"problem": "x?", "answer": "1"}', b'{"problem": "y?", "answer": "1"}']
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join([good[0], line, good[1]]))
    report = load_dataset(tmp_path / "rows.jsonl").report
    assert (report.rows, report.samples, report.bad_rows + report.bad_images) == (3, 2, 1)
    assert "row 1: " in report.summary()
    assert len(report.summary()) < 1000


def test_a_first_row_that_is_none_does_not_hide_a_missing_column(tmp_path):
    (tmp_path / "rows.jsonl").write_text('7\n{"question": "x?"}\n')
    with pytest.raises(ValueError, match="no column answer; it has: question; name the columns"):
        load_dataset(tmp_path / "rows.jsonl")


def test_a_parquet_row_whose_text_is_none_ends_alone(tmp_path):
    texts = pyarrow.array([b"x?", b"\xff\xfe", b"y?"], pyarrow.binary()).view(pyarrow.string())
    table = pyarrow.table({"problem": texts, "answer": ["1", "1", "1"]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    report = load_dataset(tmp_path / "rows.parquet").report
    assert (report.rows, report.samples, report.bad_rows) == (3, 2, 1)


@pytest.mark.parametrize("name", ["/dev/zero", "pipe", "folder", "huge.png"])
def test_what_is_no_image_file_of_bounded_size_is_never_read(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with (tmp_path / "huge.png").open("wb") as file:
        file.truncate(MAX_IMAGE_BYTES + 1)
    rows = [{"problem": "Find x.", "answer": "1"}, {"problem": "<image>Find x.", "answer": "1", "images": [name]}]
    report = load_dataset(write(tmp_path / "rows.jsonl", rows)).report
    assert (report.samples, report.bad_images) == (1, 1)


def test_images_may_be_bytes_or_files_and_marks_say_where_they_go(tmp_path):
    (tmp_path / "a.png").write_bytes(image())
    rows = [
        {"problem": "See <image> and <image>: x?", "answer": "1", "images": [{"bytes": image(), "path": None}, None]},
        {"problem": "See <image> and <image>: x?", "answer": "1", "images": [{"bytes": image(), "path": None}] * 2},
        {"problem": "No mark", "answer": "2", "images": [{"bytes": None, "path": "a.png"}]},
    ]
    data = load_dataset(write(tmp_path / "rows.parquet", rows))
    assert data.report.bad_images == 1
    marked, plain = (sample.prompt[0]["content"] for sample in data.samples)
    assert [part["type"] for part in marked] == ["text", "image", "text", "image", "text"]
    assert [part["type"] for part in plain] == ["image", "text"]
    assert data.samples[0].images[0].data == image()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("none.jsonl", None, "no dataset file"),
        ("rows.csv", "a,b\n", "neither"),
        ("rows.jsonl", "{broken\n", "line 1 is no JSON"),
        ("rows.parquet", "not parquet", "no readable parquet"),
        ("empty.jsonl", "", "no usable sample"),
    ],
)
def test_an_unreadable_file_is_refused_in_one_line(tmp_path, name, content, reason):
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=reason) as caught:
        load_dataset(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_control_characters_become_the_latex_they_were():
    assert repair("a \x08oxed{1}") == (r"a \boxed{1}", True)
    assert repair("\x0crac{1}{2} and 3\times 4") == (r"\frac{1}{2} and 3\times 4", True)
    assert repair("plain\ttext here") == ("plain\ttext here", False)


def test_a_prompt_that_explains_the_tool_gets_no_second_explanation(tmp_path):
    rows = [{"problem": "Call <tool_call>…</tool_call>. Find x.", "answer": "1"}, {"problem": "Find y.", "answer": "1"}]
    first, second = load_dataset(write(tmp_path / "r.jsonl", rows), system_prompt="Explained.").samples
    assert [message["role"] for message in first.prompt] == ["user"]
    assert [message["role"] for message in second.prompt] == ["system", "user"]


def test_made_boards_are_written_and_played_from_the_file(tmp_path):
    boards = make_boards(12, BoardSpec(sizes=((6, 6), (6, 7)), num_boxes=(1, 2)), seed=3)
    assert len({canonical(board) for board in boards}) == 12
    path = tmp_path / "train.parquet"
    assert write_rows(path, map(row_of, boards)) == 12
    data = load_dataset(path, system_prompt="Play.")
    for board, sample in zip(boards, data.samples, strict=True):
        env = sokoban.build_env(sample, {"pixels_per_cell": 16})
        assert env.board == board
        for move in solve(board) or []:
            _, done, _ = env.step(move)
        assert done
        assert env.success
    assert data.samples[0].prompt == ({"role": "system", "content": "Play."},)


def test_a_split_keeps_symmetric_boards_together():
    levels = read_boards(DATA / "boxoban" / "medium_valid_000.txt").boards[:60]
    small = make_boards(40, BoardSpec(), seed=1)
    boards, repeated = different([*levels, *levels[:5], *small])
    train, heldout = split_boards(boards, num_heldout=20, seed=2)
    assert (len(heldout), len(train), repeated) == (20, 80, 5)
    assert not {canonical(board) for board in train} & {canonical(board) for board in heldout}
    with pytest.raises(ValueError, match="none to train on"):
        split_boards(levels[:3], num_heldout=3)


def test_too_many_different_boards_are_refused():
    with pytest.raises(ValueError, match="boards differ"):
        make_boards(1000, BoardSpec(sizes=((3, 5),), wall_chance=0.0))


def test_raw_rows_with_boards_in_text_are_converted(tmp_path):
    boards = make_boards(3, BoardSpec(), seed=5)
    rows = [
        {"prompt": f"Rules.\n[Current Observation]:\n{board.text()}\nDecide the next action:", "data_source": "x"}
        for board in boards
    ]
    rows.append({"prompt": "no board", "data_source": "x"})
    chats = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    for name, kind in (("raw", rows), ("chats", chats)):
        reading = read_boards(write(tmp_path / f"{name}.parquet", kind))
        assert (reading.boards, reading.unreadable) == (boards, 1)
        assert "row 3: the text draws no board" in reading.examples[0]
    with pytest.raises(ValueError, match="no board"):
        board_in_text("# # #\n# P #")
