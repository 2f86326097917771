"""Agents through SGLang's server: what a client of OpenAI's API played is what the learner computes."""

from __future__ import annotations

import asyncio

from transformers import AutoTokenizer

from actor.engine_pool import EnginePool
from actor.render import Renderer
from actor.worker import make_players
from envs import sokoban
from envs.env_calls import messages_of
from shared.config.recipe import load_recipe
from shared.engine.engine_api import EngineClient
from tests.support.agent_rig import as_openai, ask
from tests.support.episodes import gap
from tests.support.sglang_rig import RECIPE, TOLERANCE, play, tickets, versions, vision_of


def by_screenshots(base_url, sample, args):
    """Play Sokoban as a client that sends the whole conversation each time."""
    env = sokoban.build_env(sample, args)
    observation, _ = env.reset()
    messages = [*sample.prompt, *map(as_openai, messages_of(env, observation))]
    for turn in range(args["max_turns"]):
        said = ask(base_url, messages)["content"]
        observation, done, _ = env.step(said)
        if done or turn + 1 == args["max_turns"]:
            return sokoban.episode_reward(env)
        messages += [{"role": "assistant", "content": said}, *map(as_openai, messages_of(env, observation))]


def played_by_agents(recipe, url, count, version):
    fields = {"run.dir": str(recipe.run.dir), "rollout.agent": f"{__file__}:by_screenshots"}
    own = load_recipe(RECIPE, [part for key, value in fields.items() for part in (f"--{key}", value)])

    async def use():
        pool = EnginePool([EngineClient(url, timeout_s=120.0)])
        renderer = Renderer(AutoTokenizer.from_pretrained(recipe.model.path), vision_of(recipe))
        players, _ = make_players(own, renderer, pool)
        try:
            return await asyncio.gather(*map(players.play, tickets(recipe, count, version)))
        finally:
            await players.close(10.0)
            await pool.close()

    return asyncio.run(use())


def test_an_agents_episodes_agree_with_the_learners_forward_and_with_the_environments_own(
    servers, recipe, policy, publisher
):
    url = servers.urls[0]
    assert publisher.publish(8, [url])["publish/engines"] == 1
    by_agent, by_env = played_by_agents(recipe, url, 8, 8), play(recipe, [url], 8, 8)
    vision = vision_of(recipe)
    for episode, own in zip(by_agent, by_env, strict=True):
        assert episode.trainable, episode.error
        assert versions(episode) == {8} and not episode.segments
        assert episode.token_ids.tolist().count(vision.image_token_id) == len(episode.images) >= 1
        assert gap(policy, episode) < TOLERANCE
        first, first_own = episode.turns[0], own.turns[0]
        assert (episode.token_ids[: first.start] == own.token_ids[: first_own.start]).all()
    assert max(len(episode.turns) for episode in by_agent) >= 4
