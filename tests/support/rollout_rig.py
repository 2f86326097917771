"""An engine with scripted answers, an environment that counts, and episodes played with both."""

import asyncio

import pytest

from actor.engine_pool import EnginePool
from actor.env_threads import EnvThreads
from actor.episode import EpisodeLimits
from actor.render import Renderer
from actor.rewards import EnvReward
from actor.rollout import Player
from shared.engine.engine_api import EngineClient
from shared.types import Completion, Ending, Sample, Sampling, Ticket, VersionSpan
from shared.vision import VisionSpec
from shared.wire.codec import TokenRules, check_trajectory
from tests.support.tiny import draw_image, tiny_tokenizer

SYSTEM = {"role": "system", "content": "Play."}


@pytest.fixture(scope="module")
def renderer(folder):
    return Renderer(tiny_tokenizer(), VisionSpec.load(folder))


@pytest.fixture
def threads():
    pool = EnvThreads(2)
    yield pool
    pool.close()


class Scripted(EngineClient):
    """An engine with scripted answers: each is a text, a Completion, or an exception."""

    def __init__(self, answers):
        super().__init__("http://scripted:1")
        self.answers, self.requests = list(answers), []

    async def generate(self, token_ids, images, sampling, **settings):
        self.requests.append((list(token_ids), list(images), settings))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, str):
            answer = completion(answer, version=len(self.requests))
        return answer


class Brief(EngineClient):
    """A client of a real engine with short turns even for a random model: every fourth token id ends a turn. It keeps
    requests and answers."""

    def __init__(self, url):
        super().__init__(url)
        self.requests, self.answers = [], []

    async def generate(self, token_ids, images, sampling, **settings):
        self.requests.append((list(token_ids), list(images)))
        settings["stop_ids"] = range(0, 640, 4)
        self.answers.append(await super().generate(token_ids, images, sampling, **settings))
        return self.answers[-1]


def completion(text, version=1, reason="stop"):
    ids = tiny_tokenizer().encode(text, add_special_tokens=False)
    if reason == "stop":
        ids.append(tiny_tokenizer().convert_tokens_to_ids("<|im_end|>"))
    return Completion(tuple(ids), (-0.5,) * len(ids), (VersionSpan(version, 0, len(ids)),), reason)


class Counting:
    """An environment that shows an image; an answer's reward is its length, and the answer "end" ends the episode."""

    def __init__(self, sample=None):
        self.heard, self.closed = [], False

    def reset(self):
        return self.look("begin"), {}

    def look(self, text):
        return {"obs_str": text, "multi_modal_data": {"image": [draw_image(64, 64, len(self.heard))]}}

    def step(self, text):
        self.heard.append(text)
        metrics = {"turn_metrics": {"short": len(text) < 3}, "traj_metrics": {"turns_heard": len(self.heard)}}
        return self.look("go on"), text == "end", {"reward": float(len(text)), "metrics": metrics}

    def format_observation(self, observation):
        images = [{"type": "image", "image": i} for i in observation["multi_modal_data"]["image"]]
        return {"role": "user", "content": [*images, {"type": "text", "text": observation["obs_str"]}]}

    def close(self):
        self.closed = True


def ticket(**changes):
    fields = {"id": "t", "sample": Sample("s", (SYSTEM,)), "group_size": 1, "version": 0, "lease_s": 60.0}
    return Ticket(**(fields | {"sampling": Sampling(max_new_tokens=64)} | changes))


def play(renderer, threads, answers, env=Counting, limits=None, episode_reward=None, **changes):
    engine = Scripted(answers)
    limits = limits or EpisodeLimits()
    reward_function = EnvReward(episode_reward, threads, limits.env_timeout_s) if episode_reward else None
    player = Player(env, renderer, EnginePool([engine]), limits, threads, reward_function)
    trajectory = asyncio.run(player.play(ticket(**changes)))
    check(renderer, trajectory)
    return trajectory, engine


def play_briefly(url, renderer, threads, max_turns=3):
    """Play an episode of short turns on the engine at `url`; return it and the client that played it."""

    async def main():
        async with Brief(url) as client:
            player = Player(Counting, renderer, EnginePool([client]), EpisodeLimits(max_turns=max_turns), threads)
            return await player.play(ticket(seed=1)), client

    trajectory, client = asyncio.run(main())
    check(renderer, trajectory)
    assert trajectory.ending is Ending.MAX_TURNS, trajectory.error
    return trajectory, client


def check(renderer, trajectory):
    check_trajectory(trajectory, TokenRules(renderer.image_id, renderer.banned_ids, 640))
