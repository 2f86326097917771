"""The precision of what is kept of each row of logits: errors of a row's sum would move its whole gradient one way."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import linear_logprob
from kernels.row_records import RowGrads, RowStats


@pytest.mark.parametrize("sum_exp", [1.0000001, 1.7, 151936.0])
def test_the_logarithm_of_a_rows_sum_has_the_digits_of_float64(sum_exp):
    column = torch.tensor([sum_exp])
    stats = RowStats(torch.zeros(1), column, torch.zeros(1), torch.zeros(1))
    logprob, _, log_sum = stats.finish(temperature=1.0)
    exact = math.log(column.item())
    assert log_sum.item() == pytest.approx(exact, rel=1e-14)
    assert logprob.item() == pytest.approx(-exact, rel=1e-7)


@pytest.mark.parametrize("log_sum", [1e-3, 1e-7, 1e-10])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_gradient_of_an_almost_certain_token_keeps_its_digits(log_sum, temperature):
    """It is (1 - p) / T of the logprob's; 1 - p is far below the last digit of float32 at 1."""
    largest = torch.tensor([3.0])
    saved = largest, torch.tensor([log_sum], dtype=torch.float64), torch.zeros(1), largest
    grads = RowGrads.of(saved, torch.ones(1), None, temperature)
    assert grads.at_target.item() == pytest.approx(-math.expm1(-log_sum) / temperature, rel=1e-6)


def test_no_entropy_is_negative_however_certain_the_token():
    hidden, weight = torch.tensor([[40.0], [200.0], [0.0]]), torch.tensor([[1.0], [0.0], [-1.0]])
    _, entropies = linear_logprob(hidden, weight, torch.zeros(3, dtype=torch.int64))
    assert (entropies >= 0).all() and entropies[1] == 0.0
    assert entropies[2].item() == pytest.approx(math.log(3), rel=1e-6)
