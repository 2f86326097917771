"""Folders that look like an installed environment: the names of packages' metadata, and nothing that could run."""

from __future__ import annotations

from pathlib import Path


def made_up_environment(folder: Path, **versions: str) -> Path:
    """`folder` with a dist-info folder for each package. One with SGLang looks like the environment of its server."""
    packages = folder / "lib" / "python3.11" / "site-packages"
    for name, version in versions.items():
        (packages / f"{name}-{version}.dist-info").mkdir(parents=True)
    if "sglang" in versions:
        (packages / "sglang").mkdir()
        (packages / "sglang" / "launch_server.py").touch()
        (folder / "bin").mkdir()
        (folder / "bin" / "python").touch()
    return folder
