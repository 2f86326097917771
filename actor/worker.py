"""One actor process, as launch/actors.py starts it: its settings are JSON in the environment variable PRONK_ACTOR.

It does not import torch, which would take longer than the rest of its start.
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

from actor.actor_loop import EXIT_NO_LEARNER, ActorSettings, run_actor
from actor.agents.agent_endpoint import AgentEndpoint
from actor.agents.agent_episode import Agent, AgentReward
from actor.agents.agent_program import Program
from actor.agents.remote_agents import PostedResults, RemoteAgents
from actor.api_player import ApiPlayer
from actor.api_sampler import ApiModel
from actor.engine_pool import EnginePool
from actor.env_threads import EnvThreads, TooManyHang
from actor.episode import EpisodeLimits
from actor.history import Window
from actor.isolation.fork_server import ForkConfig
from actor.isolation.processes import GRACE_S, RemoteEnv, UserProcesses
from actor.journal import Journal
from actor.model_judge import JudgeReward, ModelJudge
from actor.named_engines import NamedEngines
from actor.render import Renderer
from actor.rewards import EnvReward, FunctionReward, HttpReward, ProcessReward, Reward
from actor.rollout import BuildEnv, Player, Players
from envs.env_calls import make_env
from envs.loader import load_env, load_function, load_module
from shared.agreement import settings_of
from shared.config.recipe import EXIT_USER_ERROR, Recipe
from shared.config.sections import RolloutConfig
from shared.config.tasks import tasks_of
from shared.engine.engine_api import EngineClient
from shared.engine.http_client import JsonClient
from shared.families.registry import vocab_size_in
from shared.keys import actor_keys, agents_key, judge_key, read_api_key
from shared.redaction import redact_text
from shared.vision import VisionSpec
from shared.wire.codec import TokenRules
from shared.wire.endpoints import EndpointSettings

EXIT_HANGING = 1  # exit code if too many calls hang: a new process takes over
# Time to close the environments of cancelled episodes at the end; less than a process has after SIGTERM.
CLOSE_S = 3.0


def main() -> int:
    settings = json.loads(os.environ["PRONK_ACTOR"])
    recipe = Recipe.model_validate(settings["recipe"])
    try:
        return asyncio.run(work(recipe, settings["index"], tuple(settings["engine_urls"]), settings["journals"]))
    except ValueError as error:
        print("error: " + redact_text(" ".join(str(error).split())), file=sys.stderr)
        return EXIT_USER_ERROR
    except BaseExceptionGroup as group:  # raised by the task groups of tickets and episodes
        if hanging := first_of(group, TooManyHang):
            print(f"error: {hanging}", file=sys.stderr)
            return EXIT_HANGING
        raise
    except asyncio.CancelledError:
        return 0


def first_of(group: BaseExceptionGroup, kind: type[BaseException]) -> BaseException | None:
    """Return the first exception of `kind` in a group, at any depth; None if there is none."""
    error: BaseException | None = group.subgroup(kind)
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def work(recipe: Recipe, index: int, urls: tuple[str, ...], journals: str) -> int:
    """Play until the learner says stop, or SIGTERM or SIGINT arrives; return the exit code. `journals`: the folder for
    the journals of all actors of this host; "" = no journal."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    model, actor = recipe.model, recipe.actor
    spec = VisionSpec.load(model.path, min_pixels=model.min_pixels, max_pixels=model.max_pixels)
    renderer = Renderer(PreTrainedTokenizerFast.from_pretrained(model.path), spec)
    engines = make_pool(recipe, urls)
    journal = Journal(Path(journals, str(index)), actor.journal_mb * 2**20) if journals else None
    players, processes = make_players(recipe, renderer, engines, journal, index=index)
    await players.listen()
    rules = TokenRules(spec.image_token_id, spec.banned_ids, vocab_size_in(model.path))
    settings = ActorSettings(
        name=f"{socket.gethostname()}-actor{index}",
        learner=actor.learner,
        engine_urls=urls,
        rules=rules,
        groups=actor.groups,
        connect_timeout_s=actor.connect_timeout_s,
        endpoint=EndpointSettings(recipe.transport.max_message_bytes),
        keys=actor_keys(recipe.transport, actor.learner),
        agreed=settings_of(recipe),
    )
    keep_collections_short()
    try:
        named = engines if isinstance(engines, NamedEngines) else None
        return EXIT_NO_LEARNER if await run_actor(settings, players.play, journal, named) else 0
    finally:
        await players.close(CLOSE_S)
        await engines.close()
        for each in processes:
            each.close()


def make_pool(recipe: Recipe, urls: tuple[str, ...]) -> EnginePool:
    """Return a pool of the engines at `urls`, or of the router; without any, the pool of the engines that the learner
    names."""
    engine, api_key = recipe.engine, read_api_key(recipe.engine.api_key_file)
    addresses = (engine.router,) if engine.router else urls
    client = partial(
        EngineClient,
        timeout_s=engine.request_timeout_s,
        api_key=api_key,
        vocab_size=vocab_size_in(recipe.model.path),
    )
    if addresses:
        return EnginePool([client(url) for url in addresses])
    return NamedEngines(client, recipe.actor.learner)


def keep_collections_short() -> None:
    """Exclude all objects loaded so far from garbage collection, which would block the event loop for 0.1 s and
    more."""
    gc.collect()
    gc.freeze()


