"""Engines that die, stop, refuse or lie in the middle of a publication: named, left behind, and taken back."""

from __future__ import annotations

import signal
import time

import pytest
import torch

from learner.weights.gathering import gathered, gathered_buckets
from learner.weights.publisher import Publisher
from shared.engine.engine_messages import ServerInfo
from shared.log import get_logger
from tests.support.engines import (
    JoiningEngine,
    call,
    dribbles,
    engine_process,
    false_engine,
    hangs_up,
    is_silent,
    refuses,
    says,
    talks_nonsense,
)
from tests.support.publishing import (
    assert_same,
    held,
    holds,
    in_mid_update,
    move,
    policy,
    publish_settings,
    publishing,
    served,
)
from tests.support.tiny import running_engine

__all__ = ["policy"]  # a fixture


@pytest.fixture(autouse=True)
def log_is_captured(monkeypatch):
    monkeypatch.setattr(get_logger("publisher"), "propagate", True)


@pytest.fixture
def publisher(policy, ranks):
    with publishing(
        policy, ranks, publish_settings(timeout_s=2.0, call_timeout_s=2.0, health_timeout_s=1.0)
    ) as publisher:
        yield publisher


@pytest.fixture
def always_paused(monkeypatch):
    """Engines are spoken to as those that cannot receive beside generation."""
    monkeypatch.setattr("shared.engine.engine_api.parse_server_info", lambda info: ServerInfo())


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_an_engine_killed_in_mid_update_is_the_only_one_left_behind(folder, policy, publisher, monkeypatch, caplog):
    with running_engine(folder, update_timeout_s=8.0) as (good, app), engine_process(folder) as doomed:
        in_mid_update(monkeypatch, lambda: doomed.signal(signal.SIGKILL))
        move(policy, 0.01)
        assert served(publisher.publish(3, [doomed.url, good])) == (1, 1)
        assert_same(app, policy)
        named = [record.getMessage() for record in caplog.records if "did not take version 3" in record.getMessage()]
        assert len(named) == 1 and doomed.url in named[0]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_an_engine_stopped_in_mid_update_comes_back_with_the_right_weights(folder, policy, publisher, monkeypatch):
    with running_engine(folder, update_timeout_s=8.0) as (good, app), engine_process(folder) as frozen:
        in_mid_update(monkeypatch, lambda: frozen.signal(signal.SIGSTOP))
        move(policy, 0.01)
        assert served(publisher.publish(3, [frozen.url, good])) == (1, 1)
        assert_same(app, policy)
        move(policy, 0.01)
        assert publisher.publish(4, [frozen.url, good])["publish/dropped"] == 1  # not even healthy
        frozen.signal(signal.SIGCONT)
        move(policy, 0.01)
        assert publisher.publish(5, [frozen.url, good])["publish/engines"] == 2
        assert holds(frozen.url, policy, 5) and holds(good, policy, 5)


def test_an_engine_that_misses_a_bucket_keeps_its_old_weights_and_says_so(folder, policy, publisher, monkeypatch):
    with running_engine(folder) as (url, app):
        move(policy, 0.01)
        publisher.publish(1, [url])
        before = {name: tensor.clone() for name, tensor in held(app).items()}
        refuse = []
        real = app.updates.loader.check

        def check(entries):
            if refuse:
                raise ValueError("no more of this")
            real(entries)

        app.updates.loader.check = check
        in_mid_update(monkeypatch, lambda: refuse.append(True))
        move(policy, 0.01)
        assert publisher.publish(2, [url])["publish/dropped"] == 1
        assert all(torch.equal(tensor, before[name]) for name, tensor in held(app).items())
        assert call(url, "/model_info")["weight_version"] == "1"


def test_a_second_learner_takes_over_from_one_that_died_in_mid_update(folder, policy, publisher):
    with running_engine(folder) as (url, app):
        call(url, "/begin_weight_update", {})
        move(policy, 0.01)
        assert publisher.publish(2, [url])["publish/engines"] == 1
        assert_same(app, policy)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [refuses, hangs_up, is_silent, dribbles, talks_nonsense])
@pytest.mark.parametrize(
    "route",
    [
        "/init_weights_update_group",
        "/pause_generation",
        "/begin_weight_update",
        "/update_weights_from_distributed",
    ],
)
def test_a_misbehaving_engine_is_named_and_never_holds_the_learner(
    folder, policy, ranks, always_paused, route, fault, caplog
):
    settings = publish_settings(bucket_bytes=100_000, timeout_s=1.5, call_timeout_s=1.0, health_timeout_s=1.0)
    with (
        running_engine(folder, update_timeout_s=3.0) as (good, app),
        JoiningEngine({route: fault}) as bad,
        publishing(policy, ranks, settings) as publisher,
    ):
        move(policy, 0.01)
        assert served(publisher.publish(6, [bad, good])) == (1, 1)
        assert_same(app, policy)
        assert any(f"{bad} did not take version 6" in record.getMessage() for record in caplog.records)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [hangs_up, dribbles, talks_nonsense])
