"""The registry of optimizers: each entry names its class, what it needs and what it does not support.

Nothing elsewhere compares an optimizer's name. Importing this module does not import the classes; the learner does
that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.config.named_functions import NamedFunction, load_function

THIS_FILE = "shared/config/optimizer_specs.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """What is known about an optimizer without any parameters, for checking a recipe and for planning."""

    name: str
    optimizer: NamedFunction  # (groups of parameters, lr=, betas=, fused=) -> torch.optim.Optimizer
    has_matrix_group: bool = False  # decoder layers' matrices are the last parameter group, marked `muon`
    matrix_states: int = 2  # float32 numbers of state per parameter of these matrices
    supports_adapters: bool = True  # it can train low-rank factors in place of whole matrices

    def load_optimizer(self) -> Callable[..., Any]:
        """Return the optimizer's class. Raise ValueError, in one line, if it cannot be imported."""
        return load_function(self.optimizer, f"optimizer {self.name!r} of {THIS_FILE}")


OPTIMIZERS: dict[str, OptimizerSpec] = {
    spec.name: spec
    for spec in (
        OptimizerSpec(name="adamw", optimizer="learner.training.optim:LocalAdamW"),
        OptimizerSpec(
            name="muon",
            optimizer="learner.training.optim:MuonAdamW",
            has_matrix_group=True,
            matrix_states=1,
            supports_adapters=False,  # it makes whole matrices orthogonal
        ),
    )
}


def optimizer_spec(name: str) -> OptimizerSpec:
    """Return an optimizer's entry. Raise ValueError, in one line with the cure, for a name without one."""
    if name not in OPTIMIZERS:
        raise ValueError(
            f"learner.optimizer.name = {name!r} is no optimizer; set it to one of {', '.join(OPTIMIZERS)}, or add an "
            f"entry to OPTIMIZERS in {THIS_FILE}"
        )
    return OPTIMIZERS[name]
