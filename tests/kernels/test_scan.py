"""The backward-in-time recurrence against a plain float64 loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference, reverse_scan


def make(shape, seed=0, dtype=torch.float32):
    """(decay, delta): decays between 0 and 1, both ends included often, as a V-trace with discounts has them."""
    gen = torch.Generator().manual_seed(seed)
    decay, kind = torch.rand(shape, generator=gen), torch.rand(shape, generator=gen)
    decay = torch.where(kind < 0.4, 1.0, torch.where(kind < 0.5, 0.0, decay))
    return decay.to(dtype), torch.randn(shape, generator=gen).to(dtype)


def close(got, want, dtype=torch.float32):
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=1e-6 if dtype != torch.bfloat16 else 1e-2, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (31, 2), (64, 3), (65, 20), (2100, 1), (1000, 17), (4500, 64)])
def test_the_result_is_the_loops_and_the_arguments_are_left_alone(shape):
    decay, delta = make(shape)
    before = decay.clone(), delta.clone()
    close(reverse_scan(decay, delta), reference.reverse_scan(decay, delta))
    assert torch.equal(decay, before[0]) and torch.equal(delta, before[1])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 900), st.integers(1, 20), st.integers(0, 99))
def test_any_number_of_steps_and_streams_agrees_with_the_loop(num_steps, width, seed):
    decay, delta = make((num_steps, width), seed)
    close(reverse_scan(decay, delta), reference.reverse_scan(decay, delta))


def test_a_discount_of_one_sums_and_a_decay_of_zero_cuts_exactly():
    ones, steps = torch.ones(5000, 2, dtype=torch.float64), torch.arange(10000.0, dtype=torch.float64).view(5000, 2)
    assert torch.equal(reverse_scan(ones, steps), steps.flip(0).cumsum(0).flip(0))
    assert torch.equal(reverse_scan(0 * ones, steps), steps)


def test_episodes_that_a_decay_of_zero_ends_do_not_see_each_other():
    decay, delta = make((4000, 1))
    lengths = [1000, 2999, 1]
    decay[[999, 3998, 3999]] = 0
    alone = [reference.reverse_scan(*parts) for parts in zip(decay.split(lengths), delta.split(lengths), strict=True)]
    close(reverse_scan(decay, delta), torch.cat(alone))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_result_has_the_dtype_of_delta_and_no_gradient(dtype):
    decay, delta = make((300, 4), dtype=dtype)
    got = reverse_scan(decay.requires_grad_(), delta)
    close(got, reference.reverse_scan(decay.detach(), delta), dtype)
    assert not got.requires_grad


def test_strided_inputs_are_read_as_they_are_and_nothing_gives_nothing():
    decay, delta = make((64, 700))
    close(reverse_scan(decay.t(), delta.t()), reference.reverse_scan(decay.t(), delta.t()))
    assert reverse_scan(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0, 3)


@pytest.mark.parametrize(
    ("decay", "delta", "message"),
    [
        (torch.zeros(3, 1), torch.zeros(4, 1), "must both be"),
        (torch.zeros(3), torch.zeros(3), "must both be"),
        (torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, 1), "floating-point"),
        (torch.zeros(3, 1, device="meta"), torch.zeros(3, 1), "on one device"),
    ],
)
def test_bad_input_is_refused_in_one_line(decay, delta, message):
    with pytest.raises(ValueError, match=message) as caught:
        reverse_scan(decay, delta)
    assert "\n" not in str(caught.value)
