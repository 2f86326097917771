"""Which checkpoint did best in an evaluation: best.json beside the checkpoints names it, and it is not removed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from shared.log import get_logger

PREFIX = "step_"


def checkpoint_name(step: int) -> str:
    return f"{PREFIX}{step:08d}"


@dataclass(slots=True)
class Best:
    """The evaluated step with the best result, and the one whose result is awaited; their checkpoints are kept."""

    file: Path
    step: int = -1
    value: float = float("-inf")
    candidate: int = -1

    @staticmethod
    def load(folder: Path) -> Best:
        best = Best(folder / "best.json")
        if best.file.exists():
            known = json.loads(best.file.read_text())
            best.step, best.value = known["step"], known["value"]
        return best

    def result(self, value: float) -> bool:
        """Of the candidate. Whether it is the best so far; then best.json names it."""
        step, self.candidate = self.candidate, -1
        if step < 0 or not value > self.value:
            return False
        self.step, self.value = step, value
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps({"checkpoint": checkpoint_name(step), "step": step, "value": value}) + "\n")
        except OSError as error:
            get_logger("learner").error("%s is not written: %s", self.file, error)
        return True
