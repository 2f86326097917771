"""Adapters sent alone: engines merge them to the bytes of a merged publication, and the proof covers what they make."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from actor.engine.merged_adapter import Adapter, AdapterLoader
from actor.engine.weight_loader import WeightLoader, parse_entries
from learner.plan.duration import Speed, publication_time
from learner.plan.memory_use import Setting
from learner.weights.gathering import gathered
from learner.weights.verify import WeightVerifier, WrongWeights
from shared.engine.checksums import engine_name, part_of
from shared.engine.engine_api import EngineClient
from shared.engine.engine_messages import UNTRAINED
from shared.families.registry import PUBLISHED, sizes_of
from tests.support.engines import call
from tests.support.publishing import FAST, assert_same, fault_found, held, holds, publishing, served
from tests.support.small.adapted import adapted_policy, move_adapters, sent_alone
from tests.support.tiny import load_model, mixture_dir, running_engine, tiny_model_dir

TARGETS = ("attention", "dense", "vision")
ADAPTED = "model.language_model.layers.1.self_attn.q_proj.weight"
FROZEN = "model.language_model.layers.1.self_attn.k_norm.weight"


@pytest.fixture
def policy(folder):
    return adapted_policy(folder, publish="adapter", targets=TARGETS, rank=3)


@pytest.fixture
def publisher(policy, folder, ranks):
    with publishing(policy, ranks, FAST, WeightVerifier(policy, str(folder), ranks)) as publisher:
        yield publisher


def adapter_bytes(policy):
    return 8 + sum(4 * factor.numel() for each in policy.adapters.of.values() for factor in each.factors)


def parts_of(policy):
    return {part_of(name) for name, _ in policy.named_weights()}


# ---------------------------------------------------------------------- what is sent, and what engines make of it


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True])
def test_adapters_alone_are_sent_and_engines_hold_the_learners_sums_byte_for_byte(tmp_path, ranks, experts):
    folder = tiny_model_dir(tmp_path)
    folder = mixture_dir(folder) if experts else folder
    policy = adapted_policy(folder, publish="adapter", targets=("attention", "experts") if experts else TARGETS)
    adapted = sum(4 * p.numel() for name, p in policy.named_weights() if name in policy.adapters.of)
    small = replace(FAST, bucket_bytes=10_000)  # so that factors of one weight come apart
    with (
        publishing(policy, ranks, small, WeightVerifier(policy, str(folder), ranks)) as publisher,
        running_engine(folder) as (url, app),
    ):
        for version in range(len(parts_of(policy))):
            move_adapters(policy, 0.02)
            metrics = publisher.publish(version, [url])
            assert metrics["publish/bytes"] == adapter_bytes(policy) < adapted / 3
            assert metrics["publish/canary_gap"] < 1e-5
            assert (metrics["publish/checksum_skipped"], metrics["publish/unproven"]) == (0, 0)
            assert_same(app, policy)
            assert experts or holds(url, policy, version)  # which knows no turned stacks


def test_the_plan_counts_the_bytes_of_a_publication(policy):
    sizes = sizes_of(policy.vlm.config.to_dict())
    setting = Setting(dtype_bytes=4, lora_rank=3, lora_targets=TARGETS, lora_publish="adapter")
    assert publication_time(sizes, setting, Speed()).sent == adapter_bytes(policy) - 8  # all but the scale
    large = PUBLISHED["Qwen3-VL-8B"]
    alone = Setting(lora_rank=16, lora_publish="adapter")
    merged = replace(alone, lora_publish="merged")
    assert 100 * publication_time(large, alone, Speed()).sent < publication_time(large, merged, Speed()).sent


@pytest.mark.slow
def test_an_engine_that_joins_late_or_anew_gets_the_whole_adapter(folder, policy, publisher):
    with running_engine(folder) as (first, first_app):
        move_adapters(policy, 0.05)
        publisher.publish(1, [first])
        move_adapters(policy, 0.05)
        with running_engine(folder) as (late, late_app):
            assert served(publisher.publish(2, [first, late])) == (2, 0)
            assert_same(first_app, policy)
            assert_same(late_app, policy)


@pytest.mark.slow
def test_merged_weights_and_adapters_may_follow_each_other_only_where_the_engine_has_the_base(folder, policy, ranks):
    """Of weights that it was sent merged at first the engine has no base to merge adapters into."""
    with (
        publishing(policy, ranks) as publisher,
        running_engine(folder) as (kept, app),
        running_engine(folder) as (
            lost,
            _,
        ),
    ):
        for version, alone, urls in ((1, True, [kept]), (2, False, [kept, lost]), (3, True, [kept, lost])):
            policy.adapters.alone = alone
            move_adapters(policy, 0.05)
            assert served(publisher.publish(version, urls)) == (1 if version != 2 else 2, 1 if version == 3 else 0)
            assert_same(app, policy)
            assert holds(kept, policy, version)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "said"), [("keep_base", "1"), ("install", UNTRAINED)])
def test_an_engine_short_of_memory_names_no_version_that_it_does_not_hold(
    folder, policy, publisher, monkeypatch, what, said
):
    with running_engine(folder) as (url, app), running_engine(folder) as (other, _):
        publisher.publish(1, [url, other])
        before = {name: tensor.clone() for name, tensor in held(app).items()}
        install = app.updates.adapters.install

        def short(adapter: Adapter) -> None:
            if what == "install":
                install(replace(adapter, factors=dict([*adapter.factors.items()][:1])))
            raise torch.OutOfMemoryError("short")

        with monkeypatch.context() as patched:
            patched.setattr(app.updates.adapters, what, short)
            move_adapters(policy, 0.05)
            assert served(publisher.publish(2, [url, other])) == (1, 1)
        assert call(url, "/model_info")["weight_version"] == said
        assert all(torch.equal(tensor, before[name]) for name, tensor in held(app).items()) == (what == "keep_base")
        assert served(publisher.publish(3, [url, other])) == (2, 0)
        assert_same(app, policy)


# ---------------------------------------------------------------------- engines that serve something else


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["the base", "an older adapter"])
def test_an_engine_that_goes_on_serving_something_else_stops_the_run(folder, policy, publisher, kept):
    """It takes what it is sent, says that it is the new version, and answers as before."""
    with running_engine(folder) as (url, app):
        if kept == "an older adapter":
            move_adapters(policy, 0.02)
        publisher.publish(0, [url])
        app.updates.adapters.install = lambda adapter: None
        wrong = f"engine {url}, version .*: holds other values of .*_proj.* than the adapter that it was sent makes"
        told = fault_found(publisher, url, range(1, len(parts_of(policy)) + 1), lambda: move_adapters(policy, 1e-6))
        assert re.search(wrong, told)
        assert "\n" not in told


@pytest.mark.slow
def test_an_engine_that_serves_the_base_under_honest_checksums_is_found_by_the_canary(folder, policy, publisher):
    with running_engine(folder) as (url, app):
        app.updates.adapters.install = lambda adapter: None
        app.updates.loader.snapshot = lambda skip: list(gathered(policy))
        move_adapters(policy, 0.05)
        with pytest.raises(WrongWeights, match=f"{url}, version 8: the canary prompt's logprobs are"):
            publisher.publish(8, [url])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"), [(ADAPTED, "the adapter that it was sent"), (FROZEN, "model.path has, which")]
)
def test_an_engine_with_another_base_stops_the_run_and_its_parameter_is_named(folder, policy, publisher, name, words):
    with running_engine(folder) as (url, app):
        with torch.no_grad():
            app.updates.loader.own(name).add_(1e-5)
        told = fault_found(publisher, url, range(len(parts_of(policy))))
        assert re.search(f"engine {url}, version .*{re.escape(engine_name(name))} than {words}", told)


@pytest.mark.slow
def test_engines_that_take_no_adapters_are_left_out_and_refused_where_there_were_never_others(
    folder, policy, publisher, monkeypatch
):
    with running_engine(folder) as (good, _), running_engine(folder) as (bad, app):
        real = EngineClient.server_info

        async def server_info(client, *limits):
            found = await real(client, *limits)
            return replace(found, takes_adapters=False) if client.url == bad else found

        monkeypatch.setattr(EngineClient, "server_info", server_info)
        with pytest.raises(ValueError, match=f"^engine {bad}: takes no adapters alone; set [^\n]*$"):
            publisher.publish(1, [bad])
        assert served(publisher.publish(2, ["http://127.0.0.1:9", bad])) == (0, 2)  # one is silent, and may come back
        assert served(publisher.publish(3, [good, bad])) == (1, 1)
        assert served(publisher.publish(4, [bad])) == (0, 1)  # the other one is away
        assert app.scheduler.weight_version == "0"


# ---------------------------------------------------------------------- what an engine does not take


@pytest.fixture(scope="module")
def sent(folder):
    """What it takes, and an adapter: (names, dtypes, shapes), bytes."""
    named = sent_alone(adapted_policy(folder, publish="adapter", targets=("dense",)))
    entries = [(name, str(tensor.dtype).removeprefix("torch."), tensor.shape) for name, tensor in named]
    flat = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in named])
    return AdapterLoader(WeightLoader(load_model(folder))), entries, flat


def taken(loader, entries, flat):
    parsed = parse_entries(*map(list, zip(*entries, strict=True)))
    loader.check(parsed)
    return loader.collected([(flat[: sum(entry.nbytes for entry in parsed)], parsed)])


def changed(entries, place, *, name=None, shape=None):
    own_name, dtype, own_shape = entries[place]
    return [*entries[:place], (name or own_name, dtype, shape or own_shape), *entries[place + 1 :]]


def test_half_an_adapter_and_what_is_of_another_model_or_rank_are_refused(sent):
    loader, entries, flat = sent
    assert taken(loader, entries, flat).scale == 8.0
    stem = "base_model.model.model.language_model.layers.0.mlp"
    cases = [
        (entries[:-1], f"lacks {re.escape(entries[-1][0])}"),
        (changed(entries, 0, name=f"{stem}.lora_A.weight", shape=(1, 2)), "has no weight for"),
        (changed(entries, 1, shape=(64, 4)), r"has the shape \[64, 4\], not \[64, 64\]"),
        (changed(entries, 1, shape=(2, 64)), "have the ranks 2 and 4"),
        (changed(entries, 2, shape=(1, 4, 64)), "has the shape"),
        ([*entries, (FROZEN, "float32", (1,))], "no weight for"),
    ]
    for wrong, reason in cases:
        with pytest.raises(ValueError, match=reason):
            taken(loader, wrong, flat)


def test_an_update_with_an_adapter_and_weights_is_discarded(sent):
    loader, entries, flat = sent
    weights = parse_entries([FROZEN], ["float32"], [[16]])
    parsed = parse_entries(*map(list, zip(*entries, strict=True)))
    with pytest.raises(ValueError, match="holds an adapter and weights"):
        loader.collected([(flat, parsed), (torch.zeros(64, dtype=torch.uint8), weights)])
    assert loader.collected([(torch.zeros(64, dtype=torch.uint8), weights)]) is None
