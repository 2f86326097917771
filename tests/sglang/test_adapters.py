"""Adapters sent alone to SGLang's server: our plugin merges them into its weights, to the learner's very bytes."""

from __future__ import annotations

import pytest
import torch

from learner.weights.verify import WeightVerifier
from shared.engine.checksums import part_of
from shared.engine.engine_api import EngineClient
from tests.support.publishing import fault_found, publish_settings, publishing
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
    settings = publish_settings(timeout_s=20.0, bucket_bytes=50_000)
    give_base(recipe, ranks, servers.urls[BESIDE])
    with publishing(policy, ranks, settings, WeightVerifier(policy, recipe.model.path, ranks)) as publisher:
        yield publisher


def parts_of(policy):
    return {part_of(name) for name, _ in policy.named_weights()}


def test_the_server_answers_as_the_learner_and_is_sent_adapters_alone(servers, policy, publisher):
    url, before = servers.urls[BESIDE], publisher.verifier.canary.expected_logprobs()
    num_bytes = 8 + sum(4 * factor.numel() for each in policy.adapters.of.values() for factor in each.factors)
    for version in range(len(parts_of(policy))):
        move_adapters(policy, 0.02)
        metrics = publisher.publish(version, [url])
        assert metrics["publish/bytes"] == num_bytes
        assert metrics["publish/unproven"] == 0
    after = publisher.verifier.canary.expected_logprobs()
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 100 * metrics["publish/canary_gap"]


def test_a_server_without_the_plugin_is_refused_in_one_line(servers, publisher):
    with pytest.raises(ValueError, match=f"^engine {servers.urls[PAUSED]}: takes no adapters alone; set [^\n]*$"):
        publisher.publish(1, [servers.urls[PAUSED]])


def test_a_server_that_serves_the_base_or_another_one_is_found(servers, policy, publisher, monkeypatch):
    url, compute = servers.urls[BESIDE], publisher.verifier.compute_canary
    move_adapters(policy, 0.1)
    factors = [each.factors[1] for each in policy.adapters.of.values()]
    values = [factor.detach().clone() for factor in factors]

    @torch.no_grad()
    def with_adapters():  # the server has been sent the base alone
        for factor, value in zip(factors, values, strict=True):
            factor.copy_(value)
        compute()

    with monkeypatch.context() as patch:
        patch.setattr(publisher.verifier, "compute_canary", with_adapters)
        with torch.no_grad():
            for factor in factors:
                factor.zero_()
        words = f"engine {url}, version 5: the canary prompt's logprobs are "
        assert words in fault_found(publisher, url, [5])
    with torch.no_grad():
        for _, weight in policy.named_weights():
            weight.mul_(1.1)
    words = f"engine {url}, version 6: the canary prompt's logprobs are "
    assert words in fault_found(publisher, url, [6])


def test_half_an_adapter_is_forgotten_and_the_next_one_is_taken(servers, publisher, monkeypatch):
    url, real = servers.urls[BESIDE], EngineClient.receive

    def receive(client, bucket, *limits):
        return real(client, bucket.replace(b"lora_B", b"lora_C"), *limits)

    with monkeypatch.context() as patch:
        patch.setattr(EngineClient, "receive", receive)
        assert publisher.publish(7, [url])["publish/dropped"] == 1
    assert publisher.publish(8, [url])["publish/engines"] == 1
