"""Makes folders that look like an installed Python environment: only the packages' metadata folders, nothing that
runs."""

from __future__ import annotations

from pathlib import Path


def made_up_environment(folder: Path, **versions: str) -> Path:
    """Fill `folder` with a dist-info folder for each package; with "sglang" it also looks like the environment of
    SGLang's server."""
    packages = folder / "lib" / "python3.11" / "site-packages"
    for name, version in versions.items():
        (packages / f"{name}-{version}.dist-info").mkdir(parents=True)
    if "sglang" in versions:
        (packages / "sglang").mkdir()
        (packages / "sglang" / "launch_server.py").touch()
        (folder / "bin").mkdir()
        (folder / "bin" / "python").touch()
    return folder
