"""Checks of GPUs, memory, shared memory, and the limits of open files and locked memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.engines.gpus import DRIVER, engine_gpus
from launch.findings import Finding, failed, not_checked, ok, refused, warning
from learner.plan.fit import check_recipe
from shared.config.recipe import Recipe
from shared.families.model_sizes import ModelSizes

GIB = 2**30
SHM_WANTED = 8 * GIB  # NCCL and torch pass tensors through it; a container's default is 64 MiB
FILES_BESIDES = 256  # logs, libraries, sockets between processes
CONNECTIONS = 512  # maximum from one process to one engine


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    num_bytes: int
    free: int


def gpus_here(driver: Path = DRIVER) -> list[Gpu]:
    """Return the GPUs that torch may use; torch, whose import takes seconds, is imported only if there is a driver."""
    if not driver.exists():
        return []
    import torch

    if not torch.cuda.is_available():  # NVML counts GPUs that a driver too old for torch cannot use
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        free, num_bytes = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(torch.cuda.get_device_name(index), num_bytes, free))
    return gpus


def check_gpus(recipe: Recipe, gpus: Sequence[Gpu], driver: Path = DRIVER) -> list[Finding]:
    """Check that there are enough GPUs, that the model fits, and that the GPUs can access each other's memory."""
    if not gpus:
        return [_no_gpu(recipe, driver)]
    kinds = ", ".join(f"{[g.name for g in gpus].count(name)} x {name}" for name in dict.fromkeys(g.name for g in gpus))
    words = f"{kinds} of {min(g.num_bytes for g in gpus) / 1e9:.0f} GB"
    try:
        taken = {gpu for own in engine_gpus(recipe.engine, len(gpus)) for gpu in own}
        ranks = 1 if recipe.engine.shares_gpu else len(gpus) - len(taken)
        if recipe.learner.device == "cuda" and ranks < 1:
            raise ValueError(f"{words}: the engines take all; lower engine.count, a learner rank needs one of its own")
        if recipe.learner.device == "cuda":
            smallest = float(min(g.num_bytes for g in gpus))
            check_recipe(recipe, ranks, recipe.engine.learner_fraction * smallest)
    except ValueError as error:
        return [refused("gpus", error, "lower engine.count, or set engine.gpus")]
    busy = [str(index) for index, gpu in enumerate(gpus) if gpu.free < 0.9 * gpu.num_bytes]
    if busy:
        return [
            warning("gpus", f"{words}; memory of GPU {', '.join(busy)} is in use", "see nvidia-smi, end what uses it")
        ]
    return [ok("gpus", words), _peers(len(gpus))]


def _no_gpu(recipe: Recipe, driver: Path) -> Finding:
    wanted = [name for name in ("learner", "engine") if getattr(recipe, name).device == "cuda"]
    if driver.exists():
        cure = "see the driver's line, nvidia-smi and CUDA_VISIBLE_DEVICES"
        return failed("gpus", "NVIDIA's driver is here, but torch can use no GPU", cure)
    if not wanted:
        return not_checked("gpus", "none here, and the recipe computes on the CPU")
    fields = " and ".join(f"{name}.device" for name in wanted)
    return not_checked("gpus", f"none here; the recipe's {fields} = 'cuda'", "ask again on a machine with the GPUs")


def _peers(count: int) -> Finding:
    import torch

    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [f"{a}-{b}" for a, b in pairs if a < b and not torch.cuda.can_device_access_peer(a, b)]
    if not pairs:
        return not_checked("peer access", "one GPU alone")
    if apart:
        cure = "see nvidia-smi topo -m; NCCL goes through host memory there, which is slower"
        return warning("peer access", f"GPUs {', '.join(apart)} cannot read each other's memory", cure)
    return ok("peer access", f"all {count} GPUs read each other's memory")


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the memory that is available without swapping, in bytes; None if the system does not report it."""
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def check_memory(recipe: Recipe, sizes: ModelSizes | None, available: int | None) -> Finding:
    """Check that the host's memory is enough for one learner rank and the engines."""
    if available is None:
        return not_checked("memory", "this system does not tell what is available")
    words = f"{available / 1e9:.1f} GB available"
    if sizes is None:
        return ok("memory", words)
    copies = 4 if recipe.learner.device == "cpu" or recipe.learner.parallel.offload else 1
    need = 4 * sizes.parameters * (copies + (recipe.engine.device == "cpu") * recipe.engine.count)
    words += f", {need / 1e9:.1f} GB for the float32 parameters of a rank and what goes with them here"
    if need > available:
        return failed("memory", words, "use a larger machine, a smaller model, or more hosts")
    return ok("memory", words)


def check_shm(recipe: Recipe, folder: Path = Path("/dev/shm")) -> Finding:
    if not folder.exists():
        return not_checked("shared memory", f"this system has no {folder}")
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    words = f"{free / GIB:.1f} GiB free in {folder}"
    if recipe.learner.device == "cuda" and free < SHM_WANTED:
        return warning("shared memory", words, "give the container more: docker run --shm-size=16g, or --ipc=host")
    return ok("shared memory", words)


def check_files(recipe: Recipe) -> Finding:
    """Check the limit of open files: each episode being played holds a connection to its engine."""
    engines = len(recipe.engine.urls) or recipe.engine.count or 1
    playing = recipe.actor.groups * recipe.learner.group_size
    need = FILES_BESIDES + min(playing, CONNECTIONS * engines)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    words = f"{_limit(soft)} may be open, a process of this recipe needs up to {need}"
    if soft != resource.RLIM_INFINITY and soft < need:
        more = f"ulimit -n {max(need, 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536))}"
        return failed(
            "open files", words, more if _reaches(hard, need) else f"raise the hard limit ({_limit(hard)}), then {more}"
        )
    return ok("open files", words)


def check_locked(recipe: Recipe, devices: Path = Path("/sys/class/infiniband")) -> Finding:
    """Check the limit of locked memory: memory that a network card accesses directly must be locked."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    words = f"{_limit(soft, 'KiB', 1024)} may be locked"
    rdma = devices.is_dir() and any(devices.iterdir())
    if recipe.learner.device == "cuda" and rdma and soft != resource.RLIM_INFINITY:
        return warning(
            "locked memory", f"{words}, and there is InfiniBand", "ulimit -l unlimited (docker: --ulimit memlock=-1)"
        )
    return ok("locked memory", words if rdma else f"{words}; no InfiniBand needs more")


def _reaches(hard: int, need: int) -> bool:
    return hard == resource.RLIM_INFINITY or hard >= need


def _limit(value: int, unit: str = "", each: int = 1) -> str:
    return "any number" if value == resource.RLIM_INFINITY else f"{value // each} {unit}".strip()


def check_hardware(recipe: Recipe, sizes: ModelSizes | None) -> list[Finding]:
    return [
        *check_gpus(recipe, gpus_here()),
        check_memory(recipe, sizes, available_bytes()),
        check_shm(recipe),
        check_files(recipe),
        check_locked(recipe),
    ]
