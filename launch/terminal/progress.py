"""How far a run is, from the files in its folder: a live table in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

from launch.terminal.follow import Tail
from launch.terminal.screen import Screen
from launch.terminal.state import RunState
from launch.terminal.table import run_table
from shared.config import Recipe
from shared.log import get_logger

LOG = get_logger("local")
LINE_EVERY_S = 30.0
TABLE_EVERY_S = 1.0


class Progress:
    def __init__(self, recipe: Recipe, screen: Screen | None = None) -> None:
        folder, resumed = Path(recipe.run.dir) / recipe.run.name, recipe.learner.resume != "never"
        self.state = RunState(recipe)
        self._folder, self._told = folder, False
        self._screen = screen
        self._metrics = Tail(folder / "metrics.jsonl", resumed=resumed)
        self._alarms = Tail(folder / "alarms.jsonl", resumed=resumed)
        self._shown = 0.0

    def show(self, *, final: bool = False) -> None:
        """To be called again and again. How to look at the run is told once, as soon as there is something to see."""
        if not self._told and (self._folder / "recipe.json").exists():
            self._told = True
            LOG.info("look at the run, now or later: python launch/dashboard.py %s", shlex.quote(str(self._folder)))
        for alarm in self._alarms.new():
            self.state.add_alarm(alarm)
        fresh = sum(self.state.add_row(row) for row in self._metrics.new()) > 0
        waited = time.monotonic() - self._shown
        if self._screen is not None:
            if fresh or final or waited > TABLE_EVERY_S or self._screen.resized:
                self._shown = time.monotonic()
                self._screen.update(run_table(self.state, self._screen.width, self._shown))
        elif self.state.rows and (final or (fresh and waited > LINE_EVERY_S)):
            self._shown = time.monotonic()
            print(self.state.line(), file=sys.stderr, flush=True)
