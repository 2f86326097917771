"""Ranks that share microbatches and a mixture's experts, and compute activations again, may compile their blocks."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks.weights import distance
from tests.support.tiny import mixture_dir, tiny_model_dir


@pytest.mark.slow
def test_compiled_blocks_of_two_ranks_give_the_gradients_and_weights_of_one_that_compiles_nothing(tmp_path, run_ranks):
    model = mixture_dir(tiny_model_dir(tmp_path, layers=3))
    run_ranks("ranks.compiled", model, tmp_path)
    alone, shared = (torch.load(tmp_path / f"{size}.pt", weights_only=False) for size in (1, 2))
    assert distance(shared[0], alone[0]) < 1e-6 and distance(shared[1], alone[1]) < 1e-6
    assert shared[2] == ""  # the check at the start finds no layer that differs
    assert alone[3] == 0 and 10 < shared[3] <= 40  # graphs of parts of a block, not of each layer
