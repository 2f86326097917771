"""Engines that hold their weights alike must tell equal checksums, also where the learner cannot compute them."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from learner.weights.verify import WeightVerifier, find_disagreements
from shared.engine.engine_api import EngineClient
from shared.engine.engine_messages import checksums_of, parse_server_info
from shared.log import get_logger
from tests.support.publishing import FAST, policy, publishing
from tests.support.tiny import running_engine

__all__ = ["policy"]  # a fixture
SERVER = {"version": "0.5.23", "device": "cuda", "dtype": "bfloat16", "tp_size": 2, "ep_size": 1}


def reported(*engines):
    """Return what engines 0, 1, ... report: each the checksums of its ranks."""
    return {str(i): ranks for i, ranks in enumerate(engines)}


def test_engines_that_report_the_same_do_not_disagree():
    same = ({"x": "1", "y": "2"}, {"x": "3"})
    assert find_disagreements(reported(same, same, same)) == {}
    assert find_disagreements(reported(same)) == find_disagreements({}) == find_disagreements(reported((), ())) == {}


def test_of_three_engines_the_odd_one_is_named():
    found = find_disagreements(reported(({"x": "1"},), ({"x": "2"},), ({"x": "1"},)))
    assert found == {"1": "holds other values of x than 0, 2, though all were sent the same"}


def test_of_two_engines_both_are_named():
    found = find_disagreements(reported(({"x": "1"},), ({"x": "2"},)))
    assert found["0"] == "holds other values of x than 1, though all were sent the same"
    assert found["1"] == "holds other values of x than 0, though all were sent the same"


def test_a_rank_that_differs_is_named():
    equal = ({"x": "1"}, {"x": "2"})
    assert "x on its rank 1 than 0, 2" in find_disagreements(reported(equal, ({"x": "1"}, {"x": "7"}), equal))["1"]


def test_a_parameter_that_one_engine_does_not_report_is_compared_between_the_others():
    found = find_disagreements(reported(({"x": "1"},), ({},), ({"x": "2"},)))
    assert found.keys() == {"0", "2"}


def test_engines_whose_checksums_the_learner_cannot_compute_are_compared_with_each_other(
    folder, policy, ranks, monkeypatch, caplog
):
    monkeypatch.setattr(get_logger("publisher"), "propagate", True)
    real = EngineClient.server_info

    async def server_info(self, *limits):
        return replace(await real(self, *limits), checksums_as_sent=False, kind="of another make")

    monkeypatch.setattr(EngineClient, "server_info", server_info)
    verifier = WeightVerifier(policy, str(folder), ranks)
    with (
        running_engine(folder) as (one, _),
        running_engine(folder) as (two, app),
        publishing(policy, ranks, FAST, verifier) as publisher,
    ):
        metrics = publisher.publish(1, [one, two])
        assert (metrics["publish/engines"], metrics["publish/unproven"]) == (2, 0)
        assert metrics["publish/checksum_skipped"] > 0
        parameter = app.updates.loader._parameters["model.language_model.layers.1.mlp.down_proj.weight"]
        app.updates.loader.load = lambda flat, entries: None
        with torch.no_grad():
            parameter[0, 0] += 1e-6
        for version in range(2, 20):
            if publisher.publish(version, [one, two])["publish/distrusted"]:
                break
        words = rf"engine {one}, version \d+: holds .*layers\.1\.mlp\.down_proj\.weight than {two}, though"
        assert re.search(words, caplog.text)


def test_only_the_embedded_engine_tells_checksums_of_what_it_was_sent():
    embedded = parse_server_info({"engine": "embedded", "device": "cuda"})
    assert (embedded.checksums_as_sent, embedded.kind) == (True, "embedded")
    for info in (SERVER, {"tp_size": 2}, []):
        assert not parse_server_info(info).checksums_as_sent


def test_servers_are_of_one_kind_where_all_that_decides_how_they_hold_weights_is_the_same():
    kind = parse_server_info(SERVER).kind
    assert kind and kind == parse_server_info(SERVER | {"max_running_requests": 8}).kind
    changes = [{"tp_size": 1}, {"version": "0.5.24"}, {"ep_size": 2}, {"mm_enable_dp_encoder": True}]
    for change in [*changes, {"moe_runner_backend": "flashinfer_trtllm"}, {"cpu_offload_gb": 8}, {"dtype": "float16"}]:
        assert parse_server_info(SERVER | change).kind != kind
    for info in ({"tp_size": 2}, {"device": "cuda"}, []):
        assert parse_server_info(info).kind == ""  # unknown: compared with no other


def test_each_ranks_checksums_are_read():
    answer = {"ranks": [{"checksums": {"x": "1"}, "per_gpu_checksum": "a"}, {"checksums": {"x": "2"}}]}
    assert checksums_of(answer) == ({"x": "1"}, {"x": "2"})
