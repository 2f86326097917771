"""A run's folder of checkpoints: its contents, how a checkpoint replaces another, and what is moved aside.

    step_00000050/             a complete checkpoint
    .step_00000100.partial/    a checkpoint that is being written
    .step_00000050.replaced/   the old step_00000050 while a new one takes its name
    .step_00000010.removed/    an old checkpoint that is being removed
    .resumed                   `learner.resume` of this start of the run if it is a path, once that is loaded
    best.json                  the checkpoint with the best evaluation, and its value
    damaged/, undone/          what was moved aside: damaged checkpoints; those after the step that the run went back to

A kill at any moment leaves either the old or the new checkpoint. So does a loss of power: files and folders are synced.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from pathlib import Path

PREFIX = "step_"
# Name of a folder in a checkpoint: its weights as a Hugging Face folder, written if learner.checkpoint.export is set.
EXPORT = "hf"
BEST = "best.json"  # names the checkpoint with the best evaluation
RESUMED = ".resumed"


def checkpoint_name(step: int) -> str:
    return f"{PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def named_checkpoints(folder: Path) -> list[Path]:
    """Return all folders with a checkpoint's name, oldest first; some may be damaged."""
    if not folder.is_dir():
        return []
    paths = [p for p in folder.iterdir() if p.name.startswith(PREFIX) and p.name[len(PREFIX) :].isdigit()]
    return sorted(paths, key=step_of)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints that have a meta.json, oldest first."""
    return [path for path in named_checkpoints(folder) if (path / "meta.json").exists()]


def partial_of(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")


def put(partial: Path, final: Path) -> None:
    """Rename `partial`, which is complete and whose files are synced, to `final`, replacing any checkpoint of that
    name."""
    for folder in (partial, *(path for path in partial.iterdir() if path.is_dir())):
        sync_folder(folder)
    replaced = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        os.replace(final, replaced)
    try:
        os.replace(partial, final)
    except OSError:
        if replaced.exists():
            os.replace(replaced, final)
        raise
    sync_folder(final.parent)
    sync_folder(final.parent.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a checkpoint: first its name, atomically, then its files."""
    removed = path.with_name(f".{path.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    os.replace(path, removed)
    shutil.rmtree(removed)


def tidy(folder: Path) -> None:
    """Complete or undo operations that a kill interrupted. Nobody may be writing to the folder."""
    for path in sorted(folder.glob(f".{PREFIX}*.replaced")):
        final = path.with_name(path.name[1:].removesuffix(".replaced"))
        if not final.exists():
            os.replace(path, final)
    for ending in ("replaced", "removed", "partial"):
        for path in folder.glob(f".{PREFIX}*.{ending}"):
            shutil.rmtree(path, ignore_errors=True)


def candidates(folder: Path, resume: str) -> list[Path]:
    """Return the checkpoints that `learner.resume` allows, in order of preference: none (`never`), all, newest first
    (`auto`), or a path.

    If torchrun restarts a run that has resumed from a path, the checkpoints that the run has written since come first.
    Raise ValueError if the path is no checkpoint.
    """
    if resume == "never":
        return []
    newest_first = named_checkpoints(folder)[::-1]
    if resume == "auto":
        return newest_first
    path = Path(resume)
    if not _has_meta(path):
        raise _no_checkpoint(resume)
    marker = folder / RESUMED
    if marker.exists() and marker.read_text() == resume and path.name.startswith(PREFIX):
        return [later for later in newest_first if step_of(later) > step_of(path)] + [path]
    return [path]


def check_resume(resume: str) -> None:
    """Raise ValueError if `learner.resume` is a path without a checkpoint, unless `tidy` will restore one there."""
    path = Path(resume)
    if resume not in ("auto", "never") and not (_has_meta(path) or _has_meta(path.parent / f".{path.name}.replaced")):
        raise _no_checkpoint(resume)


def _has_meta(path: Path) -> bool:
    return os.path.exists(path / "meta.json")  # also False without permission to look


def _no_checkpoint(resume: str) -> ValueError:
    return ValueError(f"learner.resume = {resume!r} is no checkpoint: it has no meta.json; give one like step_00000050")


def rewind(folder: Path, step: int, resume: str) -> list[Path]:
    """Move the checkpoints after `step` to undone/ when a run has gone back to that step of the path `resume`; return
    their new paths.

    Otherwise `auto` would take them, and new checkpoints would count as older than they.
    """
    folder.mkdir(parents=True, exist_ok=True)
    moved = [move_aside(path, "undone") for path in named_checkpoints(folder) if step_of(path) > step]
    if step_of_best(folder) > step:
        moved.append(move_aside(folder / BEST, "undone"))
    (folder / RESUMED).write_text(resume)
    return moved


def step_of_best(folder: Path) -> int:
    """Return the step of the checkpoint that best.json names; -1 if it cannot be read, which `Best.load` reports."""
    try:
        return int(json.loads((folder / BEST).read_text())["step"])
    except (OSError, ValueError, ArithmeticError, KeyError, TypeError, RecursionError):
        return -1


def move_aside(path: Path, into: str) -> Path:
    """Move a checkpoint to a folder beside it, under a free name; return its new path. On a disk too full for another
    folder it stays where it is, under a name that is no checkpoint's."""
    aside, name = path.parent / into, path.name
    try:
        aside.mkdir(exist_ok=True)
    except OSError:
        aside, name = path.parent, f"{path.name}.{into}"
    names = (name, *(f"{name}.{number}" for number in itertools.islice(itertools.count(1), 10_000)))
    target = next(aside / name for name in names if not (aside / name).exists())
    os.replace(path, target)
    sync_folder(aside)
    sync_folder(path.parent)
    return target


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Write a folder's entries to the disk. Do nothing on a file system that cannot sync folders."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)
