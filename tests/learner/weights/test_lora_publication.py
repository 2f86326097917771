"""Adapters reach engines merged, in the weights that they change alone; the proof covers these and all others."""

from __future__ import annotations

import re

import pytest
import torch

from actor.engine.weight_loader import raw_bytes
from learner.weights.gathering import gathered
from learner.weights.verify import WeightVerifier, WrongWeights
from shared.engine.checksums import engine_name, part_of
from tests.support.publishing import FAST, assert_same, fault_found, holds, names_of_checksums, publishing
from tests.support.small.adapted import adapted_policy, move_adapters
from tests.support.tiny import running_engine

pytestmark = pytest.mark.slow
FROZEN = "model.language_model.layers.1.self_attn.k_norm.weight"


@pytest.fixture
def policy(folder):
    return adapted_policy(folder, targets=("attention", "vision"))


@pytest.fixture
def publisher(policy, folder, ranks):
    with publishing(policy, ranks, FAST, WeightVerifier(policy, str(folder), ranks)) as publisher:
        yield publisher


def parts_of(policy):
    return {part_of(name) for name, _ in policy.named_weights()}


def test_only_changed_weights_are_sent_merged_and_every_weight_is_verified_in_time(
    folder, policy, publisher, monkeypatch
):
    seen = names_of_checksums(monkeypatch)
    sent = sum(4 * p.numel() for name, p in policy.named_weights() if name in policy.adapters.of)
    with running_engine(folder) as (url, app):
        for version in range(len(parts_of(policy))):
            move_adapters(policy, 0.02)
            metrics = publisher.publish(version, [url])
            assert metrics["publish/bytes"] == sent
            assert metrics["publish/canary_gap"] < 1e-5
            assert (metrics["publish/checksum_skipped"], metrics["publish/unproven"]) == (0, 0)
            assert metrics["lora/norm"] == policy.adapters.relative_norm() > 0
        assert_same(app, policy)
        assert holds(url, policy, version)
    assert sorted(seen) == sorted({engine_name(name) for name, _ in policy.named_weights()})
    assert sent < 2 * sum(p.numel() for _, p in policy.named_weights())  # less than half of them


def test_an_engine_that_serves_the_base_instead_stops_the_run(folder, policy, publisher):
    """It takes what it is sent, says that it is the new version, and answers as the model it was started from."""
    with running_engine(folder) as (url, app):
        assert publisher.publish(0, [url])["publish/unproven"] == 0  # adapters that add nothing are the base
        app.updates.loader.load = lambda flat, entries: None
        told = fault_found(publisher, url, range(1, len(parts_of(policy)) + 1), lambda: move_adapters(policy, 1e-6))
        assert re.search(f"{url}, version .*: holds other values of .* than it was sent", told)


def test_an_engine_that_serves_the_base_under_honest_checksums_is_found_by_the_canary(folder, policy, publisher):
    with running_engine(folder) as (url, app):
        app.updates.loader.load = lambda flat, entries: None
        app.updates.loader.snapshot = lambda skip: list(gathered(policy))
        move_adapters(policy, 0.05)
        with pytest.raises(WrongWeights, match=f"{url}, version 8: the canary prompt's logprobs are"):
            publisher.publish(8, [url])


def test_an_engine_with_another_base_beneath_stops_the_run_and_is_told_to_start_anew(folder, policy, publisher):
    with running_engine(folder) as (url, app):
        with torch.no_grad():
            app.updates.loader._parameters[FROZEN].add_(1e-6)
        told = fault_found(publisher, url, range(len(parts_of(policy))))
        assert re.search(rf"{engine_name(FROZEN)} than model.path has.*: start it anew", told)
        assert "\n" not in told


def test_an_engine_that_was_started_anew_gets_all_that_training_has_changed(folder, policy, publisher):
    move_adapters(policy, 0.05)
    with running_engine(folder) as (url, app):
        publisher.publish(1, [url])
        expected = {name: bytes(raw_bytes(tensor)) for name, tensor in gathered(policy)}
    with running_engine(folder) as (url, app):
        publisher.publish(2, [url])
        assert_same(app, policy)
    assert all(bytes(raw_bytes(tensor)) == expected[name] for name, tensor in gathered(policy))
