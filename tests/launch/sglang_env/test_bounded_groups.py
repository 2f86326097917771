"""SGLang's server does not wait for a learner that has given a weight group up: it looks whether the store is there."""

from __future__ import annotations

import importlib
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


ON_CPU = SimpleNamespace(device="cpu")  # the server's updater


def joins(_updater, *_):
    return True, "joined"


def server():
    return SimpleNamespace(_model_update_group={})


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


def test_groups_of_nccl_and_those_that_were_left_are_received_on_the_servers_own_thread(hooks, store):
    hooks.join(joins, server(), *store.getsockname(), 1, 2, "n")
    hooks.leave(joins, None, "g")
    for name in ("n", "g"):
        own = hooks.receive(lambda _, group_name: threading.current_thread(), ON_CPU, group_name=name)
        assert own is threading.current_thread()


def test_a_group_of_gloo_has_the_learners_limit_and_one_of_nccl_its_own(plugin, monkeypatch):
    monkeypatch.setenv("PRONK_GROUP_TIMEOUT_S", "12.5")
    given = [plugin.limited(lambda **fields: fields, backend=backend, rank=1) for backend in ("gloo", "nccl")]
    assert given == [
        {"backend": "gloo", "rank": 1, "timeout": timedelta(seconds=12.5)},
        {"backend": "nccl", "rank": 1},
    ]
