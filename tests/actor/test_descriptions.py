"""What only describes an episode never costs it: metrics, names, texts and notes of user code."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from actor.descriptions import MAX_NAMES, EnvMetrics, LeftOutLog, describable
from actor.rewards import BadReward, finite
from envs.env_calls import number_of
from shared.types import TEXT_CHARACTERS, Group, TurnNote
from shared.wire.codec import decode, encode
from tests.support.wires import episode


class Hostile:
    def __float__(self) -> float:
        raise RuntimeError("no")

    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


class HostileMap(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("no")


def collected(*steps: Any) -> EnvMetrics:
    metrics = EnvMetrics()
    for step in steps:
        metrics.add(step)
    return metrics


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, "not finite"), (math.inf, "not finite"), (np.float32("nan"), "not finite"), (10**400, "not finite"),
        (-math.inf, "not finite"), ("0.5", "no number"),
        ("far", "no number"), (None, "no number"), (b"1", "no number"), ([1.0, 2.0], "no number"),
        (1j, "no number"), (Hostile(), "no number"), (np.zeros(3), "no number"),
    ],
)  # fmt: skip
def test_a_value_that_is_no_finite_number_is_left_out_by_its_reason_and_the_others_stay(value: Any, reason: str):
    metrics = collected({"distance": value, "success": True, "turn_metrics": {"near": value, "valid": 1}})
    assert metrics.values() == {"success": 1.0, "valid": 1.0}
    assert metrics.left_out == {"distance": reason, "near": reason}


@pytest.mark.parametrize("metrics", [[1.0], "success", 3, HostileMap(a=1), Hostile(), np.zeros(3)])
def test_metrics_that_are_no_map_are_left_out(metrics: Any):
    collector = collected({"success": 1.0}, metrics, None)
    assert collector.values() == {"success": 1.0} and list(collector.left_out) == ["metrics"]


@pytest.mark.parametrize("name", ["", "x" * 129, "two\nlines", "\udc80", 3, Hostile])
def test_a_name_that_cannot_be_shown_is_left_out(name: Any):
    metrics = collected({name: 1.0, "success": 1.0})
    assert metrics.values() == {"success": 1.0} and len(metrics.left_out) == 1


def test_an_episode_has_a_bounded_number_of_metrics():
    metrics = collected(*({f"{turn}_{i}": 1.0 for i in range(100)} for turn in range(100)))
    assert len(metrics.values()) == MAX_NAMES and len(metrics.left_out) <= MAX_NAMES


def test_turn_metrics_are_averaged_for_all_others_the_last_value_counts_and_the_start_is_no_turn():
    metrics = EnvMetrics()
    metrics.add({"success": 0.0, "turn_metrics": {"valid": 9.0}}, is_turn=False)
    assert metrics.values() == {"success": 0.0}
    metrics.add({"turn_metrics": {"valid": 1.0}, "traj_metrics": {"success": 0.5}})
    metrics.add({"turn_metrics": {"valid": 0.0}, "traj_metrics": {"success": 1.0}})
    assert metrics.values() == {"valid": 0.5, "success": 1.0}
    assert collected(*[{"turn_metrics": {"large": 1.7e308}}] * 3).values()["large"] == pytest.approx(1.7e308)


def test_the_log_names_what_was_left_out_with_its_share_once_a_minute(caplog: pytest.LogCaptureFixture):
    now = [0.0]
    seen = LeftOutLog(lambda: now[0])
    with caplog.at_level(logging.WARNING, "actor"):
        for number in range(201):
            now[0] = 0.0 if number < 200 else 60.0
            seen.add({"distance": "not finite"} if number % 4 == 0 else {})
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("env metric 'distance' was not finite in 100 % of 1 episodes")
    assert second.startswith("env metric 'distance' was not finite in 25 % of 200 episodes")


@pytest.mark.parametrize(
    "changes",
    [
        {"text": "x" * (TEXT_CHARACTERS + 1)}, {"text": "\udc80"}, {"text": None}, {"error": 3}, {"notes": (1,)},
        {"notes": (TurnNote(begin_s=-1.0),)}, {"notes": (TurnNote(info="x" * 5000),)}, {"notes": 3},
        {"started": math.nan}, {"started": -5.0}, {"started": "now"},
    ],
)  # fmt: skip
def test_texts_notes_and_times_of_a_rollout_function_can_always_be_sent(changes: dict[str, Any]):
    sound, _ = describable(replace(episode(), **changes))
    group = Group("t", "a", (sound,))
    assert decode(encode(group)).trajectories[0].reward == episode().reward


@pytest.mark.parametrize("value", ["0.5", "\u0661", b"1", None, math.nan, "1e3", Hostile(), 10**400, [1.0, 2.0]])
def test_a_reward_that_is_no_number_is_refused_in_words_that_show_it(value: Any):
    assert isinstance(number_of(value), str)
    with pytest.raises(BadReward, match="not a finite number"):
        finite(value)


@pytest.mark.parametrize("value", [True, 1, 0.5, np.float32(0.5), np.bool_(True), np.array(0.5)])
def test_numbers_of_numpy_are_rewards(value: Any):
    assert finite(value) == float(value)


class Strange:
    """A metric that answers nothing that it is asked."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")

    def __float__(self) -> float:
        raise KeyboardInterrupt

    def __repr__(self) -> str:
        raise RuntimeError("no text")


class BreaksOff(dict[str, float]):
    def items(self) -> Any:
        yield "first", 1.0
        raise GeneratorExit


def test_a_strange_metric_or_name_costs_no_other_metric():
    metrics = EnvMetrics()
    metrics.add({"strange": Strange(), Strange(): 1.0, "sound": 2.0})
    assert metrics.values() == {"sound": 2.0} and metrics.left_out["strange"] == "no number"
    metrics.add(BreaksOff())
    assert metrics.values() == {"sound": 2.0, "first": 1.0}
