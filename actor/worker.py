"""One actor process, as launch/actors.py starts it: its settings are JSON in the environment variable PRONK_ACTOR.

It needs no torch, whose import takes longer than all else of its start.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from actor.engine_pool import EnginePool
from actor.env_threads import EnvThreads, TooManyHang
from actor.isolation.nursery import Order
from actor.isolation.processes import GRACE_S, RemoteEnv, UserProcesses
from actor.journal import Journal
from actor.limits import EpisodeLimits
from actor.loop import EXIT_NO_LEARNER, ActorSettings, run_actor
from actor.named_engines import NamedEngines
from actor.render import Renderer
from actor.rewards import EnvReward, FunctionReward, HttpReward, ProcessReward, Reward
from actor.rollout import BuildEnv, Player
from envs.loader import load_env, load_function, load_module
from shared.codec import TokenRules
from shared.config import EXIT_USER_ERROR, Recipe
from shared.engine_api import EngineClient
from shared.keys import actor_security, read_api_key
from shared.transport import SocketSettings
from shared.vision import VisionSpec
from shared.weights.families import text_config

EXIT_HANGING = 1  # too many calls hang; a new process is better off
CLOSE_S = 3.0  # at the end, for environments of cancelled episodes; less than a process has after SIGTERM


def main() -> int:
    settings = json.loads(os.environ["PRONK_ACTOR"])
    recipe = Recipe.model_validate(settings["recipe"])
    try:
        return asyncio.run(work(recipe, settings["index"], tuple(settings["engine_urls"]), settings["journals"]))
    except ValueError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return EXIT_USER_ERROR
    except BaseExceptionGroup as group:  # of the task groups of tickets and episodes
        if hanging := first_of(group, TooManyHang):
            print(f"error: {hanging}", file=sys.stderr)
            return EXIT_HANGING
        raise
    except asyncio.CancelledError:
        return 0


def first_of(group: BaseExceptionGroup, kind: type[BaseException]) -> BaseException | None:
    """The first exception of `kind` in a group, however deep; None if there is none."""
    found: BaseException | None = group.subgroup(kind)
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


async def work(recipe: Recipe, index: int, urls: tuple[str, ...], journals: str) -> int:
    """Plays until the learner says stop, or SIGTERM or SIGINT arrives. `journals`: a folder for the journals of all of
    this host's actors, or none."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    model, actor = recipe.model, recipe.actor
    spec = VisionSpec.load(model.path, min_pixels=model.min_pixels, max_pixels=model.max_pixels)
    renderer = Renderer(PreTrainedTokenizerFast.from_pretrained(model.path), spec)
    engines = make_pool(recipe, urls)
    journal = Journal(Path(journals, str(index)), actor.journal_mb * 2**20) if journals else None
    processes = user_processes(recipe)
    player = make_player(recipe, renderer, engines, journal, processes)
    rules = TokenRules(spec.image_token_id, spec.banned_ids, vocab_size(model.path))
    settings = ActorSettings(
        name=f"{socket.gethostname()}-actor{index}",
        learner=actor.learner,
        engine_urls=urls,
        rules=rules,
        groups=actor.groups,
        connect_timeout_s=actor.connect_timeout_s,
        reconnect_timeout_s=actor.reconnect_timeout_s,
        heartbeat_s=actor.heartbeat_s,
        sockets=SocketSettings(recipe.transport.max_message_bytes, recipe.transport.queue_messages),
        secure=actor_security(recipe.transport, actor.learner),
    )
    keep_collections_short()
    try:
        named = engines if isinstance(engines, NamedEngines) else None
        return EXIT_NO_LEARNER if await run_actor(settings, player.play, journal, named) else 0
    finally:
        await player.threads.settle(CLOSE_S)
        await engines.close()
        if processes is not None:
            processes.close()


def make_pool(recipe: Recipe, urls: tuple[str, ...]) -> EnginePool:
    """The engines at `urls`, or behind the router; those that the learner names where there are none."""
    engine, api_key = recipe.engine, read_api_key(recipe.engine.api_key_file)
    ways = (engine.router,) if engine.router else urls
    client = partial(EngineClient, timeout_s=engine.request_timeout_s, api_key=api_key)
    if ways:
        return EnginePool([client(url) for url in ways], turn_tries=engine.turn_tries)
    learner, patience_s = recipe.actor.learner, recipe.actor.engines_timeout_s
    return NamedEngines(client, learner, patience_s=patience_s, turn_tries=engine.turn_tries)


def keep_collections_short() -> None:
    """Takes what is loaded by now out of garbage collection, which would hold up the event loop for 0.1 s and more."""
    gc.collect()
    gc.freeze()


def user_processes(recipe: Recipe) -> UserProcesses | None:
    """What runs the user's code apart from the actor; None if all of it runs in threads. ValueError for a missing or
    broken module."""
    env, reward = recipe.env, recipe.reward
    ours, theirs = env.isolation == "process", reward.isolation == "process"
    if not ours and not theirs:
        return None
    return UserProcesses(
        Order(env.module if ours else "", env.reward if theirs else "", recipe.env.build_args, env.memory_mb)
    )


def make_player(
    recipe: Recipe,
    renderer: Renderer,
    engines: EnginePool,
    journal: Journal | None = None,
    processes: UserProcesses | None = None,
) -> Player:
    """What plays episodes of the recipe's environment; `processes` are those of `user_processes`. ValueError for a
    missing or broken module."""
    env, args = recipe.env, recipe.env.build_args
    limits = EpisodeLimits(
        env.max_turns,
        env.max_tokens,
        env.turn_tokens,
        recipe.model.max_context,
        env.timeout_s + (GRACE_S if env.isolation == "process" else 0.0),
        recipe.rollout.timeout_s,
    )
    threads = EnvThreads(env.threads)
    rollout = load_function(recipe.rollout.path) if recipe.rollout.path else None
    reward, build = make_reward(recipe, threads, processes), make_builder(recipe, processes)
    return Player(build, renderer, engines, limits, threads, reward, rollout, args, journal)


def make_builder(recipe: Recipe, processes: UserProcesses | None) -> BuildEnv:
    """What makes the environment of a sample: here, or in a user process."""
    env, args = recipe.env, recipe.env.build_args
    if env.isolation == "process":
        assert processes is not None
        return lambda sample: RemoteEnv(processes, sample, env.timeout_s)
    build_env = load_env(env.module)
    return lambda sample: build_env(sample=sample, args=args)


def make_reward(recipe: Recipe, threads: EnvThreads, processes: UserProcesses | None = None) -> Reward | None:
    """Who rewards episodes: the recipe's function or server, the environment's module, or nobody but the turns."""
    env, reward = recipe.env, recipe.reward
    if reward.url:
        return HttpReward(reward.url, reward.timeout_s, reward.tries)
    if env.reward and reward.isolation == "process":
        assert processes is not None
        return ProcessReward(processes, threads, reward.timeout_s)
    if env.reward:
        return FunctionReward(load_function(env.reward), threads, reward.timeout_s)
    if env.isolation == "process":
        assert processes is not None
        remote = EnvReward(RemoteEnv.episode_reward, threads, env.timeout_s + GRACE_S)
        return remote if processes.episode_reward else None
    own = getattr(load_module(env.module), "episode_reward", None)
    return EnvReward(own, threads, env.timeout_s) if own else None


def vocab_size(model_path: str) -> int:
    """Of the model's output, padding ids included."""
    return int(text_config(json.loads((Path(model_path) / "config.json").read_text()))["vocab_size"])


if __name__ == "__main__":
    sys.exit(main())
