"""Checks that the versions of Python, torch, CUDA, NCCL and SGLang fit each other, and are those that Pronk is tested
with."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement

from launch.catalog import model_folder
from launch.engines.gpus import DRIVER, driver_version, why_driver_is_too_old
from launch.engines.kinds.engine_kind import engine_kind
from launch.engines.kinds.sglang_engine import USUAL_CUDA, cuda_home, sglang_folder
from launch.findings import Finding, failed, not_checked, ok, warning
from launch.processes import same_name
from launch.processes.children import ROOT
from shared.config.recipe import Recipe
from shared.engine.nccl_variables import VARIABLES
from shared.engine.nccl_versions import Environment, environment_in, unequal_nccl
from shared.families.registry import family_in

NEWEST_TESTED = (3, 12)


def check_python() -> Finding:
    version, wanted = ".".join(map(str, sys.version_info[:3])), "3.11 or 3.12"
    if sys.version_info[:2] > NEWEST_TESTED:
        return warning("python", f"{version}, newer than what is tested", f"prefer Python {wanted}")
    return ok("python", version)


def requirements(pyproject: Path) -> list[Requirement]:
    """Return the packages that a run requires, from pyproject.toml."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    return [Requirement(line) for line in project["dependencies"]]


def check_packages(pyproject: Path = ROOT / "pyproject.toml") -> Finding:
    """Check the installed packages against the ranges in pyproject.toml, and that none hides Pronk's package
    `kernels`."""
    if names := same_name.with_kernels():
        return failed("packages", same_name.said(names), same_name.cure(names))
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
    """Check torch's build against the machine: torch for the CPU on a machine with a GPU driver is a mistake."""
    version, cuda = importlib.metadata.version("torch"), cuda_of_torch()
    words = f"{version}, {f'CUDA {cuda}' if cuda else 'for the CPU'}; transformers " + importlib.metadata.version(
        "transformers"
    )
    if driver.exists() and not cuda:
        return failed(
            "torch", f"{words}, but this machine has NVIDIA's driver", "install torch's build for CUDA: make env"
        )
    return ok("torch", words)


def check_driver(driver: Path = DRIVER, cuda: str | None = None) -> Finding:
    """Check NVIDIA's driver against the CUDA version that torch is built for."""
    version, cuda = driver_version(driver), cuda_of_torch() if cuda is None else cuda
    if not version:
        return not_checked("driver", "no NVIDIA driver here")
    if problem := why_driver_is_too_old(cuda, driver):
        return failed("driver", problem, "install a newer driver, or torch's build for an older CUDA")
    return ok("driver", f"{version}{f' for CUDA {cuda}' if cuda else ''}")


def check_compilers(recipe: Recipe, environ: Mapping[str, str] = os.environ, usual: Path = USUAL_CUDA) -> Finding:
    """Check that SGLang can compile its kernels at its first start on a GPU: nvcc and a C++ compiler."""
    engine = recipe.engine
    if engine.kind != "sglang" or engine.device != "cuda" or engine.elsewhere:
        return not_checked("compilers", "SGLang compiles kernels on GPUs alone, and none is started here")
    home, cpp = cuda_home(sglang_folder(recipe), environ, usual), shutil.which("g++", path=environ.get("PATH", ""))
    missing = [name for name, found in (("nvcc", home), ("g++", cpp)) if not found]
    if missing:
        cure = "install CUDA's toolkit (or nvidia-cuda-nvcc into the engine's environment) and g++"
        return failed(
            "compilers", f"SGLang compiles kernels at its first start and finds no {' and no '.join(missing)}", cure
        )
    return ok("compilers", f"CUDA in {home}, {cpp}")


def cuda_of_torch() -> str:
    """Return the CUDA version that torch is built for, without importing torch; "" for the CPU."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda[^=\n]*= '([^']+)'", text, re.MULTILINE)
    return match[1] if match else ""


def check_engine(recipe: Recipe) -> Finding:
    """Check the software of the engines that this recipe starts."""
    if recipe.engine.elsewhere:
        return not_checked("engine software", "the recipe starts no engine (engine.urls, or engine.count = 0)")
    return engine_kind(recipe.engine.kind).examine(recipe)


def check_nccl(recipe: Recipe, learner: Environment | None = None) -> Finding:
    """Check that weights can be sent over NCCL: learner and engines must have equal versions."""
    if recipe.learner.device != "cuda":
        return not_checked("nccl", "not used: on a CPU weights go over gloo")
    learner = learner or environment_in(Path(sys.prefix))
    folder = engine_kind(recipe.engine.kind).environment(recipe)
    if folder is None and not recipe.engine.elsewhere:
        return ok(
            "nccl", f"{learner.nccl or 'of unknown version'} in learner and engines, which share this environment"
        )
    engine = environment_in(folder) if folder is not None else Environment()
    if recipe.engine.elsewhere or not learner.nccl or not engine.nccl:
        words = f"learner {learner.nccl or 'unknown'}, the engine's environment {engine.nccl or 'unknown'}"
        return not_checked("nccl", words, "the learner compares them before an engine joins")
    if problem := unequal_nccl(learner.nccl, engine.nccl):
        words, _, cure = problem.partition(": ")
        return failed("nccl", f"the engine's environment: {words}", cure)
    return ok("nccl", f"{learner.nccl} in learner and engine")


def check_variables(recipe: Recipe, environ: Mapping[str, str] = os.environ) -> Finding:
    """Check the NCCL variables in the user's environment, which override those that learner and engines are started
    with."""
    if recipe.learner.device != "cuda":
        return not_checked("nccl variables", "not used: on a CPU weights go over gloo")
    own = {name: environ[name] for name, v in VARIABLES.items() if environ.get(name, v.value) != v.value}
    if own:
        words = ", ".join(f"{name}={value}" for name, value in own.items())
        cure = f"unset {' '.join(own)}, or set the same for every engine and learner rank"
        return warning("nccl variables", f"{words}, which is not what engines are tested with", cure)
    return ok("nccl variables", ", ".join(f"{name}={v.value}" for name, v in VARIABLES.items()))


def check_delta_nets(recipe: Recipe) -> Finding:
    """Check that the kernels for a recurrent model's layers are installed where they would be used."""
    folder = model_folder(recipe.model.path)
    if folder is None or recipe.learner.device != "cuda" or not family_in(folder).is_recurrent:
        return not_checked("delta nets", "not used by this model on this device, or the model is not here")
    try:
        version = importlib.metadata.version("flash-linear-attention")
    except importlib.metadata.PackageNotFoundError:
        words = "flash-linear-attention is missing: torch computes the delta nets, which is slower"
        return warning("delta nets", words, "pip install 'pronk[fla]'")
    return ok("delta nets", f"flash-linear-attention {version}; the learner compares it with its own rule at its start")


def check_software(recipe: Recipe) -> list[Finding]:
    return [
        check_python(),
        check_packages(),
        check_torch(),
        check_engine(recipe),
        check_driver(),
        check_compilers(recipe),
        check_nccl(recipe),
        check_variables(recipe),
        check_delta_nets(recipe),
    ]
