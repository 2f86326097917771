"""Weights reach the embedded engine over HTTP and gloo; an engine that fails is named, left out, and tried again."""

from __future__ import annotations

import queue
import threading

import pytest
import torch

from learner import learner_loop
from learner.weights.gathering import buckets, gathered
from learner.weights.verify import WeightVerifier
from shared.config.learner_section import LearnerConfig, PublishConfig
from shared.engine.engine_api import EngineClient, EngineError
from tests.support.engines import ask, call
from tests.support.many_engines import Engine, serve
from tests.support.publishing import FAST, assert_same, holds, move, policy, publisher, publishing, served
from tests.support.small.adapted import recipe_of
from tests.support.tiny import load_model, running_engine

__all__ = ["policy", "publisher"]  # fixtures


def test_buckets_are_bounded_and_hold_every_parameter_but_the_tied_head(policy, folder):
    found, last = [], []
    for bucket in buckets(gathered(policy), torch.bfloat16, 50_000):
        found += bucket.names
        last.append(bucket.last)
        assert bucket.flat.numel() <= 50_000 or len(bucket.names) == 1
        assert set(bucket.dtypes) == {"bfloat16"}
    assert found == [name for name, _ in load_model(folder).named_parameters()]
    assert len(last) > 3 and last == [False] * (len(last) - 1) + [True]


def test_an_engine_holds_the_learners_weights_and_version_after_each_publication(folder, policy, publisher):
    with running_engine(folder) as (url, app):
        for version in (1, 2):
            move(policy, 0.01)
            metrics = publisher.publish(version, [url])
            assert served(metrics) == (1, 0)
            assert metrics["publish/bytes"] == 4 * sum(p.numel() for _, p in gathered(policy))
            assert_same(app, policy)
            assert holds(url, policy, version)


def test_engines_are_asked_at_once_over_connections_that_outlive_a_publication(policy, publisher):
    engines, ports = [Engine() for _ in range(3)], queue.SimpleQueue()
    threading.Thread(target=serve, args=(engines, ports.put), daemon=True).start()
    urls = [f"http://127.0.0.1:{port}" for port in ports.get(timeout=20)]
    for version in range(3):
        assert served(publisher.publish(version, urls)) == (3, 0)
    assert [engine.num_connections for engine in engines] == [1, 1, 1]
    assert [engine.num_received > 3 * 3 for engine in engines] == [True] * 3


@pytest.mark.slow
def test_requests_that_engines_have_refused_are_a_metric(folder, policy, publisher):
    with running_engine(folder) as (first, _), running_engine(folder) as (second, _):
        for url in (first, second, second):
            with pytest.raises(EngineError):
                call(url, "/generate", {"input_ids": "no list"})
        metrics = publisher.publish(1, [first, second])
        assert (metrics["publish/engines"], metrics["publish/refused_requests"]) == (2.0, 3.0)


@pytest.mark.slow
def test_a_new_engine_joins_and_one_that_left_is_forgotten(folder, policy, publisher):
    with running_engine(folder) as (first, first_app):
        publisher.publish(1, [first])
        with running_engine(folder) as (second, second_app):
            move(policy, 0.01)
            assert served(publisher.publish(2, [second, first])) == (2, 0)
            assert_same(first_app, policy)
            assert_same(second_app, policy)
        move(policy, 0.01)
        assert served(publisher.publish(3, [first, second])) == (1, 1)
        assert_same(first_app, policy)


@pytest.mark.slow
def test_an_engine_that_refuses_a_bucket_is_dropped_and_readmitted_at_the_next_version(folder, policy, publisher):
    with running_engine(folder, update_timeout_s=4.0) as (good, good_app), running_engine(folder) as (url, app):
        names, app.updates.loader._parameters = app.updates.loader._parameters, {}
        move(policy, 0.01)
        assert served(publisher.publish(5, [good, url])) == (1, 1)
        assert_same(good_app, policy)
        assert not app.scheduler.paused
        app.updates.loader._parameters = names
        assert served(publisher.publish(6, [good, url])) == (2, 0)
        assert_same(app, policy)


