"""Engines that hold their weights alike must tell equal checksums, also where the learner cannot compute them."""

from __future__ import annotations

import pytest
import torch

from learner.weights.agreement import Witness, disagreements
from learner.weights.kept import KeptWeights
from learner.weights.shards import Heads
from learner.weights.verify import WeightVerifier, WrongWeights
from shared.engine_messages import checksums_of, traits_of
from shared.weights.checksums import checksums
from shared.weights.layout import Layout, layout_of
from tests.support.publishing import FAST, policy, publishing
from tests.support.tiny import running_engine

__all__ = ["policy"]  # a fixture
HEADS = Heads(query=4, key=2, vision=2)
SERVER = {"version": "0.5.23", "device": "cuda", "dtype": "bfloat16", "tp_size": 2, "ep_size": 1}


def witnesses(*told, kind="a", names=("x", "y")):
    """Of engines 0, 1, ...: each says the checksums of its ranks."""
    return {str(i): Witness(kind, ranks, names) for i, ranks in enumerate(told)}


def test_equal_engines_and_engines_of_other_kinds_do_not_disagree():
    same = ({"x": "1", "y": "2"}, {"x": "3"})
    assert disagreements(witnesses(same, same, same)) == {}
    assert disagreements(witnesses(same, ({"x": "9"}, {"x": "9"}), kind="")) == {}
    other = Witness("b", ({"x": "9"}, {"x": "9"}), ("x",))
    assert disagreements(witnesses(same, same) | {"2": other}) == {}
    assert disagreements(witnesses(same, ({"x": "9"}, {"x": "9"}), names=())) == {}  # the learner has judged them


def test_of_three_engines_the_odd_one_is_named():
    found = disagreements(witnesses(({"x": "1"},), ({"x": "2"},), ({"x": "1"},)))
    assert found == {"1": "holds other values of x than 0, 2, which were sent the same"}


def test_of_two_engines_both_are_named():
    found = disagreements(witnesses(({"x": "1"},), ({"x": "2"},)))
    assert found["0"] == "holds other values of x than 1, though it was sent the same"
    assert found["1"] == "holds other values of x than 0, though it was sent the same"


def test_a_rank_that_differs_is_named():
    equal = ({"x": "1"}, {"x": "2"})
    assert "x on its rank 1 than 0, 2" in disagreements(witnesses(equal, ({"x": "1"}, {"x": "7"}), equal))["1"]


def test_engines_whose_checksums_the_learner_cannot_compute_are_compared_with_each_other(
    folder, policy, ranks, monkeypatch
):
    packed = Layout("packed, in bfloat16", unknown="a CPU may pack them")
    monkeypatch.setattr("shared.engine_messages.layout_of", lambda info, ranks: packed)
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
        words = rf"engine {one}, version \d+: holds .*layers\.1\.mlp\.down_proj\.weight than {two}, though"
        with pytest.raises(WrongWeights, match=words):
            for version in range(2, 20):
                publisher.publish(version, [one, two])


@pytest.mark.parametrize(
    ("info", "layout"),
    [
        ({"engine": "embedded", "device": "cuda"}, Layout("embedded", "sha256")),
        ({"tp_size": 2}, Layout(num_ranks=2, unknown="it does not tell how it holds them")),
        ([], Layout()),
    ],
)
def test_an_engine_says_how_it_holds_its_weights(info, layout):
    assert traits_of(info).layout == layout


