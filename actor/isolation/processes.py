"""The actor's side of its user processes: one for each open episode, reused for later episodes."""

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
from actor.isolation.fork_server import ANSWER, END, FORK, NOT_ENDED, REQUEST, ForkConfig, Ready
from actor.isolation.process_messages import UserAnswer, UserCall, pack, receive, send, unpack, unpack_plain
from actor.isolation.served import EXIT_MEMORY
from shared.types import Sample
from shared.util.user_errors import RaisedElsewhere

START_LIMIT_S = 120.0  # time limit for a fork server to import the user's modules
ASK_LIMIT_S = 20.0  # time limit for one fork or one end
# Time that a thread may take beyond a call's limit: for a fork before it and an end after it.
GRACE_S = 2 * ASK_LIMIT_S
ROOT = Path(__file__).resolve().parents[2]
SILENT_S = 60.0
NOTHING = b"\xc0"  # None in msgpack
log = logging.getLogger("actor")


class ProcessEnded(Exception):
    """A user process ended during a call: it crashed, or was killed from outside."""


class Raised(RaisedElsewhere):
    """An exception of the user's code. Each is raised as a subclass with the name of the original class."""


@dataclass(eq=False, slots=True)
class UserProcess:
    """One user process and the socket to it."""

    pid: int
    link: socket.socket
    server: ForkServer

    def is_alive(self) -> bool:
        """Tell whether an idle process still holds its end of the socket."""
        poll = select.poll()
        poll.register(self.link, select.POLLIN)
        return not poll.poll(0)


class UserProcesses:
    """Forks user processes, calls them, and ends those that overrun their limit. All methods may be called from any
    thread, and block."""

    def __init__(self, config: ForkConfig) -> None:
        """Start the fork server. Raise ValueError, with the server's message, for a module or function that is missing
        or broken."""
        self._config, self._lock = config, threading.Lock()
        self._idle: list[UserProcess] = []
        self._left: deque[UserProcess] = deque()  # processes of given-up episodes, still to be ended
        self._logged_s: dict[str, float] = {}  # when each text was last logged
        self._fork_server = ForkServer(config)
        # True if the environment's module has an episode_reward.
        self.episode_reward = self._fork_server.ready.episode_reward

    def lease(self) -> UserProcess:
        """Return a process without an episode."""
        with self._lock:
            while self._left:
                self._end(self._left.popleft())
            while self._idle:
                process = self._idle.pop()
                if process.is_alive():
                    return process
                self._warn(f"an idle user process {self._end(process)}")
            try:
                return self._fork_server.fork()
            except (EOFError, ConnectionError, TimeoutError):
                self._warn(f"the parent of the user processes {self._fork_server.close()}; a new one is started")
                self._fork_server = ForkServer(self._config)
                return self._fork_server.fork()

    def give_back(self, process: UserProcess) -> None:
        """Keep a process for a later episode."""
        with self._lock:
            self._idle.append(process)

    def leave(self, process: UserProcess) -> None:
        """Mark a process to be ended later, without blocking."""
        process.link.close()  # then it ends by itself, unless it hangs
        self._left.append(process)

    def end(self, process: UserProcess) -> str:
        """Kill a process; return how it ended, in words."""
        with self._lock:
            return self._end(process)

    def call(self, process: UserProcess, name: str, body: bytes, limit_s: float) -> msgspec.Raw:
        """Call the process and return its answer. Raise EnvTimeout after `limit_s`, MemoryError if it exceeds its
        memory, ProcessEnded if it ends otherwise; in all three cases the process is gone. An exception of the user's
        code is raised as `Raised`, a TimeoutError as itself."""
        deadline = time.monotonic() + limit_s
        try:
            send(process.link, pack(UserCall(name, msgspec.Raw(body))), limit_s)
            answer = unpack(receive(process.link, max(1e-3, deadline - time.monotonic())), UserAnswer)
        except TimeoutError:
            self.end(process)
            self._warn(f"a user process overran its {limit_s:g} s in {name}; it was ended")
            raise EnvTimeout(f"no return within {limit_s:g} s; its process was ended") from None
        except (EOFError, OSError, ValueError, msgspec.MsgspecError):
            how = self.end(process)
            self._warn(f"a user process {how} in {name}")
            if how == f"ended with exit code {EXIT_MEMORY}":
                memory = f"more memory than env.memory_mb = {self._config.memory_mb}"
                raise MemoryError(f"{memory} in {name}; its process was ended") from None
            raise ProcessEnded(f"its process {how} in {name}") from None
        if answer.error == "TimeoutError":
            raise TimeoutError(answer.text)
        if answer.error:
            raise type(answer.error, (Raised,), {})(answer.text, answer.place, answer.trace)
        return answer.value

    def close(self) -> None:
        """End all user processes."""
        with self._lock:
            self._fork_server.close()
            for process in (*self._idle, *self._left):
                process.link.close()

    def _warn(self, text: str) -> None:
        """Log a text once a minute at most; every case is counted as an episode's ending anyway."""
        now = time.monotonic()
        if now - self._logged_s.get(text, -SILENT_S) >= SILENT_S:
            self._logged_s[text] = now
            log.warning("%s", text)

    def _end(self, process: UserProcess) -> str:
        process.link.close()
        try:
            return process.server.end(process.pid)
        except (EOFError, OSError):  # the fork server is gone, and all its processes with it
            return "ended with its parent"


