"""The file of a trace, by the rules of its format: threads whose spans hold each other, names, arrows."""

from __future__ import annotations

import gzip
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.spans import ENVIRONMENTS, Span
from shared.trace_file import Source, read_trace, trace_events, write_trace
from tests.support.traces import check_rules, spans_of

packed = partial(gzip.compress, mtime=0)  # the same name of a test each time
ALWAYS = (float("-inf"), float("inf"))


def named(events: list[dict], name: str) -> list[tuple[str, str]]:
    """The (process, thread) of each span of a name."""
    return [(each.process, each.thread) for each in spans_of(events) if each.name == name]


intervals = st.tuples(st.integers(0, 40), st.integers(0, 20), st.sampled_from(["a", "b"]))


@given(st.lists(st.lists(intervals, max_size=20), max_size=4), st.booleans())
def test_whatever_overlaps_stands_on_different_threads(
    sources: list[list[tuple[int, int, str]]], keeps_tracks: bool
) -> None:
    made = [
        Source("actor x", [Span("turn", b / 7, (b + length) / 7, track=t) for b, length, t in spans], keeps_tracks)
        for spans in sources
    ]
    events = list(trace_events(made, ALWAYS))
    check_rules(events)
    assert len(spans_of(events)) == sum(map(len, sources))


def test_places_are_processes_and_tracks_threads() -> None:
    learner = Source("learner rank 0", [Span("step", 0, 4), Span("pack", 1, 2, track="packing")], keeps_tracks=True)
    group = [
        Span("group", 0, 9, track="group", note="7-ab"),
        Span("episode", 0, 5, track="episode 0"),
        Span("episode", 0, 4, track="episode 1"),
        Span("decode", 1, 2, place="engine http://e", track="episode 0"),
        Span("environment step", 2, 3, place=ENVIRONMENTS, track="episode 0"),
    ]
    events = list(trace_events([learner, Source("actor x", group)], ALWAYS))
    check_rules(events)
    assert named(events, "step") == [("learner rank 0", "main")]
    assert named(events, "pack") == [("learner rank 0", "packing")]
    assert named(events, "episode") == [("actor x", "episodes 001"), ("actor x", "episodes 002")]
    assert named(events, "decode") == [("engine http://e", "requests 001")]
    assert named(events, "environment step") == [("environments of actor x", "episodes 001")]
    order = [each["args"]["name"] for each in events if each["name"] == "process_name"]
    assert order == ["learner rank 0", "engine http://e", "actor x", "environments of actor x"]


def test_an_arrow_leads_from_a_group_to_the_step_that_trained_it() -> None:
    groups = [Source("actor x", [Span("group", n, n + 1, track="group", note=f"{n}-ab")]) for n in (1, 2, 3)]
    step = Source("learner rank 0", [Span("step", 10, 12, note="4 1-ab 3-ab 9-ab")], keeps_tracks=True)
    events = list(trace_events([*groups, step], ALWAYS))
    begins, ends = ([each for each in events if each["ph"] == kind] for kind in "sf")
    assert [each["ts"] for each in begins] == [1e6, 3e6]  # when they were complete, one second after the first began
    assert [each["ts"] for each in ends] == [9e6, 9e6]
    assert [each["id"] for each in begins] == [each["id"] for each in ends]
    check_rules(events)


def test_what_no_traced_step_touches_is_left_out_but_for_what_it_trained() -> None:
    early, late = Span("group", 0, 1, track="group"), Span("group", 4, 6, track="group")
    sources = [Source("actor x", [early]), Source("actor x", [early], whole=True), Source("actor x", [late])]
    assert len(spans_of(list(trace_events(sources, (5, 8))))) == 2


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "t.json.gz"
    write_trace(path, [Source("learner rank 0", [Span("step", 0, 1, note="1")], True)], (0, 1), {"steps": [1, 1]})
    trace = read_trace(path)
    assert trace["otherData"] == {"steps": [1, 1]}
    assert [each.note for each in spans_of(trace["traceEvents"])] == ["1"]
    assert [each.name for each in path.parent.iterdir()] == ["t.json.gz"]


@pytest.mark.parametrize("content", [b"", b"no gzip", packed(b"{"), packed(b"[]"), packed(b"{}")])
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError):
        read_trace(path)
