"""What people see while a run goes on: a table in a terminal, lines elsewhere."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from launch.dashboard_server.runs import Runs
from launch.local import say_the_end
from launch.terminal.follow import Tail
from launch.terminal.progress import RunProgress
from launch.terminal.run_state import RunState
from launch.terminal.table import numbers, process_table, run_table, sparkline
from shared.config.learner_section import LearnerConfig
from shared.config.recipe import Recipe
from shared.config.sections import EnvConfig, ModelConfig, RunConfig
from shared.log import get_logger
from shared.run_status import RunStatus, StatusFile, read_status

ROW = {
    "step": 7, "policy_version": 7.0, "rollout/reward": 4.5, "rollout/success": 0.5, "rollout/turns": 5.25,
    "time/step_s": 6.0, "speed/turns_per_s": 49.0, "learner/idle_frac": 0.25, "actors/idle_frac": 0.5,
    "staleness/token/mean": 1.5, "staleness/token/max": 2.0, "policy/entropy": 0.125, "progress/minutes": 1.0,
    "behaviour/logprob_gap": 0.01, "value/explained_variance": 0.31,
}  # fmt: skip
ALARM = {
    "rule": "truncation",
    "level": "warning",
    "step": 5,
    "message": "episodes are cut off",
    "cure": "raise a limit",
}


def recipe_of(tmp_path: Path, **learner: Any) -> Recipe:
    run = RunConfig(dir=str(tmp_path), name="run")
    return Recipe(
        model=ModelConfig(path="m"),
        env=EnvConfig(module="e"),
        run=run,
        learner=LearnerConfig(total_steps=17, **learner),
    )


def shown(content: RenderableType, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(content)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [40, 60, 100])
def test_the_table_of_a_run_fits_and_tells_where_it_stands(tmp_path: Path, width: int) -> None:
    run = RunState(recipe_of(tmp_path))
    run.add_row({"step": 0, "eval/success": 0.25})
    for _ in range(3):
        assert run.add_row(ROW)
    run.add_alarm(ALARM)
    run.add_alarm({**ALARM, "rule": "engine_gap", "level": "critical"})
    lines = shown(run_table(run, width, run.step_at), width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    told = [
        "step 7/17",
        "1.0 left",
        "0.50 ▅▅▅",
        "1.5 (max 2)",
        "25 %",
        "0.125",
        "31 %",
        "0.250 (at step 0)",
        "5.2, 49 a second",
    ]
    assert [part for part in told if part not in text] == []
    assert text.index("critical engine_gap since step 5") < text.index("warning truncation since step 5: episodes")


def test_before_the_first_step_the_table_says_what_the_learner_does(tmp_path: Path) -> None:
    run = RunState(recipe_of(tmp_path))
    assert shown(run_table(run, 60, run.started + 90), 60)[-1] == "run  starting, 2 min since the start"
    run.status = RunStatus("evaluation before", time.time(), 213, 800)
    line = shown(run_table(run, 80, run.started + 90), 80)[-1]
    assert line == "run  evaluation before: 213 of 800, 2 min since the start"


def test_the_time_left_comes_from_the_steps_and_not_from_an_evaluation_before_one(tmp_path: Path) -> None:
    run = RunState(recipe_of(tmp_path))
    run.add_row({**ROW, "step": 1, "time/step_s": 600.0})  # with the evaluation before it
    assert run.minutes_left is None and "left" not in run.line()
    for step in (2, 3, 4):
        run.add_row({**ROW, "step": step, "time/step_s": 6.0})
    assert run.minutes_left == pytest.approx((17 - 4) * 6.0 / 60)


def test_an_alarm_that_is_over_leaves_the_table(tmp_path: Path) -> None:
    run = RunState(recipe_of(tmp_path))
    run.add_row(ROW)
    run.add_alarm(ALARM)
    run.add_alarm({**ALARM, "level": "cleared"})
    assert shown(run_table(run, 80, run.step_at), 80)[-1] == "no alarms"


def test_the_minutes_left_respect_the_limit_in_minutes(tmp_path: Path) -> None:
    run = RunState(recipe_of(tmp_path, max_minutes=1.5))
    for _ in range(3):
        run.add_row(ROW)
    assert run.minutes_left == 0.5


def test_a_sparkline_is_as_wide_as_there_are_values_or_room() -> None:
    assert sparkline([], 4) == "" and sparkline([0.0, 1.0], 4) == "▁█"
    assert sparkline([0.0] * 50 + [0.5] * 50, 4) == "▁▁▅▅"


def test_the_table_of_processes_says_what_runs_and_what_starts_again() -> None:
    def process(name: str, *, child: bool = True, done: bool = False, ends: int = 0) -> Any:
        restarts = type("R", (), {"started_at": 0.0, "__len__": lambda _: ends})()
        return SimpleNamespace(name=name, child=child or None, done=done, restarts=restarts)

    processes = [process("engine 0"), process("actor 0", child=False, ends=2), process("actor 1", done=True)]
    lines = [" ".join(line.split()) for line in shown(process_table(processes, 90.0), 60)[1:]]
    assert lines == ["engine 0 runs 2 min", "actor 0 starts again 2 restarts", "actor 1 done"]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the process `local` logs."""
    lines: list[str] = []
    monkeypatch.setattr(get_logger("local"), "info", lambda text, *values: lines.append(text % values))
    return lines


