"""Weights reach the embedded engine over HTTP and gloo; an engine that fails is named, left out, and tried again."""

from __future__ import annotations

import time

import pytest
import torch

from learner.model.policy import load_policy
from learner.weights.buckets import buckets, gathered
from learner.weights.calls import call
from learner.weights.publisher import Publisher, PublishSettings
from shared.vision import VisionSpec
from tests.support.engines import false_engine, is_silent, refuses
from tests.support.tiny import load_model, running_engine

FAST = PublishSettings(bucket_bytes=100_000, timeout_s=4.0, call_timeout_s=4.0, health_timeout_s=2.0)


@pytest.fixture(scope="module")
def policy(folder):
    return load_policy(str(folder), VisionSpec.load(folder))


@pytest.fixture
def publisher(policy, ranks):
    publisher = Publisher(policy, ranks, FAST)
    yield publisher
    publisher.close()


def move(policy, amount):
    with torch.no_grad():
        for p in policy.vlm.parameters():
            p.add_(amount)


def held(app) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in app.updates.loader._parameters.items() if "lm_head" not in name}


def assert_same(app, policy):
    for name, tensor in gathered(policy):
        assert torch.equal(held(app)[name], tensor), name


def raising(error):
    def function(*_):
        raise error

    return function


def test_buckets_are_bounded_and_hold_every_parameter_but_the_tied_head(policy, folder):
    found, sizes = [], []
    for bucket in buckets(gathered(policy), torch.bfloat16, 50_000):
        found += bucket.names
        sizes.append(bucket.flat.numel())
        assert bucket.flat.numel() <= 50_000 or len(bucket.names) == 1
        assert set(bucket.dtypes) == {"bfloat16"}
    assert found == [name for name, _ in load_model(folder).named_parameters()]
    assert len(sizes) > 3


def test_an_engine_holds_the_learners_weights_and_version_after_each_publication(folder, policy, publisher):
    with running_engine(folder) as (url, app):
        for version in (1, 2):
            move(policy, 0.01)
            metrics = publisher.publish(version, [url])
            assert metrics["publish/engines"] == 1 and metrics["publish/dropped"] == 0
            assert metrics["publish/bytes"] == 4 * sum(p.numel() for _, p in gathered(policy))
            assert_same(app, policy)
            assert call(url, "/model_info", None, 5)["weight_version"] == str(version)
            assert not app.scheduler.paused


def test_a_new_engine_joins_and_one_that_left_is_forgotten(folder, policy, publisher):
    with running_engine(folder) as (first, first_app):
        publisher.publish(1, [first])
        with running_engine(folder) as (second, second_app):
            move(policy, 0.01)
            assert publisher.publish(2, [second, first])["publish/engines"] == 2
            assert_same(first_app, policy)
            assert_same(second_app, policy)
        move(policy, 0.01)
        metrics = publisher.publish(3, [first, second])
        assert (metrics["publish/engines"], metrics["publish/dropped"]) == (1, 1)
        assert_same(first_app, policy)


@pytest.mark.parametrize("answer", [refuses, is_silent])
def test_an_engine_that_does_not_join_is_named_and_others_get_the_weights(folder, policy, publisher, answer, caplog):
    answers = {"/init_weights_update_group": answer}
    with running_engine(folder, update_timeout_s=4.0) as (url, app), false_engine(answers) as (bad, _):
        move(policy, 0.01)
        started = time.monotonic()
        metrics = publisher.publish(4, [bad, url])
        assert time.monotonic() - started < 30
        assert (metrics["publish/engines"], metrics["publish/dropped"]) == (1, 1)
        assert_same(app, policy)
        assert not app.scheduler.paused
        assert any(bad in record.getMessage() for record in caplog.records)


def test_an_engine_that_refuses_a_bucket_is_dropped_and_readmitted_at_the_next_version(folder, policy, publisher):
    with running_engine(folder, update_timeout_s=4.0) as (good, good_app), running_engine(folder) as (url, app):
        real, app.updates.loader.check = app.updates.loader.check, raising(ValueError("no such parameter"))
        move(policy, 0.01)
        metrics = publisher.publish(5, [good, url])
        assert (metrics["publish/engines"], metrics["publish/dropped"]) == (1, 1)
        assert_same(good_app, policy)
        assert not app.scheduler.paused and not good_app.scheduler.paused
        app.updates.loader.check = real
        metrics = publisher.publish(6, [good, url])
        assert (metrics["publish/engines"], metrics["publish/dropped"]) == (2, 0)
        assert_same(app, policy)


def test_an_engine_that_is_silent_about_a_bucket_does_not_hold_the_learner(folder, policy, publisher):
    with running_engine(folder, update_timeout_s=4.0) as (good, good_app), running_engine(folder) as (url, app):
        app.updates.loader.check = lambda entries: time.sleep(9)
        started = time.monotonic()
        move(policy, 0.01)
        metrics = publisher.publish(7, [good, url])
        assert time.monotonic() - started < 30
        assert (metrics["publish/engines"], metrics["publish/dropped"]) == (1, 1)
        assert_same(good_app, policy)


def test_older_engines_without_begin_and_end_are_served(folder, policy, publisher, monkeypatch):
    def without(url, path, body, timeout_s):
        unknown = path in ("/begin_weight_update", "/end_weight_update")
        return call(url, "/none" if unknown else path, body, timeout_s)

    monkeypatch.setattr("learner.weights.update.call", without)
    monkeypatch.setattr("learner.weights.group.call", without)
    with running_engine(folder) as (url, app):
        call(url, "/begin_weight_update", {}, 5)  # it takes buckets without being told to begin
        move(policy, 0.01)
        assert publisher.publish(9, [url])["publish/engines"] == 1
        call(url, "/end_weight_update", {}, 5)
        assert_same(app, policy)


def test_no_engine_at_all_is_no_error(publisher):
    assert publisher.publish(10, [])["publish/engines"] == 0
    assert publisher.publish(11, ["http://127.0.0.1:9"])["publish/dropped"] == 1
