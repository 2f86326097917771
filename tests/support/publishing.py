"""A policy, a publisher with short limits, and what the engines then hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from actor.engine.weight_loader import raw_bytes
from learner.model.policy import load_policy
from learner.weights.buckets import gathered
from learner.weights.canary import gap
from learner.weights.publisher import Publisher, PublishSettings
from learner.weights.update import WeightUpdate
from learner.weights.verify import WeightVerifier
from shared.vision import VisionSpec
from shared.weights.checksums import checksums
from tests.support.engines import call

FAST = PublishSettings(bucket_bytes=100_000, timeout_s=4.0, call_timeout_s=4.0, health_timeout_s=2.0)


@pytest.fixture
def policy(folder):
    return load_policy(str(folder), VisionSpec.load(folder))


@pytest.fixture
def publisher(policy, ranks):
    with publishing(policy, ranks) as publisher:
        yield publisher


@contextmanager
def publishing(policy: Any, ranks: Any, settings: PublishSettings = FAST, *more: Any) -> Iterator[Publisher]:
    publisher = Publisher(policy, ranks, settings, *more)
    try:
        yield publisher
    finally:
        publisher.close()


def move(policy, amount):
    with torch.no_grad():
        for p in policy.vlm.parameters():
            p.add_(amount)


def in_mid_update(monkeypatch, action):
    """Calls `action` once, before the third bucket."""
    real, count = WeightUpdate.send, [0]

    async def send(self, bucket):
        count[0] += 1
        if count[0] == 3:
            action()
        await real(self, bucket)

    monkeypatch.setattr(WeightUpdate, "send", send)


def served(metrics):
    """(engines that took the weights, engines that did not) of a publication."""
    return metrics["publish/engines"], metrics["publish/dropped"]


def held(app) -> dict[str, torch.Tensor]:
    loader = app.updates.loader
    return {name: loader.published(name) for name in loader._parameters}


def assert_same(app, policy):
    for name, tensor in gathered(policy):
        assert torch.equal(held(app)[name], tensor), name
    assert not app.scheduler.paused


def holds(url, policy, version):
    """The engine at `url` says that it has this version, and its checksums are the policy's."""
    theirs = call(url, "/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]
    own = checksums((name, raw_bytes(tensor)) for name, tensor in gathered(policy))
    return theirs == own and call(url, "/model_info")["weight_version"] == str(version)


def check_no_stale_image(url: str, policy: Any, model_path: str, ranks: Any) -> None:
    """A check for any engine: no image's features outlive the weights that made them.

    Shows the canary's image, changes the vision tower alone, and shows it again.

    WrongWeights if the engine serves what the old tower saw. The policy's tower stays changed.
    """
    verifier = WeightVerifier(policy, model_path, ranks)
    with publishing(policy, ranks, FAST, verifier) as publisher:
        assert publisher.publish(1, [url])["publish/unproven"] == 0
        before = verifier.canary.expected()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in policy.named_weights():
                if ".visual." in name and parameter.ndim > 1:
                    parameter += parameter.std() * torch.randn(parameter.shape, generator=generator)
        assert gap(before, verifier.canary.expected()) > 10 * verifier.tolerance.ceiling, (
            "the tower makes no difference"
        )
        assert publisher.publish(2, [url])["publish/unproven"] == 0
