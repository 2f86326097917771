"""Versions of Python, torch, CUDA, NCCL and SGLang: whether they fit each other, and what Pronk is tested with."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement

from launch.diagnosis.report import Finding, failed, not_checked, ok, warning
from launch.engines.commands import sglang_python
from launch.processes.children import ROOT
from shared.config import ConfigError, Recipe
from shared.nccl.variables import VARIABLES
from shared.nccl.versions import SGLANG_TESTED, TORCH_OF_SGLANG, Environment, environment_in, unequal_nccl

NEWEST_TESTED = (3, 12)
DRIVER = Path("/proc/driver/nvidia/version")


def check_python() -> Finding:
    found, wanted = ".".join(map(str, sys.version_info[:3])), "3.11 or 3.12"
    if sys.version_info[:2] > NEWEST_TESTED:
        return warning("python", f"{found}, newer than what is tested", f"prefer Python {wanted}")
    return ok("python", found)


def requirements(pyproject: Path) -> list[Requirement]:
    """What a run needs, as pyproject.toml says."""
    groups = tomllib.loads(pyproject.read_text(encoding="utf-8"))["dependency-groups"]
    return [Requirement(line) for line in groups["run"]]


def check_packages(pyproject: Path = ROOT / "pyproject.toml") -> Finding:
    """Those of this environment against the ranges of pyproject.toml."""
    wrong, count = [], 0
    for requirement in requirements(pyproject):
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        count += 1
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing (needs {requirement.specifier or 'any'})")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    if wrong:
        return failed("packages", "; ".join(wrong), "build the environment anew: make env")
    return ok("packages", f"{count} packages are in their ranges")


def check_torch(driver: Path = DRIVER) -> Finding:
    """Its build against the machine: torch for the CPU beside a driver for GPUs is a mistake."""
    version, cuda = importlib.metadata.version("torch"), cuda_of_torch()
    words = f"{version}, {f'CUDA {cuda}' if cuda else 'for the CPU'}; transformers " + importlib.metadata.version(
        "transformers"
    )
    if driver.exists() and not cuda:
        return failed(
            "torch", f"{words}, but this machine has NVIDIA's driver", "install torch's build for CUDA: make env"
        )
    return ok("torch", words)


def cuda_of_torch() -> str:
    """The CUDA version that torch is built for, without importing it; empty for the CPU."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda[^=\n]*= '([^']+)'", text, re.MULTILINE)
    return found[1] if found else ""


def check_sglang(recipe: Recipe) -> Finding:
    """The environment of SGLang's server, from its folder alone."""
    if recipe.engine.kind != "sglang" or recipe.engine.elsewhere:
        return not_checked("sglang", f"the recipe starts none (engine.kind = {recipe.engine.kind!r})")
    try:
        sglang_python(recipe)
    except ConfigError as error:
        found, _, cure = str(error).partition("; ")
        elsewhere = recipe.engine.device == "cuda" and not DRIVER.exists() and "is built for cpu" in found
        state = not_checked if elsewhere else failed
        return state("sglang", found, "ask again on a machine with the GPUs" if elsewhere else cure)
    return sglang_finding(environment_in(ROOT / recipe.engine.sglang_env), recipe.engine.device)


def sglang_finding(there: Environment, device: str) -> Finding:
    nccl = f", NCCL {there.nccl}" if there.nccl else ""
    words = f"{there.sglang} with torch {there.torch}{nccl}, transformers {there.transformers}"
    if there.sglang != SGLANG_TESTED:
        return warning("sglang", f"{words}; tested is {SGLANG_TESTED}", "make sglang-env builds the tested one")
    wanted = TORCH_OF_SGLANG[there.sglang]
    if device == "cuda" and there.torch.partition("+")[0] != wanted:
        cure = "build it anew: make sglang-env"
        return warning("sglang", f"{words}; SGLang {there.sglang} is made for torch {wanted}", cure)
    return ok("sglang", words)


def check_nccl(recipe: Recipe, own: Environment | None = None) -> Finding:
    """Whether weights can go over NCCL: between GPUs, of equal versions."""
    if recipe.learner.device != "cuda":
        return not_checked("nccl", "not used: on a CPU weights go over gloo")
    own = own or environment_in(Path(sys.prefix))
    if recipe.engine.kind == "embedded" and not recipe.engine.elsewhere:
        return ok("nccl", f"{own.nccl or 'of unknown version'} in learner and engines, which share this environment")
    there = environment_in(ROOT / recipe.engine.sglang_env)
    if recipe.engine.elsewhere or not there.sglang or not own.nccl or not there.nccl:
        learner, engine = own.nccl or "unknown", there.nccl or "unknown"
        words = f"learner {learner}, SGLang's environment {engine}"
        return not_checked("nccl", words, "the learner compares them before an engine joins")
    if why := unequal_nccl(own.nccl, there.nccl):
        found, _, cure = why.partition(": ")
        return failed("nccl", f"SGLang's environment: {found}", cure)
    return ok("nccl", f"{own.nccl} in learner and SGLang")


def check_variables(recipe: Recipe, environ: Mapping[str, str] = os.environ) -> Finding:
    """What the user's environment tells NCCL, which wins over what learner and engines are started with."""
    if recipe.learner.device != "cuda":
        return not_checked("nccl variables", "not used: on a CPU weights go over gloo")
    own = {name: environ[name] for name, v in VARIABLES.items() if environ.get(name, v.value) != v.value}
    if own:
        words = ", ".join(f"{name}={value}" for name, value in own.items())
        cure = f"unset {' '.join(own)}, or set the same for every engine and learner rank"
        return warning("nccl variables", f"{words}, which is not what engines are tested with", cure)
    return ok("nccl variables", ", ".join(f"{name}={v.value}" for name, v in VARIABLES.items()))


def check_software(recipe: Recipe) -> list[Finding]:
    return [
        check_python(),
        check_packages(),
        check_torch(),
        check_sglang(recipe),
        check_nccl(recipe),
        check_variables(recipe),
    ]
