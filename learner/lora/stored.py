"""Adapters of a checkpoint, in one process without a trainer: the weights they make with their base, or they alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader

from learner.lora.adapters import Adapters, is_factor
from learner.lora.attach import attach
from learner.lora.base import TIED, base_hash
from learner.lora.files import save
from learner.model.policy import Policy
from learner.model.weight_files import WeightFiles
from shared.settings.lora import LoraConfig
from shared.weights.families import FAMILIES


def attach_stored(policy: Policy, stored: Path, lora: LoraConfig, dtype: torch.dtype) -> Adapters:
    """Gives an empty policy the adapters in a checkpoint's folder `dcp`, whole and on the CPU. `dtype`: the recipe's.
    ValueError if they are of another model."""
    policy.adapters = adapters = attach(policy.vlm, lora, dtype)
    values = {name: torch.empty(p.shape) for name, p in policy.vlm.named_parameters() if is_factor(name)}
    known = FileSystemReader(stored).read_metadata().state_dict_metadata
    for name, value in values.items():
        if getattr(known.get(f"model.vlm.{name}"), "size", None) != value.shape:
            raise ValueError(f"{stored.parent} is of another model: its {name} differs or is missing")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # it is the intent
        dcp.load({"model": {f"vlm.{n}": t for n, t in values.items()}}, checkpoint_id=str(stored), no_dist=True)
    for name, value in values.items():
        path, _, own = name.rpartition(".")
        policy.vlm.get_submodule(path).register_parameter(own, nn.Parameter(value))
    return adapters


def merged_weights(policy: Policy, model_path: str) -> Iterator[tuple[str, Tensor]]:
    """Of a policy with `attach_stored`'s adapters, by transformers' names: the base's weights, one after the other,
    merged with them as they were trained."""
    assert policy.adapters is not None
    own = dict(policy.named_weights())
    files = WeightFiles.open(
        model_path, FAMILIES[policy.vlm.config.model_type], {name: p.shape for name, p in own.items()}, also=(TIED,)
    )
    try:
        for name, p in own.items():
            weight = files.read(name, tuple(slice(0, size) for size in p.shape)).to(p.dtype)
            yield name, policy.adapters.merged(name, weight)
    finally:
        files.close()


def check_base(policy: Policy, model_path: str, checkpoint: Path, meta: dict[str, Any]) -> None:
    """ValueError if the folder does not hold the weights beneath the checkpoint's adapters."""
    found = base_hash(policy.vlm, model_path)
    if found != meta["base"]:
        raise ValueError(
            f"{checkpoint} has adapters of another base than {model_path}: its weights have the hash {meta['base']}, "
            f"those there {found}; give its base with --model"
        )


def export_adapter(policy: Policy, out: Path, *, model_path: str, base: str) -> None:
    """Of a policy with `attach_stored`'s adapters, these alone, as peft has them."""
    assert policy.adapters is not None
    policy.adapters.base = base
    values = {name: p.detach() for name, p in policy.vlm.named_parameters() if is_factor(name)}
    save(out, policy.vlm, policy.adapters, values, model_path)
