"""Checkpoints of the learner: written beside, renamed when whole, the last few kept; and export for Hugging Face.

RUN/checkpoints/step_00000050/
    dcp/        parameters and optimizer, sharded (torch.distributed.checkpoint)
    rng/        random state of each rank
    meta.json   model fingerprint, trainer and intake state, step, version
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from learner.dist import Ranks, barrier
from learner.model import Policy
from learner.step import Trainer
from shared.types import PolicyVersion

_PREFIX = "step_"
_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Restored:
    """What a checkpoint holds besides the trainer, which is restored in place."""

    path: Path
    version: PolicyVersion
    intake: dict[str, Any]


def fingerprint(policy: Policy) -> str:
    """Names and shapes of all parameters, as 16 hex digits: the same for any number of ranks and any values."""
    shapes = sorted(f"{name}{list(p.shape)}" for name, p in policy.named_parameters())
    return hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first; what an interrupted write left behind is not among them."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if p.name.startswith(_PREFIX) and p.name[len(_PREFIX) :].isdigit()]
    return sorted((p for p in found if (p / "meta.json").exists()), key=lambda p: p.name)


def save(
    folder: Path,
    trainer: Trainer,
    ranks: Ranks,
    *,
    version: PolicyVersion,
    intake: dict[str, Any],
    keep: int,
    timeout_s: float = 600.0,
) -> Path:
    """Writes a checkpoint of the trainer's step; a collective. `intake` is rank 0's, plain JSON values."""
    final = folder / f"{_PREFIX}{trainer.num_steps:08d}"
    partial = folder / f".{final.name}.partial"
    if ranks.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "rng").mkdir(parents=True)
    barrier(ranks, timeout_s=timeout_s)
    model, optimizer = get_state_dict(trainer.policy, trainer.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=str(partial / "dcp"))
    torch.save(_rng_state(ranks), partial / "rng" / f"rank_{ranks.rank}.pt")
    barrier(ranks, timeout_s=timeout_s)
    if ranks.is_main:
        meta = {
            "schema": _SCHEMA,
            "fingerprint": fingerprint(trainer.policy),
            "model_type": trainer.policy.vlm.config.model_type,
            "trainer": trainer.state(),
            "version": version,
            "intake": intake,
        }
        _write(partial / "meta.json", json.dumps(meta, indent=1))
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    barrier(ranks, timeout_s=timeout_s)
    return final


def choose(folder: Path, resume: str) -> Path | None:
    """The checkpoint that `learner.resume` asks for: `never`, `auto` (the last whole one in `folder`) or a path."""
    if resume == "never":
        return None
    if resume == "auto":
        found = checkpoints(folder)
        return found[-1] if found else None
    path = Path(resume)
    if not (path / "meta.json").exists():
        raise ValueError(
            f"learner.resume = {resume!r} is no checkpoint: it has no meta.json; give one like step_00000050"
        )
    return path


def load(path: Path, trainer: Trainer, ranks: Ranks) -> Restored:
    """Restores parameters, optimizer, counters and random state in place; a collective, on any number of ranks.

    ValueError if the checkpoint is of another model or written by another schema.
    """
    meta = json.loads((path / "meta.json").read_text())
    if meta["schema"] != _SCHEMA:
        raise ValueError(f"checkpoint {path} has schema {meta['schema']}, this learner reads {_SCHEMA}; start anew")
    mine = fingerprint(trainer.policy)
    if meta["fingerprint"] != mine:
        raise ValueError(
            f"checkpoint {path} is of another model ({meta['model_type']}, fingerprint {meta['fingerprint']}; "
            f"model.path has {trainer.policy.vlm.config.model_type}, {mine}); use its model or learner.resume = 'never'"
        )
    settings = [{k: v for k, v in group.items() if k != "params"} for group in trainer.optimizer.param_groups]
    model, optimizer = get_state_dict(trainer.policy, trainer.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=str(path / "dcp"))  # in place
    set_state_dict(trainer.policy, trainer.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    for group, own in zip(trainer.optimizer.param_groups, settings, strict=True):
        group.update(own)  # rates and decay are the recipe's, also when it has changed
    trainer.load_state(meta["trainer"])
    rng = path / "rng" / f"rank_{ranks.rank}.pt"
    if rng.exists():
        _restore_rng(torch.load(rng, weights_only=True), ranks)
    return Restored(path, meta["version"], meta["intake"])


def export(
    folder: Path,
    trainer: Trainer,
    ranks: Ranks,
    *,
    weights: Callable[[], Iterator[tuple[str, torch.Tensor]]],
    model_path: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a folder that transformers and SGLang load: weights, config, tokenizer, image processor; a collective.

    `weights` yields every whole parameter under its Hugging Face name (see `learner.publisher.gathered`).
    """
    tensors = {}
    for name, tensor in weights():
        if ranks.is_main:
            tensors[name] = tensor.to("cpu", dtype or tensor.dtype, copy=True).contiguous()
    if not ranks.is_main:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for source in Path(model_path).iterdir():
        if source.suffix in (".json", ".jinja", ".txt", ".model") and "safetensors" not in source.name:
            shutil.copyfile(source, folder / source.name)
    partial = folder / ".model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, folder / "model.safetensors")


def _rng_state(ranks: Ranks) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(ranks.device)
    return state


def _restore_rng(state: dict[str, torch.Tensor], ranks: Ranks) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and ranks.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], ranks.device)


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
