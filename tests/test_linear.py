"""The learner's fast matrix product is F.linear."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels import cpu_linear as module
from kernels.cpu_linear import FastLinear, linear, use_fast_linear


@pytest.mark.parametrize("shape", [(1, 7, 5), (3, 33, 64), (257, 128)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("on_amd", [False, True])
def test_values_and_gradients_are_those_of_torch_linear(
    shape: tuple[int, ...], with_bias: bool, on_amd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ON_AMD", on_amd)
    torch.manual_seed(0)
    x, weight = torch.randn(shape), torch.randn(19, shape[-1])
    bias = torch.randn(19) if with_bias else None
    upstream = torch.randn(*shape[:-1], 19)
    grads = []
    for function in (linear, F.linear):
        inputs = [t.clone().requires_grad_() for t in (x, weight, bias) if t is not None]
        out = function(*inputs)
        out.backward(upstream)
        grads.append([out.detach(), *(t.grad for t in inputs)])
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


def test_every_plain_linear_of_a_model_is_replaced_and_keeps_its_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    before = [p.data_ptr() for p in model.parameters()]
    use_fast_linear(model)
    assert sum(isinstance(m, FastLinear) for m in model) == 2
    assert [p.data_ptr() for p in model.parameters()] == before
