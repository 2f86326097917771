"""What guards remember of a run; the trainer holds it, so that checkpoints do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class GuardState:
    brake: float = 1.0  # what the policy's learning rate is multiplied by, besides its schedule
    ceiling: float = 1.0  # of the brake: half of it after each step back to a checkpoint
    start_entropy: float | None = None  # nats a token, of the first step
    num_rewinds: int = 0
    bad_steps: int = 0  # in a row, as the next two: without a finite loss and gradient
    steps_without_variance: int = 0
    steps_outside_entropy: int = 0
    good: bool = True  # whether a checkpoint of now is worth going back to
