"""Write the spans of many processes as one file in the Chrome trace format, gzipped JSON, and read it again.

Perfetto, Chrome and the dashboard open it. A process of ours is a process there, and what runs side by side in it has
a thread each. Times are in microseconds since the first span. An arrow leads from each group to the step that trained
it.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.spans import ENVIRONMENTS, Span

FOLDER = "traces"  # in the run's folder
SUFFIX = ".json.gz"
MAX_BYTES = 2**30  # of a file that is read, unpacked
ORDER = ("learner", "engine", "actor", "environments")  # of processes, by the first word of their names


@dataclass(frozen=True, slots=True)
class Source:
    """Spans of one process that belong together. `keeps_tracks`: each of its tracks is a thread by that name; those of
    other sources share threads where they do not overlap. `whole`: all are kept, whenever they were."""

    process: str
    spans: Sequence[Span]
    keeps_tracks: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class _SpanLayer:
    """Spans of one process and track, of which any two are apart or one holds the other."""

    process: str
    track: str
    kept: bool
    spans: tuple[Span, ...]
    end: float


def write_trace(path: Path, sources: Sequence[Source], window: tuple[float, float], about: Mapping[str, Any]) -> None:
    """Write the spans that touch the `window` (begin, end), in seconds; `about`: what the file says of itself. Raise
    OSError if the disk refuses."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    events = list(trace_events(sources, window))
    content = json.dumps({"displayTimeUnit": "ms", "otherData": dict(about), "traceEvents": events})
    partial.write_bytes(gzip.compress(content.encode(), 6))
    os.replace(partial, path)


def read_trace(path: Path) -> dict[str, Any]:
    """Return the content of a trace file. Raise ValueError if it is none, OSError if it cannot be read."""
    try:
        with gzip.open(path) as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"{path.name} holds more than {MAX_BYTES} bytes")
        trace = json.loads(content)
    except (EOFError, gzip.BadGzipFile, zlib.error, RecursionError) as error:
        raise ValueError(f"{path.name} is no trace: {error}") from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{path.name} is no trace: it has no traceEvents")
    return trace


def trace_events(sources: Sequence[Source], window: tuple[float, float]) -> Iterator[dict[str, Any]]:
    """Yield the events: names of processes and threads, spans, arrows."""
    layers = [layer for source in sources for layer in _layers(source, window)]
    begin = min((layer.spans[0].begin for layer in layers), default=0.0)
    threads = _threads(layers)
    processes = sorted({process for process, _ in threads}, key=_rank)
    pids = {process: number for number, process in enumerate(processes, 1)}
    for process, pid in pids.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    played: dict[str, tuple[int, int, float]] = {}  # ticket -> where and when its group was complete
    steps: list[tuple[Span, int, int]] = []
    for tid, ((process, thread), rows) in enumerate(sorted(threads.items(), key=_thread_rank), 1):
        pid = pids[process]
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
        for each in sorted((each for row in rows for each in row.spans), key=_outer_first):
            ts, stop = _ns(each.begin - begin), _ns(each.end - begin)
            note = {"args": {"note": each.note}} if each.note else {}
            place = {"pid": pid, "tid": tid}
            category = process.partition(" ")[0]
            yield {
                "ph": "X",
                "name": each.name,
                "cat": category,
                "ts": ts / 1e3,
                "dur": (stop - ts) / 1e3,
                **place,
            } | note
            if each.name == "group":
                played[each.note] = (pid, tid, stop / 1e3)
            elif each.name == "step" and process.endswith(" 0"):
                steps.append((each, pid, tid))
    yield from _arrows(played, steps, begin)


def _arrows(
    played: Mapping[str, tuple[int, int, float]], steps: Sequence[tuple[Span, int, int]], begin: float
) -> Iterator[dict[str, Any]]:
    number = 0
    for step, pid, tid in steps:
        for ticket in step.note.split():
            if ticket in played:
                number += 1
                same = {"name": "trained", "cat": "group", "id": number}
                from_pid, from_tid, done = played[ticket]
                yield {"ph": "s", "pid": from_pid, "tid": from_tid, "ts": done, **same}
                yield {"ph": "f", "bp": "e", "pid": pid, "tid": tid, "ts": _ns(step.begin - begin) / 1e3, **same}


def _layers(source: Source, window: tuple[float, float]) -> Iterator[_SpanLayer]:
    """Yield the source's spans, divided so that those of a layer hold each other or are apart."""
    tracks: dict[tuple[str, str], list[Span]] = {}
    for each in source.spans:
        if source.whole or (each.end >= window[0] and each.begin <= window[1]):
            tracks.setdefault((_process_of(each, source), each.track), []).append(each)
    for (process, track), spans in tracks.items():
        open_spans: list[list[Span]] = []  # of each layer, those that hold the next one
        layers: list[list[Span]] = []
        for each in sorted(spans, key=_outer_first):
            for stack in open_spans:
                while stack and stack[-1].end <= each.begin:
                    stack.pop()
            fits = (n for n, stack in enumerate(open_spans) if not stack or each.end <= stack[-1].end)
            number = next(fits, len(layers))
            if number == len(layers):
                layers.append([])
                open_spans.append([])
            layers[number].append(each)
            open_spans[number].append(each)
        for layer in layers:
            yield _SpanLayer(process, track, source.keeps_tracks, tuple(layer), max(each.end for each in layer))


def _threads(layers: Iterable[_SpanLayer]) -> dict[tuple[str, str], list[_SpanLayer]]:
    """Return the layers of each (process, thread). Layers that need not keep their track share the first thread that is
    free."""
    threads: dict[tuple[str, str], list[_SpanLayer]] = {}
    for layer in sorted(layers, key=lambda layer: layer.spans[0].begin):
        name = layer.track or "main" if layer.kept else _kind(layer)
        number = 1
        while True:
            key = layer.process, name if layer.kept and number == 1 else f"{name} {number:03d}"
            there = threads.setdefault(key, [])
            if not there or there[-1].end <= layer.spans[0].begin:
                there.append(layer)
                break
            number += 1
    return threads


def _kind(layer: _SpanLayer) -> str:
    if layer.process.startswith("actor "):
        return "groups" if layer.track == "group" else "episodes"
    return "requests" if layer.process.startswith("engine ") else "episodes"


def _process_of(each: Span, source: Source) -> str:
    return f"{ENVIRONMENTS} of {source.process}" if each.place == ENVIRONMENTS else each.place or source.process


def _rank(process: str) -> tuple[int, str]:
    first = process.partition(" ")[0]
    return ORDER.index(first) if first in ORDER else len(ORDER), process


def _thread_rank(item: tuple[tuple[str, str], list[_SpanLayer]]) -> tuple[str, bool, bool, str]:
    """Return where a thread stands in its process: the main one first, others by name, then those that are shared."""
    (process, thread), rows = item
    return process, not rows[0].kept, thread != "main", thread


def _outer_first(each: Span) -> tuple[float, float]:
    return each.begin, -each.end


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
