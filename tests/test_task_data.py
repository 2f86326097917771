"""What launch/run.py takes for a task's data: files that are whole, and those that the user has named."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from envs.geometry.triangles import rows
from envs.row_files import write_rows
from launch import prepare, run
from launch.task_run.places import Data, data_of
from shared.config import load_recipe


def test_files_of_one_name_and_one_that_was_changed_are_prepared_apart(tmp_path) -> None:
    recipe, made = load_recipe("launch/recipes/geo3k.toml"), set()
    for folder, count in (("a", 4), ("b", 4), ("b", 5)):
        (tmp_path / folder).mkdir(exist_ok=True)
        write_rows(tmp_path / folder / "own.jsonl", rows(count, "train"))
        made.add(data_of(recipe, str(tmp_path / folder / "own.jsonl"), str(tmp_path), given=False).source)
    assert len(made) == 3


def test_data_without_its_held_out_part_is_not_here(tmp_path) -> None:
    data = Data(str(tmp_path / "train.jsonl"), str(tmp_path / "heldout.jsonl"), ("geo3k",))
    write_rows(data.source, rows(4, "train"))
    assert not data.is_here
    write_rows(data.heldout, rows(4, "heldout"))
    assert data.is_here


@pytest.mark.parametrize("at", [1, 2])
def test_a_full_disk_leaves_the_files_that_were_there(tmp_path, monkeypatch, at) -> None:
    parts = {tmp_path / f"{name}.jsonl": [{"a": 1}] for name in ("heldout", "train")}
    prepare.write_all(parts)
    before, calls = {path: path.read_bytes() for path in tmp_path.iterdir()}, []

    def full(path: Path, rows: Any) -> None:
        calls.append(path)
        path.write_bytes(b"{")
        if len(calls) == at:
            raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(prepare, "write_rows", full)
    with pytest.raises(OSError, match="no space"):
        prepare.write_all(parts)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "words",
    [
        "--make 4 --heldout-from nowhere.jsonl",
        "--from a.jsonl --dataset an/other",
        "--from a.jsonl --heldout 3 --heldout-from b.jsonl",
    ],
)
def test_options_that_leave_one_another_without_effect_are_refused(tmp_path, capsys, words) -> None:
    assert prepare.main(["geo3k", *words.split(), "--out", str(tmp_path / "out")]) == 2
    assert "leave" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--gpus-per-node=0", "--episode-tokens=-5", "--gpu-memory=-1", "--host-memory=-1"])
def test_machines_and_episodes_that_cannot_be_are_refused(capsys, option) -> None:
    name, _, value = option.partition("=")
    assert run.main(["geo3k", "--gpus", "4", "--dry-run", option]) == 2
    assert f"{name} {value}: at least" in capsys.readouterr().err
