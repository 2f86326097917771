"""Which versions of torch, NCCL and SGLang go together. NCCL joins no two ranks of unequal versions, and says so only
when the first weights are sent, so learner and engines are compared before.

An environment is read from the metadata in its folder, so that it need not be able to run here.
"""

from __future__ import annotations

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
    """Versions in one environment; empty for what is not installed, or not known."""

    torch: str = ""
    nccl: str = ""
    sglang: str = ""
    transformers: str = ""


def environment_in(folder: Path) -> Environment:
    """Of the environment in `folder` (that of a venv), by the names of its packages' metadata."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("lib/python*/*-packages/*.dist-info")):
        if named := _DISTRIBUTION.fullmatch(path.name):
            name = "nccl" if _NCCL.fullmatch(named["name"]) else named["name"]
            found[name] = named["version"]
    return Environment(
        found.get("torch", ""),
        found.get("nccl") or nccl_of_torch(found.get("torch", "")),
        found.get("sglang", ""),
        found.get("transformers", ""),
    )


def nccl_of_torch(version: str) -> str:
    """What torch's wheels of this version bring; empty where it is not known, or where they bring none."""
    base, _, build = version.partition("+")
    return "" if build == "cpu" else NCCL_OF_TORCH.get(base, "")


def nccl_of_sglang(version: str) -> str:
    """What comes with SGLang's server of this version, unless somebody has installed another one."""
    return nccl_of_torch(TORCH_OF_SGLANG.get(version, ""))


def unequal_nccl(learner: str, engine: str) -> str:
    """In one line, with the cure, that these versions cannot join; empty where they can, or one is not known."""
    if not learner or not engine or learner == engine:
        return ""
    return (
        f"it has NCCL {engine}, the learner {learner}, and unequal versions do not join: install both from "
        f"constraints-gpu.txt, or nvidia-nccl-cu13=={engine} into the learner's environment"
    )
