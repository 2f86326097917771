"""Ranks that torchrun has started again find each other, and not those that are dead."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore

from learner.distributed import all_sum, barrier, close_ranks, init_ranks, store_of_attempt
from shared.config.learner_section import ParallelConfig
from tests.support.ranks.processes import places, take_place


def store_of(monkeypatch: pytest.MonkeyPatch, port: int, rank: int, attempt: int, hosts: int = 1) -> Store:
    """As a rank of two under torchrun opens it."""
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True, "RANK": rank}
    environ |= {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2 // hosts, "TORCHELASTIC_RESTART_COUNT": attempt}
    for name, value in environ.items():
        monkeypatch.setenv(name, str(value))
    return store_of_attempt(timedelta(seconds=20))


def test_ranks_of_one_attempt_share_their_addresses_and_no_other_attempt_sees_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agents = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store_of(monkeypatch, agents.port, 1, attempt=0).set("address of rank 1", "dead")
    assert store_of(monkeypatch, agents.port, 0, attempt=0).get("address of rank 1") == b"dead"
    assert not store_of(monkeypatch, agents.port, 0, attempt=1).check(["address of rank 1"])


def test_hosts_that_count_their_restarts_differently_still_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store_of(monkeypatch, agents.port, 1, attempt=1, hosts=2).set("address of rank 1", "here")
    assert store_of(monkeypatch, agents.port, 0, attempt=0, hosts=2).get("address of rank 1") == b"here"


def tell_limits(told: dict[str, str], seen: Any) -> None:
    """What one of four ranks does: it reads the time limits of all its groups."""
    take_place(told)
    ranks = init_ranks("cpu", timeout_s=77, parallel=ParallelConfig(shard_size=2, expert=2))
    meshes = [mesh for mesh in (ranks.mesh, ranks.experts) if mesh is not None]
    assert len(meshes) == 2
    for mesh in meshes:
        for dimension in range(mesh.ndim):
            group: Any = mesh.get_group(dimension)
            assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    seen.release()
    close_ranks()


def test_the_groups_of_all_meshes_have_the_learners_time_limit() -> None:
    fork = multiprocessing.get_context("fork")
    seen = fork.Semaphore(0)
    ranks = [fork.Process(target=tell_limits, args=(place, seen), daemon=True) for place in places(4)]
    for rank in ranks:
        rank.start()
    assert all(seen.acquire(timeout=60) for _ in ranks)
    for rank in ranks:
        rank.join(60)


def meet(told: dict[str, str], seen: Any) -> None:
    """What one of two ranks does: a sum, and two barriers, to the second of which rank 1 never comes."""
    take_place(told)
    ranks = init_ranks("cpu", timeout_s=30)
    assert dist.get_backend() != "gloo"  # one for each device, as on GPUs
    assert all_sum(torch.ones(1), ranks) == 2
    barrier(ranks, timeout_s=20)
    if ranks.is_main:
        with pytest.raises(RuntimeError, match="Rank 1"):
            barrier(ranks, timeout_s=0.2)
        seen.set()
    assert seen.wait(20)
    close_ranks()


def test_a_barrier_of_a_group_with_a_backend_for_each_device_names_the_rank_that_is_missing() -> None:
    fork = multiprocessing.get_context("fork")
    seen = fork.Event()
    ranks = [fork.Process(target=meet, args=(place, seen), daemon=True) for place in places(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0]
