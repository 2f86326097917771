"""One learner at a time writes into a run's folder."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from pathlib import Path

import pytest

from launch.processes.run_folder import LOCK, check_run_folder, lock, prepare_run_folder, take_run_folder
from shared.config.learner_section import LearnerConfig
from shared.config.recipe import ConfigError, Recipe
from shared.config.sections import EnvConfig, ModelConfig, RunConfig
from tests.support.machine import until
from tests.support.runs import command, places, refused


def recipe(tmp_path: Path, resume: str = "auto") -> Recipe:
    run, learner = RunConfig(dir=str(tmp_path), name="run"), LearnerConfig(resume=resume)
    return Recipe(model=ModelConfig(path="m"), env=EnvConfig(module="e"), run=run, learner=learner)


def hold(tmp_path: Path) -> None:
    _held = take_run_folder(recipe(tmp_path))
    (tmp_path / "held").touch()
    signal.pause()


@pytest.mark.slow
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_second_learner_is_refused_in_one_line_until_the_first_is_dead(tmp_path: Path, resume: str) -> None:
    """Whatever the second one wants, the first one's files stay where they are."""
    first = multiprocessing.get_context("spawn").Process(target=hold, args=(tmp_path,))
    first.start()
    try:
        until((tmp_path / "held").exists, 30.0)
        folder = tmp_path / "run"
        (folder / "metrics.jsonl").touch()
        with pytest.raises(ConfigError) as error:
            lock(folder, 0.2)
        holder = f"process {first.pid} on {socket.gethostname()}"
        assert str(folder) in str(error.value) and holder in str(error.value) and "--run.name" in str(error.value)
        assert "\n" not in str(error.value)
        os.kill(first.pid, signal.SIGKILL)  # type: ignore[arg-type]
        held = prepare_run_folder(recipe(tmp_path, resume), take_run_folder(recipe(tmp_path, resume)))
    finally:
        first.kill()
        first.join(20)
    assert (folder / "metrics.jsonl").exists() is (resume == "auto")
    assert (tmp_path / "run.1" / "metrics.jsonl").exists() is (resume == "never")
    with pytest.raises(ConfigError):  # the new folder is locked as well
        lock(folder, 0.0)
    held.close()
    lock(folder, 0.0).close()


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize("take", [take_run_folder, check_run_folder])
def test_a_folder_that_is_no_runs_is_refused_and_left_as_it_is(tmp_path: Path, resume: str, take) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"run holds thesis\.tex and is no run's.*--run\.name"):
        take(recipe(tmp_path, resume))
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "thesis.tex"]


def test_a_folder_in_which_nothing_ran_is_not_moved_aside(tmp_path: Path) -> None:
    take_run_folder(recipe(tmp_path)).close()
    prepare_run_folder(recipe(tmp_path, "never"), take_run_folder(recipe(tmp_path, "never"))).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [LOCK, "recipe.json", "software.json"]


def test_a_lock_on_a_folder_that_was_moved_aside_meanwhile_is_not_taken_for_one_on_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening the file and locking it, the holder moves the folder aside and leaves."""
    import fcntl

    folder, real, asked = tmp_path / "run", fcntl.flock, []
    folder.mkdir()

    def flock(file: object, how: int) -> None:
        asked.append(how)
        if len(asked) == 1:
            folder.rename(tmp_path / "run.1")
        real(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", flock)
    held = lock(folder)
    monkeypatch.undo()
    with pytest.raises(ConfigError):
        lock(folder, 0.0)
    held.close()
    assert len(asked) == 2


@pytest.mark.slow
def test_the_learner_says_so_before_anything_heavy_starts(tmp_path: Path) -> None:
    """Before the port, too, which the first learner has as well."""
    held = lock(tmp_path / "colour_tiny")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        line, everything = refused(command("learner", places(tmp_path, **{"learner.bind": address})))
    held.close()
    assert f"the run folder {tmp_path / 'colour_tiny'} is in use" in line
    assert f"process {os.getpid()} on {socket.gethostname()}" in line
    assert everything.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("script", ["local", "learner"])
def test_a_folder_that_cannot_be_made_is_named_before_anything_heavy_starts(tmp_path: Path, script: str) -> None:
    (tmp_path / "file").touch()
    line, everything = refused(command(script, places(tmp_path, **{"run.dir": tmp_path / "file"})))
    assert f"the run folder {tmp_path / 'file/colour_tiny'} cannot be used: Not a directory" in line
    assert "--run.dir" in line and everything.count("\n") == 1
