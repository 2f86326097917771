"""Norms, rotations of heads and gated products of Qwen3-VL, forward and backward. On a GPU milliseconds for which it is
busy: with these kernels, with transformers' operations one after the other, with Liger's kernels where installed, and
with a copy of as many bytes as must be read and written. With --count, on any machine, the bytes that are. The last
line is one JSON object.

    python -m tests.bench.kernels.passes [--tokens 13880] [--patches 36480] [--hidden 2048] [--intermediate 6144]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextRMSNorm,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_vision,
)

from kernels.gpu import gpu_norm, gpu_swiglu, layer_norm
from tests.bench.kernels.gpu_times import busy_times

LAUNCHES = 20
HEAD, VISION_HEAD, VISION_HEADS = 128, 64, 16
VISION_HIDDEN = VISION_HEADS * VISION_HEAD
MAKE_NO_BYTES = ("empty", "zeros", "detach", "view")


@dataclass(frozen=True, slots=True)
class Pass:
    """One operation: who can do it, on which inputs and weights; `copied`: how many tensors as large as the first it
    must read and write, forward and backward."""

    contestants: dict[str, Callable[..., Tensor]]
    inputs: Sequence[Tensor]
    copied: tuple[int, int]
    weights: Sequence[Tensor] = ()


class Bytes(TorchDispatchMode):
    """What operations read and write, each tensor once an operation; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        read, written = (
            {id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)} for tree in ((args, kwargs), out)
        )
        places = {tensor.untyped_storage().data_ptr() for tensor in read.values()}
        is_view = any(tensor.untyped_storage().data_ptr() in places for tensor in written.values())
        if not is_view and not any(name in str(function) for name in MAKE_NO_BYTES):
            self.count += sum(tensor.numel() * tensor.element_size() for tensor in (*read.values(), *written.values()))
        return out


def passes(device: str, tokens: int, patches: int, hidden: int, intermediate: int, heads: int) -> dict[str, Pass]:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).bfloat16()

    of_rows, of_heads = (Qwen3VLTextRMSNorm(size).to(device).bfloat16() for size in (hidden, HEAD))
    cos, sin = drawn(2, 1, tokens, HEAD)
    vision_cos, vision_sin = torch.randn(2, patches, VISION_HEAD, device=device)

    def normed_heads(x: Tensor) -> Tensor:
        q = of_heads(x).transpose(1, 2)
        turned: Tensor = apply_rotary_pos_emb(q, q[:, :0], cos, sin)[0]
        return turned.transpose(1, 2)

    def turned_heads(x: Tensor) -> Tensor:
        turned: Tensor = apply_rotary_pos_emb_vision(x, x[:, :0], vision_cos, vision_sin)[0]
        return turned

    rows: dict[str, Any] = {"ours": lambda x: gpu_norm.rms_norm(x, of_rows.weight, 1e-6), "transformers": of_rows}
    of_patches = torch.nn.LayerNorm(VISION_HIDDEN, eps=1e-6).to(device).bfloat16()
    centred: dict[str, Any] = {
        "ours": lambda x: layer_norm.layer_norm(x, of_patches.weight, of_patches.bias, 1e-6),
        "transformers": of_patches,
    }
    gated: dict[str, Any] = {"ours": gpu_swiglu.swiglu, "transformers": lambda gate, up: F.silu(gate) * up}
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        rows["liger"] = lambda x: LigerRMSNormFunction.apply(x, of_rows.weight, 1e-6, 0.0, "llama", False)
        centred["liger"] = lambda x: LigerLayerNormFunction.apply(x, of_patches.weight, of_patches.bias, 1e-6)
        gated["liger"] = LigerSiLUMulFunction.apply
    turned: dict[str, Any] = {
        "ours": lambda x: gpu_norm.rms_norm_rope(x, of_heads.weight, 1e-6, cos, sin),
        "transformers": normed_heads,
    }
    looking: dict[str, Any] = {
        "ours": lambda x: gpu_norm.apply_rope(x, vision_cos, vision_sin),
        "transformers": turned_heads,
    }
    return {
        "norm": Pass(rows, (drawn(tokens, hidden),), (2, 3), [of_rows.weight]),
        "norm of the tower": Pass(centred, (drawn(patches, VISION_HIDDEN),), (2, 3), [*of_patches.parameters()]),
        "normed and turned heads": Pass(turned, (drawn(1, tokens, heads, HEAD),), (2, 3), [of_heads.weight]),
        "turned heads of the tower": Pass(looking, (drawn(patches, VISION_HEADS, VISION_HEAD),), (2, 2)),
        "gated product": Pass(gated, (drawn(tokens, intermediate), drawn(tokens, intermediate)), (3, 5)),
    }


def counted(one: Pass) -> dict[str, list[float]]:
    """Bytes an element of the first input, forward and backward: as transformers does it, and as few as must be."""
    inputs, size = [part.detach().requires_grad_() for part in one.inputs], one.inputs[0].numel()
    with Bytes() as forward:
        out = one.contestants["transformers"](*inputs)
    with Bytes() as backward:
        torch.autograd.grad(out, inputs, torch.ones_like(out))
    found = [round(bytes_.count / size, 1) for bytes_ in (forward, backward)]
    return {"transformers": found, "ours": [2.0 * count for count in one.copied]}


def measured(one: Pass) -> dict[str, list[float]]:
    """Milliseconds of forward and of backward by contestant; `copy`: of as many bytes."""
    first = one.inputs[0]
    grad, place = torch.randn_like(first), torch.empty_like(first)
    forward: dict[str, Callable[[], object]] = {}
    backward: dict[str, Callable[[], object]] = {}
    for name, function in one.contestants.items():
        inputs = [part.detach().clone().requires_grad_() for part in one.inputs]
        out = function(*inputs)
        forward[name] = lambda function=function, inputs=inputs: function(*inputs)
        moved = [*inputs, *one.weights]
        backward[name] = lambda out=out, moved=moved: torch.autograd.grad(out, moved, grad, retain_graph=True)
    forward["copy"] = lambda: place.copy_(first)
    times, back = busy_times(forward, LAUNCHES), busy_times(backward, LAUNCHES)
    copy = times.pop("copy") / 2
    found = {name: [round(times[name], 4), round(back[name], 4)] for name in one.contestants}
    return found | {"copy": [round(copy * count, 4) for count in one.copied]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"tokens": 13_880, "patches": 36_480, "hidden": 2048, "intermediate": 6144, "heads": 16}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--count", action="store_true")
    sizes = vars(parser.parse_args())
    if sizes.pop("count"):
        few = sizes | {"tokens": 256, "patches": 256}
        found: dict[str, object] = {name: counted(one) for name, one in passes("cpu", **few).items()}
        print(json.dumps({"bytes an element, forward and backward": found}))
        return
    found = {name: measured(one) for name, one in passes("cuda", **sizes).items()}
    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps(device | sizes | {"forward and backward, ms": found}))


if __name__ == "__main__":
    main()
