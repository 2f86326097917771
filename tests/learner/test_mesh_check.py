"""What the check of shared microbatches and experts takes for rounding."""

from __future__ import annotations

from math import inf, nan

from learner.mesh_check import is_rounding


def test_a_difference_that_is_no_number_is_not_rounding():
    assert is_rounding(0.0, 1e-4) and is_rounding(1e-4, 1e-4)
    assert not is_rounding(2e-4, 1e-4) and not is_rounding(inf, 1e-4) and not is_rounding(nan, 1e-4)
