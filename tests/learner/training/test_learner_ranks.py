"""Any number of ranks (processes, FSDP2 over gloo), however their memory is used, compute the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from learner.checkpoints.restoring import load_checkpoint
from learner.distributed import close_ranks, init_ranks
from learner.weights.gathering import gathered
from tests.support.learner_ranks import recipe_of, train, trainer_of
from tests.support.ranks.cases import CASES, CASES_OF, EXACT, MODES, OTHERS
from tests.support.ranks.cuts import CUTS
from tests.support.ranks.weights import distance
from tests.support.small.families import FAMILIES, qwen3, qwen3_5, qwen25
from tests.support.tiny import mixture_dir, running_engine, tiny_model_dir

pytestmark = pytest.mark.slow
COMPARED = [(size, case) for size in (2, 3) for case in CASES_OF[size]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tiny_model_dir(tmp_path_factory.mktemp("ranks"), layers=3)  # more than the deepstack: the last is trimmed
    mixture_dir(folder)
    qwen25(folder.parent / "windows")
    qwen3(folder.parent)
    qwen3_5(folder.parent)
    for name in OTHERS:
        FAMILIES[name][0](folder.parent / name).rename(folder.parent / f"family_{name}")
    return folder


@pytest.fixture(scope="module")
def engine(folder):
    with running_engine(folder) as (url, app):
        yield url, app


@pytest.fixture(scope="module")
def results(folder, engine, run_ranks):
    """What each number of ranks found; two of them publish to the engine."""
    run_ranks("learner_ranks", folder, folder.parent, engine[0])
    return {size: torch.load(folder.parent / f"{size}.pt", weights_only=False) for size in (1, 2, 3, 4)}


@pytest.mark.parametrize(("size", "case"), COMPARED)
def test_gradients_do_not_depend_on_the_number_of_ranks(results, size, case):
    assert distance(results[size][case]["gradients"], results[1][case]["gradients"]) < 1e-6


@pytest.mark.parametrize(("size", "case"), COMPARED)
def test_three_optimizer_steps_on_any_number_of_ranks_give_equal_weights(results, size, case):
    """Muon rounds gradients to bfloat16: two that differ by 1e-7 may round to neighbours, 4e-3 apart."""
    bound = 1e-4 if case == "muon" else 1e-6
    assert distance(results[size][case]["weights"], results[1][case]["weights"]) < bound


@pytest.mark.parametrize("size", [2, 3])
def test_muon_moves_sharded_matrices_as_whole_ones(results, size):
    for got, expected in zip(results[size]["muon_alone"], results[1]["muon_alone"], strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("size", "case"), COMPARED)
def test_metrics_are_those_of_the_whole_step_on_any_number_of_ranks(results, size, case):
    for one, more in zip(results[1][case]["metrics"], results[size][case]["metrics"], strict=True):
        names = [n for n in one if not n.startswith(("time/", "speed/")) and n != "batch/microbatches"]
        assert {n: more[n] for n in names} == pytest.approx({n: one[n] for n in names}, rel=2e-3, abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_how_model_and_work_lie_on_the_ranks_changes_nothing_beyond_rounding(results, mode):
    size, case, _ = MODES[mode]
    got, expected = results[size][mode], results[1][case]
    assert distance(got["gradients"], expected["gradients"]) < 1e-6
    assert distance(got["weights"], expected["weights"]) < (1e-4 if case == "muon" else 1e-6)
    for one, more in zip(expected["metrics"], got["metrics"], strict=True):
        names = [n for n in one if not n.startswith(("time/", "speed/")) and n != "batch/microbatches"]
        assert {n: more[n] for n in names} == pytest.approx({n: one[n] for n in names}, rel=2e-3, abs=1e-5)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("cut", CUTS)
def test_a_microbatch_may_be_cut_anywhere(results, size, cut):
    """In float64: of one document in float32 the kernels of some processors differ by 1.2e-6 by themselves."""
    assert distance(results[size]["exact"]["cuts"][cut], results[1]["exact"]["cuts"][cut]) < 1e-12


@pytest.mark.parametrize("mode", EXACT)
def test_in_float64_ranks_that_share_microbatches_differ_from_one_by_its_rounding_alone(results, mode):
    size, case, _ = EXACT[mode]
    got, expected = results[size]["exact"][mode], results[1]["exact"][case]
    assert distance(got["gradients"], expected["gradients"]) < 1e-12
    assert distance(got["weights"], expected["weights"]) < 1e-12


def test_work_that_ranks_share_is_even_and_on_one_rank_is_not_mentioned(results):
    shared = results[2]["context"]["metrics"][0]
    assert shared["parallel/tokens_max"] - shared["parallel/tokens_mean"] <= 2 * shared["batch/microbatches"]
    assert 1.0 <= shared["parallel/imbalance"] < 1.2
    assert not any(name.startswith("parallel/") for name in results[1]["vtrace"]["metrics"][0])


def test_the_check_at_the_start_names_where_ranks_that_share_a_microbatch_begin_to_differ(results):
    fine, positions, gradients = results[2]["check"]
    assert fine == ""
    assert "the first difference is in the output of decoder layer 0, by" in positions
    assert "the first difference is in the gradient of vlm.model.language_model.layers" in gradients
    assert all(said.endswith("= false to go on regardless") and "\n" not in said for said in (positions, gradients))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", ["grpo", "updates"])
def test_what_is_recorded_of_an_episode_comes_from_the_rank_that_trained_it(results, case, size):
    """In `updates` each episode is trained on twice, by whichever rank; what the first time saw is recorded."""
    one, more = results[1][case]["recorded"], results[size][case]["recorded"]
    assert one.keys() == more.keys() and sum(columns is not None for columns in one.values()) >= 3
    for place, columns in one.items():
        assert (columns is None) == (more[place] is None)
        if columns is not None:
            assert np.allclose(more[place], columns, rtol=1e-3, atol=1e-4) and columns[0].max() < 0


def test_a_reference_on_several_ranks_adds_the_divergence_from_it(results):
    plain, held = results[2]["vtrace"]["metrics"][0], results[2]["reference"]["metrics"][0]
    assert held["reference/kl"] > 0.01 and plain.get("reference/kl", 0.0) == 0.0


def test_what_a_reference_is_sure_of_is_held_on_several_ranks(results):
    first, *_, last = [metrics["reference/hold"] for metrics in results[2]["frozen"]["metrics"]]
    assert 0.1 < last < first and results[2]["vtrace"]["metrics"][0].get("reference/hold", 0.0) == 0.0


@pytest.mark.parametrize("size", [1, 2])
def test_layers_that_policy_and_reference_have_in_common_are_found_on_any_number_of_ranks(results, size):
    found = {case: results[size][case]["common"] for case in ("vtrace", "reference", "frozen", "frozen_layers")}
    assert found == {"vtrace": None, "reference": None, "frozen": 0, "frozen_layers": 1}


def test_experts_are_sharded_over_ranks_and_their_load_is_measured(results):
    assert all(local == 4 and whole == 8 for local, whole in results[2]["expert_shards"])
    for metrics in results[2]["experts"]["metrics"]:
        assert 1.0 <= metrics["moe/balance"] <= metrics["moe/max_load"] <= 4.0  # two of eight experts a token
        assert 0.0 <= metrics["moe/idle"] <= 0.75
    assert "moe/balance" not in results[2]["vtrace"]["metrics"][0]


def test_two_ranks_publish_their_shards_as_whole_parameters(results, engine):
    assert results[2]["published"]["publish/engines"] == 1
    assert results[2]["published"]["publish/canary_gap"] < 1e-4
    assert results[2]["published"]["publish/checksum_skipped"] == 0
    weights = {n: t for n, t in results[2]["vtrace"]["weights"].items() if not n.startswith("value_head")}
    parameters = engine[1].updates.loader._parameters
    assert all(torch.equal(parameters[name], tensor) for name, tensor in weights.items())


def test_a_run_on_two_ranks_resumes_on_one(results, folder):
    ranks = init_ranks("cpu")
    try:
        trainer = trainer_of(str(folder), ranks)
        restored = load_checkpoint(Path(results[2]["checkpoint"]), trainer, ranks, recipe_of(trainer.config))
        assert (restored.version, restored.coordinator, trainer.num_steps) == (3, {"cursor": 5}, 3)
        train(trainer, ranks, range(3, 5), CASES["vtrace"][1])
        assert distance(dict(gathered(trainer.policy)), results[2]["uninterrupted"]) < 1e-5
    finally:
        close_ranks()


def test_what_one_rank_finds_not_finite_stops_all_of_them(results):
    """The result is rank 0's; the number is the last one's."""
    for size, named in ((1, "(other)"), (2, "(another rank names where)"), (4, "(another rank names where)")):
        fine, spoilt = results[size]["finite"]
        assert fine == "" and f"no finite number of float32 {named}" in spoilt
