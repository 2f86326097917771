"""Checkpoints that are never removed: the best one by an evaluation, named in best.json, and the last good one, to
which a run can step back."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from learner.checkpoints.checkpoint_folder import checkpoint_name, list_checkpoints, step_of
from shared.log import get_logger


def newest_good(folder: Path) -> tuple[int, ...]:
    """Return the step of the newest checkpoint whose meta.json calls it good; empty if there is none. A checkpoint of
    an earlier learner without that mark counts as good."""
    for path in reversed(list_checkpoints(folder)):
        with suppress(OSError, ValueError, RecursionError, AttributeError):
            trainer = json.loads((path / "meta.json").read_text()).get("trainer", {})
            if trainer.get("guard", {}).get("good", True):
                return (step_of(path),)
    return ()


@dataclass(slots=True)
class Best:
    """The steps whose checkpoints are kept: the one with the best evaluation, the one whose result is awaited, and the
    last good one. The thread that writes checkpoints reads them at any moment."""

    file: Path
    step: int = -1
    value: float = float("-inf")
    candidate: int = -1
    good: tuple[int, ...] = ()  # the last good step once its checkpoint is written; empty at first

    def kept(self) -> set[str]:
        """Return the names of the checkpoints to keep. The candidate is read first: if it becomes the best in between,
        `step` names it."""
        return {checkpoint_name(step) for step in (self.candidate, self.step, *self.good)}

    def last_good(self) -> Path | None:
        """Return the path of the last checkpoint that was good when it was saved; None if there is none."""
        paths = [self.file.with_name(checkpoint_name(step)) for step in self.good]
        return next((path for path in paths if (path / "meta.json").exists()), None)

    @staticmethod
    def load(folder: Path) -> Best:
        """Read best.json. A file that cannot be read is ignored and replaced by the next result."""
        best = Best(folder / "best.json")
        try:
            content = json.loads(best.file.read_text())
            step, value = int(content["step"]), float(content["value"])
            if not math.isfinite(value):
                raise ValueError(f"a value of {value}")
            best.step, best.value = step, value
        except FileNotFoundError:
            pass
        except (OSError, ValueError, ArithmeticError, KeyError, TypeError, RecursionError) as error:
            get_logger("learner").error("%s is ignored, it cannot be read: %s", best.file, error)
        return best

    def await_result(self, step: int) -> None:
        """Make a step the candidate: an evaluation follows that may make its checkpoint the best."""
        self.candidate = step

    def result(self, value: float) -> bool:
        """Record the candidate's value. If it is the new best, write it to best.json and return True."""
        step = self.candidate
        better = step >= 0 and value > self.value
        if better:
            self.step, self.value = step, value
        self.candidate = -1  # only now: one of the two fields must name the checkpoint at any moment
        if better:
            self._write()
        return better

    def forget(self, step: int) -> None:
        """Forget a candidate whose checkpoint could not be written."""
        if self.candidate == step:
            self.candidate = -1

    def _write(self) -> None:
        try:
            self.file.parent.mkdir(exist_ok=True)
            content = {"checkpoint": checkpoint_name(self.step), "step": self.step, "value": self.value}
            part = self.file.with_suffix(".part")
            with part.open("w") as file:
                file.write(json.dumps(content) + "\n")
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.file)  # atomic: a reader gets the old or the new file
        except OSError as error:
            get_logger("learner").error("%s is not written: %s", self.file, error)
