"""The actor's side of its user processes: one for each episode that is open, used again for the next one."""

from __future__ import annotations

import logging
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from actor.env_threads import EnvTimeout
from actor.isolation.nursery import ANSWER, END, FORK, NOT_ENDED, REQUEST, Order, Ready
from actor.isolation.served import EXIT_MEMORY
from actor.isolation.wire import Answer, Call, pack, receive, send, unpack, unpack_plain
from shared.types import Sample

START_LIMIT_S = 120.0  # of a nursery, which imports the user's modules
ASK_LIMIT_S = 20.0  # of one fork or one end
GRACE_S = 2 * ASK_LIMIT_S  # what a thread may take beyond a call's limit: a fork before it, an end after it
ROOT = Path(__file__).resolve().parents[2]
SILENT_S = 60.0
NOTHING = b"\xc0"  # None in msgpack
log = logging.getLogger("actor")


class ProcessEnded(Exception):
    """A user process ended during a call, by a crash of its own or from outside."""


class Raised(Exception):
    """What the user's code raised. Its classes are made with the names of the originals."""


@dataclass(eq=False, slots=True)
class UserProcess:
    """One user process and the socket to it."""

    pid: int
    link: socket.socket
    nursery: Nursery

    def alive(self) -> bool:
        """While it is idle: whether it has not hung up."""
        poll = select.poll()
        poll.register(self.link, select.POLLIN)
        return not poll.poll(0)


class UserProcesses:
    """Forks user processes, calls them, and ends those that overrun their limit. All methods may be called from any
    thread, and block."""

    def __init__(self, order: Order) -> None:
        """ValueError, as the nursery found it, for a module or function that is missing or broken."""
        self._order, self._lock = order, threading.Lock()
        self._idle: list[UserProcess] = []
        self._left: deque[UserProcess] = deque()  # of episodes that were given up; to be ended
        self._told_s: dict[str, float] = {}  # when a line was last logged, by what it says
        self._nursery = Nursery(order)
        self.episode_reward = self._nursery.ready.episode_reward  # whether the environment's module has one

    def lease(self) -> UserProcess:
        """A process without an episode."""
        with self._lock:
            while self._left:
                self._end(self._left.popleft())
            while self._idle:
                process = self._idle.pop()
                if process.alive():
                    return process
                self._warn(f"an idle user process {self._end(process)}")
            try:
                return self._nursery.fork()
            except (EOFError, ConnectionError, TimeoutError):
                self._warn(f"the parent of the user processes {self._nursery.close()}; a new one is started")
                self._nursery = Nursery(self._order)
                return self._nursery.fork()

    def give_back(self, process: UserProcess) -> None:
        """The process for the next episode."""
        with self._lock:
            self._idle.append(process)

    def leave(self, process: UserProcess) -> None:
        """Ends a process when there is time; does not block."""
        process.link.close()  # upon which it ends by itself, unless it hangs
        self._left.append(process)

    def end(self, process: UserProcess) -> str:
        """Kills a process; says how it ended."""
        with self._lock:
            return self._end(process)

    def call(self, process: UserProcess, name: str, body: bytes, limit_s: float) -> msgspec.Raw:
        """What the process answers. EnvTimeout after `limit_s`, MemoryError, ProcessEnded: the process is gone then.
        An exception of the user's is raised as `Raised`; TimeoutError as itself."""
        deadline = time.monotonic() + limit_s
        try:
            send(process.link, pack(Call(name, msgspec.Raw(body))), limit_s)
            answer = unpack(receive(process.link, max(1e-3, deadline - time.monotonic())), Answer)
        except TimeoutError:
            self.end(process)
            self._warn(f"a user process overran its {limit_s:g} s in {name}; it was ended")
            raise EnvTimeout(f"no return within {limit_s:g} s; its process was ended") from None
        except (EOFError, OSError, ValueError, msgspec.MsgspecError):
            how = self.end(process)
            self._warn(f"a user process {how} in {name}")
            if how == f"ended with exit code {EXIT_MEMORY}":
                memory = f"more memory than env.memory_mb = {self._order.memory_mb}"
                raise MemoryError(f"{memory} in {name}; its process was ended") from None
            raise ProcessEnded(f"its process {how} in {name}") from None
        if answer.error == "TimeoutError":
            raise TimeoutError(answer.text)
        if answer.error:
            raise type(answer.error, (Raised,), {})(answer.text)
        return answer.value

    def close(self) -> None:
        """Ends all of them."""
        with self._lock:
            self._nursery.close()
            for process in (*self._idle, *self._left):
                process.link.close()

    def _warn(self, text: str) -> None:
        """Logs a line, once a minute at most; each is counted as an episode's ending anyway."""
        now = time.monotonic()
        if now - self._told_s.get(text, -SILENT_S) >= SILENT_S:
            self._told_s[text] = now
            log.warning("%s", text)

    def _end(self, process: UserProcess) -> str:
        process.link.close()
        try:
            return process.nursery.end(process.pid)
        except (EOFError, OSError):  # it has ended, and all of its own with it
            return "ended with its parent"


