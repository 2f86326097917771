"""What runs inside a user process: one environment at a time, and rewards, at the actor's call."""

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
from actor.isolation.wire import Answer, Call, pack, pack_plain, receive, send, unpack
from envs.base import Info, Played
from shared.types import Sample

EXIT_MEMORY = 77  # of a process that came to its limit of memory
MIB = 2**20


class Code(NamedTuple):
    """The user's functions, where there are any, and the settings of `build_env`."""

    build_env: Callable[..., Any] | None
    episode_reward: Callable[[Any], Any] | None
    reward: Callable[[Played], Any] | None
    args: dict[str, Any]
    memory_mb: int


def live(link: socket.socket, code: Code, parent: int) -> None:
    """The whole life of a freshly forked process, from which it does not return: ends when the actor hangs up."""
    status = 1
    try:
        os.setsid()  # what it starts is ended with it
        die_with_parent(signal.SIGKILL, parent)
        faulthandler.enable()
        _limit(code.memory_mb)
        _throw_dice_anew()
        _serve(link, code)
        status = 0
    except MemoryError:
        status = EXIT_MEMORY
    finally:
        os._exit(status)


def _limit(memory_mb: int) -> None:
    """Bounds the private memory (RLIMIT_DATA; Linux alone counts all of it), and leaves no core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mb:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = memory_mb * MIB if hard == resource.RLIM_INFINITY else min(memory_mb * MIB, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _throw_dice_anew() -> None:
    """Forked processes have the same state of global generators; `random` seeds its own anew by itself."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()


def _serve(link: socket.socket, code: Code) -> None:
    episode = Episode(code)
    while True:
        try:
            call = unpack(receive(link, None), Call)
        except EOFError:
            return
        try:
            answer = Answer(msgspec.Raw(episode.handle(call)))
        except MemoryError:  # to tell about it may take more memory than there is
            os._exit(EXIT_MEMORY)
        except Exception as error:  # noqa: BLE001 - whatever the user's code raises is told to the actor
            answer = Answer(error=type(error).__name__, text=str(error))
        send(link, pack(answer), None)


@dataclass(slots=True)
class Episode:
    """One environment from its first `reset` to its `close`, then the next."""

    code: Code
    env: Any = None
    infos: list[Info] = field(default_factory=list)
    loop: asyncio.AbstractEventLoop | None = None

    def handle(self, call: Call) -> bytes:
        """The packed result of a call."""
        match call.name:
            case "reset":
                return self.reset(unpack(call.body, Sample))
            case "step":
                return self.step(unpack(call.body, str))
            case "episode_reward":
                assert self.code.episode_reward is not None
                return pack_plain(self.code.episode_reward(self.env), "the reward")
            case "reward":
                return self.reward(unpack(call.body, Played))
            case "close":
                return pack(self.close())
        raise AssertionError(call.name)

    def reset(self, sample: Sample) -> bytes:
        """Builds the environment if there is none yet: {"message": what the model sees first}, or {} for nothing."""
        if self.env is None:
            assert self.code.build_env is not None
            self.env = self.code.build_env(sample=sample, args=self.code.args)
        observation, _ = self.env.reset()
        seen = {"message": self.env.format_observation(observation)} if observation else {}
        return pack_plain(seen, "the observation")

    def step(self, text: str) -> bytes:
        """[{"message": what the model sees next, unless it is over}, over, info]."""
        observation, done, info = self.env.step(text)
        self.infos.append(info)
        seen = {} if done else {"message": self.env.format_observation(observation)}
        return pack_plain([seen, bool(done), info], "what step returned")

    def reward(self, played: Played) -> bytes:
        """The user's reward, which sees the environment itself and its own infos where they are in this process."""
        assert self.code.reward is not None
        if self.env is not None:
            played = replace(played, env=self.env, infos=tuple(self.infos))
        value = self.code.reward(played)
        if inspect.isawaitable(value):
            self.loop = self.loop or asyncio.new_event_loop()
            value = self.loop.run_until_complete(value)
        return pack_plain(value, "the reward")

    def close(self) -> bool:
        """Ends the episode. False if the process had better not serve another one: it took much memory."""
        env, self.env = self.env, None
        self.infos.clear()
        close = getattr(env, "close", None)
        if close is not None:
            close()
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return not self.code.memory_mb or used < self.code.memory_mb * MIB / 2
