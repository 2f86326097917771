"""GELU in C gives what torch gives, gradients too, and towers are computed so where they can."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from actor.engine.runner import Runner
from kernels.cpu import gelu, library
from learner.model.policy import load_policy
from shared.vision import VisionSpec
from tests.support.small.passes import check
from tests.support.tiny import load_model, tiny_model_dir

pytestmark = pytest.mark.skipif(library.library() is None, reason="no C compiler")


@pytest.mark.parametrize("shape", [(1,), (1, 1), (6, 7), (1, 70, 128), (0, 8)])
@pytest.mark.parametrize("size", [1.0, 4.0, 1e3, 1e19, 1e37])
def test_values_and_gradients_are_torchs_in_float64_for_small_and_for_large_numbers(
    shape: tuple[int, ...], size: float
) -> None:
    torch.manual_seed(0)
    if 0 in shape:
        assert gelu.gelu_tanh(torch.zeros(shape)).shape == shape
        return
    x, grad = torch.randn(2, *shape).unbind()
    check(gelu.gelu_tanh, lambda x: F.gelu(x, approximate="tanh"), (x * size,), grad, 0.0)


def test_an_element_is_computed_alike_wherever_it_is_with_gradients_and_without_and_by_any_number_of_threads() -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(2, 50, 37).unbind()
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            own = x.clone().requires_grad_()
            out = gelu.gelu_tanh(own)
            found.append((out, *torch.autograd.grad(out, own, grad), gelu.gelu_tanh(x)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(found[0][0], found[0][2])
    assert torch.equal(gelu.gelu_tanh(x[3:5, 5:9]), found[0][0][3:5, 5:9])


def test_a_nan_stays_where_it_is() -> None:
    x = torch.ones(2, 8)
    x[1, 3] = torch.nan
    assert gelu.gelu_tanh(x).isnan().nonzero().tolist() == [[1, 3]]


def test_only_modules_that_compute_it_are_replaced_and_in_bfloat16_torch_computes() -> None:
    class GELUTanh(nn.Module):  # one of this name that computes something else
        def forward(self, x):
            return x + 1

    other = GELUTanh()
    gelu.use_fast_gelu(other)
    assert torch.equal(other(torch.ones(2)), torch.full((2,), 2.0))
    x = torch.randn(9).bfloat16()
    assert torch.equal(gelu.gelu_tanh(x), F.gelu(x, approximate="tanh"))


def test_the_towers_of_learner_and_engine_compute_so(tmp_path, monkeypatch) -> None:
    folder = str(tiny_model_dir(tmp_path))
    spec = VisionSpec.load(folder)
    policy, served = load_policy(folder, spec).vlm.float(), load_model(folder)
    Runner(served, spec, num_slots=1, max_context=64)
    calls, real = [], gelu.gelu_tanh
    monkeypatch.setattr(gelu, "gelu_tanh", lambda x: calls.append(x) or real(x))
    for number, model in enumerate((policy, served), 1):
        block = model.model.visual.blocks[0].mlp
        x = torch.randn(3, block.linear_fc1.in_features)
        expected = block.linear_fc2(F.gelu(block.linear_fc1(x), approximate="tanh"))
        torch.testing.assert_close(block(x), expected)
        assert len(calls) == number
