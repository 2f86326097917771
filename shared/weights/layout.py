"""How an engine holds its weights and computes their checksums, as far as its /server_info tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from shared.nccl.versions import SGLANG_TESTED

_SIZES = {
    "cpu_offload_gb": 0,
    "offload_group_size": -1,
    "torchao_config": "",
    "enable_lora": False,
    "enable_dp_attention": False,
    "attn_cp_size": 1,
    "dcp_size": 1,
    "moe_dense_tp_size": None,
}
"""By which SGLang's parameters stand elsewhere, in another form, or are cut otherwise, and what it leaves as it is."""
_EXPERTS = {
    "moe_a2a_backend": "none",
    "moe_dp_size": 1,
    "ep_num_redundant_experts": 0,
    "init_expert_location": "trivial",
    "enable_eplb": False,
    "enable_paged_experts": False,
    "elastic_ep_backend": None,
    "kt_weight_path": None,
    "dwdp_size": 1,
}
"""The same of experts alone."""
_PLAIN_RUNNERS = ("auto", "triton")
"""The kernels that take experts as they are loaded; others swap, transpose or shuffle them, or add to them."""
_KIND = ("version", "device", "dtype", "tp_size", "ep_size", "moe_runner_backend", "mm_enable_dp_encoder")


@dataclass(frozen=True, slots=True)
class Layout:
    """The defaults are those of an engine that does not tell.

    `kind`: engines of one kind that were sent the same hold the same bytes; empty where that is not known. `hashed`:
    what its checksums are: SHA-256, or the hash of SGLang's kernels on a GPU. `unknown`: why the learner cannot know
    the bytes that it holds, or their checksums; empty where it can. `unknown_experts`: the same of experts alone.

    `num_ranks`: of its tensor-parallel group, which cut parameters (`learner.weights.shards`). `expert_groups`: among
    which experts are shared out. `whole_tower`: each rank holds all of the vision tower. `fills`: with zeros, as
    SGLang's server does on that device.
    """

    kind: str = ""
    hashed: Literal["", "sha256", "gpu"] = ""
    num_ranks: int = 1
    expert_groups: int = 1
    whole_tower: bool = False
    fills: Literal["", "cpu", "gpu"] = ""
    unknown: str = ""
    unknown_experts: str = ""


def layout_of(info: dict[str, Any], num_ranks: int) -> Layout:
    """From the answer of /server_info."""
    if info.get("engine") == "embedded":
        return Layout(kind="embedded", hashed="sha256")
    device, dtype, groups = info.get("device"), info.get("dtype"), info.get("ep_size", 1)
    if not (isinstance(device, str) and isinstance(dtype, str)):
        return Layout(num_ranks=num_ranks, unknown="it does not tell how it holds them")
    kind = ", ".join(f"{name} {info[name]}" for name in (*_KIND, *_SIZES, *_EXPERTS) if name in info)
    return Layout(
        kind,
        {"cuda": "gpu", "cpu": "sha256"}.get(device, ""),  # type: ignore[arg-type]
        num_ranks,
        groups if isinstance(groups, int) and groups > 0 else 1,
        bool(info.get("mm_enable_dp_encoder")),
        "cpu" if device == "cpu" else "gpu",
        _unknown(info, device, dtype) or _unlike(info, _SIZES),
        _unknown_experts(info, groups, num_ranks),
    )


def _unknown(info: dict[str, Any], device: str, dtype: str) -> str:
    if device == "cpu":
        return "" if dtype == "float32" else f"a CPU may pack weights of dtype {dtype}"
    if device != "cuda":
        return f"nothing is known of device {device}"
    if info.get("version") != SGLANG_TESTED:
        return f"SGLang {info.get('version')} may hash otherwise than {SGLANG_TESTED}"
    return ""


def _unknown_experts(info: dict[str, Any], groups: Any, num_ranks: int) -> str:
    if (runner := info.get("moe_runner_backend", "auto")) not in _PLAIN_RUNNERS:
        return f"moe_runner_backend {runner} lays experts out as its kernels want them"
    if not isinstance(groups, int) or groups < 1 or num_ranks % groups:
        return f"ep_size = {groups} does not divide tp_size = {num_ranks}"
    return _unlike(info, _EXPERTS)


def _unlike(info: dict[str, Any], plain: dict[str, Any]) -> str:
    """The first setting that is not what leaves parameters as they are."""
    for name, value in plain.items():
        if (found := info.get(name)) and found != value:
            return f"{name} = {found}"
    return ""
