"""A server of two tensor-parallel ranks: it samples from the weights that it is given, and its ranks tell checksums."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.engines.network import free_port
from learner.model.policy import load_policy
from learner.weights.verify import WeightVerifier
from shared.engine.engine_api import EngineClient
from tests.support.engines import ask, call
from tests.support.episodes import gap
from tests.support.publishing import publish_settings, publishing
from tests.support.sglang_rig import START_S, TOLERANCE, Servers, move, play, recipe_of, versions, vision_of
from tests.support.small.adapted import adapted_policy, move_adapters

SETTINGS = publish_settings(timeout_s=60.0, call_timeout_s=60.0, health_timeout_s=30.0)


@pytest.fixture(scope="module", params=[True], ids=["paused"])
def two_ranks(request, tmp_path_factory):
    fields = {"engine.tensor_parallel": 2, "engine.port": free_port(), "engine.start_timeout_s": START_S}
    running = Servers.start(recipe_of(tmp_path_factory.mktemp("two_ranks"), **fields), paused=request.param)
    yield running
    running.stop()


def test_two_ranks_play_with_what_they_are_given(two_ranks, ranks):
    recipe, (url,) = two_ranks.recipe, two_ranks.urls
    assert call(url, "/server_info")["tp_size"] == 2
    policy = load_policy(recipe.model.path, vision_of(recipe))
    verifier = WeightVerifier(policy, recipe.model.path, ranks)
    with publishing(policy, ranks, SETTINGS, verifier) as publisher:
        for version in range(1, 4):
            move(policy, version)
            found = publisher.publish(version, [url])
            assert found["publish/engines"] == 1
            assert found["publish/unproven"] == 0
            assert found["publish/canary_gap"] < TOLERANCE
        episodes = play(recipe, [url], 8, version)
    assert [versions(episode) for episode in episodes] == [{version}] * 8
    assert max(gap(policy, episode) for episode in episodes) < TOLERANCE


def test_each_rank_tells_checksums_of_its_own_share(two_ranks):
    first, second = ask(two_ranks.urls[0], lambda client: client.checksums((), 60.0))
    assert first.keys() == second.keys()
    same = {name for name in first if first[name] == second[name]}
    assert any(name.endswith("norm.weight") for name in same)
    assert not any(name.endswith(("qkv_proj.weight", "o_proj.weight", "embed_tokens.weight")) for name in same)


@pytest.mark.parametrize("two_ranks", [False], ids=["beside generation"], indirect=True)
def test_two_ranks_merge_adapters_that_come_alone(two_ranks, ranks):
    recipe, (url,) = two_ranks.recipe, two_ranks.urls
    targets = ("attention", "dense", "vision")
    policy = adapted_policy(recipe.model.path, spec=vision_of(recipe), publish="adapter", targets=targets)
    settings = replace(SETTINGS, bucket_bytes=50_000)
    verifier = WeightVerifier(policy, recipe.model.path, ranks)
    with publishing(policy, ranks, settings, verifier) as publisher:
        for version in range(1, 4):
            move_adapters(policy, 0.02)
            found = publisher.publish(version, [url])
            assert (found["publish/engines"], found["publish/unproven"]) == (1, 0)
            assert found["publish/canary_gap"] < TOLERANCE


@pytest.mark.parametrize("two_ranks", [False], ids=["beside generation"], indirect=True)
def test_two_ranks_forget_a_whole_update_that_is_discarded_and_take_the_next(two_ranks, ranks, monkeypatch):
    recipe, (url,) = two_ranks.recipe, two_ranks.urls
    policy, end = load_policy(recipe.model.path, vision_of(recipe)), EngineClient.end_update

    async def discard(engine, _name, *rest):
        await end(engine, None, *rest)

    def held():
        return ask(url, lambda client: client.weight_version()), ask(url, lambda client: client.checksums((), 60.0))

    with publishing(policy, ranks, SETTINGS) as publisher:
        assert publisher.publish(50, [url])["publish/engines"] == 1
        before = held()
        move(policy, 1)
        with monkeypatch.context() as patch:
            patch.setattr(EngineClient, "end_update", discard)
            assert publisher.publish(51, [url])["publish/engines"] == 1  # all has arrived
        assert held() == before
        assert publisher.publish(52, [url])["publish/engines"] == 1
    version, sums = held()
    assert version != before[0] and sums != before[1]
