"""A run can always go on: after a kill at any moment, with damaged checkpoints, and from an older step."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from learner.checkpoints.checkpoint_folder import candidates, list_checkpoints, put, remove, tidy
from learner.checkpoints.restoring import Restored, restore
from learner.checkpoints.saver import Saver
from learner.model.policy import load_policy
from learner.training.trainer import Trainer
from tests.support.checkpoints import config, recipe, save


@pytest.fixture
def trainer(folder, spec, ranks):
    return Trainer(load_policy(str(folder), spec), config(), ranks)


def save_steps(trainer: Any, ranks: Any, path: Path, steps: range, keep: int = 10) -> list[Path]:
    """Each with parameters and a version of its own."""
    saved = []
    for step in steps:
        trainer.num_steps = step
        with torch.no_grad():
            for p in trainer.policy.parameters():
                p.fill_(step)
        saved.append(save(trainer, ranks, path, version=step, keep=keep))
    return saved


def change_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "parameters cut off": lambda path: os.truncate(path / "dcp" / "__0_0.distcp", 1000),
    "parameters changed": lambda path: change_a_byte(path / "dcp" / "__0_0.distcp"),
    "parameters missing": lambda path: (path / "dcp" / "__0_0.distcp").unlink(),
    "index missing": lambda path: (path / "dcp" / ".metadata").unlink(),
    "random state empty": lambda path: os.truncate(path / "rng" / "rank_0.pt", 0),
    "meta.json cut off": lambda path: os.truncate(path / "meta.json", 100),
    "meta.json deep": lambda path: (path / "meta.json").write_text("[" * 100_000),
    "meta.json of another kind": lambda path: (path / "meta.json").write_text("[1, 2]"),
    "meta.json changed": lambda path: (path / "meta.json").write_text(
        (path / "meta.json").read_text().replace('"version": 2', '"version": 9')
    ),
    "meta.json missing": lambda path: (path / "meta.json").unlink(),
    "all but meta.json missing": lambda path: [shutil.rmtree(path / name) for name in ("dcp", "rng")],
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_kept_aside_and_the_one_before_is_taken(trainer, ranks, tmp_path, monkeypatch, damage):
    lines: list[str] = []
    log = SimpleNamespace(error=lambda text, *parts: lines.append(text % parts), info=lambda *_: None)
    monkeypatch.setattr("learner.checkpoints.restoring.get_logger", lambda _: log)
    good, newest = save_steps(trainer, ranks, tmp_path, range(1, 3))
    DAMAGES[damage](newest)
    restored = restore(tmp_path, trainer, ranks, recipe())
    assert restored.version == trainer.num_steps == 1
    assert all(bool((p == 1).all()) for p in trainer.policy.parameters())
    assert list_checkpoints(tmp_path) == candidates(tmp_path, "auto") == [good]
    assert (tmp_path / "damaged" / newest.name).is_dir()
    (line,) = lines
    assert str(newest) in line and "is damaged: " in line and str(good) in line and "\n" not in line


@pytest.mark.slow
def test_a_damaged_checkpoint_on_a_full_disk_does_not_end_the_start(trainer, ranks, tmp_path, monkeypatch):
    """A folder needs room, a new name does not."""
    good, newest = save_steps(trainer, ranks, tmp_path, range(1, 3))
    DAMAGES["all but meta.json missing"](newest)
    mkdir = Path.mkdir

    def refused(path, *arguments, **options):
        if path.name == "damaged":
            raise OSError(28, "No space left on device", str(path))
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", refused)
    assert restore(tmp_path, trainer, ranks, recipe()).version == 1
    assert list_checkpoints(tmp_path) == candidates(tmp_path, "auto") == [good]
    assert (tmp_path / f"{newest.name}.damaged").is_dir()
    assert restore(tmp_path, trainer, ranks, recipe()).version == 1


@pytest.mark.slow
@pytest.mark.parametrize(("best", "moved"), [(1, False), (2, True), (3, True), ("x", False), (None, False)])
def test_a_best_checkpoint_that_is_damaged_is_no_bar_for_what_is_still_to_come(trainer, ranks, tmp_path, best, moved):
    for path in save_steps(trainer, ranks, tmp_path, range(1, 4))[1:]:
        change_a_byte(path / "dcp" / "__0_0.distcp")
    note = {"checkpoint": f"step_{best}", "step": best, "value": 0.9}
    (tmp_path / "best.json").write_text(json.dumps(note))
    assert restore(tmp_path, trainer, ranks, recipe()).version == 1
    assert (tmp_path / "best.json").exists() is not moved
    assert (tmp_path / "damaged" / "best.json").exists() is moved
    settings = recipe(keep=1, in_background=False)
    saver = Saver(tmp_path, trainer, ranks, settings)
    trainer.num_steps = saver.best.candidate = 4
    saver.save(4, {})
    assert saver.best.result(0.8) is (best != 1)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[" * 100_000, '{"step": 1e999, "value": 1}', '{"step": 1, "value": NaN}', "1e999"])
def test_a_note_of_the_best_checkpoint_that_cannot_be_read_keeps_no_run_from_going_back(trainer, ranks, tmp_path, text):
    saved = save_steps(trainer, ranks, tmp_path, range(1, 3))
    (tmp_path / "best.json").write_text(text)
    assert Saver(tmp_path, trainer, ranks, recipe()).best.step == -1
    assert restore(tmp_path, trainer, ranks, recipe(resume=str(saved[0]))).version == 1


@pytest.mark.slow
def test_a_run_without_a_whole_checkpoint_says_so_and_touches_nothing(trainer, ranks, tmp_path):
    for path in save_steps(trainer, ranks, tmp_path, range(1, 3)):
        change_a_byte(path / "dcp" / "__0_0.distcp")
    for _ in range(2):  # nor does another attempt begin anew in silence
        with pytest.raises(ValueError, match=r"--learner\.resume never") as error:
            restore(tmp_path, trainer, ranks, recipe())
        assert "step_00000002 is damaged" in str(error.value) and "\n" not in str(error.value)
    assert len(list_checkpoints(tmp_path)) == 2
    with pytest.raises(ValueError, match=r"step_00000001 is damaged.*--learner\.resume auto"):
        restore(tmp_path, trainer, ranks, recipe(resume=str(tmp_path / "step_00000001")))
    assert restore(tmp_path / "none", trainer, ranks, recipe()) == Restored()


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_learner_names_no_files_and_is_taken(trainer, ranks, tmp_path):
    (path,) = save_steps(trainer, ranks, tmp_path, range(1, 2))
    meta = json.loads((path / "meta.json").read_text())
    del meta["files"], meta["digest"]
    (path / "meta.json").write_text(json.dumps(meta))
    assert restore(tmp_path, trainer, ranks, recipe()).version == 1


@pytest.mark.slow
def test_a_run_that_goes_back_keeps_what_it_writes_from_then_on(trainer, ranks, tmp_path):
    """Neither does `auto` take what came later, nor are the new checkpoints removed as older than it."""
    saved = save_steps(trainer, ranks, tmp_path, range(4, 9), keep=5)
    best = {"checkpoint": "step_00000008", "step": 8, "value": 1.0}
    (tmp_path / "best.json").write_text(json.dumps(best))
    told = str(saved[1])
    assert restore(tmp_path, trainer, ranks, recipe(resume=told)).version == 5
    assert list_checkpoints(tmp_path) == saved[:2]
    undone = sorted(path.name for path in (tmp_path / "undone").iterdir())
    assert undone == ["best.json", *(path.name for path in saved[2:])]
    assert candidates(tmp_path, told) == [saved[1]]
    written = save_steps(trainer, ranks, tmp_path, range(6, 8), keep=2)
    assert list_checkpoints(tmp_path) == written
    assert restore(tmp_path, trainer, ranks, recipe()).version == 7


@pytest.mark.slow
def test_torchruns_restart_goes_on_with_what_was_written_since_the_run_went_back(trainer, ranks, tmp_path):
    saved = save_steps(trainer, ranks, tmp_path, range(4, 9), keep=9)
    told = str(saved[1])
    assert candidates(tmp_path, told) == [saved[1]]  # it died before it had gone back
    restore(tmp_path, trainer, ranks, recipe(resume=told))
    assert restore(tmp_path, trainer, ranks, recipe(resume=told)).version == 5  # nothing is written yet
    (written,) = save_steps(trainer, ranks, tmp_path, range(6, 7), keep=9)
    assert restore(tmp_path, trainer, ranks, recipe(resume=told)).version == 6
    change_a_byte(written / "dcp" / "__0_0.distcp")
    assert restore(tmp_path, trainer, ranks, recipe(resume=told)).version == 5
    assert restore(tmp_path, trainer, ranks, recipe(resume=str(saved[0]))).version == 4  # told otherwise
    names = sorted(path.name for path in (tmp_path / "undone").iterdir())
    assert names == [f"step_{step:08d}" for step in (5, 6, 7, 8)]


# ---------------------------------------------------------------------- kills and losses of power


class Killed(BaseException):
    """The process ends here."""


def made(path: Path, text: str) -> Path:
    (path / "dcp").mkdir(parents=True)
    (path / "meta.json").write_text(text)
    return path


@pytest.mark.parametrize("steps", range(9))
def test_a_kill_while_a_checkpoint_is_replaced_leaves_the_old_or_the_new_one(tmp_path, monkeypatch, steps):
    final, partial = made(tmp_path / "step_00000001", "old"), made(tmp_path / ".step_00000001.partial", "new")
    calls = []

    def dies(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(real)
            if len(calls) > steps:
                raise Killed
            return real(*arguments, **options)

        return call

    with monkeypatch.context() as patch, suppress(Killed):
        for module, name in ((os, "replace"), (shutil, "rmtree"), (os, "fsync")):
            patch.setattr(module, name, dies(getattr(module, name)))
        put(partial, final)
        assert steps == len(calls), "not all of it was interrupted"
    tidy(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert (final / "meta.json").read_text() in ("old", "new")


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_no_half_of_it(tmp_path, monkeypatch):
    old = made(tmp_path / "step_00000001", "old")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(shutil, "rmtree", lambda path, **_: (_ for _ in ()).throw(Killed) if path.exists() else None)
        remove(old)
    assert list_checkpoints(tmp_path) == [] and candidates(tmp_path, "auto") == []
    tidy(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_all_that_a_checkpoint_holds_is_synced_before_it_has_its_name_and_its_name_after(
    trainer, ranks, tmp_path, monkeypatch
):
    events: list[Path | str] = []
    sync, replace = os.fsync, os.replace

    def fsync(file: Any) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}")))
        sync(file)

    def renamed(source: Any, target: Any) -> None:
        if Path(source).name == ".step_00000001.partial":
            events.append("renamed")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", renamed)
    (path,) = save_steps(trainer, ranks, tmp_path / "checkpoints", range(1, 2))
    before, after = events[: events.index("renamed")], events[events.index("renamed") :]
    partial = path.with_name(".step_00000001.partial")
    content = {partial, *(partial / each.relative_to(path) for each in path.rglob("*"))}
    assert content <= set(before)
    assert {tmp_path, tmp_path / "checkpoints"} <= set(after)


@pytest.mark.slow
def test_a_saver_replaces_the_checkpoint_of_a_step_that_is_there(trainer, ranks, tmp_path):
    save_steps(trainer, ranks, tmp_path, range(1, 2))
    saver = Saver(tmp_path, trainer, ranks, recipe(in_background=False))
    path = saver.save(9, {})
    assert json.loads((path / "meta.json").read_text())["version"] == 9
    assert [each.name for each in tmp_path.iterdir()] == ["step_00000001"]
    assert restore(tmp_path, trainer, ranks, recipe()).version == 9
