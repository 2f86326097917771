"""A mixture's experts, dealt over ranks, compute what they do on one: two and four processes over gloo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from learner.checkpoints.hf_export import export_checkpoint
from learner.distributed import close_ranks, init_ranks
from learner.model.experts import check_experts
from learner.model.policy import load_policy
from learner.weights.gathering import gathered
from shared.config.learner_section import ParallelConfig
from shared.vision import VisionSpec
from tests.support.ranks.dealt import MODES, SAVED, resumed, state_of
from tests.support.ranks.experts import CASES
from tests.support.ranks.weights import distance
from tests.support.tiny import mixture_dir, tiny_model_dir

pytestmark = pytest.mark.slow


@dataclass
class Size:
    """Stands for a dimension of a mesh of more ranks than there are."""

    value: int

    def size(self) -> int:
        return self.value


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("dealt"), layers=3)


@pytest.fixture(scope="module")
def model(dense):
    return mixture_dir(dense)


@pytest.fixture(scope="module")
def results(model, run_ranks):
    run_ranks("ranks.dealt", model, model.parent)
    return {size: torch.load(model.parent / f"{size}.pt", weights_only=False) for size in (1, 2, 4)}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", [name for case in CASES for name in (case, f"{case}, gathered")])
def test_a_layer_of_dealt_experts_gives_the_outputs_and_gradients_of_a_whole_one(results, size, case):
    for got, expected in results[size]["layer"][case]:
        assert got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_dealt_experts_are_trained_as_on_one_rank(results, mode):
    """Muon rounds gradients to bfloat16: two that differ by 1e-7 may round to neighbours, 4e-3 apart."""
    muon = "Muon" in mode
    got, expected = results[MODES[mode][0]][mode], results[1]["Muon" if muon else "one"]
    assert distance(got["gradients"], expected["gradients"]) < 1e-6
    assert distance(got["weights"], expected["weights"]) < (1e-4 if muon else 1e-6)
    for one, more in zip(expected["metrics"], got["metrics"], strict=True):
        names = [n for n in one if not n.startswith(("time/", "speed/")) and n != "batch/microbatches"]
        assert {n: more[n] for n in names} == pytest.approx({n: one[n] for n in names}, rel=2e-3, abs=1e-5)


def test_the_busiest_ranks_share_of_the_tokens_is_measured(results):
    for metrics in results[4]["expert 4"]["metrics"]:
        assert 1.0 <= metrics["moe/max_rank_load"] <= metrics["moe/max_load"] <= 4.0
    assert "moe/max_rank_load" not in results[1]["one"]["metrics"][0]


@pytest.mark.parametrize("size", [2, 4])
def test_a_gradient_that_is_not_finite_on_one_rank_moves_no_weight_of_any(results, size):
    assert results[size]["spoilt"] == (1.0, False)


@pytest.mark.parametrize("size", [2, 4])
def test_the_check_at_the_start_names_where_dealt_experts_begin_to_differ(results, size):
    fine, wrong = results[size]["check"]
    assert fine == "" and "\n" not in wrong
    assert "learner.parallel.context = 2 with learner.parallel.expert = 2 does not compute" in wrong
    assert "the first difference is in the output of decoder layer 0, by" in wrong and "set both to 1" in wrong


def test_sizes_that_do_not_fit_the_mixture_are_one_line(model, dense):
    policy = load_policy(str(model), VisionSpec.load(model))
    for expert, shards, said in (
        (3, 1, r"learner.parallel.expert = 3 does not divide the model's 8 experts; set it to 1$"),
        (2, 5, r"expert = 2 leaves 5 ranks to cut the 64 and 192 rows of an expert's matrices over"),
    ):
        with pytest.raises(ValueError, match=said):
            check_experts(policy.vlm, {"expert": Size(expert), "expert_shard": Size(shards)})
    with pytest.raises(ValueError, match=r"expert = 2, but qwen3_vl has no experts; set it to 1"):
        check_experts(load_policy(str(dense), VisionSpec.load(dense)).vlm, {"expert": Size(2), "expert_shard": Size(1)})
    with pytest.raises(ValueError, match=r"expert = 2 does not divide the 1 ranks that share a copy .* set it to 1"):
        init_ranks("cpu", parallel=ParallelConfig(expert=2))


@pytest.mark.parametrize("size", [2, 4])
def test_a_mixture_read_into_dealt_experts_is_published_bit_for_bit(results, model, size):
    expected = dict(gathered(load_policy(str(model), VisionSpec.load(model))))
    assert results[size]["loaded"].keys() == expected.keys()
    assert all(torch.equal(results[size]["loaded"][name], tensor) for name, tensor in expected.items())


def test_a_checkpoint_goes_from_any_deal_to_any_other(results, model):
    four = results[4]
    ranks = init_ranks("cpu")
    try:
        on_one = state_of(resumed(str(model), ranks, four["path"]))
    finally:
        close_ranks()
    for got, expected in (
        (on_one, four["state"]),
        (four["resumed"], four["state"]),
        (four["resumed from one"], results[1]["state"]),
    ):
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert SAVED in four and distance(four["gone on"], four["uninterrupted"]) < 1e-6


def test_a_checkpoint_of_dealt_experts_is_exported_bit_for_bit(results, model, tmp_path):
    export_checkpoint(Path(results[4]["path"]), tmp_path / "hf", model_path=str(model), dtype=None)
    exported = dict(gathered(load_policy(str(tmp_path / "hf"), VisionSpec.load(model))))
    assert all(torch.equal(tensor, results[4]["state"][name]) for name, tensor in exported.items())


def test_a_checkpoint_of_a_mixture_is_not_taken_for_one_of_the_dense_model(results, dense):
    ranks = init_ranks("cpu")
    try:
        with pytest.raises(ValueError, match=r"is of another model \(qwen3_vl_moe, .* use its model or learner.resume"):
            resumed(str(dense), ranks, results[4]["path"])
    finally:
        close_ranks()
