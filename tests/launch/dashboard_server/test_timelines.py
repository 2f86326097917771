"""Traces as the dashboard's page gets them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from launch.dashboard_server.api import answer
from launch.dashboard_server.runs import Runs, Unknown
from shared.recordings.reader import RecordingError
from tests.support.dashboard.folders import own
from tests.support.dashboard.recorded_run import HOSTILE, make_trace

__all__ = ["own"]
NAME = "steps_00000010_00000012"


def ask(folder: Path, *parts: str) -> dict:
    return answer(Runs([folder]), "/".join(("runs", "sokoban", "traces", *parts)), {})


def test_a_run_without_a_trace_has_an_empty_list(own: Path) -> None:
    assert ask(own) == {"traces": []}


def test_traces_are_listed_the_newest_first_and_nothing_else_is(own: Path) -> None:
    for steps in ((1, 2), (10, 12)):
        make_trace(own / "sokoban", steps)
    for name in ("notes.txt", f".{NAME}.json.gz.partial", "steps_x_y.json.gz"):
        (own / "sokoban" / "traces" / name).write_text("x")
    assert [(each["name"], each["first"], each["last"]) for each in ask(own)["traces"]] == [
        (NAME, 10, 12),
        ("steps_00000001_00000002", 1, 2),
    ]


def test_a_trace_has_its_processes_threads_and_spans(own: Path) -> None:
    make_trace(own / "sokoban")
    trace = ask(own, NAME)
    assert trace["about"] == {"steps": [10, 12], "lost_spans": 2}
    assert [each["name"] for each in trace["processes"]] == ["learner rank 0", f"engine {HOSTILE}", f"actor {HOSTILE}"]
    (main,) = trace["processes"][0]["threads"]
    assert main["name"] == "main" and len(main["spans"]) == 12
    number, begin, took, note = main["spans"][1]
    assert (trace["names"][number], begin, took, note) == ("step", 1.2e6, 0.7e6, "10 7-a")
    assert len(trace["processes"][2]["threads"]) == 13


@pytest.mark.parametrize("name", ["../recipe", "steps_1", "..", "steps_1_2"])
def test_only_a_trace_of_the_run_is_read(own: Path, name: str) -> None:
    with pytest.raises(Unknown):
        ask(own, name)


def test_a_link_out_of_the_run_is_not_followed(own: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = make_trace(tmp_path_factory.mktemp("outside"))
    (own / "sokoban" / "traces").mkdir()
    (own / "sokoban" / "traces" / outside.name).symlink_to(outside)
    with pytest.raises(Unknown):
        ask(own, NAME)


ODD = [1, {"ph": "X"}, {"ph": "X", "name": "step", "ts": "0", "dur": 1, "pid": 1, "tid": 1}]
GOOD = {"ph": "X", "name": "step", "ts": 0, "dur": 1.5, "pid": 1, "tid": 1}


def test_events_that_are_odd_are_left_out(own: Path) -> None:
    path = make_trace(own / "sokoban")
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [*ODD, GOOD, GOOD | {"args": 3}]}).encode()))
    assert ask(own, NAME)["processes"] == [
        {"name": "process 1", "threads": [{"name": "thread 1", "spans": [[0, 0, 1.5, ""]]}]}
    ]


@pytest.mark.parametrize("content", [b"", b"no gzip", gzip.compress(b"{", mtime=0), gzip.compress(b"[]", mtime=0)])
def test_a_damaged_trace_is_named(own: Path, content: bytes) -> None:
    make_trace(own / "sokoban").write_bytes(content)
    with pytest.raises(RecordingError):
        ask(own, NAME)