class Session:
    """A leased user process, from construction to `close`. `UserProcesses.call` describes what a call raises."""

    def __init__(self, processes: UserProcesses, limit_s: float) -> None:
        """Lease a process. `limit_s` is the default time limit of a call."""
        self._processes, self._limit_s = processes, limit_s
        self._process: UserProcess | None = processes.lease()
        self._left = weakref.finalize(self, processes.leave, self._process)
        self._left.atexit = False

    def call(self, name: str, body: bytes = NOTHING, limit_s: float = 0.0) -> msgspec.Raw:
        """Call the process and return its answer."""
        if self._process is None:
            raise ProcessEnded("its process has ended")
        try:
            return self._processes.call(self._process, name, body, limit_s or self._limit_s)
        except (EnvTimeout, MemoryError, ProcessEnded):
            self._detach()
            raise

    def close(self) -> None:
        """End the episode and give the process back, unless the process has already ended."""
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
    """An environment in a user process, with the methods that an episode needs; it is built at its first `reset`."""

    def __init__(self, processes: UserProcesses, sample: Sample, limit_s: float) -> None:
        super().__init__(processes, limit_s)
        self._sample = pack(sample)

    def reset(self) -> tuple[dict[str, Any], Any]:
        return unpack(self.call("reset", self._sample), tuple[dict, Any])

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, Any]:
        return unpack(self.call("step", pack(response_text)), tuple[dict, bool, Any])

    def format_observation(self, observation: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the messages that the environment has already made of the observation, in its process."""
        return observation["messages"]

    def episode_reward(self) -> Any:
        """Return the module's `episode_reward(env)`."""
        return unpack_plain(self.call("episode_reward"))

    def __getattr__(self, name: str) -> Any:
        cure = "set reward.isolation = 'process' too"
        raise AttributeError(f"{name!r} of an environment that runs in a process of its own; {cure}")


@dataclass(slots=True)
class ForkServer:
    """The actor's handle of the process that forks user processes."""

    config: ForkConfig
    ready: Ready = field(init=False)
    _control: socket.socket = field(init=False)
    _process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self._control, theirs = socket.socketpair()
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from actor.isolation.fork_server import main; main()"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must reach only the actor
            )
        try:
            send(self._control, pack(self.config), START_LIMIT_S)
            self.ready = unpack(receive(self._control, START_LIMIT_S), Ready)
        except (EOFError, OSError) as error:
            late = isinstance(error, TimeoutError)
            how = f"was not imported within {START_LIMIT_S:g} s" if late else f"{self.close()} at its import"
            self.close()
            raise ValueError(f"the process of {self.config.env or self.config.reward!r} {how}") from None
        if self.ready.mistake:
            self.close()
            raise ValueError(self.ready.mistake)
        self._control.settimeout(ASK_LIMIT_S)

    def fork(self) -> UserProcess:
        """Fork a user process. Raise OSError if the system allows no further process; EOFError, ConnectionError or
        TimeoutError if this server is gone."""
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
        """Kill a user process; return how it ended. Raise EOFError, ConnectionError or TimeoutError if this server is
        gone."""
        return _describe_exit(self._ask(END, pid))

    def close(self) -> str:
        """End the fork server, and with it all processes that it has forked; return how it ended."""
        self._control.close()
        try:
            return _describe_exit(self._process.wait(ASK_LIMIT_S))
        except subprocess.TimeoutExpired:
            self._process.kill()
            return _describe_exit(self._process.wait())

    def _ask(self, what: bytes, pid: int, descriptors: list[int] | None = None) -> int:
        """Send the server a request and return its answer. Raise EOFError, ConnectionError or TimeoutError if it gives
        none; the connection is then closed, since a late answer would be taken for that of the next request."""
        if self._control.fileno() < 0:
            raise EOFError("the fork server is gone")
        try:
            socket.send_fds(self._control, [REQUEST.pack(what, pid)], descriptors or [])
            data = self._control.recv(ANSWER.size)
            if len(data) < ANSWER.size:
                raise EOFError("the fork server is gone")
        except (EOFError, ConnectionError, TimeoutError):
            self._control.close()
            raise
        return ANSWER.unpack(data)[0]


def _describe_exit(code: int) -> str:
    if code == NOT_ENDED:
        return "was killed and has not ended"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