def test_how_to_look_at_a_run_is_told_once_and_not_before_there_is_one(tmp_path: Path, said: list[str]) -> None:
    progress = RunProgress(recipe_of(tmp_path / "my runs"))
    progress.show()
    assert said == []
    (tmp_path / "my runs/run").mkdir(parents=True)
    (tmp_path / "my runs/run/recipe.json").write_text("{}")
    for final in (False, False, True):
        progress.show(final=final)
    say_the_end({"optimizer_steps": 17, "episodes": 1088, "minutes": 2.5}, progress.state)
    assert [line for line in said if "dashboard" in line] == [
        f"look at the run, now or later: python launch/dashboard.py '{tmp_path}/my runs/run'"
    ]
    assert [run.name for run in Runs([tmp_path / "my runs/run"]).all()] == ["run"]  # the command opens by then


def test_the_end_says_what_was_reached(tmp_path: Path, said: list[str]) -> None:
    state = RunState(recipe_of(tmp_path))
    state.add_alarm(ALARM)
    result = {"success_before": 0.25, "success_after": 0.75, "optimizer_steps": 17, "episodes": 1088, "minutes": 2.51}
    say_the_end(result, state)
    say_the_end(result | {"success_before": None}, RunState(recipe_of(tmp_path)))
    assert said == [
        "success on held-out samples 0.250 -> 0.750; 17 steps, 1088 episodes in 2.5 minutes; alarms: truncation",
        "17 steps, 1088 episodes in 2.5 minutes; alarms: none",
    ]


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("resumed", [True, False])
def test_what_an_earlier_run_wrote_is_not_shown(tmp_path: Path, resumed: bool) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n')
    tail = Tail(path, resumed=resumed)
    assert list(tail.new()) == []
    if not resumed:
        path.rename(tmp_path / "aside.jsonl")
    with path.open("a") as file:
        file.write('{"a": 2}\n{"a": \n[3]\n{"a": 4')
    assert list(tail.new()) == [{"a": 2}]
    with path.open("a") as file:
        file.write("}\n")
    assert list(tail.new()) == [{"a": 4}]


def test_where_there_is_no_terminal_the_line_names_alarms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    progress = RunProgress(recipe_of(tmp_path))
    for name, rows in (("metrics", [ROW] * 3), ("alarms", [ALARM])):
        (tmp_path / "run" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    progress.show(final=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "step 7/17  success 0.50  reward 4.50  version 7  staleness 1.5 (max 2)  49 turns/s  learner idle 25 %  "
        "actor idle 50 %  1.0 min, 1.0 left  alarms: truncation"
    )


# ------------------------------------------------------------------ a terminal

SCRIPT = """
import subprocess, sys
from rich.text import Text
from launch.terminal.screen import Screen, is_terminal
assert is_terminal()
with Screen() as screen:
    for i in range(5):
        screen.update(Text(f"table {i}\\nsecond line"))
        subprocess.run([sys.executable, "-c", f"import os; os.write(2, b'child {i} \\\\x1b[2J\\\\x07says\\\\n')"])
        print(f"own {i}", flush=True)
print("after")
"""


def test_lines_of_children_stand_whole_above_the_table() -> None:
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "PYTHONPATH": "."}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the terminal's end, on Linux
            break
        if not part:
            break
        said += part
    os.close(ours)
    assert process.wait(60) == 0, said
    lines = said.decode().split("\r\n")
    for i in range(5):
        assert any(line.endswith(f"child {i} says") for line in lines), i
        assert any(line.endswith(f"own {i}") for line in lines), i
    assert "\x1b[2J" not in said.decode() and "\x07" not in said.decode()
    assert said.decode().rstrip().endswith("after") and "table 4" in said.decode()
    assert said.decode().rindex("own 4") < said.decode().rindex("table 4")


