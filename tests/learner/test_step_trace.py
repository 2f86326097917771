"""A trace over ranks: of several hosts by rank 0's clock, and of a run that ends early."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from learner import step_trace
from learner.distributed import Ranks, barrier, close_ranks, init_ranks
from learner.step_trace import StepTrace, gathered_spans
from shared import clocks
from shared.config.recipe import Recipe
from shared.config.sections import EnvConfig, ModelConfig, RunConfig, TraceConfig
from shared.spans import Span, SpanBuffer, packed_spans, recording, span
from shared.trace_file import read_trace
from tests.support.ranks.processes import in_processes
from tests.support.traces import check_rules, spans_of

AHEAD_S = 5e5


class Elsewhere:
    """The clock of another host, as `time` of a module."""

    @staticmethod
    def monotonic() -> float:
        return time.monotonic() + AHEAD_S


def gather(out: Path, other_host: bool) -> None:
    ranks = init_ranks("cpu", timeout_s=60)
    if other_host and ranks.rank == 1:
        step_trace.time = Elsewhere  # type: ignore[attr-defined]
        step_trace.clock_name = clocks.clock_name = lambda: "another host"  # type: ignore[assignment]
    barrier(ranks, timeout_s=60)
    now = step_trace.time.monotonic()
    gathered = gathered_spans(SpanBuffer(spans=[Span("step", now, now)], lost=ranks.rank), ranks)
    if ranks.is_main:
        torch.save([(spans[0].begin, lost, error, time.monotonic()) for spans, lost, error in gathered], out)
    barrier(ranks, timeout_s=60)
    close_ranks()


@pytest.mark.slow
@pytest.mark.parametrize("other_host", [False, True])
def test_every_ranks_spans_have_the_clock_of_rank_0(tmp_path: Path, other_host: bool) -> None:
    before = time.monotonic()
    assert in_processes([[2]], gather, tmp_path / "out", other_host) == 0
    ours, theirs = torch.load(tmp_path / "out", weights_only=False)
    assert ours[1:3] == (0, 0.0) and theirs[1] == 1
    assert before <= ours[0] <= ours[3] and before - theirs[2] <= theirs[0] <= theirs[3] + theirs[2]
    assert (0 < theirs[2] < 60) if other_host else theirs[2] == 0.0


class Tickets:
    """Has one group come after every step, as a ticket server would."""

    def __init__(self) -> None:
        self.said: list[tuple[bool, bool]] = []
        self.brings = packed_spans(SpanBuffer(spans=[Span("turn", time.monotonic(), time.monotonic() + 60)]), 0.0)

    def trace(self, *, new: bool, kept: bool) -> None:
        self.said.append((new, kept))

    def take_traces(self) -> list[tuple[str, bytes]]:
        return [("a", self.brings), ("b", b"odd")]


def recipe_of(tmp_path: Path, *steps: int) -> Recipe:
    run, trace = RunConfig(dir=str(tmp_path), name="run"), TraceConfig(steps=steps)  # type: ignore[arg-type]
    (tmp_path / "run").mkdir()
    recipe = Recipe(model=ModelConfig(path="m"), env=EnvConfig(module="e"), run=run, trace=trace)
    return recipe.model_copy(update={"learner": recipe.learner.model_copy(update={"max_staleness": 1})})


def make_steps(trace: StepTrace, numbers: range, last: int) -> None:
    for step in numbers:
        trace.before(step)
        with span("step", note=str(step)):
            assert (recording() is not None) == (trace.recorded is not None)
        trace.after(step, (), last=step == last)


def test_tickets_are_traced_from_earlier_on_and_the_file_comes_later(tmp_path: Path, ranks: Ranks) -> None:
    """By the two versions that groups may be ahead, here two steps."""
    tickets = Tickets()
    with StepTrace(recipe_of(tmp_path, 5, 6), ranks, tickets, 0) as trace:
        make_steps(trace, range(1, 3), 20)
        assert tickets.said == []
        make_steps(trace, range(3, 8), 20)
        assert tickets.said == [(True, True)] * 4 + [(False, True)]
        assert not (tmp_path / "run" / "traces").exists()
        make_steps(trace, range(8, 21), 20)
    assert tickets.said[5:] == [(False, True), (False, False)]
    (path,) = (tmp_path / "run" / "traces").iterdir()
    events = read_trace(path)
    check_rules(events["traceEvents"])
    shown = spans_of(events["traceEvents"])
    assert [each.note for each in shown if each.name == "step"] == ["5", "6"]
    assert sum(each.name == "turn" for each in shown) == 6 and events["otherData"]["lost_spans"] == 6
    assert recording() is None


def test_a_run_that_ends_amid_the_steps_leaves_what_it_has(tmp_path: Path, ranks: Ranks) -> None:
    with pytest.raises(KeyError), StepTrace(recipe_of(tmp_path, 1, 9), ranks, Tickets(), 0) as trace:
        make_steps(trace, range(1, 3), 20)
        raise KeyError
    (path,) = (tmp_path / "run" / "traces").iterdir()
    assert [each.note for each in spans_of(read_trace(path)["traceEvents"]) if each.name == "step"] == ["1", "2"]
    assert recording() is None


def test_a_disk_that_refuses_costs_the_trace_alone(tmp_path: Path, ranks: Ranks) -> None:
    with StepTrace(recipe_of(tmp_path, 1, 1), ranks, Tickets(), 0) as trace:
        (tmp_path / "run" / "traces").write_text("a file is in the way")
        make_steps(trace, range(1, 5), 20)
    assert recording() is None


def test_a_run_that_goes_on_after_the_steps_traces_nothing(tmp_path: Path, ranks: Ranks) -> None:
    tickets = Tickets()
    with StepTrace(recipe_of(tmp_path, 2, 3), ranks, tickets, 3) as trace:
        make_steps(trace, range(4, 9), 20)
    assert tickets.said == [] and not (tmp_path / "run" / "traces").exists()
