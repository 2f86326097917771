"""A checkpoint's adapters in one process without a trainer: merged with their base, or alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader

from learner.checkpoints.lora_files import save
from learner.model.lora_adapters import Adapters, is_factor
from learner.model.lora_attach import attach
from learner.model.lora_base import TIED, base_hash
from learner.model.policy import Policy
from learner.model.weight_files import WeightFiles
from shared.config.lora_section import LoraConfig
from shared.families.registry import FAMILIES


def attach_stored(policy: Policy, stored: Path, lora: LoraConfig, dtype: torch.dtype) -> Adapters:
    """Attach the adapters in a checkpoint's folder `dcp` to an empty policy, whole and on the CPU.

    `dtype`: the recipe's. Raise ValueError if they are of another model.
    """
    policy.adapters = adapters = attach(policy.vlm, lora, dtype)
    values = {name: torch.empty(p.shape) for name, p in policy.vlm.named_parameters() if is_factor(name)}
    metadata = FileSystemReader(stored).read_metadata().state_dict_metadata
    for name, value in values.items():
        if getattr(metadata.get(f"model.vlm.{name}"), "size", None) != value.shape:
            raise ValueError(f"{stored.parent} is of another model: its {name} differs or is missing")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # intended here
        dcp.load({"model": {f"vlm.{n}": t for n, t in values.items()}}, checkpoint_id=str(stored), no_dist=True)
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        policy.vlm.get_submodule(path).register_parameter(leaf, nn.Parameter(value))
    return adapters


def merged_weights(policy: Policy, model_path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (transformers' name, weight) of a policy with the adapters of `attach_stored`. The base's weights are read
    one at a time and merged with the adapters as in training."""
    assert policy.adapters is not None
    weights = dict(policy.named_weights())
    files = WeightFiles.open(
        model_path, FAMILIES[policy.vlm.config.model_type], {name: p.shape for name, p in weights.items()}, also=(TIED,)
    )
    try:
        for name, p in weights.items():
            weight = files.read(name, tuple(slice(0, size) for size in p.shape)).to(p.dtype)
            yield name, policy.adapters.merged(name, weight)
    finally:
        files.close()


def check_base(policy: Policy, model_path: str, checkpoint: Path, meta: dict[str, Any]) -> None:
    """Raise ValueError if the folder does not hold the weights on which the checkpoint's adapters were trained."""
    digest = base_hash(policy.vlm, model_path)
    if digest != meta["base"]:
        raise ValueError(
            f"{checkpoint} has adapters of another base than {model_path}: its weights have the hash {meta['base']}, "
            f"those there {digest}; give its base with --model"
        )


def export_adapter(policy: Policy, out: Path, *, model_path: str, base: str) -> None:
    """Write only the adapters that `attach_stored` gave the policy, in peft's format."""
    assert policy.adapters is not None
    policy.adapters.base = base
    values = {name: p.detach() for name, p in policy.vlm.named_parameters() if is_factor(name)}
    save(out, policy.vlm, policy.adapters, values, model_path)
