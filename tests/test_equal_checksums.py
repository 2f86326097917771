"""Engines that hold their weights alike must tell equal checksums, also where the learner cannot compute them."""

from __future__ import annotations

import pytest
import torch

from learner.weights.agreement import Witness, disagreements
from learner.weights.kept import KeptWeights
from learner.weights.verify import WeightVerifier, WrongWeights
from shared.engine_messages import checksums_of, traits_of
from shared.weights.checksums import checksums
from shared.weights.layout import Layout, layout_of
from tests.support.publishing import FAST, policy, publishing
from tests.support.tiny import running_engine

__all__ = ["policy"]  # a fixture
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
    monkeypatch.setattr("shared.engine_messages.layout_of", lambda info, ranks: Layout("packed, in bfloat16"))
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
        ({"tp_size": 2}, Layout(num_ranks=2)),
        ([], Layout()),
    ],
)
def test_an_engine_says_how_it_holds_its_weights(info, layout):
    assert traits_of(info).layout == layout


def test_servers_are_of_one_kind_where_all_that_decides_how_they_hold_weights_is_the_same():
    layout = layout_of(SERVER | {"max_running_requests": 8}, 2)
    assert (layout.hashed, layout.num_ranks, layout.fills_vocabulary) == ("gpu", 2, True)
    assert layout.kind == layout_of(SERVER, 2).kind
    for change in ({"tp_size": 1}, {"version": "0.5.24"}, {"ep_size": 2}, {"mm_enable_dp_encoder": True}):
        assert layout_of(SERVER | change, 2).kind != layout.kind
    for unknown in ({"version": "0.6"}, {"cpu_offload_gb": 8}):
        assert layout_of(SERVER | unknown, 2).hashed == ""
    cpu = SERVER | {"device": "cpu"}
    assert [layout_of(cpu | {"dtype": dtype}, 1).hashed for dtype in ("float32", "bfloat16")] == ["sha256", ""]


def test_each_ranks_checksums_are_read():
    answer = {"ranks": [{"checksums": {"x": "1"}, "per_gpu_checksum": "a"}, {"checksums": {"x": "2"}}]}
    assert checksums_of(answer) == ({"x": "1"}, {"x": "2"})


def test_a_vocabulary_that_a_server_fills_up_is_compared_with_zeros_behind_it():
    kept, name = KeptWeights(), "model.language_model.embed_tokens.weight"
    values = torch.randn(70, 4)
    kept.keep(name, values)
    filled = checksums([(name, torch.cat([values, torch.zeros(58, 4)]).view(torch.uint8).numpy().data)])
    layout = Layout("a server", "sha256", fills_vocabulary=True)
    assert kept.compare((filled,), layout, torch.float32) == ([], set())
    assert kept.compare((filled,), Layout("embedded", "sha256"), torch.float32)[0] == [*filled]


def test_what_the_learner_does_not_know_is_counted_and_not_compared():
    kept, name = KeptWeights(), "model.language_model.layers.0.mlp.experts.down_proj"
    kept.keep(name, torch.randn(3, 4, 5))
    told = ({"model.layers.0.mlp.experts.w2_weight": "0" * 16},)
    for layout in (Layout("on a GPU", "gpu"), Layout("packed"), Layout()):
        assert kept.compare(told, layout, torch.float32) == ([], {*told[0]})
    for silent in ((), ({},)):
        assert kept.compare(silent, Layout("embedded", "sha256"), torch.float32) == ([], {*told[0]})
    assert kept.compare(told, Layout("embedded", "sha256"), torch.float32)[0] == [*told[0]]
