"""Computes the results that test_experts.py compares: a mixture whose experts are dealt over ranks, and the same on one
rank: OUT/1.pt to 4.pt.

python -m tests.support.ranks.dealt MODEL OUT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from learner.checkpoints.restoring import load_checkpoint
from learner.checkpoints.saver import Saver
from learner.distributed import Ranks, barrier, close_ranks, init_ranks
from learner.model.policy import empty_policy, load_weights
from learner.model.sharding import parallelize
from learner.training.optim import local_gradients
from learner.training.trainer import Trainer
from learner.weights.gathering import gathered
from shared.config.learner_section import LearnerConfig
from shared.vision import VisionSpec
from tests.support.episodes import learner_config
from tests.support.learner_ranks import ranks_for, recipe_of, run, train, trainer_of
from tests.support.ranks.checks import said_of_experts
from tests.support.ranks.experts import layer_alone
from tests.support.ranks.processes import in_processes

NUM_GROUPS = 2
SETTINGS: dict[str, Any] = {"activation_checkpointing": True}
MODES: dict[str, tuple[int, dict[str, Any]]] = {  # (ranks, settings); each must equal one rank
    "expert 2": (2, {"expert": 2}),
    "expert 2, Muon": (2, {"expert": 2, "optimizer": "muon"}),
    "expert 2, offloaded": (2, {"expert": 2, "offload": True}),
    "expert 2 and context 2": (2, {"expert": 2, "context": 2}),
    "expert 4": (4, {"expert": 4}),
    "expert 2, each over 2 shards": (4, {"expert": 2}),
    "expert 2 and context 4": (4, {"expert": 2, "context": 4}),
    "expert 2 and context 2, two replicas": (4, {"expert": 2, "context": 2, "shard_size": 2}),
}
SAVED = "expert 2, each over 2 shards"  # the mode whose checkpoint is saved


def save(trainer: Trainer, ranks: Ranks, folder: Path) -> str:
    saver = Saver(folder, trainer, ranks, recipe_of(trainer.config))
    path = saver.save(3, {})
    saver.wait()
    return str(path)


def resumed(model: str, ranks: Ranks, path: str, **changes: Any) -> Trainer:
    trainer = trainer_of(model, ranks, **SETTINGS, **changes)
    load_checkpoint(Path(path), trainer, ranks, recipe_of(trainer.config))
    return trainer


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Return the whole weights and the optimizer's whole first moments."""
    found = {name: tensor.clone() for name, tensor in gathered(trainer.policy)}
    for name, p in trainer.policy.named_parameters():
        moment = trainer.optimizer.state[p]["exp_avg"] if p in trainer.optimizer.state else torch.zeros(0)
        found[f"moment of {name}"] = (moment.full_tensor() if isinstance(moment, DTensor) else moment).clone()
    return found


def loaded(model: str, ranks: Ranks, config: LearnerConfig) -> dict[str, Tensor]:
    """Return the tensors that would be published after reading a model's files into dealt experts."""
    policy = empty_policy(model, VisionSpec.load(model, min_pixels=1024, max_pixels=1 << 20))
    ranks = ranks_for(ranks, config.parallel)
    parallelize(policy, ranks, config, torch.float32)
    load_weights(policy, model, ranks.device)
    return {name: tensor.clone() for name, tensor in gathered(policy)}


def spoilt(trainer: Trainer, ranks: Ranks) -> tuple[float, bool]:
    """Train a step in which only the last rank has a gradient that is not finite; return the number of bad steps in a
    row, and whether any weight or moment has changed."""

    def found(*arguments: Any) -> list[list[Tensor]]:
        parts = local_gradients(*arguments)
        if ranks.rank == ranks.size - 1:
            parts[0][0].fill_(torch.nan)
        return parts

    before = state_of(trainer)
    with patch("learner.training.update.local_gradients", found):
        (metrics,) = train(trainer, ranks, range(3, 4), NUM_GROUPS)
    after = state_of(trainer)
    return metrics["optim/bad_steps_in_a_row"], not all(torch.equal(after[name], t) for name, t in before.items())


def compute(model: str, out: Path) -> None:
    ranks = init_ranks("cpu", timeout_s=120)
    result: dict[str, Any] = {}
    if ranks.size == 1:
        trainer, result["one"] = run(model, ranks, SETTINGS, NUM_GROUPS)
        result |= {"path": save(trainer, ranks, out / "of_one"), "state": state_of(trainer)}
        _, result["Muon"] = run(model, ranks, SETTINGS | {"optimizer": "muon"}, NUM_GROUPS)
    else:
        result["layer"] = layer_alone(ranks)
        result["loaded"] = loaded(model, ranks, learner_config(expert=2))
    for name, (size, settings) in MODES.items():
        if size != ranks.size:
            continue
        trainer, result[name] = run(model, ranks, SETTINGS | settings, NUM_GROUPS)
        if "context" in name:
            result["check"] = said_of_experts(trainer.policy, trainer.ranks)
            result["spoilt"] = spoilt(trainer, ranks)
        if name == SAVED:
            result |= {"path": save(trainer, ranks, out / "of_four"), "state": state_of(trainer)}
            train(trainer, ranks, range(3, 4), NUM_GROUPS)
            result["uninterrupted"] = state_of(trainer)
            trainer = resumed(model, ranks, result["path"], expert=4)
            result["resumed"] = state_of(trainer)
            train(trainer, ranks, range(3, 4), NUM_GROUPS)
            result["gone on"] = state_of(trainer)
            one = torch.load(out / "1.pt", weights_only=False)["path"]
            result["resumed from one"] = state_of(resumed(model, ranks, one, expert=2))
    if ranks.is_main:
        torch.save(result, out / f"{ranks.size}.pt")
    barrier(ranks, timeout_s=30)
    close_ranks()


if __name__ == "__main__":
    sys.exit(in_processes(((1,), (2,), (4,)), compute, sys.argv[1], Path(sys.argv[2])))
