"""A trace of a real run: two learner ranks, two actors and an engine on one clock."""

from __future__ import annotations

import json

import pytest

from shared.spans import NAMES
from shared.trace_file import read_trace
from tests.support.runs import finished, local, places
from tests.support.traces import Shown, check_rules, spans_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("all_starts_forked")]
NOT_HERE = {"wait for an engine", "reward"}  # the engine is well, and the environment gives the reward


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory, all_starts_forked: None) -> dict:
    folder = tmp_path_factory.mktemp("runs")
    fields = {"learner.total_steps": 4, "learner.checkpoint.every": 2, "eval.samples": 0, "actor.processes": 2}
    fields["actor.groups"] = 8  # half a step's: one actor cannot play a step alone
    finished(local([*places(folder, **fields), "--trace.steps", "[2, 3]", "--ranks", "2"]))
    (path,) = (folder / "colour_tiny" / "traces").iterdir()
    assert path.name == "steps_00000002_00000003.json.gz"
    return read_trace(path)


@pytest.fixture(scope="module")
def shown(trace: dict) -> list[Shown]:
    return spans_of(trace["traceEvents"])


def of(shown: list[Shown], *names: str) -> list[Shown]:
    return [each for each in shown if each.name in names]


def test_a_trace_keeps_the_rules_of_its_format_and_loses_nothing(trace: dict) -> None:
    check_rules(trace["traceEvents"])
    assert trace["otherData"] | {"run": ""} == {"steps": [2, 3], "run": "", "lost_spans": 0, "clock_error_ms": 0.0}
    json.dumps(trace, allow_nan=False)


def test_every_part_of_the_system_is_in_the_trace(shown: list[Shown]) -> None:
    assert {each.name for each in shown} == set(NAMES) - NOT_HERE
    kinds = {each.process.partition(" ")[0] for each in shown}
    assert kinds == {"learner", "actor", "engine", "environments"}
    for rank in (0, 1):
        of_rank = [each for each in shown if each.process == f"learner rank {rank}"]
        assert [each.note.split()[0] for each in of(of_rank, "step")] == ["2", "3"]
    assert len({each.process for each in of(shown, "episode")}) == 2


def test_one_clock_holds_for_all_processes(shown: list[Shown]) -> None:
    """What happens in one process while another waits for it lies within that wait."""
    calls = of(shown, "engine call")
    for part in of(shown, "queue", "prefill", "decode"):
        assert any(call.holds(part) for call in calls), part
    turns, episodes, groups = (of(shown, name) for name in ("turn", "episode", "group"))
    for inner, outer in ((calls, turns), (turns, episodes), (episodes, groups), (of(shown, "environment step"), turns)):
        for each in inner:
            assert any(one.holds(each) for one in outer), each
    publications = of(shown, "publish")
    for each in of(shown, "receive weights", "install weights", "broadcast", "gather"):
        assert any(one.holds(each) for one in publications), each


def test_a_group_is_trained_after_its_episodes(trace: dict, shown: list[Shown]) -> None:
    groups = {each.note: each for each in of(shown, "group")}
    steps = [each for each in of(shown, "step") if each.process == "learner rank 0"]
    trained = [(groups[ticket], step) for step in steps for ticket in step.note.split()[1:]]
    assert len(trained) == 2 * 16
    assert all(group.end <= step.begin for group, step in trained)
    assert sum(each["ph"] == "s" for each in trace["traceEvents"]) == len(trained)
