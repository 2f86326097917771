"""Shows the progress of a run, read from the files in its folder: a live table in a terminal, otherwise a line now and
then."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

from launch.terminal.follow import Tail
from launch.terminal.run_state import RunState
from launch.terminal.screen import Screen
from launch.terminal.table import run_table
from shared.config.recipe import Recipe
from shared.log import get_logger
from shared.run_status import read_status
from shared.util.own_commands import command

LOG = get_logger("local")
LINE_EVERY_S = 30.0
TABLE_EVERY_S = 1.0
PHASE_EVERY_S = 1.0


class RunProgress:
    def __init__(self, recipe: Recipe, screen: Screen | None = None) -> None:
        folder, resumed = Path(recipe.run.dir) / recipe.run.name, recipe.learner.resume != "never"
        self.state = RunState(recipe)
        self._folder, self._told = folder, False
        self._earlier_status = read_status(folder)
        self._screen = screen
        self._metrics = Tail(folder / "metrics.jsonl", resumed=resumed)
        self._alarms = Tail(folder / "alarms.jsonl", resumed=resumed)
        self._shown = self._phase_read = 0.0
        self._phase = ""

    def show(self, *, final: bool = False) -> None:
        """Show the progress; call it repeatedly. Once, as soon as the run's folder is ready, also log the command for
        the dashboard."""
        if not self._told and (self._folder / "recipe.json").exists():
            self._told = True
            LOG.info("look at the run, now or later: %s %s", command("dashboard"), shlex.quote(str(self._folder)))
        for alarm in self._alarms.new():
            self.state.add_alarm(alarm)
        self._read_phase()
        fresh = sum(self.state.add_row(row) for row in self._metrics.new()) > 0
        waited = time.monotonic() - self._shown
        if self._screen is not None:
            if fresh or final or waited > TABLE_EVERY_S or self._screen.resized:
                self._shown = time.monotonic()
                self._screen.update(run_table(self.state, self._screen.width, self._shown))
        elif not final and (
            (name := self.state.phase.partition(":")[0]) != self._phase or (name and waited > LINE_EVERY_S)
        ):
            self._phase = name
            self._shown = time.monotonic()
            if name:
                print(self.state.phase, file=sys.stderr, flush=True)
        elif self.state.rows and (final or (fresh and waited > LINE_EVERY_S)):
            self._shown = time.monotonic()
            print(self.state.line(), file=sys.stderr, flush=True)

    def _read_phase(self) -> None:
        """Read what the learner is doing, once a second; an earlier run's status does not count."""
        now = time.monotonic()
        if now - self._phase_read < PHASE_EVERY_S:
            return
        self._phase_read = now
        status = read_status(self._folder)
        if status not in (None, self._earlier_status):
            self.state.status = status
