"""The code that runs inside a user process: it serves the actor's calls of one environment at a time, and of
rewards."""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from actor.isolation.lifeline import die_with_parent
from actor.isolation.process_messages import (
    UserAnswer,
    UserCall,
    pack,
    pack_plain,
    pack_with_info,
    receive,
    send,
    unpack,
)
from envs.base import Info, Played
from envs.env_calls import close_env, make_env, messages_of, reset_env, reward_of, step_env
from shared.types import Sample
from shared.util.user_errors import name_of, place_of, text_of, trace_of

EXIT_MEMORY = 77  # exit code of a process that reached its memory limit
MIB = 2**20


class Code(NamedTuple):
    """The user's functions (None for those that the recipe does not have), and the settings of `build_env`."""

    build_env: Callable[..., Any] | None
    episode_reward: Callable[[Any], Any] | None
    reward: Callable[[Played], Any] | None
    args: dict[str, Any]
    memory_mb: int


def run_child(link: socket.socket, code: Code, parent: int) -> None:
    """Run a freshly forked process until the actor hangs up, then exit; never returns."""
    status = 1
    try:
        os.setsid()  # so that processes that it starts are ended with it
        die_with_parent(signal.SIGKILL, parent)
        faulthandler.enable()
        _limit(code.memory_mb)
        _reseed()
        _serve(link, code)
        status = 0
    except MemoryError:
        status = EXIT_MEMORY
    finally:
        os._exit(status)


def _limit(memory_mb: int) -> None:
    """Limit the private memory (RLIMIT_DATA, which counts all of it only on Linux), and disable core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mb:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = memory_mb * MIB if hard == resource.RLIM_INFINITY else min(memory_mb * MIB, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _reseed() -> None:
    """Reseed the global random generators, whose state forked processes share; `random` does so by itself."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()


def _serve(link: socket.socket, code: Code) -> None:
    episode = ServedEpisode(code)
    while True:
        try:
            call = unpack(receive(link, None), UserCall)
        except EOFError:
            return
        try:
            answer = UserAnswer(msgspec.Raw(episode.handle(call)))
        except MemoryError:  # an answer about it may need more memory than there is
            os._exit(EXIT_MEMORY)
        except SystemExit:
            raise
        except BaseException as error:  # noqa: BLE001 - any exception of the user's code is reported to the actor
            answer = UserAnswer(error=name_of(error), text=text_of(error), place=place_of(error), trace=trace_of(error))
        send(link, pack(answer), None)


@dataclass(slots=True)
class ServedEpisode:
    """Serves one environment from its first `reset` to its `close`, then the next one."""

    code: Code
    env: Any = None
    infos: list[Info] = field(default_factory=list)
    loop: asyncio.AbstractEventLoop | None = None

    def handle(self, call: UserCall) -> bytes:
        """Return the packed result of a call."""
        match call.name:
            case "reset":
                return self.reset(unpack(call.body, Sample))
            case "step":
                return self.step(unpack(call.body, str))
            case "episode_reward":
                assert self.code.episode_reward is not None
                return pack_plain(reward_of(self.code.episode_reward, self.env), "the reward")
            case "reward":
                return self.reward(unpack(call.body, Played))
            case "close":
                return pack(self.close())
        raise AssertionError(call.name)

    def reset(self, sample: Sample) -> bytes:
        """Build the environment if there is none yet; return [{"messages": the first observation}, or {} if there is
        none, info]."""
        if self.env is None:
            assert self.code.build_env is not None
            self.env = make_env(self.code.build_env, sample=sample, args=self.code.args)
        observation, info = reset_env(self.env)
        seen = {"messages": messages_of(self.env, observation)} if observation else {}
        return pack_with_info([seen], info, "the observation")

    def step(self, text: str) -> bytes:
        """Return [{"messages": the next observation} or {} if the episode is over, over, info]."""
        observation, done, info = step_env(self.env, text)
        self.infos.append(info)
        seen = {} if done else {"messages": messages_of(self.env, observation)}
        return pack_with_info([seen, done], info, "what step returned")

    def reward(self, played: Played) -> bytes:
        """Return the user's reward. If the environment is in this process, the reward function gets the environment
        itself and its original infos."""
        assert self.code.reward is not None
        played = replace(played, images=played.images or played.trajectory.images)
        if self.env is not None:
            played = replace(played, env=self.env, infos=tuple(self.infos))
        value = self.code.reward(played)
        if inspect.isawaitable(value):
            self.loop = self.loop or asyncio.new_event_loop()
            value = self.loop.run_until_complete(value)
        return pack_plain(value, "the reward")

    def close(self) -> bool:
        """End the episode; return False if the process has used so much memory that it should serve no other one."""
        env, self.env = self.env, None
        self.infos.clear()
        close_env(env)
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return not self.code.memory_mb or used < self.code.memory_mb * MIB / 2
