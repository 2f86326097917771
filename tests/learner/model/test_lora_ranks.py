"""Adapters on two ranks (processes, FSDP2 over gloo) are those of one, however memory is used, and are resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from learner.checkpoints.restoring import load_checkpoint
from learner.setup import build_trainer
from tests.support.learner_ranks import train
from tests.support.ranks.adapted import EXACT, MODES, NUM_GROUPS, recipe_for, state_of
from tests.support.ranks.weights import distance
from tests.support.tiny import mixture_dir, tiny_model_dir

pytestmark = pytest.mark.slow
OF_TWO = [name for name, (size, *_) in MODES.items() if size == 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tiny_model_dir(tmp_path_factory.mktemp("ranks"), layers=3)
    mixture_dir(folder)
    return folder


@pytest.fixture(scope="module")
def results(folder, run_ranks):
    run_ranks("ranks.adapted", folder, folder.parent)
    return {k: v for size in (1, 2) for k, v in torch.load(folder.parent / f"{size}.pt", weights_only=False).items()}


@pytest.mark.parametrize("mode", OF_TWO)
def test_two_ranks_train_the_adapters_of_one(results, mode):
    got, one = results[mode], results["experts of one" if "experts" in mode else "one"]
    assert all(torch.equal(got["start"][name], p) for name, p in one["start"].items())
    assert got["base"] == one["base"]
    gradients, trained, sent = (1e-12, 1e-10, 1e-12) if MODES[mode][1] in EXACT else (2e-6, 5e-6, 1e-6)
    assert distance(got["gradients"], one["gradients"]) < gradients
    assert distance(got["trained"], one["trained"]) < trained
    assert distance(got["sent"], one["sent"]) < sent
    for mine, theirs in zip(got["metrics"], one["metrics"], strict=True):
        for name in ("reference/kl", "optim/grad_norm", "policy/entropy"):
            assert (name in mine) == (name in theirs)
            assert mine.get(name, 0.0) == pytest.approx(theirs.get(name, 0.0), rel=2e-3, abs=1e-5)


def test_two_ranks_resume_bit_for_bit_and_one_takes_up_what_they_have_left(results, folder, ranks):
    found = results["resume"]
    assert all(torch.equal(found["resumed"][name], p) for name, p in found["uninterrupted"].items())
    recipe = recipe_for(str(folder), *MODES["two"][2:])
    trainer = build_trainer(recipe, ranks)
    load_checkpoint(Path(found["path"]), trainer, ranks, recipe)
    train(trainer, ranks, range(3, 4), NUM_GROUPS)
    assert distance(state_of(trainer), found["uninterrupted"]) < 5e-6


def test_frozen_shards_have_the_recipes_dtype_and_adapters_float32(results):
    assert results["dtypes"] == {(False, "torch.bfloat16"), (True, "torch.float32")}
