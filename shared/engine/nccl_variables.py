"""Environment variables for NCCL, which must be the same in the learner and in each engine on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Variable(NamedTuple):
    value: str
    reason: str


VARIABLES = {
    "NCCL_CUMEM_ENABLE": Variable(
        "0",
        "SGLang sets it to 0 for itself, and ranks that allocate their buffers in two ways fail in the first transfer "
        "between them; slime and miles set it on the trainer for that reason",
    ),
    "NCCL_NVLS_ENABLE": Variable(
        "0",
        "SGLang sets it to 0 unless it is asked otherwise: reductions in the switch reserve memory of each GPU for "
        "every communicator, hang where a container has no fabric, and need the cuMem buffers that are off",
    ),
}


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a process with this environment; values that the user has set there stay."""
    return {name: environ.get(name, variable.value) for name, variable in VARIABLES.items()}
