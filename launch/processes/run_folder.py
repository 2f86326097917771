"""A run's folder: making it, moving an old one aside, and locking it, so that no two learners write into the same
one."""

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

from learner.checkpoints.checkpoint_folder import RESUMED
from learner.run_folder_watch import LOCK
from shared.agreement import pronk_version
from shared.config.recipe import ConfigError, Recipe
from shared.log import get_logger
from shared.redaction import holds_secrets, write_private

RUN_PARTS = {"recipe.json", "metrics.jsonl", "checkpoints", "logs"}  # each run's folder has at least one of them
PATIENCE_S = 3.0  # a learner that was just killed may need this long to end
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


def take_run_folder(recipe: Recipe) -> TextIO:
    """Make the run's folder and lock it until the returned file is closed or the process ends. Raise ConfigError, which
    names the holder, if another learner has it, and for a folder that is not a run's."""
    check_is_run(Path(recipe.run.dir) / recipe.run.name)
    return lock(Path(recipe.run.dir) / recipe.run.name)


def prepare_run_folder(recipe: Recipe, held: TextIO, *, restarted: bool = False) -> TextIO:
    """Write the resolved recipe into the run's folder, whose lock is `held`; return the lock to hold from now on. If
    the recipe does not resume, a folder that is not empty is first moved aside. `restarted`: torchrun has restarted the
    ranks."""
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
    write_recipe(recipe, folder)
    (folder / "software.json").write_text(json.dumps(software(), indent=2) + "\n")
    return held


def write_recipe(recipe: Recipe, folder: Path) -> None:
    """Write `recipe.json`, which holds no secret; only its owner may read it if one was taken out."""
    values = recipe.model_dump(mode="json")
    write = write_private if holds_secrets(values) else Path.write_text
    (folder / "recipe.json").unlink(missing_ok=True)
    write(folder / "recipe.json", json.dumps(values, indent=2) + "\n")


def software() -> dict[str, str]:
    """Return the versions of Pronk and of the software that a run depends on most."""
    versions = {"pronk": pronk_version(), "python": platform.python_version(), "platform": platform.platform()}
    for name in ("torch", "transformers", "triton", "numpy", "pyzmq"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def lock(folder: Path, patience_s: float = PATIENCE_S) -> TextIO:
    """Lock `folder` as long as the returned file is open. Raise ConfigError, which names the holder, if it is not free
    within `patience_s`."""
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
    """Raise ConfigError unless the run's folder, which is made if missing, can be written."""
    check_is_run(Path(recipe.run.dir) / recipe.run.name)
    _opened(Path(recipe.run.dir) / recipe.run.name / LOCK).close()


def check_is_run(folder: Path) -> None:
    """Raise ConfigError for a folder that has contents but is no run's, so that it is neither moved aside nor written
    into."""
    names = set[str]()
    with contextlib.suppress(OSError):  # the error shows when something is written into it
        names = {path.name for path in folder.iterdir() if path.suffix != ".log"}
    if names - {LOCK} and not names & RUN_PARTS:  # logs may be written before the run's folder is ready
        raise ConfigError(
            f"the folder {folder} holds {', '.join(sorted(names)[:3])} and is no run's: it has no recipe.json; choose "
            "another --run.name or --run.dir"
        )


def _opened(path: Path) -> TextIO:
    """Open the lock file. Its folder is made if missing: the previous holder may have moved it aside."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+")
    except OSError as error:
        why = f"{error.strerror} ({error.filename})"
        raise ConfigError(f"the run folder {path.parent} cannot be used: {why}; choose another --run.dir") from None


def _is_there(file: TextIO, path: Path) -> bool:
    """Tell whether the open file is still the one at `path`, so that the previous holder of the lock has not moved the
    folder aside."""
    own = os.fstat(file.fileno())
    try:
        now = path.stat()
    except FileNotFoundError:
        return False
    return (own.st_dev, own.st_ino) == (now.st_dev, now.st_ino)
