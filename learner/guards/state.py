"""What guards remember of a run; the trainer holds it, so that checkpoints do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class GuardState:
    brake: float = 1.0  # what the policy's learning rate is multiplied by, besides its schedule
    ceiling: float = 1.0  # of the brake: half of it after each step back to a checkpoint
    start_entropy: float | None = None  # nats a token, of the first step
    num_rewinds: int = 0
