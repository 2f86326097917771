"""Which checkpoints are not removed: the one that did best in an evaluation, which best.json beside them names, and the
last good one, which a run can step back to."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from learner.checkpoints.folder import checkpoint_name, list_checkpoints, step_of
from shared.log import get_logger


def newest_good(folder: Path) -> tuple[int, ...]:
    """The step of the newest checkpoint that says of itself that it was good; none if there is none. One of an earlier
    learner says nothing, and counts as good."""
    for path in reversed(list_checkpoints(folder)):
        with suppress(OSError, ValueError, RecursionError, AttributeError):
            trainer = json.loads((path / "meta.json").read_text()).get("trainer", {})
            if trainer.get("guard", {}).get("good", True):
                return (step_of(path),)
    return ()


@dataclass(slots=True)
class Best:
    """The evaluated step with the best result, the one whose result is awaited, and the last good one: their
    checkpoints are kept. The thread that writes checkpoints asks for that at any moment."""

    file: Path
    step: int = -1
    value: float = float("-inf")
    candidate: int = -1
    good: tuple[int, ...] = ()  # the last one, once it is written; none at first

    def kept(self) -> set[str]:
        """Names of checkpoints. The candidate is looked at first: if it is the best by now, `step` says so."""
        return {checkpoint_name(step) for step in (self.candidate, self.step, *self.good)}

    def last_good(self) -> Path | None:
        """The last checkpoint that was good when it was saved."""
        paths = [self.file.with_name(checkpoint_name(step)) for step in self.good]
        return next((path for path in paths if (path / "meta.json").exists()), None)

    @staticmethod
    def load(folder: Path) -> Best:
        """What best.json says; a file that cannot be read says nothing, and is replaced by the next result."""
        best = Best(folder / "best.json")
        try:
            known = json.loads(best.file.read_text())
            best.step, best.value = int(known["step"]), float(known["value"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            get_logger("learner").error("%s is ignored, it cannot be read: %s", best.file, error)
        return best

    def result(self, value: float) -> bool:
        """Of the candidate. Whether it is the best so far; then best.json names it."""
        step = self.candidate
        better = step >= 0 and value > self.value
        if better:
            self.step, self.value = step, value
        self.candidate = -1  # not before: one of the two names its checkpoint at any moment
        if better:
            self._write()
        return better

    def is_lost(self, step: int) -> None:
        """Its checkpoint could not be written: it is no candidate any more, whatever its result."""
        if self.candidate == step:
            self.candidate = -1

    def _write(self) -> None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            known = {"checkpoint": checkpoint_name(self.step), "step": self.step, "value": self.value}
            part = self.file.with_suffix(".part")
            with part.open("w") as file:
                file.write(json.dumps(known) + "\n")
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.file)  # at once: whoever reads it finds the old or the new one
        except OSError as error:
            get_logger("learner").error("%s is not written: %s", self.file, error)
