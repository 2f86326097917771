"""Episodes through SGLang's server: what comes back is what the learner computes from the same tokens and images."""

from __future__ import annotations

import asyncio

import pytest

from launch.engines.probe import ModelFacts
from shared.types import Image, Sampling
from tests.support.engines import ask
from tests.support.episodes import gap
from tests.support.sglang_rig import ENDS, TOLERANCE, move, play, surprise, versions, vision_of
from tests.support.tiny import draw_image, png


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_episodes_with_images_agree_with_the_learners_forward(servers, recipe, policy, publisher, temperature):
    url = servers.urls[0]
    assert publisher.publish(1, [url])["publish/engines"] == 1
    episodes = play(recipe, [url], 8, 1, temperature)
    vision = vision_of(recipe)
    assert all(episode.trainable for episode in episodes), [episode.error for episode in episodes]
    assert max(len(episode.turns) for episode in episodes) >= 4
    for episode in episodes:
        ids = episode.token_ids.tolist()
        assert ids.count(vision.image_token_id) == len(episode.images) >= 1
        sampled = episode.token_ids[episode.loss_mask == 1]
        assert not set(sampled.tolist()) & set(vision.banned_ids)
        assert versions(episode) == {1}
        assert gap(policy, episode, temperature) < TOLERANCE


def test_tokens_are_sampled_as_often_as_their_logprobs_say(servers, recipe, policy, publisher):
    publisher.publish(4, servers.urls)
    episodes = [episode for _ in range(2) for episode in play(recipe, servers.urls, 32, 4)]
    assert abs(surprise(policy, episodes)) < 4
    narrow = [episode for _ in range(2) for episode in play(recipe, servers.urls, 32, 4, 1.0, 0.1)]
    assert surprise(policy, narrow) < -5  # and it would show


def test_an_episode_does_not_begin_on_what_older_weights_made_of_its_start(servers, recipe, policy, publisher):
    url = servers.urls[0]
    for version in (5, 6):
        publisher.publish(version, [url])
        episodes = play(recipe, [url], 2, version)
        assert all(gap(policy, episode) < TOLERANCE for episode in episodes)
        move(policy, version)


def test_two_engines_share_the_episodes_and_each_stays_with_one(servers, recipe, policy, publisher):
    assert publisher.publish(2, servers.urls[:1])["publish/engines"] == 1
    assert publisher.publish(3, servers.urls[1:])["publish/engines"] == 1
    episodes = play(recipe, servers.urls, 8, 3)
    played_by = [versions(episode) for episode in episodes]
    assert sorted(played_by, key=min) == [{2}] * 4 + [{3}] * 4
    assert all(gap(policy, episode) < TOLERANCE for episode in episodes)


def placeholder_and_text(recipe):
    return [*ModelFacts.load(recipe.model.path, vision_of(recipe)).image_ids, 30, 31]


def test_stop_length_and_abort_are_told_apart(servers, recipe, publisher):
    publisher.publish(4, servers.urls[:1])
    image = Image.of(png(draw_image(64, 64)))
    model = ModelFacts.load(recipe.model.path, vision_of(recipe))
    ids = [*model.image_ids, 30, 31]

    async def use(client):
        short = await client.generate(ids, [image], Sampling(max_new_tokens=3), banned_ids=ENDS)
        stopped = await client.generate(ids, [image], Sampling(max_new_tokens=200), stop_ids=range(model.vocab_size))
        long = asyncio.create_task(client.generate(ids, [image], Sampling(max_new_tokens=4000), banned_ids=ENDS))
        await asyncio.sleep(2.0)
        await client.post("/abort_request", {"abort_all": True})
        return short, stopped, await long

    short, stopped, aborted = ask(servers.urls[0], use, timeout_s=120)
    assert short.finish_reason == "length" and len(short.token_ids) == 3
    assert stopped.finish_reason == "stop" and len(stopped.token_ids) == 1
    assert aborted.finish_reason == "abort"
    assert len(aborted.logprobs) == len(aborted.token_ids) < 4000


def test_an_image_is_bounded_as_the_recipe_says(servers, recipe):
    """The engine's grid of an image is the learner's: the prompt has as many tokens."""
    vision = vision_of(recipe)
    sizes = [(20, 20), (64, 96), (333, 190)]

    ids = placeholder_and_text(recipe)

    async def use(client):
        return [await client.warm_up(ids, [Image.of(png(draw_image(*size)))], 60) for size in sizes]

    counted = [num_tokens for num_tokens, _ in ask(servers.urls[0], use)]
    assert counted == [4 + vision.num_tokens(vision.grid(*size)) for size in sizes]
