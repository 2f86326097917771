"""SGLang's server does not wait for a learner that has given a weight group up: it looks whether the store is there."""

from __future__ import annotations

import importlib
import os
import socket
import threading
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from launch.engines.kinds.sglang_engine import PLUGIN


@pytest.fixture(scope="module")
def plugin():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PLUGIN)
        plugin = importlib.import_module("pronk_bounded_groups")
        patch.setattr(plugin, "LOOK_S", 0.05)
        yield plugin


@pytest.fixture
def store():
    """Where a learner listens, as its store of a group does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def hooks(plugin, store):
    hooks = plugin.GroupHooks()
    assert hooks.join(joins, server(), *store.getsockname(), 1, 2, "g", "gloo") == (True, "joined")
    return hooks


ON_CPU = SimpleNamespace(device="cpu", _model_update_group={})  # the server's updater


def joins(_updater, *_):
    return True, "joined"


def server():
    return SimpleNamespace(device="cpu", _model_update_group={})


def test_a_bucket_that_arrives_is_what_the_server_receives(hooks):
    received = hooks.receive(lambda _, names, group_name: (names, group_name), ON_CPU, group_name="g", names=["x"])
    assert received == (["x"], "g")


def test_a_bucket_is_not_waited_for_once_the_learner_has_given_the_group_up(hooks, store):
    begun, never = threading.Event(), threading.Event()

    def receive(_updater, *, group_name):
        begun.set()
        never.wait(30)

    def give_up():
        begun.wait(10)
        store.close()

    threading.Thread(target=give_up).start()
    with pytest.raises(RuntimeError, match="has given up the group 'g'"):
        hooks.receive(receive, ON_CPU, group_name="g")
    never.set()


def test_a_bucket_is_waited_for_as_long_as_the_learner_is_there(plugin, hooks):
    arrived = threading.Event()
    threading.Timer(10 * plugin.LOOK_S, arrived.set).start()
    assert hooks.receive(lambda _, group_name: arrived.wait(30), ON_CPU, group_name="g") is True


class Gpus:
    """In the place of torch.cuda: each thread's GPU and stream. What gloo copies arrives when its stream is through."""

    def __init__(self, patch):
        self.here = threading.local()
        for name in ("current_stream", "device", "stream"):
            patch.setattr(torch.cuda, name, getattr(self, name))

    def current_stream(self, _gpu=None):
        return getattr(self.here, "current", None) or Stream(0)

    @contextmanager
    def device(self, gpu):
        self.here.gpu = gpu
        yield

    @contextmanager
    def stream(self, stream):
        before, self.here.current = self.current_stream(), stream
        yield
        self.here.current = before


class Stream:
    def __init__(self, gpu):
        self.device, self.under_way = gpu, []

    def synchronize(self):
        while self.under_way:
            self.under_way.pop()()


def test_a_bucket_is_given_when_its_bytes_are_on_the_callers_gpu_for_every_stream(hooks, monkeypatch):
    gpus, own = Gpus(monkeypatch), Stream(3)
    found = {}

    def receive(_updater, *, group_name):
        bucket, stream = torch.zeros(2), torch.cuda.current_stream()
        found.update(gpu=getattr(gpus.here, "gpu", 0), stream=stream, thread=threading.current_thread())
        stream.under_way.append(lambda: bucket.fill_(7))
        return bucket

    with torch.cuda.stream(own):
        bucket = hooks.receive(receive, SimpleNamespace(device="cuda", gpu_id=3), group_name="g")
    assert found["thread"] is not threading.current_thread()
    assert (found["gpu"], found["stream"]) == (3, own)
    assert bucket.tolist() == [7, 7]


@pytest.mark.parametrize("error", [ValueError("another shape"), TimeoutError("the group's limit")])
def test_what_goes_wrong_in_receiving_is_raised_as_it_is(hooks, error):
    def receive(_updater, *, group_name):
        raise error

    with pytest.raises(type(error), match=str(error)):
        hooks.receive(receive, ON_CPU, group_name="g")


def test_a_group_whose_learner_has_gone_is_not_joined(plugin, store):
    address = store.getsockname()
    store.close()
    joined, why = plugin.GroupHooks().join(joins, server(), *address, 1, 2, "g", "gloo")
    assert not joined and "has given up the group 'g'" in why


