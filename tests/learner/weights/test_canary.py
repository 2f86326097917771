"""The canary's tolerance follows the noise of a sound run, and stops one whose engine holds other weights."""

from __future__ import annotations

import re

import pytest
import torch

from learner.alarms.rules import limits_of
from learner.weights.canary import CEILING, FLOOR, NOISE_MULTIPLE, CanaryTolerance, gap
from learner.weights.verify import WeightVerifier
from shared.config.learner_section import PublishConfig
from shared.log import get_logger
from tests.support.publishing import FAST, policy, publishing
from tests.support.tiny import running_engine

__all__ = ["policy"]  # a fixture


@pytest.mark.parametrize("dtype", CEILING)
def test_the_first_proof_is_judged_by_the_ceiling_and_no_later_one_by_more(dtype):
    tolerance = CanaryTolerance(dtype)
    assert tolerance.limit("a") == CEILING[dtype]
    tolerance.record_passed("a", CEILING[dtype])
    assert tolerance.limit("a") == CEILING[dtype]


@pytest.mark.parametrize("dtype", CEILING)
def test_noise_that_grows_slowly_is_let_pass_and_a_jump_is_not(dtype):
    tolerance, noise = CanaryTolerance(dtype), FLOOR[dtype] / 2
    tolerance.record_passed("a", noise)
    while noise < CEILING[dtype]:
        assert noise < tolerance.limit("a") <= max(NOISE_MULTIPLE * noise, FLOOR[dtype])
        tolerance.record_passed("a", noise)
        tolerance.record_passed("a", 0.0)  # a quiet proof forgets nothing
        noise *= 2


@pytest.mark.parametrize("dtype", CEILING)
def test_an_engine_without_noise_is_still_allowed_the_floor(dtype):
    tolerance = CanaryTolerance(dtype)
    tolerance.record_passed("a", 0.0)
    assert tolerance.limit("a") == FLOOR[dtype] < CEILING[dtype] / 5
    assert FLOOR[dtype] == limits_of({"model": {"dtype": str(dtype).removeprefix("torch.")}})["canary_gap"]


def test_another_kind_of_engine_begins_at_the_ceiling():
    tolerance = CanaryTolerance(torch.bfloat16)
    tolerance.record_passed("a", 0.001)
    assert tolerance.limit("a") < tolerance.limit("b") == tolerance.ceiling


def test_experts_that_rounding_routes_otherwise_keep_the_ceiling():
    for dtype, value in ((torch.bfloat16, CEILING[torch.bfloat16]), (torch.float32, FLOOR[torch.float32])):
        tolerance = CanaryTolerance(dtype, has_experts=True)
        tolerance.record_passed("a", 0.0)
        assert tolerance.limit("a") == value


def test_a_tolerance_that_the_recipe_states_stays():
    tolerance = CanaryTolerance(torch.bfloat16, 0.7)
    tolerance.record_passed("a", 0.001)
    assert tolerance.limit("a") == 0.7


@pytest.mark.parametrize("stale", [".visual.blocks.1.", ".layers.1."])
def test_an_engine_with_a_stale_tower_or_layer_that_the_ceiling_lets_pass_is_left_out(
    folder, policy, ranks, stale, caplog, monkeypatch
):
    monkeypatch.setattr(get_logger("publisher"), "propagate", True)
    verifier = WeightVerifier(policy, str(folder), ranks)
    with running_engine(folder) as (url, app), publishing(policy, ranks, FAST, verifier) as publisher:
        assert publisher.publish(1, [url])["publish/canary_tolerance"] == CEILING[torch.float32]
        assert publisher.publish(2, [url])["publish/canary_tolerance"] == FLOOR[torch.float32]
        before = verifier.canary.expected_logprobs()
        while gap(before, verifier.canary.expected_logprobs()) < 2 * FLOOR[torch.float32]:
            with torch.no_grad():
                for name, parameter in policy.named_weights():
                    if stale in name and parameter.ndim > 1:
                        parameter *= 1.00005
        assert gap(before, verifier.canary.expected_logprobs()) < CEILING[torch.float32] / 2
        app.updates.loader.load = lambda flat, entries: None
        app.updates.loader.snapshot = lambda skip: []
        assert publisher.publish(3, [url])["publish/distrusted"] == 1
        assert re.search(rf"{url}, version 3: the canary prompt's .* above 0\.0001", caplog.text)


def test_a_stated_tolerance_is_the_one_in_force(folder, policy, ranks):
    verifier = WeightVerifier(policy, str(folder), ranks, PublishConfig(canary_tolerance=0.25))
    with running_engine(folder) as (url, _), publishing(policy, ranks, FAST, verifier) as publisher:
        assert [publisher.publish(v, [url])["publish/canary_tolerance"] for v in (1, 2)] == [0.25, 0.25]
