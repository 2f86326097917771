"""Tensor-parallel ranks that receive an update beside generation: all of them install it, or all forget it.

Each rank is a thread with its own end of a group of gloo's; SGLang's part is a stand-in with SGLang's barriers."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from launch.engines.kinds.sglang_engine import PLUGIN

MODULE = "sglang.srt.managers.scheduler_components.weight_updater"
LIMIT_S = 10.0  # of the group, which SGLang sets to two hours
FAULT = RuntimeError("connection closed by peer")


class Fields(SimpleNamespace):
    """Its fields are told by name."""


class Manager:
    """As SGLang's: begins and ends an update together with the other ranks, and notes what it loads."""

    def __init__(self, group, answers, loads=True):
        self.tp_cpu_group, self.loads, self._session = group, loads, None
        self.loaded, self.versions, self.scheduler = [], [], SimpleNamespace(enable_overlap=False)
        runner = SimpleNamespace(weight_updater=self)
        self.tp_worker = SimpleNamespace(model_runner=runner)
        self.device, self.answers, self._model_update_group = "cpu", iter(answers), {"g": None}

    def begin_weight_update(self, _):
        self._session = Fields()
        self.wait_for_all()
        return Fields(success=True, message="")

    def end_weight_update(self, _):
        self.wait_for_all()
        return Fields(success=True, message="")

    def wait_for_all(self):
        dist.all_reduce(torch.zeros(1), group=self.tp_cpu_group)

    def receive_weights_from_distributed(self, *, names, **_):
        if isinstance(answer := next(self.answers), Exception):
            raise answer
        return [(name, torch.ones(2)) for name in names]

    def load_weights_from_distributed(self, weights):
        self.loaded += [name for name, _ in weights]
        return self.loads, "" if self.loads else "out of memory"

    def _select_runners(self):
        return [("target", self.tp_worker.model_runner)]

    def _observe_weight_load(self, _):
        return nullcontext()

    def record_weight_version_after_update(self, version):
        self.versions.append(version)

    def flush_cache_after_weight_update(self, _, success, message):
        return success, message


@pytest.fixture
def plugin(monkeypatch):
    """With a stand-in for the one module of SGLang's that it imports."""
    module = ModuleType(MODULE)
    module.SchedulerWeightUpdaterManager = Manager
    module.msgspec = SimpleNamespace(structs=SimpleNamespace(replace=lambda session, **_: session))
    for name in ("BeginWeightUpdateReq", "EndWeightUpdateReq", "UpdateWeightsFromDistributedReq"):
        setattr(module, f"{name}Input", Fields)
        setattr(module, f"{name}Output", Fields)
    parts = MODULE.split(".")
    for depth in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
    monkeypatch.setitem(sys.modules, MODULE, module)
    sys.modules[MODULE.rpartition(".")[0]].weight_updater = module
    monkeypatch.syspath_prepend(PLUGIN)
    return importlib.import_module("pronk_staged_weights")


def bucket(name, version=None):
    fields = {"names": [name], "dtypes": ["float32"], "shapes": [[2]], "load_format": "flattened_bucket"}
    return SimpleNamespace(**fields, group_name="g", weight_version=version)


TWO = (bucket("a"), bucket("b", "7"))


def on_ranks(play, *arguments):
    """`play(group, argument)` of each rank at once: the results, or what was raised."""
    store, size = dist.HashStore(), len(arguments)

    def rank(index):
        group = dist.ProcessGroupGloo(store, index, size, timedelta(seconds=LIMIT_S))
        try:
            return play(group, arguments[index])
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))


def updated(plugin, manager, buckets=TWO, rid=None):
    """(answer to the end of an update, what its rank did)"""
    hooks = plugin.WeightHooks()
    hooks.begin(None, manager, Fields())
    for one in buckets:
        hooks.update(None, manager, one)
    answer = hooks.end(None, manager, Fields(rid=rid))
    assert hooks.staging is None
    return answer, manager


