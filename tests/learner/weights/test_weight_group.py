"""An engine keeps no weight group of a learner that has gone: whoever joins it leaves all earlier ones."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from actor.engine import weight_routes
from launch.engines.kinds.sglang_engine import PLUGIN
from launch.engines.network import free_port
from learner.weights.weight_group import WeightGroup
from shared.engine.engine_api import EngineError
from tests.support.engine_weights_rig import Publisher, engine, other_weights
from tests.support.machine import until
from tests.support.publishing import assert_same, policy, publishing, served

__all__ = ["engine", "policy"]  # fixtures


def num_threads() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/task"))


def killed(publisher):
    """All that engines see of that: connections break, and nobody says goodbye."""
    manager = publisher._manager
    group, manager._group, manager._members = manager._group, None, ()
    group._group.abort()
    group._group = group._tcp = None


def test_the_groups_of_killed_learners_do_not_pile_up(engine, policy, ranks):
    url, app = engine
    after_first = None
    for version in range(4):
        with publishing(policy, ranks) as publisher:
            assert served(publisher.publish(version, [url])) == (1, 0)
            assert_same(app, policy)
            killed(publisher)
        del publisher
        after_first = after_first or num_threads()
        assert len(app.updates._groups) == 1
    until(lambda: num_threads() <= after_first)


def test_a_group_that_cannot_be_joined_leaves_the_earlier_one_alone(folder, engine):
    url, app = engine
    place = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2, "backend": "gloo"}
    app.updates._timeout_s = 0.5

    async def main():
        publisher = await Publisher.connected(url)
        with pytest.raises(EngineError, match="cannot join"):
            await publisher.engine.join_group({**place, "group_name": "nobody's"}, 1, 20)
        await publisher.publish(other_weights(folder), "3")

    asyncio.run(main())
    assert app.scheduler.weight_version == "3"


class HangingGroup:
    """One of NCCL's may wait for the network while it is broken up."""

    def __init__(self):
        self.breaking, self.free = threading.Event(), threading.Event()

    def abort(self):
        self.breaking.set()
        self.free.wait(30)


def test_an_earlier_group_that_cannot_be_broken_up_at_once_holds_up_neither_engine_nor_learner(engine, monkeypatch):
    monkeypatch.setattr(weight_routes, "LEAVE_S", 0.3)
    url, app = engine
    earlier = app.updates._groups["earlier"] = HangingGroup()

    async def main():
        joining = asyncio.create_task(Publisher.connected(url))
        assert await asyncio.to_thread(earlier.breaking.wait, 10)
        publisher = await joining
        await publisher.engine.health()

    asyncio.run(main())
    assert list(app.updates._groups) == ["weights"]
    earlier.free.set()


# ---------------------------------------------------------------------- SGLang's server


class Updater:
    """As the server's: it builds groups of gloo as SGLang does."""

    device = "cpu"

    def __init__(self):
        self._model_update_group = {}

    def join(self, address, port, rank, size, name, backend):
        store = dist.TCPStore(address, port, size, is_master=False, wait_for_workers=False)
        group, _ = _new_process_group_helper(
            size, rank, [], dist.Backend(backend), dist.PrefixStore(name, store), group_name=name,
            timeout=timedelta(seconds=10),
        )  # fmt: skip
        _world.pg_group_ranks[group] = dict(enumerate(range(size)))
        self._model_update_group[name] = group
        return True, "joined"

    def receive(self, *, group_name):
        bucket = torch.zeros(3)
        dist.broadcast(bucket, 0, group=self._model_update_group[group_name])
        return bucket


@pytest.fixture(scope="module")
def plugin():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PLUGIN)
        yield importlib.import_module("pronk_bounded_groups")


def joined(hooks, updater, name):
    """A learner's end of a group that the server is in."""
    learner = WeightGroup(name, 2, "gloo", 10.0)
    with ThreadPoolExecutor() as pool:
        connected = pool.submit(learner.connect)
        assert hooks.join(Updater.join, updater, "127.0.0.1", learner.port, 1, 2, name, "gloo")[0]
        connected.result(10)
    return learner


@pytest.mark.usefixtures("ranks")
def test_a_server_of_sglang_leaves_the_groups_of_killed_learners_when_it_joins_another(plugin):
    hooks, updater, before, after_first = plugin.GroupHooks(), Updater(), len(_world.pg_map), None
    for number in range(4):
        learner = joined(hooks, updater, f"group {number}")
        with ThreadPoolExecutor() as pool:
            bucket = pool.submit(hooks.receive, Updater.receive, updater, group_name=f"group {number}")
            learner.broadcast(torch.ones(3))
            assert bucket.result(10).tolist() == [1, 1, 1]
        learner._group.abort()
        del learner
        after_first = after_first or num_threads()
        assert list(updater._model_update_group) == list(hooks.stores) == [f"group {number}"]
    until(lambda: len(_world.pg_map) == before + 1 and num_threads() <= after_first)
    plugin.break_up(updater._model_update_group.popitem()[1])
    until(lambda: len(_world.pg_map) == before)


def test_a_server_of_sglang_that_cannot_join_a_group_keeps_the_one_it_has(plugin):
    hooks, updater = plugin.GroupHooks(), SimpleNamespace(device="cpu", _model_update_group={"earlier": object()})
    with socket.create_server(("127.0.0.1", 0)) as store:
        refused = hooks.join(lambda *_: (False, "no room"), updater, *store.getsockname(), 1, 2, "another", "gloo")
    assert refused == (False, "no room") and list(updater._model_update_group) == ["earlier"] and not hooks.stores
