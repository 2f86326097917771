"""The sweep of simulations: its cases, the rows that it keeps, what it tells and what it refuses."""

from __future__ import annotations

import json

import pytest

from shared.families.registry import find_sizes
from tests.bench.scale import command, growth, sweep
from tests.bench.scale.sweep import COLOCATED, Parts, cases, fitting
from tests.bench.scale.tables import tables

MODEL = "Qwen3-VL-8B"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(sweep, "EPISODES_A_GPU", 2)
    monkeypatch.setattr(sweep, "_source", lambda: b"as it is")


def test_the_sweep_keeps_its_rows_and_tells_them(tmp_path):
    kept = tmp_path / "rows.jsonl"
    rows = sweep.sweep(MODEL, [8], kept)
    assert len(rows) == len(fitting(MODEL, [8])) < len(list(cases(MODEL, [8])))
    assert sweep.sweep(MODEL, [8], kept) == json.loads(json.dumps(rows))
    assert len(kept.read_text().splitlines()) == len(rows)
    assert f"| {COLOCATED} | " in tables(rows)


@pytest.mark.parametrize(("name", "value"), [("_source", lambda: b"changed"), ("STEPS", 4), ("EPISODES_A_GPU", 3)])
def test_rows_of_another_state_of_the_code_are_made_again(name, value, tmp_path, monkeypatch):
    kept = tmp_path / "rows.jsonl"
    before = sweep.sweep(MODEL, [4], kept)
    monkeypatch.setattr(sweep, name, value)
    after = sweep.sweep(MODEL, [4], kept)
    assert len(kept.read_text().splitlines()) == len(before) + len(after)
    assert {row["code"] for row in before}.isdisjoint(row["code"] for row in after)


def test_only_parts_with_an_engine_and_a_learner_that_fits_are_simulated():
    shares = {(case.gpus, case.share) for case in fitting(MODEL, [2, 4, 8])}
    assert shares == {(2, 1.0), (4, 1.0), (4, 0.5), (8, 1.0), (8, 0.25), (8, 0.5)}
    assert all(Parts.of(case, find_sizes(MODEL)).engines for case in fitting(MODEL, [2, 4, 8]))


@pytest.mark.slow
def test_sizes_at_which_not_all_systems_fit_have_gaps_in_the_tables_and_in_the_picture(tmp_path, capsys):
    shown = ["--gpus", "1", "2", "8", "--rows", str(tmp_path / "rows.jsonl"), "--draw", str(tmp_path / "new" / "a.png")]
    assert command.main(shown) == 0
    told, said = capsys.readouterr()
    assert said.splitlines() == [f"--gpus 1: no engine and learner of {MODEL} fit; use more GPUs"]
    assert "| one step off | – | " in told
    last = json.loads(told.splitlines()[-1])
    assert last["benchmark"] == "scale" and {row["gpus"] for row in last["rows"]} == {2, 8}
    assert (tmp_path / "new" / "a.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", "1"], f"--gpus 1: no engine and learner of {MODEL} fit; use more GPUs"),
        (["--gpus", "8", "0"], "--gpus 0 is no number of GPUs; use 1 or more"),
        (["--gpus", "8", "--model", "Qwen3-VL-235B-A22B"], "--gpus 8: no engine and learner of Qwen3-VL-235B-A22B fit"),
        (["--model", "Foo"], "no sizes of 'Foo': give a folder with config.json, or one of Qwen"),
    ],
)
def test_gpus_and_models_of_which_nothing_is_simulated_are_one_line(options, said, tmp_path, capsys):
    assert command.main([*options, "--rows", str(tmp_path / "rows.jsonl")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize("text", ["no row", "1"])
def test_a_file_of_other_lines_is_not_taken_for_rows(text, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(text + "\n")
    assert command.main(["--gpus", "4", "--rows", str(tmp_path / "rows.jsonl")]) == 2
    assert "rows.jsonl holds lines that are no rows of this command; name another file" in capsys.readouterr().err


@pytest.mark.parametrize("main", [command.main, growth.main])
@pytest.mark.parametrize(
    ("name", "said"),
    [("file/a.png", "cannot be made"), ("a.txt", "must end in .png, .svg, .pdf"), ("folder.png", "is a folder")],
)
def test_a_picture_that_cannot_be_written_is_refused_before_the_work_begins(main, name, said, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(SystemExit) as end:
        main(["--draw", str(tmp_path / name)])
    assert end.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_the_results_are_printed_though_the_picture_cannot_be_drawn(tmp_path, capsys, monkeypatch):
    def fails(rows, path):
        raise OSError("the disk is full")

    monkeypatch.setattr(command, "draw", fails)
    with pytest.raises(OSError, match="the disk is full"):
        command.main(["--gpus", "4", "--rows", str(tmp_path / "rows.jsonl"), "--draw", str(tmp_path / "a.png")])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
