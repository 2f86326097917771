"""From a checkpoint to a Hugging Face folder: python -m learner.export RUN/checkpoints/step_00000050 --out FOLDER

Weights in files of bounded size, named and laid out as the published checkpoints of the model's family are, config,
tokenizer, chat template and image processor: what transformers and engines load.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from learner.model.policy import load_policy
from learner.weights.buckets import gathered
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
    """Writes `weights`, which `learner.weights.buckets.gathered` gives, and `model_path`'s other files to `folder`.

    A collective where gathering the weights is one; rank 0 alone writes. At most
    `file_bytes`, or one parameter that is larger, is held at once.
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
    save_file(tensors, path, metadata={"format": "pt"})


def export_checkpoint(checkpoint: Path, out: Path, *, model_path: str, dtype: torch.dtype | None) -> None:
    """In one process, without an optimizer. ValueError: no such checkpoint, or of another model."""
    if not (checkpoint / "meta.json").exists():
        raise ValueError(f"{checkpoint} is no checkpoint: it has no meta.json; give one like checkpoints/step_00000050")
    path = model_path or json.loads((checkpoint / "meta.json").read_text())["recipe"]["model"]["path"]
    policy = load_policy(path, VisionSpec.load(path))
    state = {name: tensor for name, tensor in policy.state_dict().items() if not name.startswith("value_head.")}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process is the intent
        dcp.load({"model": state}, checkpoint_id=str(checkpoint / "dcp"), no_dist=True)  # in place, whatever the critic
    export(out, gathered(policy), model_path=path, dtype=dtype)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--model", default="", help="the model's folder, if it is no longer where the recipe had it")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights written")
    options = parser.parse_args(argv)
    try:
        dtype = getattr(torch, options.dtype)
        export_checkpoint(options.checkpoint, options.out, model_path=options.model, dtype=dtype)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