def test_a_file_that_replaces_the_followed_one_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "time": {step}}}\n' for step in range(1, 7)))
    tail = Tail(path, resumed=True)
    assert not list(tail.new())
    later = time.time() + 60
    part = tmp_path / "part"
    part.write_text(f'{{"step": 1, "time": 1}}\n{{"step": 2, "time": {later}}}\n')
    part.replace(path)
    assert [row["step"] for row in tail.new()] == [2]
    with path.open("a") as file:
        file.write(f'{{"step": 3, "time": {later + 1}}}\n')
    assert [row["step"] for row in tail.new()] == [3]


@pytest.mark.parametrize("width", [80, 81, 100, 140])
def test_no_name_in_the_table_is_cut_off(tmp_path: Path, width: int) -> None:
    names = ["success", "reward", "turns", "version", "staleness", "learner idle", "actors idle", "entropy", "gap"]
    values = ["0.29 ▂▃▃▃▂▃▃▂▃▃▃▂▃▃▂▃", "0.29", "12.0, 1427 a second", *["1"] * 6, "0", "0.156 (at step 0)"]
    console = Console(width=width, file=io.StringIO())
    console.print(numbers(list(zip([*names, "critic explains", "held out"], values, strict=True)), width))
    text = console.file.getvalue()
    assert "…" not in text and all(name in text for name in [*names, "critic explains", *values[:3]])


def test_where_there_is_no_terminal_the_last_line_is_shown_in_any_phase(tmp_path: Path, capsys) -> None:
    (tmp_path / "run").mkdir()
    progress = RunProgress(recipe_of(tmp_path))
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    progress.state.status = RunStatus("evaluation after", time.time(), 800, 800)
    progress.show(final=True)
    assert capsys.readouterr().err.startswith("step 7/17")


def test_where_there_is_no_terminal_a_phase_is_one_line_however_far_it_is(tmp_path: Path, capsys) -> None:
    (tmp_path / "run").mkdir()
    progress = RunProgress(recipe_of(tmp_path))
    status = StatusFile(tmp_path / "run")
    for done in range(3):
        status.enter("evaluation before", done, 800)
        progress.state.status = read_status(tmp_path / "run")
        progress.show()
    status.enter("waiting for engines")
    progress.state.status = read_status(tmp_path / "run")
    progress.show()
    assert capsys.readouterr().err.splitlines() == ["evaluation before: 0 of 800", "waiting for engines"]


def test_the_table_has_a_line_for_each_task_and_held_out_set(tmp_path):
    state = RunState(recipe_of(tmp_path))
    of_task = {"success": 0.25, "reward": 1.5, "without_variance": 0.5}
    tasks = {f"tasks/{name}/{key}": value for name in ("lake", "maze") for key, value in of_task.items()}
    state.add_row(ROW | tasks)
    state.add_row({"step": 7, "eval/success": 0.5, "eval/sets/lake/success": 0.75, "eval/sets/hard/success": 0.125})
    lines = shown(run_table(state, 100, time.monotonic()), 100)
    (lake,) = [line for line in lines if line.startswith("lake")]
    assert all(words in lake for words in ("success 0.25", "reward 1.50", "held out 0.750", "equal rewards 50 %"))
    (hard,) = [line for line in lines if line.startswith("hard")]
    assert "held out 0.125" in hard and "success" not in hard
    assert any(line.startswith("maze") for line in lines)
    assert not any("equal rewards" in line for line in shown(run_table(plain(tmp_path), 100, 0.0), 100))


def plain(tmp_path: Path) -> RunState:
    state = RunState(recipe_of(tmp_path))
    state.add_row(ROW)
    return state
