"""Lets a user's module import `pronk`: it is always the Pronk that runs the module, also in a clone that is not
installed, and whichever is."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("actor", "envs", "kernels", "launch", "learner", "shared")
_FOLDERS = (ROOT / "launch" / "package" / "pronk", ROOT)  # of a clone, of an installed Pronk


def bind_package() -> None:
    """Make `import pronk` in this process give this Pronk."""
    folder = next(each for each in _FOLDERS if (each / "rooms.py").is_file())
    loaded = sys.modules.get("pronk")
    if loaded is not None and str(folder) in list(loaded.__path__):
        return
    for name in [each for each in sys.modules if each == "pronk" or each.startswith("pronk.")]:
        del sys.modules[name]
    spec = importlib.util.spec_from_file_location("pronk", folder / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pronk"] = module
    spec.loader.exec_module(module)


def hidden_by_pronk(module: str) -> str:
    """Return, in words, that a module's name begins with that of a package of Pronk's, where it is not; "" if it does
    not begin so."""
    top = module.partition(".")[0]
    if top not in PACKAGES:
        return ""
    return f"in Pronk's processes {top!r} is Pronk's own package"