def test_a_group_that_was_left_is_received_on_the_servers_own_thread(hooks):
    hooks.leave(None, server(), "g")
    own = hooks.receive(lambda _, group_name: threading.current_thread(), ON_CPU, group_name="g")
    assert own is threading.current_thread()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_group_has_the_learners_limit_and_no_watchdog(plugin, monkeypatch, backend):
    monkeypatch.setenv("PRONK_GROUP_TIMEOUT_S", "12.5")
    monkeypatch.delenv(plugin.BLOCKING_WAIT, raising=False)
    given = plugin.limited(
        lambda **fields: {**fields, "waits": os.environ[plugin.BLOCKING_WAIT]}, backend=backend, rank=1
    )
    assert given == {"backend": backend, "rank": 1, "timeout": timedelta(seconds=12.5), "waits": "1"}
    assert plugin.BLOCKING_WAIT not in os.environ


# ------------------------------------------------------------------ NCCL, as its source says that it behaves


class FalseNccl:
    """A communicator of this process: `broadcast` returns at once, and its kernel spins until all members have sent, or
    until it is aborted here. To destroy it is to wait for its kernels."""

    def __init__(self):
        self.begun, self.over, self.aborted = threading.Event(), threading.Event(), False
        self.over.set()

    def broadcast(self, *_args, **_how):
        self.over.clear()
        self.begun.set()

    def once_begun(self, then):
        """Call a function when the kernel spins."""
        threading.Thread(target=lambda: (self.begun.wait(10), then()), daemon=True).start()

    def destroy(self):
        self.over.wait(30)

    def abort(self):
        self.aborted = True
        self.over.set()

    def synchronize(self):
        self.over.wait(30)


@pytest.fixture
def nccl(plugin, store, monkeypatch):
    """A server on a GPU that has joined the group "n"; its store; the group."""
    group, gpus = FalseNccl(), Gpus(monkeypatch)
    gpus.current_stream = lambda _gpu=None: SimpleNamespace(device=0, synchronize=group.synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", gpus.current_stream)
    monkeypatch.setattr("torch.distributed.distributed_c10d._abort_process_group", lambda given: given.abort())
    monkeypatch.setattr(torch.distributed, "broadcast", group.broadcast)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    updater = SimpleNamespace(device="cuda", gpu_id=0, _model_update_group={})

    def join(updater, *_fields):
        updater._model_update_group["n"] = group
        return True, "joined"

    hooks = plugin.GroupHooks()
    group.once_begun(group.over.set)  # the others have come
    assert hooks.join(join, updater, *store.getsockname(), 1, 2, "n", "nccl") == (True, "joined")
    group.begun.clear()
    return hooks, updater, group


def bucket_over(group):
    def receive(_updater, *, group_name):
        group.broadcast()
        return "weights"

    return receive


def test_a_bucket_of_nccl_is_given_when_its_kernel_is_through(nccl):
    hooks, updater, group = nccl
    group.once_begun(group.over.set)
    assert hooks.receive(bucket_over(group), updater, group_name="n") == "weights"
    assert group.over.is_set() and not group.aborted


def test_a_bucket_of_nccl_that_another_engine_misses_ends_here_once_the_learner_gives_up(nccl, store):
    hooks, updater, group = nccl
    group.once_begun(store.close)
    with pytest.raises(RuntimeError, match="has given up the group 'n'"):
        hooks.receive(bucket_over(group), updater, group_name="n")
    assert group.over.wait(10) and group.aborted and updater._model_update_group == {}


def test_a_group_of_nccl_in_the_middle_of_a_broadcast_is_left_at_once(nccl):
    hooks, updater, group = nccl
    group.broadcast()
    assert hooks.leave(lambda *_: group.destroy(), updater, "n")[0]
    assert group.over.wait(10) and group.aborted
    assert not hooks.leave(None, updater, "n")[0]


def test_a_group_of_nccl_whose_members_do_not_all_come_is_not_joined(store, nccl):
    hooks, updater, group = nccl
    group.once_begun(store.close)

    def join(updater, *_fields):
        updater._model_update_group["m"] = group
        return True, "joined"

    joined, why = hooks.join(join, updater, *store.getsockname(), 1, 2, "m", "nccl")
    assert not joined and "has given up the group 'm'" in why
    assert group.over.wait(10) and group.aborted and "m" not in updater._model_update_group
