"""Adapters sent alone: engines merge them to the bytes of a merged publication, and the proof covers what they make."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from learner.weights.buckets import gathered, outgoing
from learner.weights.verify import WeightVerifier, WrongWeights
from shared.weights.adapters import SCALE
from shared.weights.checksums import part_of
from tests.support.publishing import FAST, assert_same, holds, publishing, served
from tests.support.small.adapted import adapted_policy, move_adapters
from tests.support.tiny import mixture_dir, running_engine, tiny_model_dir

pytestmark = pytest.mark.slow
TARGETS = ("attention", "dense", "vision")


@pytest.fixture
def policy(folder):
    return adapted_policy(folder, publish="adapter", targets=TARGETS, rank=3)


@pytest.fixture
def publisher(policy, folder, ranks):
    with publishing(policy, ranks, FAST, WeightVerifier(policy, str(folder), ranks)) as publisher:
        yield publisher


def adapter_bytes(policy):
    return 8 + sum(4 * factor.numel() for each in policy.adapters.of.values() for factor in each.factors)


def parts_of(policy):
    return {part_of(name) for name, _ in policy.named_weights()}


def test_the_adapter_alone_is_sent_and_the_engine_holds_the_learners_sums_byte_for_byte(folder, policy, publisher):
    with running_engine(folder) as (url, app):
        for version in range(len(parts_of(policy))):
            move_adapters(policy, 0.02)
            metrics = publisher.publish(version, [url])
            assert metrics["publish/bytes"] == adapter_bytes(policy)
            assert metrics["publish/canary_gap"] < 1e-5
            assert (metrics["publish/checksum_skipped"], metrics["publish/unproven"]) == (0, 0)
            assert_same(app, policy)
            assert holds(url, policy, version)
    assert adapter_bytes(policy) < 0.2 * sum(
        4 * p.numel() for n, p in policy.named_weights() if n in policy.adapters.of
    )
