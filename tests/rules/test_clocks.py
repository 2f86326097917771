"""No wait, lease or decision depends on the time of day, which may jump."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.paths import ROOT

WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
MAY_READ = {  # write it down, for people
    "learner/metrics/metric_writer.py",
    "learner/recording/recorder.py",
    "learner/alarms/alarm_records.py",
    "launch/dashboard_server/runs.py",
    "shared/run_status.py",
    "actor/episode.py",
}


def reads_wall_clock(path: Path) -> bool:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    named = [ast.unparse(n.func) for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    renamed = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module == "time"]
    return bool(renamed or {name.split("datetime.datetime.")[-1] for name in named} & WALL_CLOCKS)


def test_nothing_is_decided_by_the_wall_clock() -> None:
    packages = ("shared", "envs", "actor", "learner", "kernels", "launch")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    assert {str(path.relative_to(ROOT)) for path in files if reads_wall_clock(path)} == MAY_READ
