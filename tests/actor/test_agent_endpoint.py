"""Agents that play through an endpoint with OpenAI's API: their streams are those of the policy, token for token."""

from __future__ import annotations

import asyncio
import time
from random import Random

import pytest

from actor.engine_pool import EnginePool
from actor.episode import EpisodeLimits
from actor.rollout import Player
from envs import sokoban
from envs.env_calls import messages_of
from shared.engine.engine_api import EngineError
from shared.types import Completion, Ending, Sample
from tests.support.agent_rig import ROOMY, as_openai, ask, image_part, play_agent, post, text
from tests.support.rollout_rig import SYSTEM, Brief, Scripted, check, completion, renderer, threads, ticket
from tests.support.tiny import draw_image, running_engine

__all__ = ["renderer", "threads"]  # fixtures


def sampled(trajectory):
    """The tokens of each turn."""
    return [trajectory.token_ids[turn.start : turn.end].tolist() for turn in trajectory.turns]


# ---------------------------------------------------------------------- the tokens


def sokoban_agent(base_url, sample, args):
    """Play Sokoban by screenshots, as `envs.sokoban` does; return what that rewards."""
    env = sokoban.build_env(sample, BOARD)
    observation, _ = env.reset()
    messages = [*sample.prompt, *map(as_openai, messages_of(env, observation))]
    while True:
        answer = ask(base_url, messages)
        observation, done, _ = env.step(answer["content"])
        if done:
            return sokoban.episode_reward(env)
        messages += [
            {"role": "assistant", "content": answer["content"]},
            *map(as_openai, messages_of(env, observation)),
        ]


BOARD = {"pixels_per_cell": 16, "max_actions_per_step": 1, "min_solution": 4}


def sokoban_ticket(seed):
    prompt = ({"role": "system", "content": sokoban.system_prompt(BOARD)},)
    return {"sample": Sample("s", prompt, metadata={"seed": seed}), "seed": 7}


def solution(seed):
    """Answers of the solver's, each with a thought."""
    env = sokoban.build_env(sokoban_ticket(seed)["sample"], BOARD)
    answers, done = [], False
    while not done:
        answers.append(f"<think>step {len(answers)}</think>{env.best_response()}")
        _, done, _ = env.step(answers[-1])
    return answers


@pytest.mark.parametrize("seed", [3, 4])
def test_an_agent_that_plays_by_screenshots_has_the_tokens_of_the_environments_own_episode(renderer, threads, seed):
    answers, changes = solution(seed), sokoban_ticket(seed)
    own_engine = Scripted(answers)
    player = Player(lambda sample: sokoban.build_env(sample, BOARD), renderer, EnginePool([own_engine]), ROOMY, threads)
    own = asyncio.run(player.play(ticket(**changes)))
    trajectory, engine = play_agent(renderer, threads, sokoban_agent, answers, **changes)
    assert own.ending is trajectory.ending is Ending.COMPLETED and len(own.turns) == len(answers) >= 4
    assert trajectory.token_ids.tobytes() == own.token_ids.tobytes()
    assert trajectory.loss_mask.tobytes() == own.loss_mask.tobytes()
    assert trajectory.behaviour_logprobs.tobytes() == own.behaviour_logprobs.tobytes()
    assert trajectory.images == own.images and trajectory.segments == own.segments == ()
    assert engine.requests == own_engine.requests  # with the same seeds and bans, too
    assert [(turn.start, turn.end) for turn in trajectory.turns] == [(turn.start, turn.end) for turn in own.turns]
    assert trajectory.reward == trajectory.turns[-1].reward > 5


@pytest.mark.slow
def test_on_a_real_engine_too(renderer, threads, folder):
    with running_engine(folder, max_context=4096) as (url, _):

        async def main():
            async with Brief(url) as client:
                limits = EpisodeLimits(max_turns=4, max_context=4096)
                player = Player(lambda s: sokoban.build_env(s, BOARD), renderer, EnginePool([client]), limits, threads)
                return await player.play(ticket(**sokoban_ticket(3)))

        own = asyncio.run(main())
        limits = EpisodeLimits(max_turns=4, max_context=4096)
        trajectory, _ = play_agent(renderer, threads, sokoban_agent, Brief(url), limits, **sokoban_ticket(3))
    assert own.ending is trajectory.ending is Ending.MAX_TURNS and len(own.turns) == 4
    assert trajectory.token_ids.tobytes() == own.token_ids.tobytes()
    assert trajectory.policy_versions.tobytes() == own.policy_versions.tobytes()
    assert trajectory.images == own.images
    assert trajectory.reward == 0.0 and trajectory.trainable
