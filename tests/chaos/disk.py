"""What a disk does to a run: it is full or slow (an ext4 image on a loop device, which needs root), or gives back other
bytes than it was given."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
from pathlib import Path

from learner.checkpoints.checkpoint_folder import list_checkpoints

SIZE_BYTES = 192 * 2**20
FLIPPED_BITS = 3


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


def newest(run: Path) -> list[Path]:
    """The two newest whole checkpoints, the newer one first; empty if there are less."""
    found = list_checkpoints(run / "checkpoints")[::-1][:2]
    return found if len(found) == 2 else []


def damage(checkpoint: Path, rng: random.Random) -> str:
    """Flips bits of one of its files, cuts it off or removes it; says what was done."""
    file = rng.choice(sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size > 1))
    size = file.stat().st_size
    name, how = file.relative_to(checkpoint), rng.choice(("flipped", "cut off", "empty", "removed"))
    match how:
        case "flipped":
            with file.open("r+b") as content:
                for _ in range(FLIPPED_BITS):
                    place = rng.randrange(size)
                    content.seek(place)
                    byte = content.read(1)[0]
                    content.seek(place)
                    content.write(bytes([byte ^ 1 << rng.randrange(8)]))
        case "removed":
            file.unlink()
        case _:
            with file.open("r+b") as content:
                content.truncate(0 if how == "empty" else rng.randrange(1, size))
    return f"{name} of {checkpoint.name} {how}"
