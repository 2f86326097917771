"""Starts ranks as torchrun would, but forked from a process that has already imported torch."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

import torch

from launch.engines.network import free_port
from learner.distributed import BACKENDS


def take_place(told: dict[str, str]) -> None:
    """Make this process a rank, with torchrun's variables in `told`. Its default group gets a backend for each device,
    as on GPUs."""
    os.environ.update(told)
    BACKENDS["cpu"] = "cpu:gloo,cuda:gloo"


def as_rank(told: dict[str, str], compute: Callable[..., None], arguments: Sequence[Any]) -> None:
    take_place(told)
    compute(*arguments)


def places(size: int) -> list[dict[str, str]]:
    """Return the environment variables that torchrun would set for each of `size` ranks."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    return [{**group, "RANK": str(rank)} for rank in range(size)] if size > 1 else [{}]


def in_processes(rounds: Sequence[Sequence[int]], compute: Callable[..., None], *arguments: Any) -> int:
    """Call `compute` on every rank of each size; the sizes of one round run at the same time. Return 0, or 1 as soon as
    a rank has failed; ranks that wait for it end with this process."""
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")  # fork, since ten imports of torch would take most of the time
    for sizes in rounds:
        told = [place for size in sizes for place in places(size)]
        ranks = [fork.Process(target=as_rank, args=(place, compute, arguments), daemon=True) for place in told]
        for rank in ranks:
            rank.start()
        while ranks:
            wait([rank.sentinel for rank in ranks])
            ended = [rank for rank in ranks if rank.exitcode is not None]
            if any(rank.exitcode for rank in ended):
                return 1
            ranks = [rank for rank in ranks if rank not in ended]
    return 0
