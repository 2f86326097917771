"""How an engine holds its weights and computes their checksums, as far as its /server_info tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from shared.nccl.versions import SGLANG_TESTED

_KIND = ("version", "device", "dtype", "tp_size", "ep_size", "moe_runner_backend", "moe_a2a_backend", "torchao_config")
_SPREAD = ("mm_enable_dp_encoder", "enable_dp_attention", "moe_dense_tp_size", "enable_fp32_lm_head", "cpu_offload_gb")


@dataclass(frozen=True, slots=True)
class Layout:
    """The defaults are those of an engine that does not tell.

    `kind`: engines of one kind that were sent the same hold the same bytes; empty where that is not known. `hashed`:
    what its checksums are, where the learner knows the bytes that it holds: SHA-256 of them, or the hash of SGLang's
    kernels on a GPU. `num_ranks`: of its tensor-parallel group. `fills_vocabulary`: with zeros, up to a multiple.
    """

    kind: str = ""
    hashed: Literal["", "sha256", "gpu"] = ""
    num_ranks: int = 1
    fills_vocabulary: bool = False


def layout_of(info: dict[str, Any], num_ranks: int) -> Layout:
    """From the answer of /server_info."""
    if info.get("engine") == "embedded":
        return Layout(kind="embedded", hashed="sha256")
    device, dtype = info.get("device"), info.get("dtype")
    if not (isinstance(device, str) and isinstance(dtype, str)):
        return Layout(num_ranks=num_ranks)
    kind = ", ".join(f"{name} {info[name]}" for name in (*_KIND, *_SPREAD) if name in info)
    hashed: Literal["", "sha256", "gpu"] = ""
    if device == "cuda" and info.get("version") == SGLANG_TESTED and not info.get("cpu_offload_gb"):
        hashed = "gpu"  # another version's may be another
    elif (device, dtype) == ("cpu", "float32"):  # in bfloat16 a CPU may pack its weights
        hashed = "sha256"
    return Layout(kind, hashed, num_ranks, fills_vocabulary=True)
