"""Each publication is checked: an engine that holds or serves other weights than it was given stops the run."""

from __future__ import annotations

import threading

import pytest

from learner.model.policy import load_policy
from learner.weights.gathering import gathered_buckets
from learner.weights.verify import VerifierSettings, WeightVerifier, WrongWeights, hashes_compared
from shared.engine_api import EngineClient
from shared.engine_messages import EngineTraits
from shared.vision import VisionSpec
from shared.weights.checksums import all_but, engine_name, part_of
from shared.weights.layout import Layout
from tests.support.engines import JoiningEngine, is_silent, says
from tests.support.publishing import FAST, check_no_stale_image, move, policy, publishing
from tests.support.small.families import qwen25
from tests.support.tiny import running_engine, tiny_model_dir

__all__ = ["policy"]  # a fixture


@pytest.fixture
def publisher(policy, folder, ranks):
    with publishing(policy, ranks, FAST, WeightVerifier(policy, str(folder), ranks)) as publisher:
        yield publisher


@pytest.mark.slow
def test_every_parameter_of_an_honest_engine_is_covered_in_time(folder, policy, publisher):
    names = {name for name, _ in policy.named_weights()}
    seen, kept = [], publisher.verifier._kept
    real, kept.compare = kept.compare, lambda theirs, *how: seen.extend(theirs[0]) or real(theirs, *how)
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


def test_a_parameter_that_did_not_arrive_is_named_and_stops_the_run(folder, policy, publisher):
    lost = "model.language_model.layers.1.self_attn.k_norm.weight"
    with running_engine(folder) as (url, app):
        real = app.updates.loader.load

        def load(flat, entries):
            kept = app.updates.loader._parameters[lost].detach().clone()
            real(flat, entries)
            app.updates.loader._parameters[lost].data.copy_(kept)

        app.updates.loader.load = load
        with pytest.raises(WrongWeights, match=f"{url}, version .*{engine_name(lost)}"):
            for version in range(20):
                move(policy, 1e-6)
                publisher.publish(version, [url])


def test_an_engine_whose_checksums_lie_is_found_by_the_canary(folder, policy, publisher):
    with running_engine(folder) as (url, app):
        app.updates.loader.load = lambda flat, entries: None
        app.updates.loader.snapshot = lambda skip: list(publisher.verifier._kept._values.items())
        move(policy, 0.05)
        with pytest.raises(WrongWeights, match=f"{url}, version 8: the canary prompt's logprobs are"):
            publisher.publish(8, [url])


def test_the_learner_computes_its_own_answer_while_the_last_bucket_travels(folder, policy, publisher):
    computed, waited = threading.Event(), []
    real, canary = publisher.verifier.canary.expected, publisher.verifier.canary
    canary.expected = lambda: (real(), computed.set())[0]
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
    verifier = WeightVerifier(policy, str(folder), ranks, VerifierSettings(tolerance=0.3))
    with running_engine(folder, dtype="bfloat16") as (url, _), publishing(policy, ranks, FAST, verifier) as publisher:
        metrics = publisher.publish(1, [url])
        assert 1e-4 < metrics["publish/canary_gap"] < 0.3
        assert metrics["publish/checksum_skipped"] == 0


def test_only_every_so_many_publications_are_checked(folder, policy, ranks):
    verifier = WeightVerifier(policy, str(folder), ranks, VerifierSettings(every=3))
    with running_engine(folder) as (url, _), publishing(policy, ranks, FAST, verifier) as publisher:
        checked = ["publish/canary_gap" in publisher.publish(version, [url]) for version in range(5)]
        assert checked == [True, False, False, True, False]


def test_a_publication_does_not_wait_for_the_proof_and_the_next_one_does(folder, policy, publisher):
    """It is compared with the weights that were published, whatever training has made of them meanwhile."""
    with running_engine(folder) as (url, app):
        real, gate = app.scheduler.submit, threading.Event()
        app.scheduler.submit = lambda *request: (gate.wait(20), real(*request))[1]
        assert "publish/canary_gap" not in publisher.publish(1, [url], wait=False)
        move(policy, 0.05)
        gate.set()
        found = publisher.proven()
        assert found["publish/canary_gap"] < 1e-4
        assert (found["publish/checksum_skipped"], found["publish/unproven"]) == (0, 0)
        assert publisher.proven() == {}
        publisher.publish(2, [url], wait=False)
        assert publisher.publish(3, [url], wait=False)["publish/unproven"] == 0  # of version 2


def test_wrong_weights_that_are_found_later_stop_the_run(folder, policy, publisher):
    with running_engine(folder) as (url, app):
        app.updates.loader.load = lambda flat, entries: None
        for later in (publisher.proven, lambda: publisher.publish(9, [url])):
            move(policy, 0.05)
            publisher.publish(8, [url], wait=False)
            with pytest.raises(WrongWeights, match=f"engine {url}, version 8: holds other values"):
                later()


def test_a_silent_engine_holds_up_neither_the_step_nor_the_end_of_the_run(folder, policy, ranks):
    verifier = WeightVerifier(policy, str(folder), ranks, VerifierSettings(timeout_s=0.3))
    with JoiningEngine({"/generate": is_silent}) as url, publishing(policy, ranks, FAST, verifier) as publisher:
        publisher.publish(1, [url], wait=False)
        assert publisher.proven()["publish/unproven"] == 1
        verifier.settings = VerifierSettings(timeout_s=600.0)
        publisher.publish(2, [url], wait=False)  # and is closed


def test_checksums_are_asked_of_those_engines_alone_whose_are_compared():
    known, packed = Layout("embedded", "sha256"), Layout("packed", "sha256", unknown="it may pack them")
    for layouts, compared in (
        ([known], [0]),
        ([packed], []),
        ([packed, known], [1]),
        ([packed, packed], [0, 1]),
        ([Layout(), Layout()], []),
    ):
        engines = [EngineClient(f"http://host:{port}") for port in range(1, 1 + len(layouts))]
        members = {engine: EngineTraits(layout=layout) for engine, layout in zip(engines, layouts, strict=True)}
        assert hashes_compared(members) == {engines[i] for i in compared}
