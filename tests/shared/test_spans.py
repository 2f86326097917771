"""Spans: nothing without a trace, each in its buffer, and on the wire nothing that hurts a group."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.spans import (
    NAMES,
    Span,
    SpanBuffer,
    add_span,
    on_track,
    packed_spans,
    record_process,
    recorded_into,
    recording,
    span,
    unpacked_spans,
)
from shared.types import SPANS_BYTES

PACKAGES = ("actor", "envs", "learner", "launch", "shared")


@pytest.fixture
def process() -> Iterator[SpanBuffer]:
    buffer = SpanBuffer()
    record_process(buffer)
    yield buffer
    record_process(None)


def test_without_a_trace_nothing_is_measured_or_kept() -> None:
    assert recording() is None
    with span("step"), on_track("other"):
        add_span("turn", 1.0, 2.0)
    assert span("step") is span("turn")  # one context that does nothing


def test_a_span_holds_what_was_done_within_it_also_after_an_error(process: SpanBuffer) -> None:
    with pytest.raises(KeyError), span("step", note="1"), span("forward"):
        raise KeyError
    inner, outer = process.spans
    assert (inner.name, outer.name, outer.note) == ("forward", "step", "1")
    assert outer.begin <= inner.begin <= inner.end <= outer.end


def test_spans_of_groups_that_are_played_at_once_do_not_mix(process: SpanBuffer) -> None:
    """Nor those of episodes of one group; what no group's context holds is the process's."""

    async def play(name: str, buffer: SpanBuffer) -> None:
        with recorded_into(buffer, "group"), span("group", note=name):
            async with asyncio.TaskGroup() as episodes:
                for index in range(2):
                    episodes.create_task(episode(name, index))

    async def episode(name: str, index: int) -> None:
        with on_track(f"episode {index}"), span("episode", note=name):
            await asyncio.sleep(0.001)

    async def both() -> None:
        await asyncio.gather(play("a", a), play("b", b))

    a, b = SpanBuffer(), SpanBuffer()
    asyncio.run(both())
    for name, buffer in (("a", a), ("b", b)):
        assert {each.note for each in buffer.spans} == {name}
        assert sorted(each.track for each in buffer.spans) == ["episode 0", "episode 1", "group"]
    assert not process.spans


def test_a_full_buffer_counts_what_it_loses() -> None:
    buffer = SpanBuffer(most=2)
    with recorded_into(buffer, ""):
        for _ in range(5):
            add_span("turn", 0.0, 1.0)
    assert (len(buffer.spans), buffer.lost) == (2, 3)
    assert unpacked_spans(packed_spans(buffer, 0.0)) == (buffer.spans, 3)


def test_spans_travel_by_the_other_clock_and_within_their_bound() -> None:
    few = SpanBuffer(spans=[Span("turn", 1.5, 2.0, "place", "track", "note")])
    assert unpacked_spans(packed_spans(few, 100.0)) == ([Span("turn", 101.5, 102.0, "place", "track", "note")], 0)
    many = SpanBuffer(spans=[Span("turn", 1.0, 2.0, note="x" * 4000)] * 1000)
    data = packed_spans(many, 0.0)
    sound, lost = unpacked_spans(data)
    assert len(data) <= SPANS_BYTES and sound and len(sound) + lost == 1000


@pytest.mark.parametrize(
    "odd",
    [
        ["turn", 2.0, 1.0],  # ends before it begins
        ["turn", float("nan"), 1.0],
        ["turn", 0.0, float("inf")],
        ["no such name", 0.0, 1.0],
        ["turn", 0.0, 1.0, "x" * 1000],  # a place that is too long
        ["turn", "0.0", 1.0],
        ["turn"],
        {"name": "turn"},
        None,
    ],
)
def test_an_odd_span_costs_itself_alone(odd: object) -> None:
    good = ["turn", 0.0, 1.0]
    assert unpacked_spans(msgspec.msgpack.encode([[good, odd, good], 0])) == ([Span("turn", 0.0, 1.0)] * 2, 1)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_spans_give_none(data: bytes) -> None:
    assert unpacked_spans(data)[0] == []


def literal_names() -> set[str]:
    """The names with which `span` and `add_span` are called, and the laps of a step's clock."""
    names: set[str] = set()
    for path in (path for package in PACKAGES for path in Path(package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args and isinstance(first := node.args[0], ast.Constant):
                called = ast.unparse(node.func).rpartition(".")[2]
                names |= {first.value} if called in ("span", "add_span", "lap") else set()
    return names


def test_every_name_in_the_code_is_in_the_table_and_on_the_page() -> None:
    chosen = {"environment reset", "environment step", "queue", "prefill", "decode", "gather", "verify"}
    assert literal_names() | chosen == set(NAMES)
    page = Path("docs/how-to/traces.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"`{name}`" not in page] == []
