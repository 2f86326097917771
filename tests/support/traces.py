"""The spans of a trace's events, and the rules of the Chrome trace format."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from shared.spans import NAMES


@dataclass(frozen=True)
class Shown:
    """One span as a reader shows it; times in nanoseconds."""

    process: str
    thread: str
    name: str
    begin: int
    end: int
    note: str

    def holds(self, other: Shown) -> bool:
        return self.begin <= other.begin and other.end <= self.end


def spans_of(events: list[dict]) -> list[Shown]:
    """Return the spans in the order of the file."""
    processes = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    threads = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    return [
        Shown(
            processes[each["pid"]],
            threads[each["pid"], each["tid"]],
            each["name"],
            round(each["ts"] * 1000),
            round((each["ts"] + each["dur"]) * 1000),
            each.get("args", {}).get("note", ""),
        )
        for each in events
        if each["ph"] == "X"
    ]


def check_rules(events: list[dict]) -> None:
    """Check what readers require: known kinds of events, named processes and threads, times from 0 on, spans of one
    thread that hold each other or are apart, and arrows that begin and end once, within spans, and forward in time."""
    assert {each["ph"] for each in events} <= {"M", "X", "s", "f"}
    shown = spans_of(events)
    assert all(each.begin >= 0 and each.end >= each.begin and each.name in NAMES for each in shown)
    names = [(each["pid"], each["args"]["name"]) for each in events if each["name"] == "thread_name"]
    assert len(set(names)) == len(names)
    for _, rows in groupby(sorted(shown, key=thread_of), key=thread_of):
        stack: list[Shown] = []
        for each in sorted(rows, key=lambda each: (each.begin, -each.end)):
            while stack and stack[-1].end <= each.begin:
                stack.pop()
            assert not stack or stack[-1].holds(each), (stack[-1], each)
            stack.append(each)
    begins, ends = ({each["id"]: each for each in events if each["ph"] == kind} for kind in "sf")
    assert begins.keys() == ends.keys() and len(begins) * 2 == sum(each["ph"] in "sf" for each in events)
    assert all(begins[number]["ts"] <= ends[number]["ts"] for number in begins)


def thread_of(shown: Shown) -> tuple[str, str]:
    return shown.process, shown.thread
