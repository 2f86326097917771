"""Adapters in files of the peft library: adapter_config.json and adapter_model.safetensors.

A tensor's name is `base_model.model.`, the path of the module in transformers' model, then `lora_A.weight` [r, in] or
`lora_B.weight` [out, r]. For a stack of E experts they are [E r, in], where the expert varies slowest, and [out, r E],
where it varies fastest. If a module has two such stacks, peft wraps the first one again for the second, so that the
path of the first one ends with `base_layer`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from learner.model.lora_adapters import Adapted, Adapters
from learner.model.lora_attach import fill
from shared.engine.adapter_names import factor_names

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# Key in the tensors' metadata: the hash of the base's weights, if Pronk wrote the file.
BASE = "base"
PLAIN: dict[str, Any] = {
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
    "trainable_token_indices": None,
}
"""What an adapter of peft may have besides, and what it is in ours."""
KEEP_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` by which peft leaves the base as it is; by others, as pissa, it makes another one."""


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file that others may read as the umask says; safetensors itself keeps it to its owner. Raise
    OSError if the disk refuses."""
    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    path.chmod(mode)


def save(folder: Path, vlm: nn.Module, adapters: Adapters, values: Mapping[str, Tensor], base_path: str) -> None:
    """Write adapters. `values`: whole factors by their names in the model. Raise OSError if the disk refuses."""
    folder.mkdir(exist_ok=True)
    tensors = {}
    for each in adapters.of.values():
        stem = each.name.rpartition(".")[0]
        names = _names(each)
        for name, factor in zip(names, (each.a, each.b), strict=True):
            value = values[f"{stem}.{factor}"]
            tensors[name] = _flattened(value, first=factor == each.a).contiguous()
    write_tensors(tensors, folder / TENSORS, {"format": "pt", BASE: adapters.base})
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_path,
        "r": adapters.rank,
        "lora_alpha": adapters.scale * adapters.rank,
        "lora_dropout": 0.0,
        "inference_mode": True,
        "target_modules": _modules(vlm, adapters),
        "target_parameters": _parameters(adapters),
        **PLAIN,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def load(folder: str, adapters: Adapters) -> None:
    """Load the values of a model's adapters from a folder that `save` or peft wrote; each rank takes its part.

    Raise ValueError, in one line, if the base, rank, alpha, targets or shapes differ, or if it uses options of peft
    that the learner does not support.
    """
    config = _config(folder)
    setting = f"learner.lora.adapter = {folder!r}"
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{setting} is no LoRA: its peft_type is {config.get('peft_type')!r}")
    if config.get("r") != adapters.rank:
        raise ValueError(
            f"{setting} has r = {config.get('r')}, but learner.lora.rank = {adapters.rank}; set it to that"
        )
    alpha = adapters.scale * adapters.rank
    if abs(float(config.get("lora_alpha") or 0) - alpha) > 1e-6 * alpha:
        raise ValueError(
            f"{setting} has lora_alpha = {config.get('lora_alpha')}, but learner.lora.alpha = {alpha:g}; set it to that"
        )
    for name, plain in PLAIN.items():
        if (config.get(name) or None) not in (plain or None, None):
            raise ValueError(f"{setting} has {name} = {config[name]!r}, which the learner's adapters have not")
    if (start := config.get("init_lora_weights")) not in KEEP_BASE:
        raise ValueError(
            f"{setting} has init_lora_weights = {start!r}, which changed the base's weights; save it from peft with "
            "path_initial_model_for_weight_conversion"
        )
    try:
        with safe_open(Path(folder) / TENSORS, "pt") as file:
            _check_base(setting, (file.metadata() or {}).get(BASE, ""), adapters.base)
            _check_tensors(setting, {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}, adapters)
            for each in adapters.of.values():
                a, b = each.factors
                for name, parameter in zip(_names(each), (a, b), strict=True):
                    fill(parameter, _unflattened(file.get_tensor(name), parameter, first=parameter is a))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{setting}: {TENSORS} cannot be read: {' '.join(str(error).split())[:200]}") from error


def _config(folder: str) -> dict[str, Any]:
    path = Path(folder) / CONFIG
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"learner.lora.adapter = {folder!r} is no adapter: {path} cannot be read: {why}") from error
    if not isinstance(config, dict):
        raise ValueError(f"learner.lora.adapter = {folder!r} is no adapter: {path} is no description of one")
    return config


def _check_base(setting: str, theirs: str, expected: str) -> None:
    if theirs and expected and theirs != expected:
        raise ValueError(
            f"{setting} is of another model: its base has the hash {theirs}, that of model.path is {expected}; "
            "set model.path to the model that it was trained on, or leave it out"
        )


def _check_tensors(setting: str, shapes: dict[str, list[int]], adapters: Adapters) -> None:
    wanted = {}
    for each in adapters.of.values():
        for name, factor, first in zip(_names(each), each.factors, (True, False), strict=True):
            wanted[name] = [*_flattened(torch.empty(factor.shape, device="meta"), first=first).shape]
    hint = "set learner.lora.targets to what it adapts"
    if missing := [name for name in wanted if name not in shapes]:
        raise ValueError(f"{setting} is of other targets: it lacks {missing[0]} and {len(missing) - 1} more; {hint}")
    if surplus := [name for name in shapes if name not in wanted]:
        raise ValueError(f"{setting} is of other targets: it has {surplus[0]} and {len(surplus) - 1} more; {hint}")
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise ValueError(f"{setting} is of another model: {name} is {shapes[name]} instead of {shape}")


def _names(each: Adapted) -> tuple[str, str]:
    """Return the names of A and B in the file."""
    path, _, leaf = each.name.rpartition(".")
    stacked = leaf != "weight"
    first = stacked and next(name for name, p in each.module.named_parameters() if p.ndim == 3) == leaf
    inner = ".base_layer" if first else ""
    return factor_names(f"{path}{inner}")


def _flattened(value: Tensor, *, first: bool) -> Tensor:
    """Return a factor in the shape that peft's files have."""
    if value.ndim == 2:
        return value
    return value.flatten(0, 1) if first else value.permute(1, 2, 0).flatten(1)


def _unflattened(value: Tensor, like: Tensor, *, first: bool) -> Tensor:
    """Return a factor in the shape that the model has."""
    if like.ndim == 2:
        return value
    experts = like.shape[0]
    return value.unflatten(0, (experts, -1)) if first else value.unflatten(1, (-1, experts)).permute(2, 0, 1)


def _modules(vlm: nn.Module, adapters: Adapters) -> list[str] | str:
    """Return the names of the adapted linears: their last parts if no other module has one of these, otherwise a
    pattern."""
    names = [name.removesuffix(".weight") for name in adapters.of if name.endswith(".weight")]
    lasts = sorted({name.rpartition(".")[2] for name in names})
    others = {name for name, _ in vlm.named_modules()} - {*names}
    if not any(name.rpartition(".")[2] in lasts for name in others):
        return lasts
    return "|".join(sorted({re.sub(r"\\\.\d+", r"\\.\\d+", re.escape(name)) for name in names}))


def _parameters(adapters: Adapters) -> list[str] | None:
    names = {".".join(name.split(".")[-3:]) for name in adapters.of if not name.endswith(".weight")}
    return sorted(names, key=lambda name: "gate_up" not in name) or None
