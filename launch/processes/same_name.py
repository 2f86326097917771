"""Finds installed distributions with a package of the same name as Pronk's `kernels`. If Hugging Face's `kernels` is
installed, transformers tries to import functions from it, gets Pronk's package instead, and fails."""

from __future__ import annotations

import importlib.metadata
import re

from shared.config.recipe import ConfigError

OURS = "pronk"
_FILE = re.compile(r'^"?kernels(/|\.py,)', re.MULTILINE)  # matches a RECORD, whose paths are relative to site-packages


def with_kernels() -> list[str]:
    """Return the names of the installed distributions, except Pronk, that are called `kernels` or contain such a
    package."""
    found = {each.metadata["Name"] or "" for each in importlib.metadata.distributions() if _brings_kernels(each)}
    return sorted(found - {"", OURS})


def check_kernels() -> None:
    """Raise ConfigError, in one line with the cure, if there is such a distribution."""
    if names := with_kernels():
        raise ConfigError(f"{said(names)}; {cure(names)}")


def said(names: list[str]) -> str:
    return f"installed here: {', '.join(names)}, for whose package `kernels` transformers would take Pronk's, and end"


def cure(names: list[str]) -> str:
    return f"take it out of this environment: pip uninstall {' '.join(names)}"


def _brings_kernels(distribution: importlib.metadata.Distribution) -> bool:
    if (distribution.metadata["Name"] or "").lower() == "kernels":
        return True
    packages = (distribution.read_text("top_level.txt") or "").split()
    return "kernels" in packages or bool(_FILE.search(distribution.read_text("RECORD") or ""))
