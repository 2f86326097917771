"""The weight group over NCCL, which no CPU has: against a backend that takes and refuses what NCCL does."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from datetime import timedelta
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from actor.engine.weight_loader import join_group
from learner.weights.weight_group import WeightGroup
from shared.engine.weight_group_names import DEVICES, FIRST_BYTES

LIMIT_S = 0.3


class FalseNccl:
    """Tensors must lie on the device that stands for a GPU here (`meta`). A wait beyond its limit raises and breaks the
    communicator. Where the group has a watchdog, that ends the process when it finds a broken communicator, or a
    collective beyond the group's own limit. `abort` may wait for the network."""

    made: ClassVar[list[FalseNccl]] = []
    connects = True  # the first broadcast, of eight bytes, arrives: all members are there

    class Options:
        _timeout = timedelta(minutes=10)

    def __init__(self, store, rank, size, options):
        self.limit_s, self.device = options._timeout.total_seconds(), DEVICES["nccl"]
        self.sent, self.arrived, self.aborted, self.free = [], threading.Event(), threading.Event(), threading.Event()
        self.free.set()
        self.process_ended, self.broken = threading.Event(), threading.Event()
        self.has_watchdog = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") != "1"
        self.made.append(self)

    def broadcast(self, tensors, options):
        for tensor in tensors:
            if tensor.device.type != self.device:
                raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
        self.sent += tensors
        if self.has_watchdog:
            threading.Thread(target=self._watchdog, daemon=True).start()
        return self

    def wait(self, timeout):
        if self.connects:
            self.connects = False
            return True
        if not self.arrived.wait(timeout.total_seconds()):
            self.broken.set()
            raise RuntimeError("NCCL watchdog: the collective has timed out")
        return True

    def _watchdog(self):
        until = time.monotonic() + self.limit_s
        while not self.arrived.wait(0.01):
            if (self.broken.is_set() or time.monotonic() > until) and not self.aborted.is_set():
                self.process_ended.set()
                return

    def abort(self):
        self.free.wait(20)
        self.aborted.set()


@pytest.fixture
def nccl(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FalseNccl, raising=False)
    monkeypatch.setitem(DEVICES, "nccl", "meta")
    group = WeightGroup("weights", 2, "nccl", LIMIT_S)
    group.connect()
    return group, FalseNccl.made[-1]


def test_weights_that_rest_in_the_memory_of_the_cpu_are_sent_from_the_gpu(nccl):
    group, backend = nccl
    backend.arrived.set()
    group.broadcast(torch.zeros(5, dtype=torch.uint8))
    assert [len(tensor) for tensor in backend.sent] == [FIRST_BYTES, 5]


def test_an_engine_that_hangs_costs_the_bounded_wait_and_not_the_process(nccl):
    group, backend = nccl
    with pytest.raises(RuntimeError, match="timed out"):
        group.broadcast(torch.zeros(8, dtype=torch.uint8))
    assert not backend.process_ended.wait(2 * LIMIT_S)
    asyncio.run(group.abort())
    assert backend.aborted.is_set()


def test_a_group_that_cannot_be_broken_up_at_once_does_not_hold_the_calls_to_engines(nccl, monkeypatch):
    monkeypatch.setattr("learner.weights.weight_group.ABORT_S", LIMIT_S)
    group, backend = nccl
    backend.free.clear()

    async def others_go_on():
        breaking = asyncio.create_task(group.abort())
        await asyncio.sleep(0)
        assert not breaking.done()
        await breaking

    asyncio.run(others_go_on())
    assert not backend.aborted.is_set()
    backend.free.set()
    assert backend.aborted.wait(10)


def test_the_embedded_engines_end_outlives_its_own_wait_too(nccl):
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    joined = join_group(
        address="127.0.0.1", port=store.port, rank=1, world_size=2, name="weights", backend="nccl", timeout_s=LIMIT_S
    )
    assert joined.limit_s >= 10 * LIMIT_S and not joined.has_watchdog
    assert [len(tensor) for tensor in joined.sent] == [FIRST_BYTES]
