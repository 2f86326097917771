"""One rank of the doctor's trial, started by torchrun: it runs the stages in order, and reports the begin and end of
each.

    learner ─▶ engine ─▶ weights ─▶ episode ─▶ step ─▶ weights again ─▶ checkpoint

These are the parts of a run, called as launch/actors.py and learner/learner_loop.py call them. Rank 0 has the engine.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import json
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from actor.isolation.lifeline import die_with_parent
from launch.processes.children import Stopped, raise_on_signals
from shared.config.recipe import Recipe
from shared.engine import nccl_variables
from shared.util.process_memory import use_one_heap

if TYPE_CHECKING:
    from launch.doctor_checks.trial_stages import Trial


@dataclass(slots=True)
class Events:
    """Writes one line of JSON for each begin and end of a stage to a file that the doctor reads."""

    path: Path
    rank: int
    stage: str = "learner"
    _began: float = field(default_factory=time.monotonic)

    def run(self, stage: str, work: Callable[[], str]) -> None:
        """Run a stage between two events. `work` returns its result in words; only rank 0 reports it."""
        self.stage, self._began = stage, time.monotonic()
        if self.rank == 0:
            self._tell(stage=stage, state="begun")
        found = work()
        if self.rank == 0:
            self._tell(stage=stage, state="ok", found=found, seconds=time.monotonic() - self._began)

    def fail(self, error: BaseException) -> None:
        where = f" (rank {self.rank})" if self.rank else ""
        words = " ".join(str(error).split()) or type(error).__name__
        self._tell(stage=self.stage, state="failed", found=words + where, seconds=time.monotonic() - self._began)

    def _tell(self, **event: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:  # one short write, so that lines of two ranks do not mix
            file.write(json.dumps(event) + "\n")


def main(order_path: str) -> int:
    use_one_heap()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGKILL)
    order = json.loads(Path(order_path).read_text())
    os.chdir(order["folder"])
    recipe = Recipe.model_validate(order["recipe"])
    events = Events(Path(order["events"]), int(os.environ.get("RANK", "0")))
    if recipe.learner.device == "cuda":
        os.environ.update(nccl_variables.settings(os.environ))
    raise_on_signals()
    with ExitStack() as stack:
        try:
            from launch.doctor_checks.trial_stages import Trial  # imports torch and transformers

            go_through(stack.enter_context(Trial(recipe)), events)
        except Stopped:
            return 130
        except Exception as error:  # any error is reported as the stage's failure
            logging.getLogger("pronk").exception("the stage %r failed", events.stage)
            events.fail(error)
            return 1
    return 0


def go_through(work: Trial, events: Events) -> None:
    events.run("learner", work.load)
    events.run("engine", work.serve)
    events.run("weights", work.publish_moved)
    events.run("episode", work.play)
    events.run("step", work.step)
    events.run("weights again", work.publish_trained)
    events.run("checkpoint", work.save_and_read)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
