"""Fixtures of a policy and of a publisher with short limits, and checks of the weights that engines hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from actor.engine.weight_loader import raw_bytes
from learner.model.policy import load_policy
from learner.weights.canary import gap
from learner.weights.gathering import gathered
from learner.weights.publisher import Publisher, PublishSettings
from learner.weights.verify import WeightVerifier, WrongWeights
from learner.weights.weight_update import WeightUpdate
from shared.config.learner_section import PublishConfig
from shared.engine.checksums import checksums
from shared.engine.engine_api import EngineClient
from shared.vision import VisionSpec
from tests.support.engines import call


def publish_settings(
    *,
    bucket_bytes: int = 100_000,
    call_timeout_s: float = 30.0,
    health_timeout_s: float = 10.0,
    give_up_s: float = 600.0,
    **config: Any,
) -> PublishSettings:
    """Return settings with the gloo backend; `config` are fields of the recipe's section publish."""
    return PublishSettings(
        config=PublishConfig(**config),
        backend="gloo",
        give_up_s=give_up_s,
        bucket_bytes=bucket_bytes,
        call_timeout_s=call_timeout_s,
        health_timeout_s=health_timeout_s,
    )


FAST = publish_settings(timeout_s=4.0, call_timeout_s=4.0, health_timeout_s=2.0)


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
    """Arrange that `action` is called once, before the third bucket of an update."""
    real, count = WeightUpdate.send, [0]

    async def send(self, bucket):
        count[0] += 1
        if count[0] == 3:
            action()
        await real(self, bucket)

    monkeypatch.setattr(WeightUpdate, "send", send)


def names_of_checksums(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects, from now on, the names of parameters for which engines report checksums."""
    real, names = EngineClient.checksums, list[str]()

    async def checksums_told(self, *arguments):
        ranks = await real(self, *arguments)
        names.extend(name for rank in ranks for name in rank)
        return ranks

    monkeypatch.setattr(EngineClient, "checksums", checksums_told)
    return names


def served(metrics):
    """Return (engines that took the weights, engines that did not) of a publication."""
    return metrics["publish/engines"], metrics["publish/dropped"]


def fault_found(publisher: Publisher, url: str, versions: Iterable[int], change: Callable[[], object] = int) -> str:
    """Publish the versions to an engine, after `change` each time, until its weights are found to be wrong; return what
    is said of it: by the end of the run, if no engine has been right before, else where it is left out."""
    for version in versions:
        change()
        try:
            publisher.publish(version, [url])
        except WrongWeights as error:
            return str(error)
        if url in publisher.distrusted:
            return f"engine {url}, {publisher.distrusted[url].partition('(')[2]}"
    raise AssertionError(f"nothing wrong was found in version {version}")


def held(app) -> dict[str, torch.Tensor]:
    loader = app.updates.loader
    return {name: loader.published(name) for name in loader._parameters}


def assert_same(app, policy):
    for name, tensor in gathered(policy):
        assert torch.equal(held(app)[name], tensor), name
    assert not app.scheduler.paused


def holds(url, policy, version):
    """Return True if the engine at `url` reports this version, and its checksums are those of the policy."""
    theirs = call(url, "/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]
    own = checksums((name, raw_bytes(tensor)) for name, tensor in gathered(policy))
    return theirs == own and call(url, "/model_info")["weight_version"] == str(version)


def check_no_stale_image(url: str, policy: Any, model_path: str, ranks: Any) -> None:
    """Check that an engine does not reuse image features that older weights have computed: send the canary's image,
    change only the vision tower, and send it again. Raise WrongWeights if the engine answers with the old tower's
    features. The policy's tower stays changed.
    """
    verifier = WeightVerifier(policy, model_path, ranks)
    with publishing(policy, ranks, FAST, verifier) as publisher:
        assert publisher.publish(1, [url])["publish/unproven"] == 0
        before = verifier.canary.expected_logprobs()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in policy.named_weights():
                if ".visual." in name and parameter.ndim > 1:
                    parameter += parameter.std() * torch.randn(parameter.shape, generator=generator)
        assert gap(before, verifier.canary.expected_logprobs()) > 10 * verifier.tolerance.ceiling, (
            "the tower makes no difference"
        )
        metrics = publisher.publish(2, [url])
        assert metrics["publish/unproven"] == 0
        if metrics["publish/distrusted"]:
            raise WrongWeights(publisher.distrusted[url])
