"""The process that forks user processes: it has imported the user's modules, and has one thread.

It is the parent of all user processes, so that only it kills and reaps them and no pid is ever mistaken. When the actor
hangs up or is gone, it ends all of them and itself.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from typing import Any

import msgspec

from actor.isolation.lifeline import die_with_parent, may_outlive_parent
from actor.isolation.process_messages import pack, receive, send, unpack
from actor.isolation.served import Code, run_child
from envs.loader import load_env, load_function, load_module

REQUEST = struct.Struct("<ci")  # FORK or END, and for END the pid
ANSWER = struct.Struct("<i")
FORK, END = b"f", b"e"
NOT_ENDED = 2**31 - 1
END_LIMIT_S = 5.0
LOOK_S = 1.0  # interval between checks that the parent is alive


class ForkConfig(msgspec.Struct):
    """What user processes run: the paths of the environment's module and the reward function as in the recipe, "" for
    none."""

    env: str = ""
    reward: str = ""
    args: dict[str, Any] = {}
    memory_mb: int = 0


class Ready(msgspec.Struct):
    """The fork server's first answer: what the user's modules contain, or the user's mistake."""

    mistake: str = ""
    episode_reward: bool = False


def main() -> None:
    """Serve on the socket whose descriptor is the last argument."""
    die_with_parent(signal.SIGKILL)  # while it imports and reads no messages
    parent, control = os.getppid(), socket.socket(fileno=int(sys.argv[-1]))
    config = unpack(receive(control, None), ForkConfig)
    try:
        code = load(config)
    except ValueError as error:
        send(control, pack(Ready(str(error))), None)
        return
    send(control, pack(Ready(episode_reward=code.episode_reward is not None)), None)
    may_outlive_parent()  # when the parent is gone, it first kills its user processes
    gc.collect()
    gc.freeze()  # a collection in a fork would copy its pages
    pids: set[int] = set()
    try:
        serve(control, code, parent, pids)
    finally:
        for pid in pids.copy():
            end(pid)


def load(config: ForkConfig) -> Code:
    """Return the user's functions. Raise ValueError for a module or function that is missing or broken."""
    build_env = load_env(config.env) if config.env else None
    own = getattr(load_module(config.env), "episode_reward", None) if config.env else None
    reward = load_function(config.reward) if config.reward else None
    return Code(build_env, own, reward, config.args, config.memory_mb)


def serve(control: socket.socket, code: Code, parent: int, pids: set[int]) -> None:
    """Fork and end processes as the actor asks; `pids` is the set of running processes. Return when the actor is
    gone."""
    control.settimeout(LOOK_S)
    while os.getppid() == parent:
        try:
            data, descriptors, _, _ = socket.recv_fds(control, REQUEST.size, 1)
        except TimeoutError:
            continue
        if not data:
            return
        what, pid = REQUEST.unpack(data)
        if what == FORK:
            answer = fork(control, socket.socket(fileno=descriptors[0]), code)
            if answer > 0:
                pids.add(answer)
        else:
            answer = end(pid) if pid in pids else -errno.ESRCH
            pids.discard(pid)
        control.sendall(ANSWER.pack(answer))


def fork(control: socket.socket, link: socket.socket, code: Code) -> int:
    """Fork a process that serves on `link`; return its pid, or -errno if there can be none."""
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        pid = -(error.errno or errno.EAGAIN)
    if pid == 0:
        control.close()
        run_child(link, code, parent)
    link.close()
    return pid


def end(pid: int) -> int:
    """Kill a child and everything that it has started, if it still runs; return how it ended: its exit code, or minus
    the number of its signal. Return NOT_ENDED if the kernel does not end it in time."""
    for kill in (os.killpg, os.kill):  # its process group; itself, in case it has not made the group yet
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + END_LIMIT_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return NOT_ENDED
        time.sleep(0.001)
