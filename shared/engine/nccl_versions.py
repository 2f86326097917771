"""Which versions of torch, NCCL and SGLang go together. Ranks with different NCCL versions cannot join one group, and
NCCL reports this only when the first weights are sent; so learner and engines are compared before that.

An environment's versions are read from the metadata in its folder, so that nothing in it has to run here.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

SGLANG_TESTED = "0.5.23"
NCCL_OF_TORCH = {
    "2.11.0": "2.28.9",
    "2.12.1": "2.29.7",
    "2.13.0": "2.29.7",
    "2.14.0": "2.30.7",
    "2.14.1": "2.30.7",
}
"""As torch's wheels for CUDA 13 require it."""
TORCH_OF_SGLANG = {"0.5.16": "2.11.0", "0.5.19": "2.13.0", "0.5.22": "2.14.1", "0.5.23": "2.14.1"}
"""As SGLang's own requirements pin it."""
_DISTRIBUTION = re.compile(r"(?P<name>.+)-(?P<version>[^-]+)\.dist-info")
_NCCL = re.compile(r"nvidia[-_]nccl[-_]cu\d+")


@dataclass(frozen=True, slots=True)
class Environment:
    """Versions of packages in one environment; empty if a package is not installed or its version is not known."""

    torch: str = ""
    nccl: str = ""
    sglang: str = ""
    transformers: str = ""


def environment_in(folder: Path) -> Environment:
    """Read the versions in the virtual environment `folder` from the names of its packages' metadata folders."""
    versions: dict[str, str] = {}
    for path in sorted(folder.glob("lib/python*/*-packages/*.dist-info")):
        if named := _DISTRIBUTION.fullmatch(path.name):
            name = "nccl" if _NCCL.fullmatch(named["name"]) else named["name"]
            versions[name] = named["version"]
    return Environment(
        versions.get("torch", ""),
        versions.get("nccl") or nccl_of_torch(versions.get("torch", "")),
        versions.get("sglang", ""),
        versions.get("transformers", ""),
    )


def loaded_nccl(library: str = "libnccl.so.2") -> str:
    """Return the version of the NCCL library that this process has loaded, or would load; empty without one. What torch
    tells (torch.cuda.nccl.version) is the one that it was compiled with."""
    try:
        number = ctypes.c_int()
        if ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number)):
            return ""
    except (OSError, AttributeError):
        return ""
    return f"{number.value // 10000}.{number.value % 10000 // 100}.{number.value % 100}"


def nccl_of_torch(version: str) -> str:
    """Return the NCCL version that torch's wheels of this version require; empty if it is not known, or if they require
    none."""
    base, _, build = version.partition("+")
    return "" if build == "cpu" else NCCL_OF_TORCH.get(base, "")


def nccl_of_sglang(version: str) -> str:
    """Return the NCCL version that comes with SGLang's server of this version, unless another one was installed; empty
    if not known."""
    return nccl_of_torch(TORCH_OF_SGLANG.get(version, ""))


def unequal_nccl(learner: str, engine: str) -> str:
    """Return one line, with the cure, if these NCCL versions cannot join one group; empty if they can, or if one is not
    known."""
    if not learner or not engine or learner == engine:
        return ""
    return (
        f"it has NCCL {engine}, the learner {learner}, and unequal versions do not join: install both from "
        f"constraints-gpu.txt, or nvidia-nccl-cu13=={engine} into the learner's environment"
    )
