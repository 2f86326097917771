"""Restarts this host's actor processes when they crash or are killed, but not if the learner told them to stop or if
the recipe is wrong."""

from __future__ import annotations

import json
import sys

from actor.actor_loop import EXIT_NO_LEARNER
from launch.processes.children import Child, start
from launch.processes.restarts import Restarts, Supervised, how_it_ended
from shared.config.recipe import EXIT_USER_ERROR, WITH_SECRETS, Recipe


class ActorFailed(Exception):
    """An actor process has failed for good, which ends the run; `code` is its exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class ActorProcess(Supervised):
    def __init__(self, recipe: Recipe, index: int, engine_urls: tuple[str, ...], journals: str = "") -> None:
        """Prepare one actor process. `journals`: the folder for the journals of this host's actors; "" = no
        journals."""
        super().__init__(f"actor {index}", Restarts(recipe.actor.max_restarts), "actor.max_restarts")
        self._settings = {
            "recipe": recipe.model_dump(mode="json", context=WITH_SECRETS),
            "index": index,
            "engine_urls": engine_urls,
            "journals": journals,
        }

    def start(self) -> None:
        """Start the process; it gets its settings through an environment variable."""
        env = {"PRONK_ACTOR": json.dumps(self._settings), "OMP_NUM_THREADS": "1"}
        self.child = start(self.name, [sys.executable, "-P", "-m", "actor.worker"], env=env)
        self.restarts.started()

    def failure(self, child: Child) -> str:
        """Return how the actor has failed, in words. Raise ActorFailed if a restart would not help."""
        how, code = how_it_ended(child), child.process.returncode
        self.done = code == 0
        if code in (EXIT_USER_ERROR, EXIT_NO_LEARNER):
            raise ActorFailed(f"{self.name} {how}; its reason is above", code)
        return "" if self.done else how

    def given_up(self, failure: str, child: Child) -> ActorFailed:
        return ActorFailed(f"{self.name} {failure}", abs(child.process.returncode))