def test_ranks_that_have_all_install_it(plugin):
    found = on_ranks(lambda group, answers: updated(plugin, Manager(group, answers)), [None, None], [None, None])
    for answer, manager in found:
        assert (answer.success, answer.message) == (True, "the weights are version 7")
        assert (manager.loaded, manager.versions) == (["a", "b"], ["7"])


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("answers", [[FAULT, None], [None, FAULT]], ids=["first bucket", "last bucket"])
def test_where_one_rank_lacks_a_bucket_all_forget_the_update_and_say_so(plugin, broken, answers):
    of_ranks = [[None, None], [None, None]]
    of_ranks[broken] = answers
    found = on_ranks(lambda group, answers: updated(plugin, Manager(group, answers)), *of_ranks)
    first, second = (answer for answer, _ in found)
    assert first.success is second.success is False
    assert first.message == second.message
    assert f"rank {broken}: " in first.message and "closed by peer" in first.message
    assert all(manager.loaded == manager.versions == [] for _, manager in found)


def test_where_one_rank_refuses_a_bucket_in_the_middle_all_forget_the_update(plugin):
    def play(group, knows_it):
        middle = bucket("b")
        middle.group_name = "g" if knows_it else "another"
        return updated(plugin, Manager(group, [None] * 3), (bucket("a"), middle, bucket("c", "7")))

    for answer, manager in on_ranks(play, True, False):
        assert not answer.success and "rank 1: a bucket was refused" in answer.message
        assert "there is no group 'another'" in answer.message
        assert manager.loaded == manager.versions == []


def test_ranks_that_have_forgotten_an_update_install_the_next_one(plugin):
    def play(group, answers):
        manager = Manager(group, answers)
        return updated(plugin, manager)[0], updated(plugin, manager)[0]

    found = on_ranks(play, [None, None, None, None], [None, FAULT, None, None])
    assert [[answer.success for answer in answers] for answers in found] == [[False, True]] * 2


def test_a_rank_in_which_no_update_is_open_keeps_the_others_from_waiting(plugin):
    def play(group, begun):
        manager = Manager(group, [None, None])
        return updated(plugin, manager)[0] if begun else plugin.WeightHooks().end(None, manager, Fields(rid=None))

    found = on_ranks(play, True, False)
    assert [(answer.success, "rank 1: no update is open" in answer.message) for answer in found] == [(False, True)] * 2


def test_where_one_rank_cannot_load_what_it_has_no_rank_calls_the_weights_a_version(plugin):
    found = on_ranks(lambda group, loads: updated(plugin, Manager(group, [None] * 2, loads)), True, False)
    for answer, manager in found:
        assert (answer.success, answer.message) == (False, "rank 1: out of memory")
        assert manager.versions == ["none"]


def test_a_rank_that_does_not_answer_ends_the_others_instead_of_holding_them_up(plugin, monkeypatch):
    monkeypatch.setattr(importlib.import_module("pronk_agreed_ranks"), "AGREE_S", 0.3)
    ended = threading.Event()

    def play(group, answers):
        if answers is None:
            return ended.wait(10)
        try:
            return updated(plugin, Manager(group, answers))
        finally:
            ended.set()

    error, waited = on_ranks(play, [None, None], None)
    assert isinstance(error, RuntimeError) and "do not tell each other" in str(error)
    assert waited


def test_a_reason_that_is_longer_than_what_ranks_tell_each_other_is_cut(plugin):
    first_reason = importlib.import_module("pronk_agreed_ranks").first_reason
    first, second = on_ranks(first_reason, "", "é" * 1000)
    assert first == second and first.startswith("rank 1: éé") and len(first) < 300


def test_a_single_rank_asks_nobody(plugin):
    ((answer, _),) = on_ranks(lambda group, answers: updated(plugin, Manager(group, answers)), [None, FAULT])
    assert not answer.success and answer.message.startswith("the update failed and is forgotten")


def test_ranks_that_have_all_forget_it_where_the_learner_discards_it(plugin):
    def play(group, answers):
        return updated(plugin, Manager(group, answers), rid=plugin.DISCARD)

    for answer, manager in on_ranks(play, [None, None], [None, FAULT]):
        assert (answer.success, manager.loaded, manager.versions) == (True, [], [])


@pytest.mark.parametrize(
    ("body", "rid"),
    [({"discard": True}, "discard"), ({"discard": "x"}, None), ({"weight_version": "7"}, None), (["discard"], None)],
)
def test_the_models_processes_are_told_of_a_discard_in_the_requests_id(plugin, body, rid):
    front, request = plugin.Front(), Fields(rid=None)
    front.version = "7"

    async def original(_manager, request, _http):
        return request.rid, front.version

    async def read():
        return body

    found = asyncio.run(front.end(original, None, request, SimpleNamespace(json=read)))
    assert found == (rid, None if rid else "7")
