"""A run's folder of checkpoints: what is there, how one takes another's place, what is moved aside.

    step_00000050/             a whole checkpoint
    .step_00000100.partial/    one that is being written
    .step_00000050.replaced/   what step_00000050 takes the place of, for a moment
    .step_00000010.removed/    an old one on its way out
    .resumed                   the path from which this start of the run was told to resume, once it has
    best.json                  the checkpoint that did best in an evaluation, and its value
    damaged/, undone/          what was moved aside: not whole; later than the step that the run was told to go back to

A kill at any moment leaves the old checkpoint or the new one. So does a loss of power: files and folders are synced.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from pathlib import Path

PREFIX = "step_"
EXPORT = "hf"  # of a checkpoint: its weights as a Hugging Face folder, where learner.checkpoint.export wants it
BEST = "best.json"  # names the checkpoint that did best in an evaluation
RESUMED = ".resumed"


def checkpoint_name(step: int) -> str:
    return f"{PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def named_checkpoints(folder: Path) -> list[Path]:
    """All that are called so, oldest first; one of them may be damaged."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if p.name.startswith(PREFIX) and p.name[len(PREFIX) :].isdigit()]
    return sorted(found, key=step_of)


def list_checkpoints(folder: Path) -> list[Path]:
    """Those that are complete by their names, oldest first."""
    return [path for path in named_checkpoints(folder) if (path / "meta.json").exists()]


def partial_of(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")


def put(partial: Path, final: Path) -> None:
    """`partial`, whole and with its files synced, is `final` from now on, whatever stood there."""
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
    """At once by its name, then bit by bit."""
    removed = path.with_name(f".{path.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    os.replace(path, removed)
    shutil.rmtree(removed)


def tidy(folder: Path) -> None:
    """Ends what a kill has interrupted. Nobody may be writing there."""
    for path in sorted(folder.glob(f".{PREFIX}*.replaced")):
        final = path.with_name(path.name[1:].removesuffix(".replaced"))
        if not final.exists():
            os.replace(path, final)
    for ending in ("replaced", "removed", "partial"):
        for path in folder.glob(f".{PREFIX}*.{ending}"):
            shutil.rmtree(path, ignore_errors=True)


def candidates(folder: Path, resume: str) -> list[Path]:
    """What `learner.resume` asks for, the first choice first: nothing (`never`), all that are there, newest first
    (`auto`), or a path. torchrun's restarts of a run that has resumed from a path go on with what it wrote since.

    ValueError: the path is no checkpoint.
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
    """ValueError if `learner.resume` is a path where neither a checkpoint is, nor what `tidy` makes one of again."""
    path = Path(resume)
    if resume not in ("auto", "never") and not (_has_meta(path) or _has_meta(path.parent / f".{path.name}.replaced")):
        raise _no_checkpoint(resume)


def _has_meta(path: Path) -> bool:
    return os.path.exists(path / "meta.json")  # False, too, where one may not look


def _no_checkpoint(resume: str) -> ValueError:
    return ValueError(f"learner.resume = {resume!r} is no checkpoint: it has no meta.json; give one like step_00000050")


def rewind(folder: Path, step: int, resume: str) -> list[Path]:
    """After the run has gone back to `step` of the path `resume`: later checkpoints are moved to undone/, so that
    neither `auto` takes them nor the new ones count as older than they. Returns where they are now."""
    folder.mkdir(parents=True, exist_ok=True)
    moved = [move_aside(path, "undone") for path in named_checkpoints(folder) if step_of(path) > step]
    if step_of_best(folder) > step:
        moved.append(move_aside(folder / BEST, "undone"))
    (folder / RESUMED).write_text(resume)
    return moved


def step_of_best(folder: Path) -> int:
    """Of the checkpoint that best.json names; -1 where it names none that can be read: whoever loads it says so."""
    try:
        return int(json.loads((folder / BEST).read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return -1


def move_aside(path: Path, into: str) -> Path:
    """To a folder beside it, under a name that is free there."""
    aside = path.parent / into
    aside.mkdir(exist_ok=True)
    names = (path.name, *(f"{path.name}.{number}" for number in itertools.islice(itertools.count(1), 10_000)))
    place = next(aside / name for name in names if not (aside / name).exists())
    os.replace(path, place)
    sync_folder(aside)
    sync_folder(path.parent)
    return place


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Its entries are on the disk; where folders cannot be synced, they are as safe as that disk makes them."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)
