"""Finds Pronk's packages for whoever imports `pronk`: under their own names in Pronk's processes, under `pronk.` in any
other program.

A program's own `envs` or `shared` is never hidden, and never taken for Pronk's.
"""

from __future__ import annotations

import builtins
import importlib
import sys
import tomllib
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pronk

PACKAGES = ("actor", "envs", "kernels", "launch", "learner", "shared")
_HERE = Path(__file__).resolve().parent
ROOT = _HERE if (_HERE / "shared").is_dir() else _HERE.parents[2]
PREFIX = "pronk."


def version() -> str:
    """Return Pronk's version, which pyproject.toml holds."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def ours(name: str) -> ModuleType:
    """Return the module of Pronk's packages that is called `name` there, such as envs.base."""
    return importlib.import_module(name if is_pronks_process() else PREFIX + name)


def is_pronks_process() -> bool:
    """Tell whether Pronk's packages have been imported under their own names."""
    shared = sys.modules.get("shared")
    return shared is not None and str(ROOT / "shared") in list(getattr(shared, "__path__", ()))


class RoomFinder(MetaPathFinder):
    """Finds `pronk.envs.base`: in Pronk's processes it is the module `envs.base` itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(PREFIX) or fullname.split(".")[1] not in PACKAGES:
            return None
        if is_pronks_process():
            return ModuleSpec(fullname, _Alias(fullname.removeprefix(PREFIX)), is_package=True)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Prefixed(fullname, spec.loader.path)
        return spec


class _Alias(Loader):
    """Gives a module that has another name already."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own


class _Prefixed(SourceFileLoader):
    """Runs a module whose imports of Pronk's packages lead to `pronk.` + their name."""

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)


def _import(
    name: str, globals: Any = None, locals: Any = None, fromlist: Sequence[str] | None = (), level: int = 0
) -> ModuleType:
    top = name.partition(".")[0]
    if level or top not in PACKAGES:
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    module = builtins.__import__(PREFIX + name, globals, locals, fromlist or ("",))
    return module if fromlist else sys.modules[PREFIX + top]


if str(ROOT) not in pronk.__path__:
    pronk.__path__.append(str(ROOT))
if not any(isinstance(each, RoomFinder) for each in sys.meta_path):
    sys.meta_path.insert(0, RoomFinder())
