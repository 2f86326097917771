"""Trace the steps `trace.steps` of a run: of all ranks, and of the actors, engines and environments that play for them.

A rank records its own spans. The others come with the groups of traced tickets, by rank 0's clock already; those
tickets are issued from some steps earlier on, and the file is written some steps later, as far as episodes may be ahead
of the learner.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
import torch.distributed as dist
from msgspec.structs import replace

from learner.distributed import Ranks
from shared.clocks import ClockOffset, clock_name
from shared.config.recipe import Recipe
from shared.log import get_logger
from shared.spans import Span, SpanBuffer, record_process, unpacked_spans
from shared.trace_file import FOLDER, SUFFIX, Source, write_trace
from shared.types import Group

ASKED = 8  # how often another host's clock is asked


class TraceSource(Protocol):
    """Has the tickets traced, and gives what their groups bring."""

    def trace(self, *, new: bool, kept: bool) -> None: ...

    def take_traces(self) -> list[tuple[str, bytes]]: ...


class StepTrace:
    """The trace of a run's steps; a context in which `before` and `after` are called around each step, on every
    rank."""

    def __init__(self, recipe: Recipe, ranks: Ranks, source: TraceSource, step: int) -> None:
        """Prepare the trace of a run that has made `step` steps."""
        self._first, self._last = recipe.trace.steps or (0, -1)
        self._ahead = (recipe.learner.max_staleness + 1) * recipe.learner.publish.every
        self._ranks, self._source = ranks, source
        self._run = Path(recipe.run.dir) / recipe.run.name
        self.recorded: SpanBuffer | None = None
        self._groups: list[tuple[str, list[Span]]] = []  # (actor, spans of one of its groups)
        self._trained: set[str] = set()  # tickets of the traced steps
        self._lost = 0
        self._window = [0.0, 0.0]
        self._step, self._over = step, step >= self._last

    def __enter__(self) -> StepTrace:
        self._announce(self._step + 1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.recorded is not None:  # the run ends early, and other ranks may be gone
            self._write([(self.recorded.spans, self.recorded.lost, 0.0)])

    def before(self, step: int) -> None:
        """Begin to trace if `step` is the first one, or to have tickets traced."""
        if self._over or step < self._first - self._ahead:
            return
        self._announce(step)
        if step >= self._first and self.recorded is None:
            self.recorded = SpanBuffer()
            self._window = [time.monotonic(), time.monotonic()]
            record_process(self.recorded)

    def _announce(self, step: int) -> None:
        if self._ranks.is_main and not self._over and step >= self._first - self._ahead:
            self._source.trace(new=step <= self._last, kept=True)

    def after(self, step: int, groups: Sequence[Group], *, last: bool) -> None:
        """Collect what has come; write the file when nothing more is expected. Then, a collective."""
        if self._over or step < self._first - self._ahead:
            return
        for actor, data in self._source.take_traces():
            spans, lost = unpacked_spans(data)
            self._groups.append((f"actor {actor}", spans))
            self._lost += lost
        if self._first <= step <= self._last:
            self._window[1] = time.monotonic()
            self._trained |= {group.ticket_id for group in groups}
        if self.recorded is not None and (last or step >= self._last + self._ahead):
            self._write(gathered_spans(self.recorded, self._ranks))

    def _write(self, of_ranks: list[tuple[list[Span], int, float]]) -> None:
        self._over, self.recorded = True, None
        record_process(None)
        if not self._ranks.is_main:
            return
        self._source.trace(new=False, kept=False)
        sources = [Source(f"learner rank {rank}", spans, True) for rank, (spans, _, _) in enumerate(of_ranks)]
        for actor, spans in self._groups:
            is_trained = any(each.name == "group" and each.note in self._trained for each in spans)
            sources.append(Source(actor, spans, whole=is_trained))
        path = self._run / FOLDER / f"steps_{self._first:08d}_{self._last:08d}{SUFFIX}"
        about = {
            "steps": [self._first, self._last],
            "run": self._run.name,
            "lost_spans": self._lost + sum(lost for _, lost, _ in of_ranks),
            "clock_error_ms": 1e3 * max(error for _, _, error in of_ranks),
        }
        log = get_logger("learner")
        try:
            write_trace(path, sources, (self._window[0], self._window[1]), about)
        except OSError as error:
            log.error("the trace of steps %d to %d is not written: %s", self._first, self._last, error)
        else:
            log.info("the trace of steps %d to %d is in %s", self._first, self._last, path)
        self._groups.clear()


def gathered_spans(buffer: SpanBuffer, ranks: Ranks) -> list[tuple[list[Span], int, float]]:
    """Return on rank 0, for each rank, its spans by rank 0's clock, how many it has lost, and the clock's error in
    seconds. A collective."""
    offset = clock_offset(ranks)
    moved = [replace(each, begin=each.begin + offset.add_s, end=each.end + offset.add_s) for each in buffer.spans]
    own = (moved, buffer.lost, offset.error_s)
    if ranks.size == 1:
        return [own]
    all_ranks: list[tuple[list[Span], int, float]] = [own] * ranks.size
    dist.gather_object(own, all_ranks if ranks.is_main else None, group=ranks.on_cpu)
    return all_ranks


def clock_offset(ranks: Ranks) -> ClockOffset:
    """Return what leads from this rank's clock to rank 0's, which answers one rank after another. A collective."""
    offset = ClockOffset()
    offset.measure(clock_name(), 0.0, 0.0, 0.0)
    if ranks.size == 1:
        return offset
    names = [""] * ranks.size
    dist.all_gather_object(names, clock_name(), group=ranks.on_cpu)
    for rank in range(1, ranks.size):
        if names[rank] == names[0] or ranks.rank not in (0, rank):
            continue
        reading = torch.zeros(1, dtype=torch.float64)
        for _ in range(ASKED):
            if ranks.is_main:
                dist.recv(reading, rank, group=ranks.on_cpu)
                dist.send(torch.tensor([time.monotonic()], dtype=torch.float64), rank, group=ranks.on_cpu)
            else:
                asked = time.monotonic()
                dist.send(reading, 0, group=ranks.on_cpu)
                dist.recv(reading, 0, group=ranks.on_cpu)
                offset.measure(names[0], asked, float(reading), time.monotonic())
    return offset
