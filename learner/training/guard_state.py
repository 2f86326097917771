"""The state of the guards, which the trainer holds so that checkpoints include it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class GuardState:
    brake: float = 1.0  # factor of the policy's learning rate, besides its schedule
    ceiling: float = 1.0  # upper limit of the brake; halved at each step back to a checkpoint
    start_entropy: float | None = None  # entropy of the first step, in nats per token
    num_rewinds: int = 0
    # The next three count consecutive steps. bad_steps: steps without a finite loss and gradient.
    bad_steps: int = 0
    steps_without_variance: int = 0
    steps_outside_entropy: int = 0
    good: bool = True  # a checkpoint made now is worth going back to