def test_servers_are_of_one_kind_where_all_that_decides_how_they_hold_weights_is_the_same():
    layout = layout_of(SERVER | {"max_running_requests": 8}, 2)
    assert layout == Layout(layout.kind, "gpu", num_ranks=2, fills="gpu")
    assert layout.kind == layout_of(SERVER, 2).kind
    changes = [{"tp_size": 1}, {"version": "0.5.24"}, {"ep_size": 2}, {"mm_enable_dp_encoder": True}]
    for change in [*changes, {"moe_runner_backend": "flashinfer_trtllm"}]:
        assert layout_of(SERVER | change, 2).kind != layout.kind


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"version": "0.6"}, "SGLang 0.6 may hash otherwise than 0.5.23"),
        ({"cpu_offload_gb": 8}, "cpu_offload_gb = 8"),
        ({"enable_dp_attention": True}, "enable_dp_attention = True"),
        ({"attn_cp_size": 2}, "attn_cp_size = 2"),
        ({"device": "cpu"}, "a CPU may pack weights of dtype bfloat16"),
        ({"device": "xpu"}, "nothing is known of device xpu"),
    ],
)
def test_a_server_whose_bytes_the_learner_cannot_know_says_why(setting, reason):
    assert layout_of(SERVER | setting, 2).unknown == reason
    plain = {"cpu_offload_gb": 0, "offload_group_size": -1, "attn_cp_size": 1, "enable_lora": None}
    for known in (plain, {"device": "cpu", "dtype": "float32"}):
        assert layout_of(SERVER | known, 2).unknown == ""


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"moe_runner_backend": "flashinfer_trtllm"}, "moe_runner_backend flashinfer_trtllm lays experts out as its"),
        ({"moe_runner_backend": "flashinfer_cutlass"}, "moe_runner_backend flashinfer_cutlass lays experts out as its"),
        ({"moe_runner_backend": "triton_kernel"}, "moe_runner_backend triton_kernel lays experts out as its"),
        ({"moe_a2a_backend": "deepep"}, "moe_a2a_backend = deepep"),
        ({"ep_num_redundant_experts": 4}, "ep_num_redundant_experts = 4"),
        ({"init_expert_location": "/a/file.json"}, "init_expert_location = /a/file.json"),
        ({"ep_size": 3}, "ep_size = 3 does not divide tp_size = 2"),
    ],
)
def test_experts_that_a_servers_kernels_arrange_are_not_compared_and_it_is_said_why(setting, reason):
    kept, other = KeptWeights(HEADS), "model.language_model.layers.0.input_layernorm.weight"
    kept.keep("model.language_model.layers.0.mlp.experts.down_proj", torch.randn(2, 4, 6))
    kept.keep(other, torch.randn(4))
    layout = layout_of(SERVER | setting, 2)
    assert layout.unknown == "" and layout.unknown_experts.startswith(reason)
    experts, norm = "model.layers.0.mlp.experts.w2_weight", "model.layers.0.input_layernorm.weight"
    told = [{experts: "0" * 16, norm: "0" * 16}] * 2
    assert kept.compare(told, layout, torch.float32) == ([norm], {experts: layout.unknown_experts})
    plain = layout_of(SERVER | {"moe_runner_backend": "triton", "init_expert_location": "trivial"}, 2)
    assert kept.compare(told, plain, torch.float32) == ([norm, experts], {})


def test_each_ranks_checksums_are_read():
    answer = {"ranks": [{"checksums": {"x": "1"}, "per_gpu_checksum": "a"}, {"checksums": {"x": "2"}}]}
    assert checksums_of(answer) == ({"x": "1"}, {"x": "2"})


def test_a_vocabulary_that_a_server_fills_up_is_compared_with_zeros_behind_it():
    kept, name = KeptWeights(HEADS), "model.language_model.embed_tokens.weight"
    values = torch.randn(70, 4)
    kept.keep(name, values)
    filled = checksums([(name, torch.cat([values, torch.zeros(58, 4)]).view(torch.uint8).numpy().data)])
    layout = Layout("a server", "sha256", fills="cpu")
    assert kept.compare((filled,), layout, torch.float32) == ([], {})
    assert kept.compare((filled,), Layout("embedded", "sha256"), torch.float32)[0] == [*filled]


def test_what_the_learner_does_not_know_is_counted_and_not_compared():
    kept, name = KeptWeights(HEADS), "model.language_model.layers.0.mlp.experts.down_proj"
    kept.keep(name, torch.randn(3, 4, 5))
    told = ({"model.layers.0.mlp.experts.w2_weight": "0" * 16},)
    for layout in (Layout("on a GPU", "gpu", unknown_experts="why"), Layout("packed", unknown="why"), Layout()):
        different, unknown = kept.compare(told, layout, torch.float32)
        assert different == [] and unknown.keys() == told[0].keys() and all(unknown.values())
    for silent in ((), ({},), None):
        assert kept.compare(silent, Layout("embedded", "sha256"), torch.float32)[1].keys() == told[0].keys()
    assert kept.compare(told, Layout("embedded", "sha256"), torch.float32)[0] == [*told[0]]
    kept.clear()
    kept.keep("model.language_model.layers.0.novelty.weight", torch.randn(4, 4))
    told = [{"model.layers.0.novelty.weight": "0" * 16}] * 2
    unruly = kept.compare(told, Layout("two ranks", "sha256", 2, fills="gpu"), torch.float32)
    assert unruly == ([], {"model.layers.0.novelty.weight": "no rule says how it is cut"})
