"""A disk for one run that can be filled to the last byte and made slow: an ext4 image on a loop device (needs root)."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

SIZE_BYTES = 192 * 2**20


class Disk:
    """The disk is mounted at `folder`; OSError where this machine does not allow it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._image = folder.with_suffix(".img")
        self._ballast = folder / "ballast"
        folder.mkdir(parents=True)
        with self._image.open("wb") as image:
            image.truncate(SIZE_BYTES)
        try:
            run("mkfs.ext4", "-q", "-m", "0", str(self._image))
            run("mount", "-o", "loop,noatime", str(self._image), str(folder))
        except OSError:
            self._image.unlink()
            raise

    def fill(self) -> None:
        """Writes until nothing more fits, also while others free and take space."""
        with self._ballast.open("ab", buffering=0) as ballast:
            size = 2**20
            while size >= 512:
                try:
                    ballast.write(b"\xff" * size)
                except OSError:
                    size //= 2

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def freeze(self) -> None:
        """Makes each write wait in the kernel until `thaw`."""
        run("fsfreeze", "--freeze", str(self.folder))

    def thaw(self) -> None:
        with contextlib.suppress(OSError):  # the disk is not frozen
            run("fsfreeze", "--unfreeze", str(self.folder))

    def close(self, keep: Path) -> None:
        """Unmounts the disk and keeps its files in `keep`."""
        self.thaw()
        self.free()
        shutil.copytree(self.folder, keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("lost+found"))
        run("umount", "--lazy", str(self.folder))
        self._image.unlink()
        os.rmdir(self.folder)


def run(*command: str) -> None:
    """Runs a command; OSError with its error output if it fails or does not exist."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip()}")
