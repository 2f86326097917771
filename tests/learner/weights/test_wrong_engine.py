"""An engine with wrong weights or wrong numbers is left out alone: named, its samples refused, and taken back after a
full publication and a right canary."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from learner.weights.publisher import Publisher
from learner.weights.verify import WeightVerifier, WrongWeights
from shared.config.learner_section import PublishConfig
from shared.log import get_logger
from tests.support.engines import call
from tests.support.hostile.engine_server import HostileEngine
from tests.support.machine import until
from tests.support.publishing import assert_same, move, policy, publish_settings, publishing
from tests.support.tiny import running_engine

__all__ = ["policy"]  # a fixture


@pytest.fixture(autouse=True)
def log_is_captured(monkeypatch):
    monkeypatch.setattr(get_logger("publisher"), "propagate", True)


@contextmanager
def judging(folder, policy, ranks, every: int = 1, **settings) -> Iterator[tuple[Publisher, list]]:
    """Yield a publisher that verifies, and the calls of its `refuse`."""
    refused: list[tuple[str, int, int]] = []
    verifier = WeightVerifier(policy, str(folder), ranks, PublishConfig(verify_every=every))
    fast = publish_settings(timeout_s=5.0, call_timeout_s=5.0, **settings)
    with publishing(policy, ranks, fast, verifier, "", "me", lambda *what: refused.append(what)) as publisher:
        yield publisher, refused


def version_of(url: str) -> str:
    return str(call(url, "/model_info")["weight_version"])


def messages(caplog, words: str) -> set[str]:
    return {record.getMessage() for record in caplog.records if words in record.getMessage()}


def test_one_of_two_engines_with_other_weights_is_left_out_and_comes_back(folder, policy, ranks, caplog):
    with (
        running_engine(folder) as (good, good_app),
        running_engine(folder) as (bad, bad_app),
        judging(folder, policy, ranks) as (publisher, refused),
    ):
        assert publisher.publish(1, [good, bad])["publish/distrusted"] == 0
        real, bad_app.updates.loader.load = bad_app.updates.loader.load, lambda flat, entries: None
        for version in (2, 3):
            move(policy, 0.05)
            assert publisher.publish(version, [good, bad])["publish/distrusted"] == 1
            assert_same(good_app, policy)
            assert version_of(good) == f"{version}-me"
            until(lambda: version_of(bad) == "none")  # so that nothing that it samples counts
        assert refused == [(bad, 1, 2)]  # once, and since its last proof
        (line,) = messages(caplog, "is left out until it shows the right weights")
        assert bad in line and "version 2-me: holds other values of" in line and good not in line
        bad_app.updates.loader.load = real
        for version in range(4, 9):
            metrics = publisher.publish(version, [good, bad])
            if not metrics["publish/distrusted"]:
                break
        assert not metrics["publish/distrusted"]
        until(lambda: version_of(bad) == f"{version}-me")
        assert_same(bad_app, policy)
        assert publisher.publish(9, [good, bad])["publish/engines"] == 2
        assert len(messages(caplog, f"engine {bad} shows the right weights again")) == 1


def test_an_engine_that_tells_other_numbers_of_the_canary_is_left_out_and_comes_back(folder, policy, ranks, caplog):
    with (
        running_engine(folder) as (good, _),
        running_engine(folder) as (behind, app),
        HostileEngine(behind) as liar,
        judging(folder, policy, ranks) as (publisher, refused),
    ):
        publisher.publish(1, [good, liar.url])
        liar.spoil("/generate", "another canary")
        metrics = publisher.publish(2, [good, liar.url])
        assert metrics["publish/distrusted"] == 1 and metrics["publish/canary_gap"] < 1e-4  # of those that are used
        assert refused == [(liar.url, 1, 2)]
        (line,) = messages(caplog, "is left out until")
        assert f"engine {liar.url}, version 2-me: the canary prompt's logprobs are" in line
        until(lambda: app.scheduler.weight_version == "none")
        liar.spoil("/generate", "")
        assert publisher.publish(3, [good, liar.url])["publish/engines"] == 1  # not yet proven
        until(lambda: app.scheduler.weight_version == "3-me")
        metrics = publisher.publish(4, [good, liar.url])
        assert (metrics["publish/distrusted"], metrics["publish/engines"]) == (0, 2)


def test_what_the_wrong_weights_have_cached_is_dropped(folder, policy, ranks):
    with (
        running_engine(folder) as (good, _),
        running_engine(folder) as (bad, app),
        judging(folder, policy, ranks) as (publisher, _),
    ):
        publisher.publish(1, [good, bad])
        flushed = []
        real = app.scheduler.slots.flush
        app.scheduler.slots.flush = lambda: flushed.append(1) or real()
        with torch.no_grad():
            app.updates.loader._parameters["model.language_model.layers.1.mlp.down_proj.weight"].add_(1.0)
        app.updates.loader.load = lambda flat, entries: None
        publisher.publish(2, [good, bad])
        until(lambda: flushed)


def test_the_only_engine_is_waited_for_and_then_the_run_ends_with_a_line(folder, policy, ranks):
    with running_engine(folder) as (url, app), judging(folder, policy, ranks, give_up_s=1.5) as (publisher, refused):
        publisher.publish(1, [url])
        app.updates.loader.load = lambda flat, entries: None
        move(policy, 0.05)
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=f"no engine has taken new weights for .*{url}.*wrong weights"):
            for version in range(2, 100):
                publisher.publish(version, [url])
                time.sleep(0.2)
        assert 1.0 < time.monotonic() - began < 30 and refused == [(url, 1, 2)]


def test_engines_of_which_none_has_ever_been_right_end_the_run_at_once(folder, policy, ranks):
    with (
        running_engine(folder) as (one, app),
        running_engine(folder) as (two, other),
        judging(folder, policy, ranks) as (publisher, _),
    ):
        app.updates.loader.load = other.updates.loader.load = lambda flat, entries: None
        move(policy, 0.05)
        with pytest.raises(WrongWeights, match=f"engine {one}, version 1.*engine {two}, version 1|{two}.*{one}"):
            publisher.publish(1, [one, two])


def test_a_distrusted_engine_is_verified_at_the_next_publication_whatever_is_due(folder, policy, ranks):
    with (
        running_engine(folder) as (good, _),
        running_engine(folder) as (bad, app),
        judging(folder, policy, ranks, every=3) as (publisher, refused),
    ):
        publisher.publish(1, [good, bad])
        real, app.updates.loader.load = app.updates.loader.load, lambda flat, entries: None
        move(policy, 0.05)
        assert "publish/distrusted" not in publisher.publish(2, [good, bad])
        assert "publish/distrusted" not in publisher.publish(3, [good, bad])
        assert publisher.publish(4, [good, bad])["publish/distrusted"] == 1
        assert refused == [(bad, 1, 4)]  # all since its last proof
        app.updates.loader.load = real
        assert publisher.publish(5, [good, bad])["publish/distrusted"] == 0
