"""Each publication is checked: an engine that holds or serves other weights than it was given stops the run."""

from __future__ import annotations

import re
import threading

import pytest
import torch

from learner.model.policy import load_policy
from learner.weights.gathering import gathered, gathered_buckets
from learner.weights.verify import SampledWeights, WeightVerifier, WrongWeights, engines_with_comparable_checksums
from shared.config.learner_section import PublishConfig
from shared.engine.checksums import all_but, checksums, engine_name, part_of
from shared.engine.engine_api import EngineClient
from shared.engine.engine_messages import ServerInfo
from shared.vision import VisionSpec
from tests.support.engines import JoiningEngine, is_silent, says
from tests.support.publishing import (
    FAST,
    check_no_stale_image,
    fault_found,
    move,
    names_of_checksums,
    policy,
    publishing,
)
from tests.support.small.families import qwen25
from tests.support.tiny import running_engine, tiny_model_dir

__all__ = ["policy"]  # a fixture


@pytest.fixture
def publisher(policy, folder, ranks):
    with publishing(policy, ranks, FAST, WeightVerifier(policy, str(folder), ranks)) as publisher:
        yield publisher


@pytest.mark.slow
def test_every_parameter_of_an_honest_engine_is_covered_in_time(folder, policy, publisher, monkeypatch):
    names = {name for name, _ in policy.named_weights()}
    seen = names_of_checksums(monkeypatch)
    with running_engine(folder) as (url, _):
        for version in range(len({part_of(name) for name in names})):
            move(policy, 0.01)
            metrics = publisher.publish(version, [url])
            assert metrics["publish/canary_gap"] < 1e-4
            assert (metrics["publish/checksum_skipped"], metrics["publish/unproven"]) == (0, 0)
    assert sorted(seen) == sorted({engine_name(name) for name in names})


def test_a_server_is_asked_for_one_part_of_the_model_alone():
    names = [f"model.language_model.layers.{i}.self_attn.q_proj.weight" for i in (1, 2, 11)]
    names += ["model.language_model.norm.weight", "model.language_model.layers.1.input_layernorm.weight"]
    names += ["model.visual.blocks.1.norm1.weight", "model.visual.merger.norm.weight"]
    for part in {part_of(name) for name in names}:
        skip = all_but(part, names)
        left = [name for name in names if not any(fragment in engine_name(name) for fragment in skip)]
        assert left == [name for name in names if part_of(name) == part]


@pytest.mark.slow
def test_a_parameter_that_did_not_arrive_is_named_and_stops_the_run(folder, policy, publisher):
    lost = "model.language_model.layers.1.self_attn.k_norm.weight"
    with running_engine(folder) as (url, app):
        real = app.updates.loader.load

        def load(flat, entries):
            kept = app.updates.loader._parameters[lost].detach().clone()
            real(flat, entries)
            app.updates.loader._parameters[lost].data.copy_(kept)

        app.updates.loader.load = load
        told = fault_found(publisher, url, range(20), lambda: move(policy, 1e-6))
        assert re.search(f"{url}, version .*{engine_name(lost)}", told)


def test_an_engine_whose_checksums_lie_is_found_by_the_canary(folder, policy, publisher):
    with running_engine(folder) as (url, app):
        app.updates.loader.load = lambda flat, entries: None
        app.updates.loader.snapshot = lambda skip: list(gathered(policy))
        move(policy, 0.05)
        with pytest.raises(WrongWeights, match=f"{url}, version 8: the canary prompt's logprobs are"):
            publisher.publish(8, [url])


def test_the_learner_computes_its_own_answer_while_the_last_bucket_travels(folder, policy, publisher):
    computed, waited = threading.Event(), []
    real, canary = publisher.verifier.canary.expected_logprobs, publisher.verifier.canary
    canary.expected_logprobs = lambda: (real(), computed.set())[0]
    with running_engine(folder) as (url, app):
        load, last = app.updates.loader.load, list(gathered_buckets(policy, publisher.ranks, FAST.bucket_bytes))[-1]

        def late(flat, entries):
            if entries[0].name == last.names[0]:
                waited.append(computed.wait(3))
            load(flat, entries)

        app.updates.loader.load = late
        assert publisher.publish(3, [url])["publish/unproven"] == 0
    assert waited == [True]


def test_an_engine_that_says_another_version_stops_the_run(folder, publisher):
    with running_engine(folder) as (url, app):
        real = app.scheduler.weights_changed
        app.scheduler.weights_changed = lambda version, flush: real(None, flush)
        with pytest.raises(WrongWeights, match="says that its weights are version 0"):
            publisher.publish(8, [url])


@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_model_dir, qwen25])
def test_the_canary_follows_a_changed_vision_tower(make, tmp_path, ranks):
    folder = make(tmp_path)
    with running_engine(folder) as (url, _):
        check_no_stale_image(url, load_policy(str(folder), VisionSpec.load(folder)), str(folder), ranks)


@pytest.mark.slow
def test_a_stale_image_stops_the_run(folder, policy, ranks):
    with running_engine(folder) as (url, app):
        real, cache = app.scheduler.runner.encode, {}

        def encode(patches, grids):
            keys = [part.tobytes() for part in patches]
            new = [i for i, key in enumerate(keys) if key not in cache]
            for i, features in zip(new, real([patches[i] for i in new], [grids[i] for i in new]), strict=True):
                cache[keys[i]] = features
            return [cache[key] for key in keys]

        app.scheduler.runner.encode = encode
        app.updates.loader.snapshot = lambda skip: []
        with pytest.raises(WrongWeights, match="the canary prompt's logprobs are"):
            check_no_stale_image(url, policy, str(folder), ranks)


