"""In SGLang's environment, with TRITON_INTERPRET=1: its own hash of each tensor in FILE, by its own kernels, which
Triton's interpreter runs on the CPU. Prints one JSON object, names to hashes.

    .venv-sglang/bin/python -P tests/sglang/hash_tensors.py FILE
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

SOURCE = "kernels/ops/memory/gpu_tensor_hash.py"


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU, for which the function asks."""

    is_cuda = True


def server_hash() -> Any:
    """The function, by its file: it needs nothing else of the package, which takes long to import."""
    package = find_spec("sglang")
    assert package and package.submodule_search_locations
    spec = spec_from_file_location("gpu_tensor_hash", Path(package.submodule_search_locations[0]) / SOURCE)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.gpu_tensor_hash


if __name__ == "__main__":
    gpu_tensor_hash, found = server_hash(), {}
    for name, tensor in load_file(sys.argv[1]).items():
        value = gpu_tensor_hash(tensor.as_subclass(OnGpu), reduce_chunk=4)  # adding up is the same in any groups
        found[name] = f"{value:016x}"
    print(json.dumps(found))
