"""What the fused log-probability is measured beside: other implementations, each optional, and the bare products."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from kernels import gemm, tiles

PEERS = {"liger": "liger_kernel", "trl": "trl", "verl": "verl", "cce": "cut_cross_entropy", "quack": "quack"}
NEEDS_GPU = ("cce", "verl", "quack")
Contestant = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def full_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """torch's own path: all logits at once."""
    logprobs = (hidden @ weight.t()).float().log_softmax(-1)
    return logprobs.gather(1, target.to(hidden.device)[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def bare_products(hidden: Tensor, weight: Tensor) -> Callable[[], None]:
    """The floor: the three products of forward and backward (6NHV) over slices of the vocabulary as wide as the
    kernels' own, and nothing else. The gradients of logits that it multiplies are made here, once."""
    x_NH, w_VH = hidden.detach(), weight.detach()
    narrow = gemm.widened(w_VH[:0]).dtype
    half, device = narrow != torch.float32, w_VH.device
    width = tiles.plan(len(x_NH), len(w_VH), None, device, half=half, tracked=True).num_columns
    gradients = torch.randn(len(x_NH) * width, device=device).div_(len(w_VH)).to(narrow)

    def run() -> None:
        x = gemm.Operand(gemm.widened(x_NH))
        dx_NH, dw_VH = torch.empty(x_NH.shape, device=device), torch.empty_like(w_VH)
        place = torch.empty_like(gradients, dtype=torch.float32)
        for start in range(0, len(w_VH), width):
            w = gemm.Operand(gemm.widened(w_VH[start : start + width]))
            shape = len(x_NH), len(w.whole)
            logits, d = (flat[: shape[0] * shape[1]].view(shape) for flat in (place, gradients))
            gemm.logits_tile(x, w, logits)
            gemm.add_hidden_grad(dx_NH, d, w, new=start == 0)
            gemm.add_weight_grad(dw_VH[start : start + width], d, x, new=True)

    return run


def peers(entropy: bool = True) -> tuple[dict[str, Contestant], dict[str, str]]:
    """(contestants that can run here, why the others cannot). Rows with target -100 count for nothing."""
    absent = {name: "not installed" for name, module in PEERS.items() if importlib.util.find_spec(module) is None}
    if not torch.cuda.is_available():
        absent |= {name: "needs a GPU" for name in NEEDS_GPU if name not in absent}
    makers = {"cce": _cce, "verl": _verl, "liger": _liger, "quack": _quack, "trl": _trl}
    runs = {name: found for key, maker in makers.items() if key not in absent for name, found in maker(entropy).items()}
    if hasattr(torch.nn.functional, "linear_cross_entropy"):
        runs |= _torch_chunked()
    else:
        absent["torch chunked"] = f"not in torch {torch.__version__}"
    return runs, absent


def _torch_chunked() -> dict[str, Contestant]:
    """torch's own since 2.13: a loss per token, and a scalar one whose gradients are made in the forward."""
    from torch.nn import LinearCrossEntropyOptions
    from torch.nn.functional import linear_cross_entropy

    def run(reduction: str, h: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, None]:
        options = LinearCrossEntropyOptions()
        return -linear_cross_entropy(h, w, t.to(h.device), reduction=reduction, options=options), None

    return {
        "torch chunked": lambda h, w, t: run("none", h, w, t),
        "torch chunked (scalar loss)": lambda h, w, t: run("sum", h, w, t),
    }


def _cce(entropy: bool) -> dict[str, Contestant]:
    from cut_cross_entropy import linear_cross_entropy

    return {"cce": lambda h, w, t: (-linear_cross_entropy(h, w, t.to(h.device), reduction="none"), None)}


def _verl(entropy: bool) -> dict[str, Contestant]:
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return {"verl": lambda h, w, t: linear_cross_entropy(h, w, t.to(h.device).clamp(min=0), 1.0)}


def _liger(entropy: bool) -> dict[str, Contestant]:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Scalar
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction as Scaled

    def liger(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Per token: its CuTe kernel on Hopper, its chunked torch path elsewhere."""
        found = Scaled.apply(hidden, weight, target.to(hidden.device), 1.0, -100, 1, entropy)
        return (-found[0], found[1]) if entropy else (-(found[0] if isinstance(found, tuple) else found), None)

    runs: dict[str, Contestant] = {"liger": liger}
    if torch.cuda.is_available():
        runs["liger (Triton, scalar loss)"] = lambda h, w, t: (-Scalar.apply(h, w, t.to(h.device))[0], None)
    return runs


def _quack(entropy: bool) -> dict[str, Contestant]:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return {"quack (scalar loss)": lambda h, w, t: (-chunked_linear_cross_entropy(h, w, t.to(h.device)), None)}


def _trl(entropy: bool) -> dict[str, Contestant]:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    def trl(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """As its trainer calls it: the valid rows alone, tiles of 32,768 columns."""
        valid = (target >= 0).to(hidden.device)
        rows, labels = (hidden, target) if bool(valid.all()) else (hidden[valid], target.to(hidden.device)[valid])
        wanted = ("entropy",) if entropy else ()
        found = ChunkedLogProbFunction.apply(
            rows, weight, None, labels.to(hidden.device), 1.0, 32768, None, 1.0, wanted
        )
        empty = torch.zeros(len(target), device=hidden.device)
        return tuple(None if x is None else empty.masked_scatter(valid, x) for x in found[:2])  # type: ignore

    return {"trl": trl}
