"""What a run's processes say is in files of its folder, and on the terminal as it comes."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from launch.engines.engine_supervisor import EngineServer
from launch.engines.kinds.engine_kind import EngineSpec
from launch.processes.children import start
from launch.processes.run_logs import LogFile, RunLogs, before, bound_log
from shared.config.sections import EngineConfig
from tests.support.machine import until

SAYS = "import sys; print({text!r}, end='', file=sys.stderr)"


def say(logs: RunLogs, text: str, name: str = "learner") -> None:
    """A process of that name that has said it and ended."""
    with logs.stderr(name) as stderr:
        child = start(name, [sys.executable, "-c", SAYS.format(text=text)], stderr=stderr)
    assert child.process.wait(60) == 0
    logs._threads[-1].join(60)


def make_ready(run: Path) -> None:
    """As the learner does; an earlier recipe is another one."""
    run.mkdir(exist_ok=True)
    path = run / "recipe.json"
    at = path.stat().st_mtime_ns + 1 if path.exists() else None
    path.write_text("{}")
    if at:
        os.utime(path, ns=(at, at))


@pytest.mark.parametrize("earlier", [False, True])
def test_what_is_said_is_passed_on_and_kept_once_the_folder_is_the_run_s(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], earlier: bool
) -> None:
    run = tmp_path / "run"
    if earlier:
        make_ready(run)
    with RunLogs(run) as logs:
        say(logs, "too early\n")
        make_ready(run)
        say(logs, "12:00:00 learner INFO one\nTraceback: cut off")
        say(logs, "another\n", "actors")
    assert (run / "logs/learner.log").read_text() == "12:00:00 learner INFO one\nTraceback: cut off"
    assert (run / "logs/actors.log").read_text() == "another\n"
    assert (run / "logs/learner.log").stat().st_mode & 0o777 == 0o600
    said = capfd.readouterr().err
    assert all(text in said for text in ("too early\n", "Traceback: cut off", "another\n"))


def test_what_one_process_says_before_and_after_the_folder_is_ready_is_kept_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with RunLogs(run) as logs:
        with logs.stderr("learner") as stderr:
            code = "import sys; print('early', file=sys.stderr, flush=True); input(); print('late', file=sys.stderr)"
            process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=stderr)
        until(lambda: "early" in capfd.readouterr().err)
        make_ready(run)
        process.communicate(b"\n", timeout=60)
    assert (run / "logs/learner.log").read_text() == "early\nlate\n"


def test_lines_of_two_processes_stand_whole(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_ready(tmp_path / "run")
    code = "import os\nfor _ in range(200): os.write(2, b'{0}' * 300); os.write(2, b'{0}' * 300 + b'\\n')"
    with RunLogs(tmp_path / "run") as logs:
        children = []
        for letter in "ab":
            with logs.stderr(letter) as stderr:
                children.append(start(letter, [sys.executable, "-c", code.format(letter)], stderr=stderr))
        assert [child.process.wait(60) for child in children] == [0, 0]
    assert set(capfd.readouterr().err.splitlines()) == {"a" * 600, "b" * 600}


def test_a_log_that_is_too_long_goes_on_in_a_new_file_beside_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "logs/learner.log"
    file = LogFile(path, max_bytes=10)
    for i in range(8):
        file.add(b"line %d\n" % i)
    file.close()
    assert path.read_text() == "line 6\nline 7\n" and path.with_suffix(".1.log").read_text() == "line 4\nline 5\n"
    file = LogFile(path, max_bytes=100)
    file.add(b"of the next process\n")
    file.close()
    assert path.read_text().endswith("line 7\nof the next process\n")


def test_a_disk_that_refuses_costs_the_file_and_not_what_is_passed_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "logs").write_text("in the way")
    with RunLogs(run) as logs:
        make_ready(run)
        say(logs, "one\n")
        say(logs, "two\n")
    said = capfd.readouterr().err
    assert "one\n" in said and "two\n" in said


def test_a_log_that_another_process_writes_is_cut_when_it_is_too_long_and_goes_on(tmp_path: Path) -> None:
    path, code = tmp_path / "engine.log", "import sys\nfor line in sys.stdin: print('said', line, end='', flush=True)"
    with path.open("ab") as output:
        speaker = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=output)
    for number in range(5):
        speaker.stdin.write(b"%d\n" % number)
        speaker.stdin.flush()
        until(lambda said=number: path.read_text().endswith(f"said {said}\n"))
        bound_log(path, max_bytes=14)
    speaker.stdin.close()
    assert speaker.wait(60) == 0
    assert before(path).read_text() == "said 0\nsaid 1\nsaid 2\n" and path.read_text() == "said 3\nsaid 4\n"
    assert before(path).stat().st_mode & 0o777 == 0o600


def test_a_log_that_cannot_be_copied_is_cut_all_the_same_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engine.log"
    path.write_text("too long")
    before(path).mkdir()
    bound_log(path, max_bytes=4)
    bound_log(tmp_path / "none.log")
    assert path.read_text() == "" and f"what {path} held is not kept: Is a directory" in caplog.text


def test_an_engine_that_is_watched_keeps_the_last_of_its_log_and_a_new_run_begins_without_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.engines.engine_supervisor.bound_log", partial(bound_log, max_bytes=4))
    log = tmp_path / "engine.log"
    before(log).write_text("of another run")
    command = (sys.executable, "-c", "import time; print('loaded', flush=True); time.sleep(60)")
    engine = EngineServer(EngineSpec("engine", "http://127.0.0.1:1", command, {}, (), log), EngineConfig())
    engine.start()
    try:
        assert not before(log).exists()
        until(lambda: engine.keep_alive() or before(log).exists())
        assert before(log).read_text() == "loaded\n"
    finally:
        assert engine.child is not None
        engine.child.kill()
