"""Helpers for tests with SGLang's real server: engines of the small Sokoban model, a player, a publisher."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from actor.engine_pool import EnginePool
from actor.render import Renderer
from actor.rollout import Player
from actor.worker import make_player
from launch.actors import check
from launch.engines.engine_supervisor import EngineServer, wait_until_serving
from launch.processes.children import stop_all
from launch.task_samples import held_out_samples
from learner.distributed import Ranks
from learner.model.policy import Policy, load_policy
from shared.config.recipe import Recipe, load_recipe
from shared.engine.engine_api import EngineClient
from shared.types import Sampling, Ticket, Trajectory
from shared.vision import VisionSpec
from tests.support.engines import surprise_z
from tests.support.episodes import packed
from tests.support.publishing import publish_settings, publishing

START_S = 600  # for several servers at once on a busy machine
TOLERANCE = 1e-4  # tolerance of a logprob
RECIPE = "launch/recipes/sokoban_tiny.toml"
MODEL = "launch/models/sokoban_tiny"
ENDS = tuple(AutoTokenizer.from_pretrained(MODEL).get_vocab()[word] for word in ("<|im_end|>", "<|im_start|>"))
"""Tokens that end a turn of the small model: a request that bans them runs to its limit."""


def recipe_of(tmp: Path, **fields: object) -> Recipe:
    own = {"run.dir": tmp, "engine.kind": "sglang", "eval.samples": 32, **fields}
    return load_recipe(RECIPE, [part for key, value in own.items() for part in (f"--{key}", str(value))])


@dataclass(slots=True)
class Servers:
    """Engines, started as by launch/actors.py. By default the first one does not stage weights, so that it is paused
    for updates; the others stage them."""

    recipe: Recipe
    engines: list[EngineServer]

    @staticmethod
    def start(recipe: Recipe, *, paused: bool = True) -> Servers:
        model, specs = check(recipe)
        if paused:
            specs = (replace(specs[0], env=specs[0].env | {"PRONK_STAGE_WEIGHTS": "0"}), *specs[1:])
        servers = Servers(recipe, [EngineServer(spec, recipe.engine) for spec in specs])
        try:
            for engine in servers.engines:
                engine.start()
            wait_until_serving(servers.urls, servers.engines, model, recipe.engine.start_limit_s)
        except BaseException:
            servers.stop()
            raise
        return servers

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(engine.spec.url for engine in self.engines)

    def stop(self) -> None:
        stop_all([engine.child for engine in self.engines if engine.child])

    def pid(self, index: int) -> int:
        child = self.engines[index].child
        assert child is not None
        return child.process.pid

    def keep_until(self, done: Callable[[], bool], timeout_s: float = 240.0) -> None:
        """Supervise the engines, as launch/actors.py does, until `done()`."""
        deadline = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < deadline, "the engine did not come back"
            for engine in self.engines:
                engine.keep_alive()
            time.sleep(0.2)


def versions(episode: Trajectory) -> set[int]:
    """Return the versions of the weights that sampled the episode's tokens."""
    return set(episode.policy_versions[episode.loss_mask == 1].tolist())


def vision_of(recipe: Recipe) -> VisionSpec:
    model = recipe.model
    return VisionSpec.load(model.path, min_pixels=model.min_pixels, max_pixels=model.max_pixels)


async def with_player(recipe: Recipe, urls: Sequence[str], use: Callable[[Player], Awaitable[Any]]) -> Any:
    """Return the result of `use`, called with an open player."""
    renderer = Renderer(AutoTokenizer.from_pretrained(recipe.model.path), vision_of(recipe))
    engines = EnginePool([EngineClient(url, timeout_s=120.0) for url in urls])
    try:
        return await use(make_player(recipe, renderer, engines))
    finally:
        await engines.close()


def play(recipe: Recipe, urls: Sequence[str], count: int, version: int, *sampling: float) -> list[Trajectory]:
    """Play episodes of held-out samples, all at the same time."""

    async def use(player: Player) -> list[Trajectory]:
        return await asyncio.gather(*map(player.play, tickets(recipe, count, version, *sampling)))

    return asyncio.run(with_player(recipe, urls, use))


def tickets(recipe: Recipe, count: int, version: int, temperature: float = 1.0, top_p: float = 1.0) -> list[Ticket]:
    sampling = Sampling(temperature, top_p, -1, recipe.env.turn_tokens)
    return [Ticket(s.id, s, 1, version, sampling, 600.0) for s in held_out_samples(recipe)[:count]]


def give_base(recipe: Recipe, ranks: Ranks, url: str) -> None:
    """Publish the weights of the model's files to the server, which may hold weights from other tests."""
    policy = load_policy(recipe.model.path, vision_of(recipe))
    with publishing(policy, ranks, publish_settings(timeout_s=60.0)) as publisher:
        assert publisher.publish(0, [url])["publish/engines"] == 1


@torch.no_grad()
def surprise(policy: Policy, trajectories: Sequence[Trajectory]) -> float:
    """Return `surprise_z` of the tokens that an engine sampled at temperature 1 with these weights."""
    batch = packed(policy, trajectories)
    hidden_NH, _ = policy._final_hidden(batch, policy._lower_activations(batch, None, 0))
    logits_NV = hidden_NH @ policy.vlm.lm_head.weight.T
    logits_NV[:, list(policy.banned_ids)] = -torch.inf
    return surprise_z(logits_NV.log_softmax(-1), batch.target_ids)


@torch.no_grad()
def move(policy: Policy, seed: int, scale: float = 0.05) -> None:
    """Change every parameter by random noise of `scale` times its standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.vlm.parameters():
        spread = parameter.std() if parameter.numel() > 1 else parameter.abs()
        parameter += scale * spread * torch.randn(parameter.shape, generator=generator)