class Session:
    """A user process on loan, from here to `close`. See `UserProcesses.call` for what a call raises."""

    def __init__(self, processes: UserProcesses, limit_s: float) -> None:
        """`limit_s` is the time limit of a call that has none of its own."""
        self._processes, self._limit_s = processes, limit_s
        self._process: UserProcess | None = processes.lease()
        self._left = weakref.finalize(self, processes.leave, self._process)
        self._left.atexit = False

    def call(self, name: str, body: bytes = NOTHING, limit_s: float = 0.0) -> msgspec.Raw:
        """What the process answers."""
        if self._process is None:
            raise ProcessEnded("its process has ended")
        try:
            return self._processes.call(self._process, name, body, limit_s or self._limit_s)
        except (EnvTimeout, MemoryError, ProcessEnded):
            self._detach()
            raise

    def close(self) -> None:
        """Ends the episode, unless the process has ended before; gives the process back."""
        if self._process is None:
            return
        process = self._process
        try:
            serves_on = unpack(self.call("close"), bool)
        except (Raised, TimeoutError):
            self._processes.end(process)
            raise
        finally:
            self._detach()
        if serves_on:
            self._processes.give_back(process)
        else:
            self._processes.end(process)

    def _detach(self) -> None:
        self._process = None
        self._left.detach()


class RemoteEnv(Session):
    """An environment in a user process, as an episode sees it; it is built at its first `reset`."""

    def __init__(self, processes: UserProcesses, sample: Sample, limit_s: float) -> None:
        super().__init__(processes, limit_s)
        self._sample = pack(sample)

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return unpack(self.call("reset", self._sample), dict), {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, Any]:
        return unpack(self.call("step", pack(response_text)), tuple[dict, bool, Any])

    def format_observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """The message that the environment itself has made of the observation."""
        return observation["message"]

    def episode_reward(self) -> Any:
        """The module's `episode_reward(env)`."""
        return unpack_plain(self.call("episode_reward"))

    def __getattr__(self, name: str) -> Any:
        cure = "set reward.isolation = 'process' too"
        raise AttributeError(f"{name!r} of an environment that runs in a process of its own; {cure}")


@dataclass(slots=True)
class Nursery:
    """The process that forks user processes, from here."""

    order: Order
    ready: Ready = field(init=False)
    _control: socket.socket = field(init=False)
    _process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self._control, theirs = socket.socketpair()
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from actor.isolation.nursery import main; main()"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is the actor's
            )
        try:
            send(self._control, pack(self.order), START_LIMIT_S)
            self.ready = unpack(receive(self._control, START_LIMIT_S), Ready)
        except (EOFError, OSError) as error:
            late = isinstance(error, TimeoutError)
            how = f"was not imported within {START_LIMIT_S:g} s" if late else f"{self.close()} at its import"
            self.close()
            raise ValueError(f"the process of {self.order.env or self.order.reward!r} {how}") from None
        if self.ready.mistake:
            self.close()
            raise ValueError(self.ready.mistake)
        self._control.settimeout(ASK_LIMIT_S)

    def fork(self) -> UserProcess:
        """A new user process. OSError where the system allows none; EOFError, ConnectionError or TimeoutError: this
        nursery is gone."""
        link, theirs = socket.socketpair()
        with theirs:
            try:
                pid = self._ask(FORK, 0, [theirs.fileno()])
                if pid < 0:
                    raise OSError(-pid, "no process can be forked")
            except BaseException:
                link.close()
                raise
        return UserProcess(pid, link, self)

    def end(self, pid: int) -> str:
        """Kills a user process; says how it ended. EOFError, ConnectionError or TimeoutError: this nursery is gone."""
        return _how(self._ask(END, pid))

    def close(self) -> str:
        """Ends this process, and with it all that it has forked; says how it ended."""
        self._control.close()
        try:
            return _how(self._process.wait(ASK_LIMIT_S))
        except subprocess.TimeoutExpired:
            self._process.kill()
            return _how(self._process.wait())

    def _ask(self, what: bytes, pid: int, descriptors: list[int] | None = None) -> int:
        """EOFError, ConnectionError or TimeoutError, after which nothing more is asked: a late answer would be taken
        for the next."""
        if self._control.fileno() < 0:
            raise EOFError("the nursery is gone")
        try:
            socket.send_fds(self._control, [REQUEST.pack(what, pid)], descriptors or [])
            data = self._control.recv(ANSWER.size)
            if len(data) < ANSWER.size:
                raise EOFError("the nursery is gone")
        except (EOFError, ConnectionError, TimeoutError):
            self._control.close()
            raise
        return ANSWER.unpack(data)[0]


def _how(code: int) -> str:
    if code == NOT_ENDED:
        return "was killed and has not ended"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
