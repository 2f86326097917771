"""Export of a checkpoint to a Hugging Face folder: python -m learner.export RUN/checkpoints/step_00000050 --out FOLDER

The folder holds all that transformers and engines load: weights in files of bounded size, with the names and layout of
the family's published checkpoints, config, tokenizer, chat template and image processor. Adapters are merged into their
base; with --adapter only the adapters are written, in the peft library's format.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import safe_open

from learner.checkpoints.hf_export import export_checkpoint
from learner.checkpoints.lora_files import CONFIG
from shared.util.own_commands import called_as


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=called_as("python -m learner.export"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--model", default="", help="the model's folder, if it is no longer where the recipe had it")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of the weights written (default: model.dtype)"
    )
    parser.add_argument("--adapter", action="store_true", help="write the adapter alone, for the peft library")
    options = parser.parse_args(argv)
    try:
        # Files of an earlier export would be loaded instead of these.
        if options.out.exists() and any(options.out.iterdir()):
            raise ValueError(f"--out {options.out} is not empty: choose another folder")
        dtype = getattr(torch, options.dtype) if options.dtype else None
        how = {"model_path": options.model, "dtype": dtype, "adapter": options.adapter}
        export_checkpoint(options.checkpoint, options.out, **how)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(describe_export(options.out))
    return 0


def describe_export(folder: Path) -> str:
    """Return in one line what was written, and how it is loaded."""
    files = sorted(folder.glob("*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in files)
    size = f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
    if (folder / CONFIG).exists():
        return (
            f"{folder}: an adapter of {size}, for the peft library: PeftModel.from_pretrained(model, {str(folder)!r})"
        )
    with safe_open(files[0], framework="pt") as opened:
        dtype = opened.get_slice(next(iter(opened.keys()))).get_dtype()
    needs = "" if find_spec("torchvision") else "; AutoProcessor needs pip install torchvision too"
    written = f"{len(files)} file{'s' if len(files) > 1 else ''} of weights ({size}, {dtype})"
    return f"{folder}: {written}, tokenizer and image processor, for transformers and engines{needs}"


if __name__ == "__main__":
    sys.exit(main())
