"""Ranks of the learner: process group, rank 0's frames and flags to all, sums over ranks. Every wait has a limit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from learner.parallel.divisors import next_divisors
from shared.learner_config import ParallelConfig

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Of the default group, by the ranks' device. On GPUs it is mixed, and no gloo group: `Ranks.on_cpu` is one."""


@dataclass(frozen=True, slots=True)
class Context:
    """This process among the neighbouring ranks that share each microbatch; `group` is None where it is alone."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def leads(self) -> bool:
        """Whether this rank counts what all of them know."""
        return self.rank == 0


ALONE = Context()


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the learner's; `mesh` has one dimension over all of them, or two: replicas, shards."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    on_cpu: dist.ProcessGroup | None = None  # gloo alone, for barriers: the default group has a backend for each device
    context: Context = ALONE
    experts: DeviceMesh | None = None  # ([replicate,] expert_shard, expert), where experts are dealt over ranks

    @property
    def replicas(self) -> int:
        """How many ranks hold the same shard."""
        return self.mesh.size(0) if self.mesh.ndim == 2 else 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def init_ranks(device: str = "cpu", *, timeout_s: float = 1800.0, parallel: ParallelConfig | None = None) -> Ranks:
    """Joins torchrun's process group (a single process makes its own group of one).

    `timeout_s` bounds every collective, so it must exceed the longest wait of rank 0 for groups. `parallel`: how many
    ranks share a copy of the parameters, a microbatch, a mixture's experts. ValueError: no such device, or ranks that
    one of these sizes does not divide.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    parallel = parallel or ParallelConfig()
    shards = parallel.shard_size or size
    check_divides("shard_size", shards, size)
    check_divides("context", parallel.context, size)
    check_divides("expert", parallel.expert, shards, "that share a copy of the parameters")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device = 'cuda' but torch sees no GPU; use device = 'cpu'")
    if device == "cuda" and local_rank >= torch.cuda.device_count():
        raise ValueError(f"rank {rank} needs GPU {local_rank}, but there are {torch.cuda.device_count()}; start fewer")
    place = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    backend = BACKENDS[place.type]
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(backend, store=store_of_attempt(timeout), rank=rank, world_size=size, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    on_cpu = dist.new_group(backend="gloo", timeout=timeout) if size > 1 else None
    mesh, experts = make_mesh(place.type, size, shards), make_expert_mesh(place.type, size, shards, parallel.expert)
    return Ranks(rank, size, place, mesh, on_cpu, make_context(rank, size, parallel.context, timeout), experts)


def check_divides(setting: str, value: int, size: int, which: str = "") -> None:
    """ValueError, with the next values that do, if one of learner.parallel does not divide the number of ranks."""
    if size % value:
        raise ValueError(
            f"learner.parallel.{setting} = {value} does not divide the {size} ranks{' ' * bool(which)}{which}; "
            f"set it to {next_divisors(value, size)}"
        )


def make_context(rank: int, size: int, context: int, timeout: timedelta) -> Context:
    """Neighbouring ranks in groups of `context`; a collective of all ranks where that is above 1."""
    if context == 1:
        return ALONE
    group, _ = dist.new_subgroups(context, timeout=timeout)
    return Context(rank % context, context, group)


def store_of_attempt(timeout: timedelta) -> dist.Store:
    """torchrun's store; on a single host with keys of this attempt's own. torchrun keeps its store through restarts, so
    that the rank that is first would find the addresses of dead ones. Over several hosts the attempt's number can
    differ; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, set for torchrun, gives each attempt a store."""
    store, _, size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    if os.environ.get("LOCAL_WORLD_SIZE") != str(size):
        return store
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def make_mesh(device_type: str, size: int, shard_size: int) -> DeviceMesh:
    """One dimension over all ranks or, where fewer share a copy, [replicas, shards]; a collective."""
    if shard_size in (0, size):
        return init_device_mesh(device_type, (size,))
    return init_device_mesh(device_type, (size // shard_size, shard_size), mesh_dim_names=("replicate", "shard"))


def make_expert_mesh(device_type: str, size: int, shard_size: int, expert: int) -> DeviceMesh | None:
    """[[replicas,] shards of an expert, ranks over which experts are dealt]; None for 1. A collective."""
    if expert == 1:
        return None
    shards = shard_size or size
    shape, names = (shards // expert, expert), ("expert_shard", "expert")
    if shards < size:
        return init_device_mesh(device_type, (size // shards, *shape), mesh_dim_names=("replicate", *names))
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def ranks_of_host(ranks: Ranks) -> int:
    """How many ranks this rank's host has, as torchrun tells; all of them where nobody does."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))


def gpu_bytes(ranks: Ranks) -> float | None:
    """Memory of this rank's GPU; None on a CPU."""
    if ranks.device.type != "cuda":
        return None
    return float(torch.cuda.get_device_properties(ranks.device).total_memory)


def close_ranks() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def broadcast_frames(frames: Sequence[bytes | memoryview] | None, ranks: Ranks) -> list[memoryview]:
    """Rank 0's byte strings on every rank; the others pass None. They travel as one tensor of raw bytes."""
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
    """This rank's shard of a tensor; of one that is not sharded all."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def all_sum(tensor: Tensor, ranks: Ranks) -> Tensor:
    """The sum over ranks, in place."""
    if ranks.size > 1:
        dist.all_reduce(tensor)
    return tensor


def all_max(tensor: Tensor, ranks: Ranks) -> Tensor:
    """The largest over ranks, in place."""
    if ranks.size > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor


def broadcast_flag(value: bool, ranks: Ranks) -> bool:
    """Rank 0's answer on every rank."""
    answer = torch.tensor([value], dtype=torch.int32)
    if ranks.size > 1:
        dist.broadcast(answer, src=0)
    return bool(answer)


def barrier(ranks: Ranks, *, timeout_s: float) -> None:
    """Waits for all ranks on the CPU. RuntimeError naming the missing rank after `timeout_s`."""
    if ranks.size > 1:
        dist.monitored_barrier(ranks.on_cpu, timeout=timedelta(seconds=timeout_s))
