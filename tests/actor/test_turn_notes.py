"""What actors note of turns: seconds, and what the environment said, as bounded JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from actor.episode import TurnTimings
from shared.recordings.bounded_json import bounded_json
from shared.types import INFO_CHARACTERS, Group, TurnNote
from shared.wire.codec import decode, encode
from tests.support.wires import episode


class Hostile:
    @property
    def __class__(self):
        raise RuntimeError("no class")


class HostileDict(dict):
    def items(self):
        raise RuntimeError("no keys")


ENDLESS: list = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    "value",
    [
        {"text": "x" * 100_000, "more": ["y" * 1000] * 1000, "deep": {"a": {"b": {"c": {"d": {"e": {"f": [1]}}}}}}},
        {i: dict.fromkeys(range(100), "…") for i in range(1000)},
        [2**80, -(2**80), float("nan"), float("inf"), np.float32(1.5), np.int64(3), np.bool_(True), "\ud800"],
        ENDLESS,
        np.zeros((1000, 1000)),
        {"a": Hostile()},
        [[[[[0] * 100] * 100] * 100] * 100] * 100,
        HostileDict(a=1),
        {"a": b"\0" * 100_000},
    ],
)
@pytest.mark.parametrize("room", [2, 3, 20, 300, INFO_CHARACTERS])
def test_whatever_an_environment_says_becomes_json_of_bounded_length(value, room: int) -> None:
    text = bounded_json(value, room)
    assert len(text) <= room
    assert text == "" or json.loads(text) is not None


def test_what_is_small_stays_as_it_is_and_what_is_cut_says_so() -> None:
    small = {"moved": True, "reward": -0.1, "names": ["up", "left"], "none": None}
    assert json.loads(bounded_json(small, 1000)) == small
    cut = json.loads(bounded_json({"board": "#" * 5000, "reward": 1.0}, 1000))
    assert cut["reward"] == 1.0 and cut["board"].endswith("…")


def test_seconds_belong_to_the_turn_before_the_call_and_turns_from_a_journal_took_no_generation() -> None:
    notes = TurnTimings()
    notes.record_call(10.0, 11.0)  # the reset, before any turn
    notes.record_answer(notes._began + 1.0, notes._began + 3.0)
    notes.record_turn()
    notes.timed(lambda: None)()
    entered = notes._entered
    notes.record_call(entered - 0.5, entered + 0.25)
    notes.record_turn()  # of a journal
    first, second = notes.notes([{"a": 1}])
    assert first == TurnNote(pytest.approx(1.0), pytest.approx(2.0), pytest.approx(0.5), pytest.approx(0.25), '{"a":1}')
    assert (second.generate_s, second.wait_s, second.env_s, second.info) == (0.0, 0.0, 0.0, "")


def test_a_clock_before_1970_costs_no_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: -86_400.0)
    group = Group("0-a", "a", (episode(started=TurnTimings().started),))
    assert decode(encode(group)).trajectories[0].started == 0.0