def test_older_engines_without_begin_and_end_are_served(folder, policy, publisher, monkeypatch):
    real = EngineClient.post

    async def post(self, path, body, timeout_s=30.0):
        if path in ("/begin_weight_update", "/end_weight_update"):
            raise EngineError(self.url, "HTTP 404", 404)
        return await real(self, path, body, timeout_s)

    with running_engine(folder) as (url, app):
        call(url, "/begin_weight_update", {})  # it takes buckets without being told to begin
        move(policy, 0.01)
        with monkeypatch.context() as patch:
            patch.setattr(EngineClient, "post", post)
            assert served(publisher.publish(9, [url])) == (1, 0)
        ask(url, lambda client: client.end_update("9"))
        assert_same(app, policy)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://host..domain:1", "http://[::1", "nothing", "http://."])
def test_what_is_no_engine_is_dropped_and_no_error(publisher, url):
    assert served(publisher.publish(10, [])) == (0, 0)
    assert served(publisher.publish(11, [url])) == (0, 1)


@pytest.mark.slow
def test_an_engine_that_was_started_anew_holds_up_no_other(folder, policy, publisher):
    """Who waits for the lost broadcast hears at once that nothing will come: its own limit is far longer."""
    with running_engine(folder, update_timeout_s=300.0) as (good, app), running_engine(folder) as (anew, other):
        publisher.publish(1, [good, anew])
        for version in (2, 4):
            other.updates._groups.clear()
            assert served(publisher.publish(version, [good, anew])) == (1, 1)
            assert_same(app, policy)
            assert served(publisher.publish(version + 1, [good, anew])) == (2, 0)


def test_a_number_of_a_dead_learner_is_not_taken_for_its_successors(folder, policy, ranks):
    """Both publish a version 6, and their weights differ."""
    verifier = WeightVerifier(policy, str(folder), ranks)
    with running_engine(folder) as (url, _):
        with publishing(policy, ranks, FAST, None, "", "dead") as before:
            before.publish(6, [url])
        assert call(url, "/model_info")["weight_version"] == "6-dead"
        with publishing(policy, ranks, FAST, verifier, "", "mine") as after:
            with after.watch(lambda: [url], 6) as watch:
                assert watch.publication_due.wait(20)
            move(policy, 0.01)
            after.publish(6, [url])
        assert holds(url, policy, "6-mine")


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, float("nan")), (torch.float16, 7e4)])
def test_weights_that_are_not_finite_for_the_engines_are_given_to_none(folder, policy, publisher, dtype, value):
    with running_engine(folder) as (url, app):
        policy.dtype = dtype
        publisher.publish(1, [url])
        tokens = app.scheduler.generation
        with torch.no_grad():
            policy.vlm.model.language_model.norm.weight[3] = value
        with pytest.raises(
            ValueError, match=r"no finite number of float\d\d \(model.language_model.norm.weight\)"
        ) as told:
            publisher.publish(2, [url])
        assert "\n" not in str(told.value)
        assert call(url, "/model_info")["weight_version"] == "1" and app.scheduler.generation == tokens


@pytest.mark.parametrize(("wait_s", "publish_s"), [(600.0, 1800.0), (600.0, 300.0), (9000.0, 10.0)])
def test_ranks_wait_for_one_another_longer_than_for_groups_or_than_engines_that_hang_hold_the_first(
    folder, monkeypatch, wait_s, publish_s
):
    """Three tries to begin and a bucket, each of which may end at the limit of a publication."""

    class Joined(Exception):
        pass

    def init_ranks(device, *, timeout_s, parallel):
        raise Joined(timeout_s)

    monkeypatch.setattr(learner_loop, "init_ranks", init_ranks)
    config = LearnerConfig(wait_timeout_s=wait_s, publish=PublishConfig(timeout_s=publish_s))
    with pytest.raises(Joined) as joined:
        learner_loop.run(recipe_of(folder, config), None, (), None)
    (limit_s,) = joined.value.args
    assert limit_s >= max(wait_s, 4 * publish_s) + 600
