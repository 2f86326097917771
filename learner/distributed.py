"""The learner's ranks: process group, broadcasts from rank 0, reductions over ranks. Every wait has a time limit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from learner.plan.divisors import next_divisors
from shared.config.learner_section import ParallelConfig

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Of the default group, by the ranks' device. On GPUs it is mixed, and no gloo group: `Ranks.on_cpu` is one."""


@dataclass(frozen=True, slots=True)
class Context:
    """This process among the neighbouring ranks that share each microbatch; `group` is None if it shares with no
    other."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def leads(self) -> bool:
        """True on the rank that counts values that all ranks of the group hold alike."""
        return self.rank == 0


ALONE = Context()


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the learner's ranks. `mesh` has one dimension over all of them, or two: replicas, shards."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    # A pure gloo group for barriers; the default group has a backend for each device.
    on_cpu: dist.ProcessGroup | None = None
    context: Context = ALONE
    experts: DeviceMesh | None = None  # ([replicate,] expert_shard, expert); set if experts are dealt over ranks

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same shard."""
        return self.mesh.size(0) if self.mesh.ndim == 2 else 1

    @property
    def context_group(self) -> int:
        """Index of this rank's group among the groups that share microbatches."""
        return self.rank // self.context.size

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def init_ranks(device: str = "cpu", *, timeout_s: float = 1800.0, parallel: ParallelConfig | None = None) -> Ranks:
    """Join torchrun's process group; a single process makes its own group of one.

    `timeout_s` bounds every collective, so it must exceed rank 0's longest wait for groups. `parallel`: how many ranks
    share a copy of the parameters, a microbatch, or the experts. Raise ValueError if there is no such device, or if one
    of these sizes does not divide the number of ranks.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    parallel = parallel or ParallelConfig()
    shards = parallel.shard_size or size
    check_divides("shard_size", shards, size)
    check_divides("context", parallel.context, size)
    check_divides("expert", parallel.expert, shards, "that share a copy of the parameters")
    if device == "cuda" and not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built for the CPU"
        raise ValueError(
            f"learner.device = 'cuda', but torch can use no GPU ({built}): python launch/doctor.py --quick says what "
            "is missing; or set it to 'cpu'"
        )
    if device == "cuda" and local_rank >= torch.cuda.device_count():
        raise ValueError(f"rank {rank} needs GPU {local_rank}, but there are {torch.cuda.device_count()}; start fewer")
    own_device = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    backend = BACKENDS[own_device.type]
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(backend, store=store_of_attempt(timeout), rank=rank, world_size=size, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    on_cpu = dist.new_group(backend="gloo", timeout=timeout) if size > 1 else None
    mesh = make_mesh(own_device.type, size, shards)
    experts = make_expert_mesh(own_device.type, size, shards, parallel.expert)
    for made in (mesh, experts):
        limit(made, timeout)
    return Ranks(rank, size, own_device, mesh, on_cpu, make_context(rank, size, parallel.context, timeout), experts)


def limit(mesh: DeviceMesh | None, timeout: timedelta) -> None:
    """Give the groups of a mesh this time limit; torch makes them with its own of half an hour."""
    if mesh is not None and dist.get_world_size() > 1:
        for dimension in range(mesh.ndim):
            _set_pg_timeout(timeout, mesh.get_group(dimension))


def check_divides(setting: str, value: int, size: int, which: str = "") -> None:
    """Raise ValueError, with the nearest values that do, if a value of learner.parallel does not divide the number of
    ranks."""
    if size % value:
        raise ValueError(
            f"learner.parallel.{setting} = {value} does not divide the {size} ranks{' ' * bool(which)}{which}; "
            f"set it to {next_divisors(value, size)}"
        )


def make_context(rank: int, size: int, context: int, timeout: timedelta) -> Context:
    """Return this rank's place among neighbouring ranks in groups of `context`. A collective of all ranks if `context`
    is above 1."""
    if context == 1:
        return ALONE
    group, _ = dist.new_subgroups(context, timeout=timeout)
    return Context(rank % context, context, group)


def store_of_attempt(timeout: timedelta) -> dist.Store:
    """Return torchrun's store; on a single host with a prefix for this attempt.

    torchrun keeps its store through restarts, so without the prefix the first rank of an attempt would find the
    addresses of dead ranks. Over several hosts the number of the attempt can differ; there
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, set for torchrun, gives each attempt a store of its own.
    """
    store, _, size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    if os.environ.get("LOCAL_WORLD_SIZE") != str(size):
        return store
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def make_mesh(device_type: str, size: int, shard_size: int) -> DeviceMesh:
    """Return a mesh of one dimension over all ranks or, if fewer ranks share a copy, [replicas, shards]. A
    collective."""
    if shard_size in (0, size):
        return init_device_mesh(device_type, (size,))
    return init_device_mesh(device_type, (size // shard_size, shard_size), mesh_dim_names=("replicate", "shard"))


def make_expert_mesh(device_type: str, size: int, shard_size: int, expert: int) -> DeviceMesh | None:
    """Return the mesh [[replicas,] shards of an expert, ranks over which experts are dealt]; None if `expert` is 1. A
    collective."""
    if expert == 1:
        return None
    shards = shard_size or size
    shape, names = (shards // expert, expert), ("expert_shard", "expert")
    if shards < size:
        return init_device_mesh(device_type, (size // shards, *shape), mesh_dim_names=("replicate", *names))
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def ranks_of_host(ranks: Ranks) -> int:
    """Return the number of ranks on this rank's host, from torchrun; without torchrun, the number of all ranks."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))


