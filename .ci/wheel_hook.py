"""Puts the package `pronk` and pyproject.toml, which holds the version, into the wheel. An editable installation needs
neither: it takes them from the clone."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FILES = {"launch/package/pronk": "pronk", "pyproject.toml": "pronk/pyproject.toml"}


class PackageHook(BuildHookInterface):
    """hatchling calls it before it builds."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["force_include"].update(FILES)