@pytest.mark.parametrize("answer", [says({"success": True}), says({}, 500)])
def test_an_engine_that_confirms_nothing_is_counted_and_not_stopped(publisher, answer, caplog):
    with JoiningEngine({"/generate": answer}) as url:
        assert publisher.publish(1, [url])["publish/unproven"] == 1
    assert any(url in record.getMessage() and "did not confirm" in record.getMessage() for record in caplog.records)


def test_a_server_without_checksums_is_checked_by_the_canary_alone(folder, policy, publisher):
    with running_engine(folder) as (url, app):
        app.updates.loader.snapshot = None  # an error 500
        metrics = publisher.publish(1, [url])
        assert metrics["publish/canary_gap"] < 1e-4
        assert metrics["publish/checksum_skipped"] > 0


def test_an_engine_of_another_dtype_holds_what_it_was_sent_rounded(folder, policy, ranks):
    verifier = WeightVerifier(policy, str(folder), ranks, PublishConfig(canary_tolerance=0.3))
    with running_engine(folder, dtype="bfloat16") as (url, _), publishing(policy, ranks, FAST, verifier) as publisher:
        metrics = publisher.publish(1, [url])
        assert 1e-4 < metrics["publish/canary_gap"] < 0.3
        assert metrics["publish/checksum_skipped"] == 0


@pytest.mark.slow
def test_only_every_so_many_publications_are_checked(folder, policy, ranks):
    verifier = WeightVerifier(policy, str(folder), ranks, PublishConfig(verify_every=3))
    with running_engine(folder) as (url, _), publishing(policy, ranks, FAST, verifier) as publisher:
        checked = ["publish/canary_gap" in publisher.publish(version, [url]) for version in range(5)]
        assert checked == [True, False, False, True, False]


def test_a_publication_does_not_wait_for_the_verification_and_the_next_one_does(folder, policy, publisher):
    """It is compared with the weights that were published, whatever training has made of them meanwhile."""
    with running_engine(folder) as (url, app):
        real, gate = app.scheduler.submit, threading.Event()
        app.scheduler.submit = lambda *request: (gate.wait(20), real(*request))[1]
        assert "publish/canary_gap" not in publisher.publish(1, [url], wait=False)
        move(policy, 0.05)
        gate.set()
        found = publisher.verification_metrics()
        assert found["publish/canary_gap"] < 1e-4
        assert (found["publish/checksum_skipped"], found["publish/unproven"]) == (0, 0)
        assert publisher.verification_metrics() == {}
        publisher.publish(2, [url], wait=False)
        assert publisher.publish(3, [url], wait=False)["publish/unproven"] == 0  # of version 2


def test_wrong_weights_that_are_found_later_stop_the_run(folder, policy, publisher):
    with running_engine(folder) as (url, app):
        app.updates.loader.load = lambda flat, entries: None
        for later in (publisher.verification_metrics, lambda: publisher.publish(9, [url])):
            move(policy, 0.05)
            publisher.publish(8, [url], wait=False)
            with pytest.raises(WrongWeights, match=f"engine {url}, version 8: holds other values"):
                later()


def test_a_silent_engine_holds_up_neither_the_step_nor_the_end_of_the_run(folder, policy, ranks):
    verifier = WeightVerifier(policy, str(folder), ranks, timeout_s=0.3)
    with JoiningEngine({"/generate": is_silent}) as url, publishing(policy, ranks, FAST, verifier) as publisher:
        publisher.publish(1, [url], wait=False)
        assert publisher.verification_metrics()["publish/unproven"] == 1
        verifier.timeout_s = 600.0
        publisher.publish(2, [url], wait=False)  # and is closed


def test_checksums_are_asked_of_those_engines_alone_whose_are_compared():
    embedded = ServerInfo(kind="embedded", checksums_as_sent=True)
    server, two_ranks = ServerInfo(kind="a server"), ServerInfo(kind="a server", num_ranks=2)
    for capabilities, compared in (
        ([embedded], [0]),
        ([server], []),
        ([server, embedded], [1]),
        ([server, server], [0, 1]),
        ([server, two_ranks], []),
        ([ServerInfo(), ServerInfo()], []),
    ):
        engines = [EngineClient(f"http://host:{port}") for port in range(1, 1 + len(capabilities))]
        members = dict(zip(engines, capabilities, strict=True))
        assert engines_with_comparable_checksums(members) == {engines[i] for i in compared}


def test_parameters_that_differ_or_are_not_told_are_named():
    sampled, norm = SampledWeights(), "model.language_model.layers.0.input_layernorm.weight"
    values = {f"model.language_model.layers.0.self_attn.{part}_proj.weight": torch.randn(4, 4) for part in "qkv"}
    for name, tensor in (values | {norm: torch.randn(4)}).items():
        sampled.record(name, tensor)
    joined, other = "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.input_layernorm.weight"
    assert sampled.engine_names == {joined, other}
    rounded = checksums((name, tensor.half().view(torch.uint8).numpy().data) for name, tensor in values.items())
    assert sampled.compare(rounded, torch.float32) == ([], {other})  # an engine may hold them in a dtype of its own
    assert sampled.compare({joined: "0" * 16, other: "0" * 16}, torch.float32) == ([other, joined], set())
    sampled.clear()
    assert sampled.compare({joined: "0" * 16}, torch.float32) == ([], set())
