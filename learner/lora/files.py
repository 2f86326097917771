"""An adapter alone, in the files of the peft library: adapter_config.json and adapter_model.safetensors.

Names of tensors are `base_model.model.` and the path of the module in transformers' model, then `lora_A.weight` [r, in]
and `lora_B.weight` [out, r]. Of a stack of E experts they are [E r, in] and [out, r E], the expert varying slowest in
the first and fastest in the second; where a module has two such stacks, peft wraps the first one again for the second,
so that the first one's names go on with `base_layer`.
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

from learner.lora.adapters import Adapted, Adapters
from learner.lora.attach import fill
from shared.weights.adapters import factor_names

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base"  # in the tensors' metadata: the hash of the base's weights, where Pronk wrote them
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


def save(folder: Path, vlm: nn.Module, adapters: Adapters, values: Mapping[str, Tensor], base_path: str) -> None:
    """`values`: whole factors by the names that the model has them under. OSError when the disk refuses."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for each in adapters.of.values():
        stem = each.name.rpartition(".")[0]
        names = _names(each)
        for name, factor in zip(names, (each.a, each.b), strict=True):
            value = values[f"{stem}.{factor}"]
            tensors[name] = _flattened(value, first=factor == each.a).contiguous()
    try:
        save_file(tensors, folder / TENSORS, metadata={"format": "pt", BASE: adapters.base})
    except SafetensorError as error:
        raise OSError(f"{folder / TENSORS} cannot be written: {error}") from error
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
    """The values of a model's adapters, from such a folder; each rank takes its parts.

    ValueError, in one line, for one of another base, rank, alpha, of other targets or shapes, or of a kind of its own.
    """
    config = _config(folder)
    said = f"learner.lora.adapter = {folder!r}"
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{said} is no LoRA: its peft_type is {config.get('peft_type')!r}")
    if config.get("r") != adapters.rank:
        raise ValueError(f"{said} has r = {config.get('r')}, but learner.lora.rank = {adapters.rank}; set it to that")
    alpha = adapters.scale * adapters.rank
    if abs(float(config.get("lora_alpha") or 0) - alpha) > 1e-6 * alpha:
        raise ValueError(
            f"{said} has lora_alpha = {config.get('lora_alpha')}, but learner.lora.alpha = {alpha:g}; set it to that"
        )
    for name, plain in PLAIN.items():
        if (config.get(name) or None) not in (plain or None, None):
            raise ValueError(f"{said} has {name} = {config[name]!r}, which the learner's adapters have not")
    if (start := config.get("init_lora_weights")) not in KEEP_BASE:
        raise ValueError(
            f"{said} has init_lora_weights = {start!r}, which changed the base's weights; save it from peft with "
            "path_initial_model_for_weight_conversion"
        )
    try:
        with safe_open(Path(folder) / TENSORS, "pt") as file:
            _check_base(said, (file.metadata() or {}).get(BASE, ""), adapters.base)
            _check_tensors(said, {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}, adapters)
            for each in adapters.of.values():
                a, b = each.factors
                for name, mine in zip(_names(each), (a, b), strict=True):
                    fill(mine, _unflattened(file.get_tensor(name), mine, first=mine is a))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{said}: {TENSORS} cannot be read: {' '.join(str(error).split())[:200]}") from error


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


def _check_base(said: str, theirs: str, own: str) -> None:
    if theirs and own and theirs != own:
        raise ValueError(
            f"{said} is of another model: its base has the hash {theirs}, that of model.path is {own}; set model.path "
            "to the model that it was trained on, or leave it out"
        )


def _check_tensors(said: str, found: dict[str, list[int]], adapters: Adapters) -> None:
    wanted = {}
    for each in adapters.of.values():
        for name, factor, first in zip(_names(each), each.factors, (True, False), strict=True):
            wanted[name] = [*_flattened(torch.empty(factor.shape, device="meta"), first=first).shape]
    cure = "set learner.lora.targets to what it adapts"
    if missing := [name for name in wanted if name not in found]:
        raise ValueError(f"{said} is of other targets: it lacks {missing[0]} and {len(missing) - 1} more; {cure}")
    if surplus := [name for name in found if name not in wanted]:
        raise ValueError(f"{said} is of other targets: it has {surplus[0]} and {len(surplus) - 1} more; {cure}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ValueError(f"{said} is of another model: {name} is {found[name]} instead of {shape}")


def _names(each: Adapted) -> tuple[str, str]:
    """Of A and B."""
    path, _, own = each.name.rpartition(".")
    stacked = own != "weight"
    first = stacked and next(name for name, p in each.module.named_parameters() if p.ndim == 3) == own
    inner = ".base_layer" if first else ""
    return factor_names(f"{path}{inner}")


def _flattened(value: Tensor, *, first: bool) -> Tensor:
    """As peft holds it."""
    if value.ndim == 2:
        return value
    return value.flatten(0, 1) if first else value.permute(1, 2, 0).flatten(1)


def _unflattened(value: Tensor, like: Tensor, *, first: bool) -> Tensor:
    """As the model holds it."""
    if like.ndim == 2:
        return value
    experts = like.shape[0]
    return value.unflatten(0, (experts, -1)) if first else value.unflatten(1, (-1, experts)).permute(2, 0, 1)


def _modules(vlm: nn.Module, adapters: Adapters) -> list[str] | str:
    """The adapted linears: the last parts of their names where no other module is called so, else a pattern."""
    own = [name.removesuffix(".weight") for name in adapters.of if name.endswith(".weight")]
    lasts = sorted({name.rpartition(".")[2] for name in own})
    others = {name for name, _ in vlm.named_modules()} - {*own}
    if not any(name.rpartition(".")[2] in lasts for name in others):
        return lasts
    return "|".join(sorted({re.sub(r"\\\.\d+", r"\\.\\d+", re.escape(name)) for name in own}))


def _parameters(adapters: Adapters) -> list[str] | None:
    found = {".".join(name.split(".")[-3:]) for name in adapters.of if not name.endswith(".weight")}
    return sorted(found, key=lambda name: "gate_up" not in name) or None