def user_processes(recipe: Recipe) -> UserProcesses | None:
    """Return the processes that run the user's code outside the actor; None if all of it runs in threads. Raise
    ValueError for a missing or broken module."""
    env, reward = recipe.env, recipe.reward
    ours, theirs = env.isolation == "process", reward.isolation == "process"
    if not ours and not theirs:
        return None
    return UserProcesses(
        ForkConfig(env.module if ours else "", env.reward if theirs else "", recipe.env.build_args, env.memory_mb)
    )


def make_players(
    recipe: Recipe,
    renderer: Renderer,
    engines: EnginePool,
    journal: Journal | None = None,
    api: ApiModel | None = None,
    index: int = 0,
) -> tuple[Players, list[UserProcesses]]:
    """Return the players of the recipe's tasks, and the processes that run the user's code, to be closed at the end.
    The tasks share engines, journal and threads; each has its own environment, limits and reward. Raise ValueError for
    a missing or broken module."""
    threads, endpoint = EnvThreads(recipe.env.threads), make_endpoint(recipe.rollout, index)
    players, started = dict[str, Player](), list[UserProcesses]()
    try:
        for task in tasks_of(recipe):
            with task.named():
                processes = user_processes(task.recipe)
                started += [processes] if processes is not None else []
                players[task.name] = make_player(
                    task.recipe, renderer, engines, journal, processes, threads, endpoint, api
                )
    except ValueError:
        for each in started:
            each.close()
        raise
    return Players(players, endpoint), started


def make_endpoint(rollout: RolloutConfig, index: int) -> AgentEndpoint | None:
    """Return what the agents of an actor call; None if no agents play. Raise ValueError for a key that is missing."""
    if rollout.listen:
        return AgentEndpoint(*rollout.address(index), api_key=agents_key(rollout), remote=RemoteAgents())
    if rollout.command:
        return AgentEndpoint(results=PostedResults())
    return AgentEndpoint() if rollout.agent else None


def make_agent(rollout: RolloutConfig) -> Agent | Program | None:
    """Return the function or the program that plays; None if there is none. Raise ValueError if it is missing or
    broken."""
    if rollout.command:
        return Program.of(rollout.command)
    return load_function(rollout.agent) if rollout.agent else None


def make_player(
    recipe: Recipe,
    renderer: Renderer,
    engines: EnginePool,
    journal: Journal | None = None,
    processes: UserProcesses | None = None,
    threads: EnvThreads | None = None,
    endpoint: AgentEndpoint | None = None,
    api: ApiModel | None = None,
) -> Player:
    """Return the player of the episodes of a recipe of one task; `processes` is the result of `user_processes`. Raise
    ValueError for a missing or broken module."""
    env, args = recipe.env, recipe.env.build_args
    limits = EpisodeLimits(
        env.max_turns,
        env.max_tokens,
        env.turn_tokens,
        recipe.model.max_context,
        env.timeout_s + (GRACE_S if env.isolation == "process" else 0.0),
        recipe.rollout.timeout_s,
        Window(*(None if limit == "all" else limit for limit in (env.history, env.keep_images))),
    )
    threads = threads or EnvThreads(env.threads)
    if api is not None:
        reward, build = make_reward(recipe, threads, processes), make_builder(recipe, processes)
        return ApiPlayer(api, build, renderer, limits, threads, reward)
    rollout = load_function(recipe.rollout.path) if recipe.rollout.path else None
    reward, build = make_reward(recipe, threads, processes), make_builder(recipe, processes)
    agent = make_agent(recipe.rollout)
    return Player(build, renderer, engines, limits, threads, reward, rollout, args, journal, agent, endpoint)


def make_builder(recipe: Recipe, processes: UserProcesses | None) -> BuildEnv:
    """Return the function that makes a sample's environment: in this process, or in a user process."""
    env, args = recipe.env, recipe.env.build_args
    if env.isolation == "process":
        assert processes is not None
        return lambda sample: RemoteEnv(processes, sample, env.timeout_s)
    build_env = load_env(env.module)
    return lambda sample: make_env(build_env, sample=sample, args=args)


def make_reward(recipe: Recipe, threads: EnvThreads, processes: UserProcesses | None = None) -> Reward | None:
    """Return the reward of the recipe: that of its function, its server, or the environment module's own, mixed with
    its judge's score; None if only the turns' rewards count. Raise ValueError for a judge's rubric or key that cannot
    be read."""
    base, judge = make_base_reward(recipe, threads, processes), recipe.reward.judge
    if recipe.rollout.by_agents:
        base = AgentReward(base, is_judged=bool(judge.url))
    if not judge.url:
        return base
    http = JsonClient(judge.url, connections=judge.concurrency, api_key=judge_key(judge))
    return JudgeReward(ModelJudge(judge, judge.rubric_text(), recipe.reward.timeout_s, http), base)


def make_base_reward(recipe: Recipe, threads: EnvThreads, processes: UserProcesses | None) -> Reward | None:
    env, reward = recipe.env, recipe.reward
    if reward.url:
        return HttpReward(reward.url, reward.timeout_s, reward.send)
    if env.reward and reward.isolation == "process":
        assert processes is not None
        return ProcessReward(processes, threads, reward.timeout_s)
    if env.reward:
        return FunctionReward(load_function(env.reward), threads, reward.timeout_s)
    if recipe.rollout.by_agents:
        return None  # there is no environment that could be asked
    if env.isolation == "process":
        assert processes is not None
        remote = EnvReward(RemoteEnv.episode_reward, threads, env.timeout_s + GRACE_S)
        return remote if processes.episode_reward else None
    own = getattr(load_module(env.module), "episode_reward", None)
    return EnvReward(own, threads, env.timeout_s) if own else None


if __name__ == "__main__":
    sys.exit(main())