def test_an_engine_without_a_whole_health_answer_is_not_asked_to_join(policy, publisher, fault):
    with false_engine({"/health": fault}) as (url, seen):
        assert publisher.publish(7, [url])["publish/dropped"] == 1
        assert {path for path, _ in seen} == {"/health"}


def test_every_tensor_parallel_rank_of_an_engine_has_its_place_in_the_group(folder, policy, publisher):
    with running_engine(folder) as (url, app), JoiningEngine({}, num_ranks=2) as parallel:
        move(policy, 0.01)
        assert publisher.publish(1, [parallel.url, url])["publish/engines"] == 2
        assert_same(app, policy)
        total = sum(4 * tensor.numel() for _, tensor in gathered(policy))
        for place in (0, 1):
            assert sum(len(flat) for rank, flat in parallel.received if rank == place) == total


def test_retracting_pauses_the_engine_and_flushes_what_the_old_weights_computed(policy, ranks):
    publisher = Publisher(policy, ranks, publish_settings(bucket_bytes=100_000, pause_mode="retract"))
    with JoiningEngine({}, num_ranks=2) as engine:
        assert publisher.publish(1, [engine.url])["publish/engines"] == 1
        publisher.close()
        paths = [path for path, _ in engine.seen if path not in ("/health", "/server_info")]
        assert paths[1:4] == ["/pause_generation", "/update_weight_version", "/begin_weight_update"]
        assert paths[-4:-1] == ["/end_weight_update", "/update_weight_version", "/continue_generation"]
        bodies = dict(engine.seen)
        assert bodies["/pause_generation"] == {"mode": "retract"}
        assert bodies["/update_weights_from_distributed"]["flush_cache"] is True


def test_a_run_whose_engines_all_stay_away_stops_and_names_them(policy, ranks):
    publisher = Publisher(policy, ranks, publish_settings(health_timeout_s=0.5, give_up_s=0.2))
    with false_engine({"/health": refuses}) as (url, _):
        assert publisher.publish(1, [url])["publish/dropped"] == 1
        time.sleep(0.3)
        with pytest.raises(TimeoutError, match=f"no engine has taken new weights .*{url}"):
            publisher.publish(2, [url])


def test_the_time_without_engines_counts_from_the_last_publication_that_one_took(policy, ranks):
    settings = publish_settings(timeout_s=4.0, call_timeout_s=4.0, health_timeout_s=0.5, give_up_s=1.0)
    with (
        JoiningEngine({}) as good,
        false_engine({"/health": refuses}) as (bad, _),
        publishing(policy, ranks, settings) as publisher,
    ):
        assert served(publisher.publish(1, [good])) == (1, 0)
        time.sleep(1.1)
        assert served(publisher.publish(2, [good])) == (1, 0)
        assert served(publisher.publish(3, [bad])) == (0, 1)  # the run goes on


@pytest.mark.slow
@pytest.mark.parametrize(
    "route", ["/init_weights_update_group", "/pause_generation", "/begin_weight_update", "/end_weight_update"]
)
def test_an_engine_that_fails_before_or_after_the_buckets_costs_the_others_no_second_pass(
    folder, policy, publisher, always_paused, route, monkeypatch
):
    """Only what has to be done with a new group is: every bucket is gathered and sent once."""
    walks = []
    monkeypatch.setattr(
        "learner.weights.publisher.gathered_buckets", lambda *how: walks.append(how) or gathered_buckets(*how)
    )
    total = sum(4 * tensor.numel() for _, tensor in gathered(policy))
    with running_engine(folder) as (good, app), JoiningEngine({route: refuses}) as bad:
        metrics = publisher.publish(6, [bad, good])
        assert served(metrics) == (1, 1) and (len(walks), metrics["publish/bytes"]) == (1, total)
        assert_same(app, policy)
        assert holds(good, policy, 6)


def test_an_engine_that_could_not_be_told_to_go_on_is_told_again_and_not_left_out(policy, publisher):
    def fails_twice(request, body):
        told.append(body)
        (hangs_up if len(told) < 3 else says({"success": True}))(request, body)

    told = []
    with JoiningEngine({"/continue_generation": fails_twice}) as url:
        assert served(publisher.publish(1, [url])) == (1, 0) and len(told) == 3


@pytest.mark.slow
def test_a_change_of_members_has_each_of_the_others_join_once_and_wait_for_nobody_who_leaves(policy, publisher):
    with JoiningEngine({}) as gone, JoiningEngine({"/destroy_weights_update_group": is_silent}, num_ranks=2) as stays:
        for version, urls in enumerate([[stays.url, gone], [stays.url], [stays.url], [gone, stays.url]]):
            assert publisher.publish(version, urls)["publish/engines"] == len(urls)
        joined = [path for path, _ in stays.seen if path == "/init_weights_update_group"]
        assert len(joined) == 3  # once for each change
