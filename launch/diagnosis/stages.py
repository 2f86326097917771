"""One rank of the doctor's round, started by torchrun: one stage after the other, each told as it begins and ends.

    learner ─▶ engine ─▶ weights ─▶ episode ─▶ step ─▶ weights again ─▶ checkpoint

These are the parts of a run, called as launch/actors.py and learner/loop.py call them. Rank 0 has the engine.
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
from shared.config import Recipe
from shared.guards.memory import use_one_heap
from shared.nccl import variables

if TYPE_CHECKING:
    from launch.diagnosis.parts import Round


@dataclass(slots=True)
class Events:
    """A line of JSON for each beginning and end of a stage, in a file that the doctor reads."""

    path: Path
    rank: int
    stage: str = "learner"
    _began: float = field(default_factory=time.monotonic)

    def run(self, stage: str, work: Callable[[], str]) -> None:
        """`work` says in words what it has found; rank 0's words count."""
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
        with self.path.open("a", encoding="utf-8") as file:  # one short write: lines of two ranks do not mix
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
        os.environ.update(variables.settings(os.environ))
    raise_on_signals()
    with ExitStack() as stack:
        try:
            from launch.diagnosis.parts import Round  # torch and transformers

            go_through(stack.enter_context(Round(recipe)), events)
        except Stopped:
            return 130
        except Exception as error:  # whatever a stage fails of, it is told as that stage's
            logging.getLogger("pronk").exception("the stage %r failed", events.stage)
            events.fail(error)
            return 1
    return 0


def go_through(work: Round, events: Events) -> None:
    events.run("learner", work.load)
    events.run("engine", work.serve)
    events.run("weights", work.publish_moved)
    events.run("episode", work.play)
    events.run("step", work.step)
    events.run("weights again", work.publish_trained)
    events.run("checkpoint", work.save_and_read)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
