"""Makes a mixture of experts that computes the same as a dense model: each expert is a copy of its layer's MLP.

Bytes are copied from file to file, without torch: the doctor makes one in milliseconds.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np

WEIGHTS = "model.safetensors"
BITS = {"BF16": np.uint16, "F32": np.uint32}
"""An integer of the size of a dtype of safetensors."""
MLP = re.compile(r"(model\.language_model\.layers\.\d+\.mlp)\.gate_proj\.weight")


def mixture_of(dense: str | Path, folder: Path, *, num_experts: int = 4, chosen: int = 2) -> Path:
    """Write a mixture made from the Qwen3-VL in `dense`, in the published layout; routers are random (Komatsuzaki et
    al., 2023, "Sparse Upcycling"). The weights of the chosen experts sum to 1, so that any choice gives the MLP's
    output."""
    shutil.copytree(dense, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(_as_mixture(config, num_experts, chosen), indent=2))
    weights, dtype = _read(folder / WEIGHTS)
    draw = np.random.default_rng(0)
    for stem in [match[1] for name in [*weights] if (match := MLP.fullmatch(name))]:
        gate, up, down = (weights.pop(f"{stem}.{part}_proj.weight") for part in ("gate", "up", "down"))
        for name, matrix in (("gate_up", np.concatenate((gate, up))), ("down", down)):
            weights[f"{stem}.experts.{name}_proj"] = np.broadcast_to(matrix.T, (num_experts, *matrix.T.shape))
        router = draw.normal(scale=gate.shape[1] ** -0.5, size=(num_experts, gate.shape[1])).astype(np.float32)
        bits = router.view(np.uint32)
        weights[f"{stem}.gate.weight"] = bits if dtype == "F32" else (bits >> 16).astype(np.uint16)
    _write(folder / WEIGHTS, weights, dtype)
    return folder


def _as_mixture(config: dict[str, Any], num_experts: int, chosen: int) -> dict[str, Any]:
    text = config["text_config"]
    text |= {"model_type": "qwen3_vl_moe_text", "num_experts": num_experts, "num_experts_per_tok": chosen}
    text |= {"moe_intermediate_size": text["intermediate_size"], "decoder_sparse_step": 1, "mlp_only_layers": []}
    vision = config["vision_config"] | {"model_type": "qwen3_vl_moe_vision"}
    own = {"model_type": "qwen3_vl_moe", "architectures": ["Qwen3VLMoeForConditionalGeneration"]}
    return config | own | {"text_config": text, "vision_config": vision}


def _read(path: Path) -> tuple[dict[str, np.ndarray], str]:
    """Return each tensor as integers with the same bits, and the dtype of all tensors. A safetensors file consists of
    the header's length in 8 bytes, the header in JSON, and the tensors' bytes."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    (dtype,) = {each["dtype"] for each in header.values()}
    weights = {}
    for name, each in header.items():
        first, last = each["data_offsets"]
        weights[name] = np.frombuffer(content[start + first : start + last], BITS[dtype]).reshape(each["shape"])
    return weights, dtype


def _write(path: Path, weights: dict[str, np.ndarray], dtype: str) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, bits in weights.items():
        header[name] = {"dtype": dtype, "shape": bits.shape, "data_offsets": (end, end + bits.nbytes)}
        end += bits.nbytes
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)  # so that the tensors begin at a multiple of 8
    path.write_bytes(b"".join((len(told).to_bytes(8, "little"), told, *(bits.tobytes() for bits in weights.values()))))
