"""Three steps of a mixture on one rank, then on two that share each microbatch and the experts, compute activations
again and compile their blocks: `python -m tests.support.ranks.compiled MODEL OUT` writes OUT/RANKS.pt (gradients,
weights, what the check at the start says, how many graphs were made).

Graphs are traced by torch.compile and run without a compiler backend ("eager").
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch._dynamo.utils import counters

from learner.distributed import barrier, close_ranks, init_ranks
from learner.weights.gathering import gathered
from tests.support.learner_ranks import CASES, first_gradients_noted, train, trainer_of
from tests.support.ranks.checks import said
from tests.support.ranks.processes import in_processes

STEPS = 3
SHARED = {"context": 2, "expert": 2, "activation_checkpointing": True, "compile": True}


def trained(model: Path, out: Path) -> None:
    ranks = init_ranks("cpu", timeout_s=240)
    settings, with_images = CASES["vtrace"]
    shared = SHARED if ranks.size == 2 else {}
    with patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        trainer = trainer_of(model, ranks, **settings | shared)
        with first_gradients_noted(trainer) as gradients:
            for step in range(STEPS):
                train(trainer, ranks, range(step, step + 1), with_images)
        weights = {name: tensor.clone() for name, tensor in gathered(trainer.policy)}
        words = said(trainer.policy, trainer.ranks) if shared else ""
    if ranks.is_main:
        torch.save((dict(gradients), weights, words, counters["frames"]["ok"]), out / f"{ranks.size}.pt")
    barrier(ranks, timeout_s=100)
    close_ranks()


if __name__ == "__main__":
    sys.exit(in_processes(((1,), (2,)), trained, Path(sys.argv[1]), Path(sys.argv[2])))
