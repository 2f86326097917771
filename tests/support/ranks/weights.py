"""The distance between sets of tensors."""

from __future__ import annotations

from torch import Tensor


def distance(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the norm of the difference, relative to the norm of `expected`."""
    assert got.keys() == expected.keys()
    difference = sum((got[name] - expected[name]).double().square().sum() for name in expected)
    return float((difference / sum(t.double().square().sum() for t in expected.values())).sqrt())
