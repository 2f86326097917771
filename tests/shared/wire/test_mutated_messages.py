"""The wire under mutated and random messages; `python -m tests.fuzz` is the long version."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.wire.codec import MESSAGES, SCHEMA_VERSION
from tests.fuzz.mutations import run, seeds, verdict_of
from tests.support.wires import sealed

FIELDS = sorted({name for kind in MESSAGES.values() for name in kind.__struct_fields__})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20) | st.binary(),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=30,
)


def test_every_mutated_message_is_refused_with_its_reason_or_valid() -> None:
    result = run(5000, seed=1)
    verdicts = result["verdicts"]
    assert isinstance(verdicts, dict)
    assert sum(verdicts.values()) == 5000
    assert len([verdict for verdict in verdicts if not verdict.startswith("valid")]) > 10


def test_the_fuzzer_starts_from_a_valid_message_of_each_kind() -> None:
    assert sorted(verdict_of(frames) for frames in seeds()) == sorted(f"valid {kind}" for kind in MESSAGES)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(sorted(MESSAGES)),
    fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5),
    frames=st.lists(st.binary(max_size=50), max_size=4),
)
def test_any_fields_of_any_kind_get_a_verdict(kind: str, fields: dict[str, object], frames: list[bytes]) -> None:
    header = {"v": SCHEMA_VERSION, "message": {"kind": kind, **fields}, "images": []}
    assert verdict_of(sealed([msgspec.msgpack.encode(header), *frames])) not in ("digest", "unknown_kind")


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(frames=st.lists(st.binary(max_size=100), max_size=5))
def test_any_bytes_get_a_verdict(frames: list[bytes]) -> None:
    assert verdict_of(frames)
