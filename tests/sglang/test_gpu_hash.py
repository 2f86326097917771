"""The learner's form of SGLang's GPU hash against SGLang's own kernels, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import torch
from safetensors.torch import save_file

from learner.weights.gpu_hash import TILE, gpu_hash

PYTHON = Path(".venv-sglang/bin/python")
SIZES = (
    (1, torch.uint8),
    (5, torch.uint8),
    (257, torch.bfloat16),
    (4099, torch.float16),
    (2 * TILE + 1, torch.float32),
)


def test_the_hash_is_that_of_sglangs_kernels(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{n} of {t}": (torch.randn(n, generator=generator) * 100).to(t) for n, t in SIZES}
    save_file(tensors, tmp_path / "tensors.safetensors")
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [PYTHON, "-P", "tests/sglang/hash_tensors.py", tmp_path / "tensors.safetensors"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert json.loads(ended.stdout.splitlines()[-1]) == {name: gpu_hash(values) for name, values in tensors.items()}
