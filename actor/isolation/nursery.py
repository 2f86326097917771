"""The process that forks user processes: it has imported the user's modules, and has one thread.

It is the parent of them all, so that each is killed and reaped by the one process that knows whose pid it is. It ends,
and all of them with it, when the actor hangs up or is gone.
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
from actor.isolation.served import Code, live
from actor.isolation.wire import pack, receive, send, unpack
from envs.loader import load_env, load_function, load_module

REQUEST = struct.Struct("<ci")  # what is asked, and of which pid
ANSWER = struct.Struct("<i")
FORK, END = b"f", b"e"
NOT_ENDED = 2**31 - 1
END_LIMIT_S = 5.0
LOOK_S = 1.0  # between two looks whether the parent lives


class Order(msgspec.Struct):
    """What the user processes are for: paths of module and function as in the recipe, empty for none."""

    env: str = ""
    reward: str = ""
    args: dict[str, Any] = {}
    memory_mb: int = 0


class Ready(msgspec.Struct):
    """What was found in the user's modules, or the user's mistake."""

    mistake: str = ""
    episode_reward: bool = False


def main() -> None:
    """Serves on the socket whose descriptor is the last argument."""
    die_with_parent(signal.SIGKILL)  # while it imports and hears nothing
    parent, control = os.getppid(), socket.socket(fileno=int(sys.argv[-1]))
    order = unpack(receive(control, None), Order)
    try:
        code = load(order)
    except ValueError as error:
        send(control, pack(Ready(str(error))), None)
        return
    send(control, pack(Ready(episode_reward=code.episode_reward is not None)), None)
    may_outlive_parent()  # that kills its user processes first
    gc.collect()
    gc.freeze()  # a collection in a fork would copy its pages
    pids: set[int] = set()
    try:
        tend(control, code, parent, pids)
    finally:
        for pid in pids.copy():
            end(pid)


def load(order: Order) -> Code:
    """The user's functions. ValueError for a module or function that is missing or broken."""
    build_env = load_env(order.env) if order.env else None
    own = getattr(load_module(order.env), "episode_reward", None) if order.env else None
    reward = load_function(order.reward) if order.reward else None
    return Code(build_env, own, reward, order.args, order.memory_mb)


def tend(control: socket.socket, code: Code, parent: int, pids: set[int]) -> None:
    """Forks and ends processes as the actor asks; `pids` are those that live. Returns when the actor is gone."""
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
    """The pid of a new process that serves on `link`; -errno if there can be none."""
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        pid = -(error.errno or errno.EAGAIN)
    if pid == 0:
        control.close()
        live(link, code, parent)
    link.close()
    return pid


def end(pid: int) -> int:
    """Kills a child and all that it has started; how it ended: its exit code, or minus the number of its signal. It may
    have ended before. NOT_ENDED if the kernel does not let go of it."""
    for kill in (os.killpg, os.kill):  # its group, and itself if it has not made it yet
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
