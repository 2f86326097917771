"""Export of a checkpoint's weights as a Hugging Face folder; the command is `python -m learner.export`.

The folder holds all that transformers and engines load: weights in files of bounded size, with the names and layout of
the family's published checkpoints, config, tokenizer, chat template and image processor. Adapters are merged into their
base, or written alone in the peft library's format.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from learner.checkpoints.checkpoint_folder import list_checkpoints
from learner.checkpoints.lora_files import write_tensors
from learner.checkpoints.lora_stored import attach_stored, check_base, export_adapter, merged_weights
from learner.checkpoints.wholeness import check_alone
from learner.model.policy import Policy, empty_policy
from learner.weights.gathering import published
from shared.config.lora_section import LoraConfig
from shared.vision import VisionSpec

FILE_BYTES = 4 * 2**30
INDEX = "model.safetensors.index.json"


def export(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    *,
    model_path: str,
    dtype: torch.dtype | None = None,
    is_main: bool = True,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write `weights`, which have published names and layout, and the other files of `model_path` to `folder`.

    The folder is made if need be, but none above it: somebody may have moved those away.
    A collective if gathering the weights is one; only rank 0 writes. At most `file_bytes`, or one larger parameter, are
    held in memory at once. Raise OSError if the disk refuses.
    """
    if is_main:
        folder.mkdir(exist_ok=True)
        for source in Path(model_path).iterdir():
            if source.suffix in (".json", ".jinja", ".txt", ".model") and "safetensors" not in source.name:
                shutil.copyfile(source, folder / source.name)
        _set_dtype(folder / "config.json", dtype)
    files: list[dict[str, Tensor]] = [{}]
    file_of: dict[str, int] = {}
    held = total = 0
    for name, tensor in weights:
        if not is_main:
            continue
        copy = tensor.detach().to("cpu", dtype or tensor.dtype, copy=True).contiguous()
        if files[-1] and held + copy.nbytes > file_bytes:
            write_tensors(files[-1], folder / f".part_{len(files) - 1}", {"format": "pt"})
            files[-1].clear()
            files.append({})
            held = 0
        files[-1][name] = copy
        file_of[name] = len(files) - 1
        held, total = held + copy.nbytes, total + copy.nbytes
    if is_main:
        write_tensors(files[-1], folder / f".part_{len(files) - 1}", {"format": "pt"})
        _name_files(folder, file_of, len(files), total)


def _name_files(folder: Path, file_of: dict[str, int], count: int, total: int) -> None:
    """Name the files: a single one is model.safetensors; several are numbered, with an index of the tensors in each."""
    names = ["model.safetensors"]
    if count > 1:
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        index = {"metadata": {"total_size": total}, "weight_map": {name: names[i] for name, i in file_of.items()}}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for i, name in enumerate(names):
        os.replace(folder / f".part_{i}", folder / name)


def _set_dtype(config: Path, dtype: torch.dtype | None) -> None:
    """Write the dtype of the weights into a model's config.json, where it names one: it is that in which they are
    loaded."""
    if dtype is None or not config.is_file():
        return
    values = json.loads(config.read_text(encoding="utf-8"))
    for section in (values, *(value for value in values.values() if isinstance(value, dict))):
        section.update({key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in section})
    config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def export_checkpoint(
    checkpoint: Path, out: Path, *, model_path: str, dtype: torch.dtype | None, adapter: bool = False
) -> None:
    """Export a checkpoint in one process, without an optimizer. `dtype`: of the weights written, the recipe's if None;
    `adapter`: write only its adapters.

    Raise ValueError if it is no checkpoint, is damaged, or is of another model or base, or if `adapter` is set and it
    has no adapters.
    """
    if not (checkpoint / "meta.json").exists():
        if not checkpoint.is_dir():
            raise ValueError(f"{checkpoint}: there is no such folder; give a checkpoint, RUN/checkpoints/step_NUMBER")
        kept = list_checkpoints(checkpoint / "checkpoints") or list_checkpoints(checkpoint)
        cure = f"one of its checkpoints, such as {kept[-1]}" if kept else "RUN/checkpoints/step_NUMBER"
        raise ValueError(f"{checkpoint} is no checkpoint: it has no meta.json; give {cure}")
    meta = check_alone(checkpoint)
    model, lora = meta["recipe"]["model"], LoraConfig(**meta["recipe"]["learner"].get("lora", {}))
    out.parent.mkdir(parents=True, exist_ok=True)
    path, stored, computed = model_path or model["path"], checkpoint / "dcp", getattr(torch, model["dtype"])
    if adapter and not lora.on:
        raise ValueError(f"{checkpoint} has no adapter: all weights were trained; leave --adapter out")
    if lora.on:
        policy = empty_policy(path, VisionSpec.load(path))
        check_base(policy, path, checkpoint, meta)
        if adapter:
            attach_stored(policy, stored, lora, computed)
            export_adapter(policy, out, model_path=path, base=meta["base"])
            return
    export_stored(stored, out, model_path=path, dtype=dtype or computed, lora=lora, computed=computed)


def export_stored(
    stored: Path,
    out: Path,
    *,
    model_path: str,
    dtype: torch.dtype | None,
    file_bytes: int = FILE_BYTES,
    lora: LoraConfig | None = None,
    computed: torch.dtype | None = None,
) -> None:
    """Export from a checkpoint's folder `dcp`, without a collective and whatever its critic.

    It takes at most twice the memory of `export`. `computed`: the recipe's dtype, if it is not `dtype`. Raise
    ValueError if the checkpoint is of another model than `model_path`.
    """
    policy = empty_policy(model_path, VisionSpec.load(model_path))
    if lora is not None and lora.on:
        attach_stored(policy, stored, lora, computed or dtype or torch.float32)
        weights = (published(policy, *weight) for weight in merged_weights(policy, model_path))
        export(out, weights, model_path=model_path, dtype=dtype, file_bytes=file_bytes)
        return
    shapes: dict[str, Any] = {
        name: metadata.size
        for name, metadata in FileSystemReader(stored).read_metadata().state_dict_metadata.items()
        if isinstance(metadata, TensorStorageMetadata)
    }
    wrong = [n for n, parameter in policy.named_weights() if shapes.get(f"model.vlm.{n}") != parameter.shape]
    if wrong:
        raise ValueError(f"{stored.parent} is of another model than {model_path}: its {wrong[0]} differs or is missing")
    export(out, _read(policy, stored, file_bytes), model_path=model_path, dtype=dtype, file_bytes=file_bytes)


def _read(policy: Policy, stored: Path, most_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (published name, whole parameter) of the stored policy. At most `most_bytes`, or one larger parameter, are
    read at once."""
    held: dict[str, Tensor] = {}
    for name, parameter in [*policy.named_weights(), ("", None)]:
        full = parameter is None or sum(t.nbytes for t in held.values()) + parameter.nbytes > most_bytes
        if full and held:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # intended here
                dcp.load({"model": {f"vlm.{n}": t for n, t in held.items()}}, checkpoint_id=str(stored), no_dist=True)
            yield from (published(policy, n, t) for n, t in held.items())
            held = {}
        if parameter is not None:
            held[name] = torch.empty(parameter.shape, dtype=parameter.dtype)
