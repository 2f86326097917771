"""GPUs of engines and learner ranks: which process uses which, and locks so that no GPU is used by two by accident."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from shared.config.recipe import ConfigError
from shared.config.sections import EngineConfig
from shared.engine.engine_kinds import capabilities_of

DRIVER = Path("/proc/driver/nvidia/version")
LEAST_DRIVER = {"12": 525, "13": 580}  # by CUDA's first number, as NVIDIA's tables of compatibility have them


def driver_version(driver: Path = DRIVER) -> str:
    """Return the version of NVIDIA's driver; empty without one, or if the file says none."""
    if not driver.exists():
        return ""
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+[\d.]*)", driver.read_text(errors="replace"))
    return match[1] if match else ""


def why_driver_is_too_old(cuda: str, driver: Path = DRIVER) -> str:
    """Return why programs for this version of CUDA cannot run with the driver that is here; empty if they can, or if
    either version is not known."""
    version, least = driver_version(driver), LEAST_DRIVER.get(cuda.partition(".")[0], 0)
    if not version or int(version.partition(".")[0]) >= least:
        return ""
    return f"NVIDIA's driver {version} is too old for CUDA {cuda}, which needs {least} or newer"


def engine_gpus(engine: EngineConfig, num_visible: int) -> list[tuple[int, ...]]:
    """Return the GPUs of each engine, as this process counts them; none on the CPU. The learner's ranks use the first
    GPUs of a host, so engines use the last ones unless `engine.gpus` names others. Raise ConfigError if there are too
    few."""
    if engine.device == "cpu":
        if engine.gpus:
            raise ConfigError(f"engine.gpus = {list(engine.gpus)}, but engine.device = 'cpu'; set it to cuda")
        return [()] * engine.count
    each = engine.tensor_parallel if capabilities_of(engine.kind).spans_gpus else 1
    needed = engine.count * each
    last = tuple(range(max(0, num_visible - needed), num_visible))
    gpus = engine.gpus or ((0,) if engine.shares_gpu else last)
    words = f"engine.count = {engine.count} engines of {each} GPU{'s' * (each > 1)} need {needed}"
    if len(gpus) != needed:
        raise ConfigError(f"{words}, but there are {len(gpus)} ({list(gpus)}); lower the count or set engine.gpus")
    if len(set(gpus)) != needed:
        raise ConfigError(f"engine.gpus = {list(gpus)} gives a GPU to two engines; name each once")
    if any(not 0 <= gpu < num_visible for gpu in gpus):
        raise ConfigError(f"engine.gpus = {list(gpus)}: this machine shows the GPUs 0 to {num_visible - 1}")
    return [gpus[i * each : (i + 1) * each] for i in range(engine.count)]


def check_apart(gpus: Sequence[tuple[int, ...]], num_ranks: int) -> None:
    """Raise ConfigError if an engine has a GPU of a learner rank; the ranks use GPUs 0 to `num_ranks` - 1 of the same
    host."""
    shared = sorted(gpu for own in gpus for gpu in own if gpu < num_ranks)
    if shared:
        raise ConfigError(
            f"GPU {shared[0]} would be an engine's and a learner rank's (the ranks take 0 to {num_ranks - 1}); "
            "set engine.gpus to others, or start fewer ranks"
        )


def check_shared(engine: EngineConfig, learner_device: str, num_ranks: int) -> None:
    """Raise ConfigError if the engine cannot share the GPU of the learner's only rank, the first GPU of the host."""
    if why := engine.unshareable(learner_device, num_ranks):
        raise ConfigError(why)
    if engine.gpus not in ((), (0,)):
        raise ConfigError(f"engine.shares_gpu with engine.gpus = {list(engine.gpus)}: the learner has GPU 0; set it so")


def gpu_names(gpus: Sequence[int], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the machine's names of the GPUs that a process with this environment numbers `gpus`."""
    visible = [part.strip() for part in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    return tuple(visible[gpu] if visible else str(gpu) for gpu in gpus)


def lock_gpus(gpus: Sequence[str], owner: str, shared_as: str = "") -> list[TextIO]:
    """Lock GPUs, given by the machine's names, until the files are closed or the process ends. Raise ConfigError, which
    names the holder, if one is locked already; only Pronk's processes use these locks. With `shared_as`, the name of a
    kind of process ("learner" or "engine"), the GPU may also be locked by one process of another kind."""
    held: list[TextIO] = []
    for gpu in gpus:
        lock = Path(tempfile.gettempdir()) / f"pronk-gpu-{gpu}.lock"
        held.append(_locked(lock, fcntl.LOCK_SH if shared_as else fcntl.LOCK_EX, gpu, owner))
        if shared_as:
            held.append(_locked(lock.with_suffix(f".{shared_as}.lock"), fcntl.LOCK_EX, gpu, owner))
    return held


def _locked(path: Path, kind: int, gpu: str, owner: str) -> TextIO:
    file = _lock_file(path)
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        other = file.read().strip() or "another process"
        raise ConfigError(f"GPU {gpu} for {owner} is taken by {other}; set others") from None
    file.truncate(0)
    file.write(f"{owner} (process {os.getpid()})")
    file.flush()
    return file


def _lock_file(path: Path) -> TextIO:
    """Open the lock file, which only its owner can write. Raise ConfigError if it cannot be opened, since another user
    has made it."""
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+")
    except OSError as error:
        raise ConfigError(f"the lock {path} cannot be opened: {error.strerror}; remove it, or set TMPDIR") from None


def gpu_bytes() -> float:
    """Return the memory, in bytes, of the first GPU that this process may use."""
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory)


def num_visible() -> int:
    """Return the number of GPUs that this process may use."""
    import torch

    return torch.cuda.device_count()
