"""Starts an agent that is a program of its own (`rollout.command`), once for each episode: it gets its episode in
variables and a file, and prints or posts its reward. A guard runs it, and ends all that it has started."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from actor.agents import program_guard
from actor.agents.dialogues import MODEL, Refused
from actor.agents.remote_agents import AgentFailed, Reported, episode_as_json, result_in
from actor.rewards import BadReward, number_or_turns
from shared.redaction import redact_text
from shared.types import Ticket
from shared.util.threads import in_thread
from shared.util.user_errors import RaisedElsewhere, in_words

GUARD = Path(program_guard.__file__)
GRACE_S = 5.0  # time that a program has to end after it has posted its result
END_S = program_guard.TERM_S + program_guard.KILL_S + 10.0  # a guard that takes longer is ended itself
PREFIX = "PRONK_"
MAX_LINES, MAX_TAIL = 12, 700  # of a program's last words in an episode's error: lines, characters
MAX_LOGGED = 50  # lines in the log


@dataclass(frozen=True, slots=True)
class Program:
    """The words of a command, the first of which is a file that can be executed."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, command: str) -> Program:
        """Return the program that `rollout.command` names. Raise ValueError, in one line, if there is none."""
        first, *rest = shlex.split(command)
        path = shutil.which(first) or shutil.which(first, path=os.curdir)
        if path is not None:
            return cls((os.path.abspath(path), *rest))
        if os.path.isfile(first):
            cure = f"chmod +x {first}, or name the program that runs it before it"
            raise ValueError(f"rollout.command = {command!r}: {first} cannot be executed; {cure}")
        raise ValueError(
            f"rollout.command = {command!r}: there is no program {first}; install it, or give its path, from the "
            "folder in which the actors start"
        )


class AgentProgramFailed(AgentFailed, RaisedElsewhere):
    """How a program has failed, with its last words; `trace` has more of them."""


class ProgramCall:
    """One episode that a program plays. `waiting` has its result, or what has gone wrong."""

    def __init__(
        self, program: Program, base_url: str, ticket: Ticket, args: Mapping[str, Any], posted: asyncio.Future[Reported]
    ) -> None:
        """Start the program. `posted` is what it posts, if it does."""
        self._program, self._base_url, self._ticket, self._args = program, base_url, ticket, args
        self._posted = posted
        self._link: socket.socket | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._file = ""
        self._given_up = False
        self._told = asyncio.create_task(self._report())
        self.waiting = asyncio.create_task(self._outcome())
        for task in (self._told, self.waiting):
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # retrieved by nobody else

    def give_up(self) -> None:
        """Let the guard end the program and all that it has started."""
        if self._given_up:
            return
        self._given_up = True
        self._posted.cancel()
        self._hang_up()
        asyncio.get_running_loop().call_later(END_S, self._end_guard)

    async def last_words(self) -> str:
        """Return what a given up program wrote last, in words that follow others; "" if that is not known."""
        try:
            report = await asyncio.shield(self._told)
        except AgentProgramFailed:
            return ""
        return in_last_words(report)

    async def _outcome(self) -> Reported:
        try:
            either: list[asyncio.Future[Any]] = [self._told, self._posted]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._posted.done() and not self._posted.cancelled():
                await asyncio.wait([self._told], timeout=GRACE_S)
                return self._posted.result()
            return result_of(await self._told)
        finally:
            self.give_up()

    async def _report(self) -> dict[str, Any]:
        """Return the guard's report about the program, when all of it has ended. Raise AgentProgramFailed if there is
        none."""
        loop, report = asyncio.get_running_loop(), bytearray()
        try:
            await in_thread(self._start)
            assert self._link is not None and self._guard is not None
            while data := await loop.sock_recv(self._link, 1 << 16):
                report += data
            while self._guard.poll() is None:  # it has written its last
                await asyncio.sleep(0.002)
            return dict(msgspec.json.decode(report))
        except (OSError, RuntimeError, MemoryError) as error:
            raise AgentProgramFailed(f"the program cannot be started: {error}") from error
        except msgspec.DecodeError:
            raise AgentProgramFailed("the process that guards the program was killed") from None
        finally:
            if self._link is not None:
                self._link.close()
            if self._file:  # its guard was killed
                with suppress(OSError):
                    os.unlink(self._file)

    def _start(self) -> None:
        """Write the episode's file and start the guard. Raise OSError if that is not possible."""
        self._link, theirs = socket.socketpair()
        with theirs:
            self._link.setblocking(False)
            descriptor, self._file = tempfile.mkstemp(prefix="pronk_episode_", suffix=".json")
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(self._episode()))
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", GUARD, str(theirs.fileno()), self._file, *self._program.words],
                pass_fds=[theirs.fileno()],
                env=self._environment(self._file),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must reach only the actor
            )
        if self._given_up:
            self._hang_up()

    def _episode(self) -> dict[str, Any]:
        return {"base_url": self._base_url, **episode_as_json(self._ticket, self._args)}

    def _environment(self, path: str) -> dict[str, str]:
        """Return the program's variables: those of the actor, but for Pronk's own, which may hold secrets."""
        seed = self._ticket.sample.metadata.get("seed")
        own = {"BASE_URL": self._base_url, "MODEL_NAME": MODEL, "EPISODE": path}
        own |= {} if seed is None else {"SEED": str(seed)}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        return kept | {f"{PREFIX}{name}": value for name, value in own.items()}

    def _hang_up(self) -> None:
        if self._link is not None:
            with suppress(OSError):  # it has ended meanwhile
                self._link.shutdown(socket.SHUT_WR)

    def _end_guard(self) -> None:
        if self._guard is not None and self._guard.poll() is None:
            self._guard.kill()


