"""The learner of the chaos run: the real one, in which a step can be spoilt from outside.

A file in the folder that CHAOS_FLAGS names, called `FAULT-PID`, spoils the next step of that rank, and is removed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from launch.learner import main

NOT_FINITE, OUT_OF_MEMORY = "not finite", "out of memory"
TOO_LARGE = 2**50  # elements


def flag(folder: Path, fault: str, pid: int) -> Path:
    return folder / f"{fault}-{pid}"


def is_due(fault: str) -> bool:
    """Once for each flag."""
    try:
        flag(Path(os.environ["CHAOS_FLAGS"]), fault, os.getpid()).unlink()
    except FileNotFoundError:
        return False
    return True


def spoil_a_weight(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """After the optimizer's step: one number of this rank's part of the policy is none."""
    if is_due(NOT_FINITE):
        for parameter in optimizer.param_groups[0]["params"]:
            own = parameter.detach()
            own = own.to_local() if hasattr(own, "to_local") else own
            if own.numel():
                own.view(-1)[0] = float("nan")
                return


def ask_for_too_much(module: torch.nn.Module, *_: Any) -> None:
    """In the middle of a forward: torch's own error, while the other rank waits in a collective."""
    if isinstance(module, torch.nn.Linear) and is_due(OUT_OF_MEMORY):
        torch.empty(TOO_LARGE)


if __name__ == "__main__":
    register_optimizer_step_post_hook(spoil_a_weight)
    torch.nn.modules.module.register_module_forward_pre_hook(ask_for_too_much)
    sys.exit(main())