def gpu_bytes(ranks: Ranks) -> float | None:
    """Return the bytes of this rank's GPU; None on a CPU."""
    if ranks.device.type != "cuda":
        return None
    return float(torch.cuda.get_device_properties(ranks.device).total_memory)


def close_ranks() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def broadcast_frames(frames: Sequence[bytes | memoryview] | None, ranks: Ranks) -> list[memoryview]:
    """Return rank 0's byte strings on every rank; the other ranks pass None. They are sent as one tensor of raw
    bytes."""
    if ranks.size == 1:
        assert frames is not None
        return [memoryview(frame).cast("B") for frame in frames]
    count = torch.tensor([len(frames) if frames is not None else 0])
    dist.broadcast(count, src=0)
    sizes = torch.zeros(int(count), dtype=torch.int64)
    if frames is not None:
        sizes = torch.tensor([memoryview(frame).nbytes for frame in frames], dtype=torch.int64)
    dist.broadcast(sizes, src=0)
    joined = bytearray().join(frames) if frames is not None else bytearray(int(sizes.sum()))
    if joined:
        dist.broadcast(torch.frombuffer(joined, dtype=torch.uint8), src=0)
    view, ends = memoryview(joined).toreadonly(), sizes.cumsum(0).tolist()
    return [view[end - size : end] for size, end in zip(sizes.tolist(), ends, strict=True)]


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def all_sum(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Return the sum over ranks, in place."""
    if ranks.size > 1:
        dist.all_reduce(tensor)
    return tensor


def all_max(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Return the maximum over ranks, in place."""
    if ranks.size > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor


def broadcast_flag(value: bool, ranks: Ranks) -> bool:
    """Return rank 0's value on every rank."""
    answer = torch.tensor([value], dtype=torch.int32)
    if ranks.size > 1:
        dist.broadcast(answer, src=0)
    return bool(answer)


def barrier(ranks: Ranks, *, timeout_s: float) -> None:
    """Wait for all ranks on the CPU. Raise RuntimeError, which names the missing rank, after `timeout_s`."""
    if ranks.size > 1:
        dist.monitored_barrier(ranks.on_cpu, timeout=timedelta(seconds=timeout_s))