def result_of(report: Mapping[str, Any]) -> Reported:
    """Return what a program that has ended says about its episode: the last line that it has printed. Raise
    AgentProgramFailed if it has failed, BadReward for a result of another form."""
    if why := report.get("failed"):
        raise AgentProgramFailed(f"the program cannot be started: {why}")
    if report["ended"] == "flood":
        why = f"the program wrote more than {program_guard.MAX_OUTPUT >> 20} MiB"
    elif report["code"] is None:
        why = "the program was ended"
    elif report["code"] < 0:
        why = f"the program was ended by {signal_name(-report['code'])}"
    elif report["code"]:
        why = f"the program ended with exit code {report['code']}"
    else:
        return result_in_output(report["out"])
    raise AgentProgramFailed(f"{why}{in_last_words(report)}", trace="\n".join([why, *lines_of(report)[-MAX_LOGGED:]]))


def result_in_output(output: str) -> Reported:
    """Return the result in the last line that a program has printed: a number, or an object as one posts it; without a
    reward if it is another text. Raise BadReward for a number or an object that is no result."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if not lines:
        return Reported(None, why="the program printed nothing")
    given = value_in(lines[-1])
    if isinstance(given, int | float | list) and not isinstance(given, bool):
        return Reported(number_or_turns(given))
    if not isinstance(given, dict):
        return Reported(None, why=f"the program's last line, {in_words(lines[-1])}, is no number")
    try:
        result = result_in(given)
    except Refused as refusal:
        raise BadReward(f"the program's last line, {in_words(lines[-1])}: {refusal}") from None
    if isinstance(result, AgentFailed):
        raise result
    return result


def value_in(line: str) -> Any:
    """Return the JSON value of a line, or its number as other languages write it, such as .5 and nan; None for another
    text."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        with suppress(ValueError):
            return float(line)
    return None


def lines_of(report: Mapping[str, Any]) -> list[str]:
    """Return the lines that a program wrote last, as far as they can be printed: its errors, or if it wrote none what
    it printed."""
    texts = [report.get(name, "") for name in ("err", "out")]
    text = next((text for text in texts if text.strip()), "")
    lines = ["".join(filter(str.isprintable, line.expandtabs(4))).rstrip() for line in text.splitlines()]
    return [line for line in lines if line]


def in_last_words(report: Mapping[str, Any]) -> str:
    """Return a program's last words, to follow others in one line."""
    words = " ".join(" ".join(lines_of(report)[-MAX_LINES:]).split())
    return f"; its last words: {redact_text(words)[-MAX_TAIL:]}" if words else ""


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
