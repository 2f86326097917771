"""What SGLang's server keeps of an update that arrives beside generation: all of it in order, or an error."""

from __future__ import annotations

import importlib
import importlib.metadata
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from launch.engines.kinds.sglang_engine import PLUGIN
from shared.engine.engine_messages import parse_server_info


class Updater:
    """As the server's: `answers` of one call after the other; an exception is raised, an event waited for."""

    device = "cpu"

    def __init__(self, *answers):
        self.answers = iter(answers)

    def receive_weights_from_distributed(self, *, names, **_):
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, threading.Event):
            answer.wait(10)
        return [(name, torch.ones(2)) for name in names]


def request(name, version=None):
    fields = {"names": [name], "dtypes": ["float32"], "shapes": [[2]], "load_format": "flattened_bucket"}
    return SimpleNamespace(**fields, group_name="g", weight_version=version)


@pytest.fixture(scope="module")
def plugin():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PLUGIN)
        yield importlib.import_module("pronk_staged_weights")


@pytest.fixture
def staging(plugin):
    staging = plugin.Staging()
    yield staging
    staging.close()


def test_buckets_are_received_in_order_while_the_server_goes_on(staging):
    gate = threading.Event()
    updater = Updater(gate, None)
    staging.receive(updater, request("a"))  # returns at once: its bytes come later
    assert staging.version is None
    staging.receive(updater, request("b", "7"))
    gate.set()
    assert staging.version == "7"  # the update is whole
    assert [name for bucket in staging.buckets() for name, _ in bucket] == ["a", "b"]


def test_a_broken_broadcast_is_an_error_and_not_half_an_update(staging):
    updater = Updater(None, RuntimeError("connection closed by peer"))
    staging.receive(updater, request("a"))
    staging.receive(updater, request("b"))
    with pytest.raises(RuntimeError, match="closed by peer"):
        staging.buckets()


def test_bytes_that_do_not_come_are_not_waited_for_without_end(plugin, staging, monkeypatch):
    monkeypatch.setattr(plugin, "LAST_BYTES_S", 0.05)
    gate = threading.Event()
    staging.receive(Updater(gate), request("a"))
    with pytest.raises(TimeoutError):
        staging.buckets()
    gate.set()


def test_no_wait_for_one_bucket_begins_the_wait_for_another_anew(plugin, staging, monkeypatch):
    monkeypatch.setattr(plugin, "LAST_BYTES_S", 1.0)
    gates = [threading.Event() for _ in range(3)]
    for gate, after_s in zip(gates, (0.6, 1.2, 1.8), strict=True):
        staging.receive(Updater(gate), request("a"))
        threading.Timer(after_s, gate.set).start()
    with pytest.raises(TimeoutError):
        staging.buckets()


def test_all_buckets_of_all_updates_use_one_stream_of_a_gpu(plugin, monkeypatch):
    made = []

    def new_stream(gpu):
        made.append(gpu)
        return SimpleNamespace(synchronize=lambda: None)

    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, nullcontext)
    updater = Updater(*[None] * 6)
    updater.device, updater.gpu_id = "cuda", 5
    for _ in range(2):
        staging = plugin.Staging()
        for name in "abc":
            staging.receive(updater, request(name))
        staging.buckets()
        staging.close()
    assert made == [5]


def test_the_plugins_are_found_by_their_entry_points(plugin):
    points = {point.name: point.load() for point in importlib.metadata.entry_points(group="sglang.srt.plugins")}
    assert points["pronk_staged_weights"] is plugin.register
    names = {"pronk_staged_weights", "pronk_drained_pauses", "pronk_image_bounds", "pronk_bounded_groups"}
    names |= {"pronk_whole_positions"}
    assert points.keys() == names
    assert all(register.__module__ == name for name, register in points.items())


@pytest.mark.parametrize(
    ("info", "beside"),
    [
        ({"engine": "embedded", "updates_beside_generation": True}, True),
        ({"internal_states": [{"updates_beside_generation": True}]}, True),
        ({"internal_states": [{"updates_beside_generation": True}, {}]}, False),
        ({"internal_states": [{}]}, False),
        ({"internal_states": "?"}, False),
        ({}, False),
        (None, False),
    ],
)  # fmt: skip
def test_an_engine_is_paused_unless_all_of_it_receives_beside_generation(info, beside):
    assert parse_server_info(info).beside_generation is beside


@pytest.mark.parametrize(("refused", "total"), [({"status_400": 2, "": 1}, 3), ({"a": "b", "c": -4}, 0), ("many", 0)])
def test_what_an_engine_says_that_it_has_refused_is_added_up_if_it_is_a_count(refused, total):
    assert parse_server_info({"refused": refused}).num_refused == total
