"""The choice of a GPU's attention kernel by its compute capability, the installed modules, and the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from kernels.delta_rule import use_fla
from learner.model import attention
from learner.model.adapt import check_varlen
from shared.families.registry import family_in


@dataclass(frozen=True, slots=True)
class Kernel:
    majors: range  # compute capabilities (major) on which it runs
    module: str  # module that must be installed; empty = it is part of torch
    torch_name: str  # name by which torch activates it; empty = torch's default


KERNELS = {
    "flash2": Kernel(range(8, 13), "", ""),
    "flash3": Kernel(range(9, 10), "flash_attn_interface", "FA3"),
    "flash4": Kernel(range(9, 11), "flash_attn.cute", "FA4"),
}


def choose(setting: str, dtype: str, capability: tuple[int, int] | None, installed: frozenset[str]) -> str:
    """Return `flash2`, `flash3`, `flash4` or `sdpa` (one call for each length of document, any device and dtype).

    Raise ValueError, in one line with the cure, if the kernel cannot run, or if no kernel is known for a newer GPU.
    `setting`: learner.parallel.attention; `auto` is torch's own flash2 for bfloat16 on a GPU, otherwise sdpa. `dtype`:
    model.dtype. `capability`: the GPU's (major, minor); None on a CPU. `installed`: the installed modules among those
    that `KERNELS` names.
    """
    if setting == "sdpa" or (setting == "auto" and (capability is None or dtype != "bfloat16" or capability[0] < 8)):
        return "sdpa"
    if capability is None or dtype != "bfloat16":
        where = "a CPU" if capability is None else "a GPU"
        raise ValueError(
            f"learner.parallel.attention = {setting!r} is for bfloat16 on a GPU, this is {dtype} on {where}; "
            "set it to 'auto'"
        )
    major, minor = capability
    usable = [name for name, k in KERNELS.items() if major in k.majors and (not k.module or k.module in installed)]
    cure = f"set learner.parallel.attention = {usable[0] if usable else 'sdpa'!r}"
    if setting == "auto" and not usable:
        raise ValueError(f"no flash attention is known to run on a GPU of compute capability {major}.{minor}; {cure}")
    name = "flash2" if setting == "auto" else setting
    kernel = KERNELS[name]
    if major not in kernel.majors:
        runs_on = " or ".join(f"{m}.x" for m in kernel.majors)
        raise ValueError(
            f"learner.parallel.attention = {name!r} runs on compute capability {runs_on}, "
            f"this GPU has {major}.{minor}; {cure}"
        )
    if kernel.module and kernel.module not in installed:
        raise ValueError(
            f"learner.parallel.attention = {name!r} needs the module {kernel.module}; install it, or {cure}"
        )
    return name


def activate(setting: str, dtype: str, device: torch.device) -> str:
    """Choose the kernel for this process's device and activate it; return its name.

    Raise ValueError as `choose` does, and if the kernel's causal masks are not aligned as the learner needs.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    modules = {kernel.module for kernel in KERNELS.values() if kernel.module}
    name = choose(setting, dtype, capability, frozenset(m for m in modules if _installed(m)))
    attention.use_varlen(name != "sdpa")
    if name != "sdpa":
        check_varlen()
    if name != "sdpa" and KERNELS[name].torch_name:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl(KERNELS[name].torch_name)
    if name != "sdpa":
        attention.check_masks(device)
    return name


def activate_delta_rule(model_path: str, device: torch.device) -> str:
    """Let flash-linear-attention compute the recurrence of a model that has one, on a GPU; return "", or a line that
    says why torch computes it."""
    if device.type != "cuda" or not family_in(model_path).is_recurrent:
        return ""
    why = use_fla(device)
    return f"{why}: torch computes the delta nets, which is slower; pip install 'pronk[fla]'" if why else ""


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that contains the module is missing
        return False
