"""The fast matrix product is F.linear, in the learner and in the engine."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kernels.cpu import linear as cpu_linear
from kernels.cpu.linear import linear, use_fast_linear, use_plain_linear


@pytest.fixture(params=[False, True], ids=["MKL", "oneDNN"], autouse=True)
def wide(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both products on whatever CPU this is."""
    monkeypatch.setattr(cpu_linear, "_can_use_onednn", lambda: request.param)


@pytest.mark.parametrize("shape", [(1, 7, 5), (3, 33, 64), (257, 128)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("on_amd", [False, True])
def test_values_and_gradients_are_those_of_torch_linear(
    shape: tuple[int, ...], with_bias: bool, on_amd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_linear, "_ON_AMD", on_amd)
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


def test_in_inference_mode_values_are_those_of_torch_linear_for_any_strides() -> None:
    x, weight, bias = torch.randn(5, 3, 33).transpose(0, 1), torch.randn(33, 19).t(), torch.randn(19)
    with torch.inference_mode():
        torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)


def test_every_plain_linear_of_a_model_computes_so_until_it_is_undone_and_a_copy_has_its_own_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    use_fast_linear(model)
    other = copy.deepcopy(model)
    torch.nn.init.zeros_(other[0].weight)
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(cpu_linear, "linear", lambda x, w, b: asked.append(w) or F.linear(x, w, b))
    model(torch.ones(1, 3)), other(torch.ones(1, 3))
    assert [id(w) for w in asked] == [id(m.weight) for m in (model[0], model[2], other[0], other[2])]
    use_plain_linear(model)
    model(torch.ones(1, 3))
    assert len(asked) == 4


@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, False, True)])
def test_layers_that_read_the_same_give_what_each_gives_alone_and_gradients_too(wanted: tuple[bool, ...]) -> None:
    torch.manual_seed(0)
    given, modules = torch.randn(2, 7, 12), [nn.Linear(12, width, bias=False) for width in (5, 8)]
    grads = [torch.randn(2, 7, module.out_features) for module in modules]

    def gradients(function) -> list[torch.Tensor]:
        x = given.clone().requires_grad_(wanted[0])
        for module, want in zip(modules, wanted[1:], strict=True):
            module.weight.requires_grad_(want)
        inputs = [each for each in (x, *(module.weight for module in modules)) if each.requires_grad]
        outs = function(x)
        some = [(out, grad) for out, grad in zip(outs, grads, strict=True) if out.requires_grad]
        found = torch.autograd.grad([out for out, _ in some], inputs, [grad for _, grad in some])
        return [*(out.detach() for out in outs), *found]

    ours = gradients(lambda x: cpu_linear.linears(x, *modules))
    alone = gradients(lambda x: tuple(F.linear(x, module.weight) for module in modules))
    for got, expected in zip(ours, alone, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_layers_with_more_than_a_weight_are_left_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "_ON_AMD", False)

    def layers() -> list[nn.Linear]:
        return [nn.Linear(4, 4, bias=False) for _ in range(2)]

    x, plain, biased, watched, replaced = torch.ones(2, 4), layers(), layers(), layers(), layers()
    use_fast_linear(nn.ModuleList(plain))
    biased[1].bias = nn.Parameter(torch.zeros(4))
    watched[0].register_forward_hook(lambda *_: None)
    replaced[1].forward = lambda x: x @ replaced[0].weight.t()  # type: ignore[method-assign]
    assert cpu_linear.supports_linears(x, *plain)
    assert not any(cpu_linear.supports_linears(x, *each) for each in (biased, watched, replaced))
    assert not cpu_linear.supports_linears(x.bfloat16(), *plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert not cpu_linear.supports_linears(x, *plain)
    monkeypatch.setattr(cpu_linear, "_ON_AMD", True)
    assert cpu_linear.supports_linears(x, *plain) is not cpu_linear._can_use_onednn()
