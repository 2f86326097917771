"""Keeps this host's actor processes alive. An actor that was killed or crashed is started again; one that the learner
has sent home, or that cannot work as the recipe says, is not."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field

from actor.loop import EXIT_NO_LEARNER, EXIT_USER_ERROR
from launch.processes.children import Child, start
from launch.processes.restarts import Restarts, TooManyRestarts, how_it_ended
from shared.config import Recipe
from shared.log import get_logger

LOG = get_logger("actors")


class ActorFailed(Exception):
    """An actor process that ends the run; `code` is its exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@dataclass(slots=True)
class ActorProcess:
    """One actor process through all its restarts; `child` is None between an end and the next start."""

    recipe: Recipe
    index: int
    engine_urls: tuple[str, ...]
    child: Child | None = None
    done: bool = False  # it has ended well
    _restarts: Restarts = field(init=False)
    _start_at: float = 0.0

    def __post_init__(self) -> None:
        self._restarts = Restarts(self.recipe.actor.max_restarts)

    def start(self) -> None:
        """The process gets its resolved settings through its environment."""
        settings = {"recipe": self.recipe.model_dump(mode="json"), "index": self.index, "engine_urls": self.engine_urls}
        command = [sys.executable, "-m", "actor.worker"]
        env = {"PRONK_ACTOR": json.dumps(settings), "OMP_NUM_THREADS": "1"}
        self.child = start(f"actor {self.index}", command, env=env)
        self._restarts.started()

    def keep_alive(self) -> None:
        """To be called again and again. ActorFailed: a restart would not help, or did not."""
        if self.done:
            return
        if self.child is None:
            if time.monotonic() >= self._start_at:
                self.start()
            return
        how = how_it_ended(self.child)
        code = self.child.process.returncode
        if not how:
            return
        if code == 0:
            self.done = True
            return
        if code in (EXIT_USER_ERROR, EXIT_NO_LEARNER):
            raise ActorFailed(f"actor {self.index} {how}; its reason is above", code)
        try:
            pause_s = self._restarts.pause_s()
        except TooManyRestarts as error:
            raise ActorFailed(f"actor {self.index} {how}, {error} (actor.max_restarts)", abs(code)) from None
        LOG.warning("actor %d %s; starting it again in %g s", self.index, how, pause_s)
        self.child, self._start_at = None, time.monotonic() + pause_s
