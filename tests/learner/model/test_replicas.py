"""Ranks that hold the same shard add up their gradients once an update, not once a microbatch."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks.weights import distance

pytestmark = pytest.mark.slow


def test_replicas_add_up_their_gradients_once_an_update_and_get_the_same(folder, tmp_path, run_ranks):
    run_ranks("ranks.replicas", folder, tmp_path / "found.pt")
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    once, always = found["once"], found["always"]
    assert once["microbatches"] == always["microbatches"] > 1 and once["groups"] == always["groups"] > 3
    assert always["sums"] == always["groups"] * always["microbatches"]
    assert once["sums"] == once["groups"]  # the outermost parameters too
    assert distance(once["gradient"], always["gradient"]) < 1e-6
