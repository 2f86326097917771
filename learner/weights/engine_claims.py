"""Claims of engines: an engine takes weights from one living learner alone, and the one that comes second loses.

An engine that knows its learner (`ServerInfo.takes_claims`) is told every few seconds that this one lives, and refuses
others meanwhile. Any other server shows only the name of its weights, which carries the process that published them:
weights of another run's process are not replaced before their name has stayed the same for a while.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shared.engine.engine_api import EngineClient, EngineError, each
from shared.engine.engine_messages import ServerInfo, parse_weight_name

CLAIM_EVERY_S = 5.0
CALL_S = 5.0
AT_ONCE = 64
QUIET_S = 30.0  # a learner whose weights have stayed at an engine for this long publishes to it no more


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The run that publishes. `token` is the same in all its processes; `is_process` tells whether a process is one of
    the run's."""

    run: str
    token: str
    is_process: Callable[[str], bool]

    @staticmethod
    def of(folder: Path, is_process: Callable[[str], bool]) -> RunIdentity:
        """Return the identity of the run in `folder`, in which only one learner at a time can work."""
        try:
            inode = folder.stat().st_ino
        except OSError:
            inode = 0
        text = f"{socket.gethostname()} {folder.resolve()} {inode}"
        return RunIdentity(folder.name, hashlib.sha256(text.encode()).hexdigest()[:16], is_process)


class EngineClaims:
    """This learner's claims. Used on the loop of EngineLink only."""

    def __init__(self, identity: RunIdentity) -> None:
        self._identity = identity
        self._claimed: set[EngineClient] = set()
        self._foreign: dict[EngineClient, tuple[str, float]] = {}  # foreign name of the weights, and since when
        self._task: asyncio.Task[None] | None = None

    async def check(self, engine: EngineClient, info: ServerInfo, timeout_s: float) -> None:
        """Claim an engine. Raise EngineError if another learner publishes to it."""
        if info.takes_claims:
            await engine.claim(self._identity.run, self._identity.token, timeout_s)
            self._claimed.add(engine)
            if self._task is None:
                self._task = asyncio.create_task(self._repeat())
            return
        try:
            name = str(await engine.weight_version(timeout_s))
            process = parse_weight_name(name)[1]
        except (EngineError, ValueError):  # no weights of any run
            process = ""
        if not process or self._identity.is_process(process):
            self._foreign.pop(engine, None)
            return
        now = time.monotonic()
        seen, since = self._foreign.get(engine, ("", now))
        since = since if seen == name else now
        self._foreign[engine] = name, since
        if now - since < QUIET_S:
            raise EngineError(
                engine.url,
                f"another learner publishes to it: its weights are {name}, of process {process}, which is none of run "
                f"{self._identity.run!r}; end that run, or give this one engines of its own (it is taken once that "
                f"name has stayed for {QUIET_S:g} s)",
                409,
            )

    async def close(self) -> None:
        """End all claims, so that another run need not wait."""
        if self._task is not None:
            self._task.cancel()
        await each(self._claimed, lambda engine: self._claim(engine, ends=True), at_once=AT_ONCE)

    async def _repeat(self) -> None:
        """Tell the engines every few seconds that this learner lives; a refusal shows at the next publication."""
        while True:
            await asyncio.sleep(CLAIM_EVERY_S)
            await each([*self._claimed], self._claim, at_once=AT_ONCE)

    async def _claim(self, engine: EngineClient, *, ends: bool = False) -> None:
        await engine.claim(self._identity.run, self._identity.token, CALL_S, ends=ends)
