"""From a checkpoint to a Hugging Face folder: python -m learner.export RUN/checkpoints/step_00000050 --out FOLDER

Weights in files of bounded size, named and laid out as the published checkpoints of the model's family are, config,
tokenizer, chat template and image processor: what transformers and engines load. Adapters are merged into their base;
with --adapter they are written alone, as the peft library has them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from learner.checkpoints.wholeness import check_alone
from learner.lora.stored import attach_stored, check_base, export_adapter, merged_weights
from learner.model.policy import Policy, empty_policy
from learner.weights.buckets import published
from shared.settings.lora import LoraConfig
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
    """Writes `weights`, named and laid out as published, and `model_path`'s other files to `folder`.

    A collective where gathering the weights is one; rank 0 alone writes. At most
    `file_bytes`, or one parameter that is larger, is held at once. OSError when the disk refuses.
    """
    if is_main:
        folder.mkdir(parents=True, exist_ok=True)
        for source in Path(model_path).iterdir():
            if source.suffix in (".json", ".jinja", ".txt", ".model") and "safetensors" not in source.name:
                shutil.copyfile(source, folder / source.name)
    files: list[dict[str, Tensor]] = [{}]
    place: dict[str, int] = {}
    held = total = 0
    for name, tensor in weights:
        if not is_main:
            continue
        copy = tensor.detach().to("cpu", dtype or tensor.dtype, copy=True).contiguous()
        if files[-1] and held + copy.nbytes > file_bytes:
            _save(files[-1], folder / f".part_{len(files) - 1}")
            files[-1].clear()
            files.append({})
            held = 0
        files[-1][name] = copy
        place[name] = len(files) - 1
        held, total = held + copy.nbytes, total + copy.nbytes
    if is_main:
        _save(files[-1], folder / f".part_{len(files) - 1}")
        _name_files(folder, place, len(files), total)


def _name_files(folder: Path, place: dict[str, int], count: int, total: int) -> None:
    """One file is model.safetensors; several are numbered, with an index of who is where."""
    names = ["model.safetensors"]
    if count > 1:
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        index = {"metadata": {"total_size": total}, "weight_map": {name: names[i] for name, i in place.items()}}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for i, name in enumerate(names):
        os.replace(folder / f".part_{i}", folder / name)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def export_checkpoint(
    checkpoint: Path, out: Path, *, model_path: str, dtype: torch.dtype | None, adapter: bool = False
) -> None:
    """In one process, without an optimizer; `adapter`: its adapters alone. ValueError: no checkpoint, a damaged one, or
    one of another model or base, or without adapters where these are wanted."""
    if not (checkpoint / "meta.json").exists():
        raise ValueError(f"{checkpoint} is no checkpoint: it has no meta.json; give one like checkpoints/step_00000050")
    meta = check_alone(checkpoint)
    own, lora = meta["recipe"]["model"], LoraConfig(**meta["recipe"]["learner"].get("lora", {}))
    path, stored, computed = model_path or own["path"], checkpoint / "dcp", getattr(torch, own["dtype"])
    if adapter and not lora.on:
        raise ValueError(f"{checkpoint} has no adapter: all weights were trained; leave --adapter out")
    if lora.on:
        policy = empty_policy(path, VisionSpec.load(path))
        check_base(policy, path, checkpoint, meta)
        if adapter:
            attach_stored(policy, stored, lora, computed)
            export_adapter(policy, out, model_path=path, base=meta["base"])
            return
    export_stored(stored, out, model_path=path, dtype=dtype, lora=lora, computed=computed)


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
    """From a checkpoint's folder `dcp`, whatever its critic; no collective, and no more memory than `export` takes
    twice. `computed`: the dtype of the recipe, if it is not `dtype`. ValueError: of another model than that of
    `model_path`."""
    policy = empty_policy(model_path, VisionSpec.load(model_path))
    if lora is not None and lora.on:
        attach_stored(policy, stored, lora, computed or dtype or torch.float32)
        weights = (published(policy, *weight) for weight in merged_weights(policy, model_path))
        export(out, weights, model_path=model_path, dtype=dtype, file_bytes=file_bytes)
        return
    shapes: dict[str, Any] = {
        name: known.size
        for name, known in FileSystemReader(stored).read_metadata().state_dict_metadata.items()
        if isinstance(known, TensorStorageMetadata)
    }
    wrong = [n for n, parameter in policy.named_weights() if shapes.get(f"model.vlm.{n}") != parameter.shape]
    if wrong:
        raise ValueError(f"{stored.parent} is of another model than {model_path}: its {wrong[0]} differs or is missing")
    export(out, _read(policy, stored, file_bytes), model_path=model_path, dtype=dtype, file_bytes=file_bytes)


def _read(policy: Policy, stored: Path, most_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters of the stored policy, as published; at most so many bytes, or one, are read at once."""
    held: dict[str, Tensor] = {}
    for name, parameter in [*policy.named_weights(), ("", None)]:
        full = parameter is None or sum(t.nbytes for t in held.values()) + parameter.nbytes > most_bytes
        if full and held:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # it is the intent
                dcp.load({"model": {f"vlm.{n}": t for n, t in held.items()}}, checkpoint_id=str(stored), no_dist=True)
            yield from (published(policy, n, t) for n, t in held.items())
            held = {}
        if parameter is not None:
            held[name] = torch.empty(parameter.shape, dtype=parameter.dtype)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--model", default="", help="the model's folder, if it is no longer where the recipe had it")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights written")
    parser.add_argument("--adapter", action="store_true", help="write the adapter alone, for the peft library")
    options = parser.parse_args(argv)
    try:
        # Files of an earlier export would be loaded in the place of these.
        if options.out.exists() and any(options.out.iterdir()):
            raise ValueError(f"--out {options.out} is not empty: choose another folder")
        dtype = getattr(torch, options.dtype)
        how = {"model_path": options.model, "dtype": dtype, "adapter": options.adapter}
        export_checkpoint(options.checkpoint, options.out, **how)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
