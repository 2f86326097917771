"""A run's folder: made, moved aside, and locked, so that no two learners write into one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import platform
import socket
import time
from importlib import metadata
from pathlib import Path
from typing import TextIO

from learner.checkpoints.folder import RESUMED
from shared.config import ConfigError, Recipe
from shared.log import get_logger

LOCK = "learner.lock"
RUN_PARTS = {"recipe.json", "metrics.jsonl", "checkpoints", "logs"}  # one of which each run's folder has
PATIENCE_S = 3.0  # a learner that was killed a moment ago may still be on its way out
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


def take_run_folder(recipe: Recipe) -> TextIO:
    """Makes the run's folder and locks it until the answer is closed or the process ends. ConfigError, naming the
    holder, when another learner has it; for a folder that is no run's."""
    check_is_run(Path(recipe.run.dir) / recipe.run.name)
    return lock(Path(recipe.run.dir) / recipe.run.name)


def prepare_run_folder(recipe: Recipe, held: TextIO, *, restarted: bool = False) -> TextIO:
    """Writes the resolved recipe into the folder that is `held`; what it holds of a run that is not to be resumed is
    moved aside. Returns the lock from then on. `restarted`: torchrun has started the ranks again."""
    folder = Path(recipe.run.dir) / recipe.run.name
    if recipe.learner.resume == "never" and any(path.name != LOCK for path in folder.iterdir()):
        asides = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
        aside = next(each for each in asides if not each.exists())
        folder.rename(aside)
        held.close()
        get_logger("learner").info("the earlier run is now in %s", aside)
        held = take_run_folder(recipe)
    if not restarted:
        (folder / "checkpoints" / RESUMED).unlink(missing_ok=True)
    (folder / "recipe.json").write_text(json.dumps(recipe.model_dump(mode="json"), indent=2) + "\n")
    (folder / "software.json").write_text(json.dumps(software(), indent=2) + "\n")
    return held


def software() -> dict[str, str]:
    """The versions of what a run depends on most."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("torch", "transformers", "triton", "numpy", "pyzmq"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def lock(folder: Path, patience_s: float = PATIENCE_S) -> TextIO:
    """Takes `folder` for as long as the answer is open. ConfigError, within `patience_s`, names who has it."""
    path, deadline = folder / LOCK, time.monotonic() + patience_s
    while True:
        file = _opened(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(file, path):
                break
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = file.read().strip() or "another process"
                raise ConfigError(
                    f"the run folder {folder} is in use by the learner of {holder}; stop that one, or choose another "
                    "--run.name"
                ) from None
            time.sleep(0.1)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            get_logger("learner").warning("%s cannot be locked (%s): start no second learner on it", folder, error)
            return file
        file.close()
    file.truncate()
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def check_run_folder(recipe: Recipe) -> None:
    """ConfigError unless the run's folder, which is made where it is not there, can be written into."""
    check_is_run(Path(recipe.run.dir) / recipe.run.name)
    _opened(Path(recipe.run.dir) / recipe.run.name / LOCK).close()


def check_is_run(folder: Path) -> None:
    """ConfigError for a folder that holds something, and nothing of a run: it would be moved aside, or written into."""
    names = set[str]()
    with contextlib.suppress(OSError):  # whoever writes into it says why it cannot be read
        names = {path.name for path in folder.iterdir() if path.suffix != ".log"}
    if names - {LOCK} and not names & RUN_PARTS:  # logs may be begun before the run
        raise ConfigError(
            f"the folder {folder} holds {', '.join(sorted(names)[:3])} and is no run's: it has no recipe.json; choose "
            "another --run.name or --run.dir"
        )


def _opened(path: Path) -> TextIO:
    """The lock file, in its folder, which whoever had it may have moved aside."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+")
    except OSError as error:
        why = f"{error.strerror} ({error.filename})"
        raise ConfigError(f"the run folder {path.parent} cannot be used: {why}; choose another --run.dir") from None


def _is_there(file: TextIO, path: Path) -> bool:
    """Whether the folder was not moved aside by the one who had the lock."""
    own = os.fstat(file.fileno())
    try:
        now = path.stat()
    except FileNotFoundError:
        return False
    return (own.st_dev, own.st_ino) == (now.st_dev, now.st_ino)
