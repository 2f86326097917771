"""A run's traces in the form that the page needs: threads by process, and each thread's spans as rows of numbers."""

from __future__ import annotations

import re
from typing import Any

from launch.dashboard_server.runs import Run, Unknown, size_of
from shared.recordings.reader import RecordingError
from shared.trace_file import FOLDER, SUFFIX, read_trace

NAME = re.compile(r"steps_(\d{1,12})_(\d{1,12})")
MAX_TRACES = 1000
MAX_SHOWN_SPANS = 300_000
MAX_NOTE = 300


def traces(run: Run) -> dict[str, Any]:
    """Return the run's traces: name, first and last step, and size in bytes, the newest first."""
    found = []
    try:
        paths = sorted(run.inside(run.folder / FOLDER).iterdir(), reverse=True)[:MAX_TRACES]
    except (OSError, Unknown):
        paths = []
    for path in paths:
        name = path.name.removesuffix(SUFFIX)
        if path.name.endswith(SUFFIX) and (match := NAME.fullmatch(name)):
            found.append({"name": name, "first": int(match[1]), "last": int(match[2]), "bytes": size_of(path)})
    return {"traces": found}


def timeline(run: Run, name: str) -> dict[str, Any]:
    """Return a trace: what the file says of itself, and its processes with their threads. A span is [name's index,
    begin, duration, note], in microseconds. Raise Unknown if there is no such trace, RecordingError for a file that is
    none."""
    if not NAME.fullmatch(name):
        raise Unknown(f"{name[:100]!r} is no name of a trace")
    try:
        trace = read_trace(run.file(run.folder / FOLDER / f"{name}{SUFFIX}"))
    except ValueError as error:
        raise RecordingError(str(error)) from None
    events = [event for event in trace["traceEvents"] if isinstance(event, dict)]
    labels = {(e.get("name"), e.get("pid"), e.get("tid")): _label(e) for e in events if e.get("ph") == "M"}
    spans = [event for event in events if event.get("ph") == "X" and _is_sound(event)]
    if len(spans) > MAX_SHOWN_SPANS:
        raise RecordingError(
            f"{name} has {len(spans)} spans, the page shows {MAX_SHOWN_SPANS} at most: open the file at ui.perfetto.dev"
        )
    names: dict[str, int] = {}
    processes: dict[int, dict[str, Any]] = {}
    threads: dict[tuple[int, int], list[list[Any]]] = {}
    for e in spans:
        pid, tid = e["pid"], e["tid"]
        if (pid, tid) not in threads:
            row = threads[pid, tid] = []
            label = labels.get(("process_name", pid, 0)) or f"process {pid}"
            process = processes.setdefault(pid, {"name": label, "threads": []})
            thread = labels.get(("thread_name", pid, tid)) or f"thread {tid}"
            process["threads"].append({"name": thread, "spans": row})
        note = e.get("args", {}).get("note", "")
        number = names.setdefault(e["name"], len(names))
        threads[pid, tid].append([number, e["ts"], e["dur"], str(note)[:MAX_NOTE]])
    for row in threads.values():
        row.sort(key=lambda span: (span[1], -span[2]))
    about = trace.get("otherData")
    return {
        "about": about if isinstance(about, dict) else {},
        "names": list(names),
        "processes": [processes[pid] for pid in sorted(processes)],
    }


def _label(event: dict[str, Any]) -> str:
    args = event.get("args")
    return str(args.get("name", ""))[:MAX_NOTE] if isinstance(args, dict) else ""


def _is_sound(event: dict[str, Any]) -> bool:
    """Tell whether a span has all that is shown of it."""
    numbers = all(isinstance(event.get(key), int | float) and abs(event[key]) < 1e18 for key in ("ts", "dur"))
    places = isinstance(event.get("pid"), int) and isinstance(event.get("tid"), int)
    return numbers and places and isinstance(event.get("name"), str) and isinstance(event.get("args", {}), dict)
