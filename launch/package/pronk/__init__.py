"""Pronk from Python. These names are kept; all else of Pronk may change from one version to the next.

Pronk's own packages are `pronk.envs.base` and so on in any program, so that it can have a package `envs` of its own. In
Pronk's processes, where a user's environment is played, they are `envs.base` as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pronk.programs import ProgramFailed, evaluate, train
from pronk.rooms import ROOT, ours, version
from pronk.run_files import RunFiles

if TYPE_CHECKING:
    from pronk.envs.base import Env, Played
    from pronk.shared.config.recipe import Recipe, load_recipe
    from pronk.shared.types import Sample

__all__ = [
    "ROOT",
    "Env",
    "Played",
    "ProgramFailed",
    "Recipe",
    "RunFiles",
    "Sample",
    "__version__",
    "evaluate",
    "load_recipe",
    "train",
]
__version__ = version()
_WHERE = {
    "Env": "envs.base",
    "Played": "envs.base",
    "Recipe": "shared.config.recipe",
    "Sample": "shared.types",
    "load_recipe": "shared.config.recipe",
}
"""The modules of the names that are imported when they are first used."""


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'pronk' has no attribute {name!r}")
    value = getattr(ours(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
