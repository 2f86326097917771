"""Adapters sent alone to SGLang's server: our plugin merges them into its weights, to the learner's very bytes."""

from __future__ import annotations

import pytest
import torch

from learner.weights.publisher import PublishSettings
from learner.weights.verify import WeightVerifier, WrongWeights
from shared.engine_api import EngineClient
from shared.weights.checksums import part_of
from tests.support.publishing import publishing
from tests.support.sglang_rig import give_base, vision_of
from tests.support.small.adapted import adapted_policy, move_adapters

PAUSED, BESIDE = 0, 1
"""The server without the plugin that takes adapters, and the one with it."""


@pytest.fixture
def policy(recipe):
    targets = ("attention", "dense", "vision")
    return adapted_policy(recipe.model.path, spec=vision_of(recipe), publish="adapter", rank=3, targets=targets)


@pytest.fixture
def publisher(servers, policy, recipe, ranks):
    settings = PublishSettings(timeout_s=20.0, bucket_bytes=50_000)
    give_base(recipe, ranks, servers.urls[BESIDE])
    with publishing(policy, ranks, settings, WeightVerifier(policy, recipe.model.path, ranks)) as publisher:
        yield publisher


def parts_of(policy):
    return {part_of(name) for name, _ in policy.named_weights()}


def test_the_server_holds_the_learners_sums_byte_for_byte_and_is_sent_adapters_alone(servers, policy, publisher):
    url, before = servers.urls[BESIDE], publisher.verifier.canary.expected()
    num_bytes = 8 + sum(4 * factor.numel() for each in policy.adapters.of.values() for factor in each.factors)
    for version in range(len(parts_of(policy))):
        move_adapters(policy, 0.02)
        metrics = publisher.publish(version, [url])
        assert metrics["publish/bytes"] == num_bytes
        assert (metrics["publish/checksum_skipped"], metrics["publish/unproven"]) == (0, 0)
    after = publisher.verifier.canary.expected()
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 100 * metrics["publish/canary_gap"]


def test_a_server_without_the_plugin_is_refused_in_one_line(servers, publisher):
    with pytest.raises(ValueError, match=f"^engine {servers.urls[PAUSED]}: takes no adapters alone; set [^\n]*$"):
        publisher.publish(1, [servers.urls[PAUSED]])


def test_a_server_that_serves_the_base_or_another_one_is_found(servers, policy, publisher, monkeypatch):
    url, walk = servers.urls[BESIDE], publisher._walk

    def without_adapters(*arguments):
        kept = [(each.factors[1], each.factors[1].detach().clone()) for each in policy.adapters.of.values()]
        with torch.no_grad():
            for factor, _ in kept:
                factor.zero_()
            walk(*arguments)
            for factor, value in kept:
                factor.copy_(value)

    move_adapters(policy, 1e-4)
    with monkeypatch.context() as patch:
        patch.setattr(publisher, "_walk", without_adapters)
        with pytest.raises(WrongWeights, match=f"engine {url}, version 5: holds other values of .* that it was sent "):
            publisher.publish(5, [url])
    with torch.no_grad():
        for _, weight in policy.named_weights():
            weight.mul_(1.01)
    with pytest.raises(WrongWeights, match=f"engine {url}, version 6: holds other values of .* model.path"):
        publisher.publish(6, [url])


def test_half_an_adapter_is_forgotten_and_the_next_one_is_taken(servers, publisher, monkeypatch):
    url, real = servers.urls[BESIDE], EngineClient.receive

    def receive(client, bucket, *limits):
        return real(client, bucket.replace(b"lora_B", b"lora_C"), *limits)

    with monkeypatch.context() as patch:
        patch.setattr(EngineClient, "receive", receive)
        assert publisher.publish(7, [url])["publish/dropped"] == 1
    assert publisher.publish(8, [url])["publish/engines"] == 1
