"""SwiGLU's MLP, block by block, gives what torch gives, gradients too, and a policy's MLPs are computed so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu import library, mlp
from learner.model.lora_attach import attach, initialise
from learner.model.policy import load_policy
from shared.config.lora_section import LoraConfig
from shared.vision import VisionSpec
from tests.support.tiny import tiny_model_dir

pytestmark = pytest.mark.skipif(library.library() is None, reason="no C compiler")
HIDDEN, WIDTH = 24, 40


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "BLOCK_FLOATS", 7 * WIDTH)
    monkeypatch.setattr(mlp, "MIN_BLOCK", 1)


def drawn(*shape: int) -> list[Tensor]:
    """Hidden states [*shape, HIDDEN], the weights of gate, up and down, and a gradient of the output."""
    torch.manual_seed(0)
    weights = torch.randn(2, WIDTH, HIDDEN).unbind()
    return [torch.randn(*shape, HIDDEN), *weights, torch.randn(HIDDEN, WIDTH), torch.randn(*shape, HIDDEN)]


def by_torch(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def with_gradients(function, parts: list[Tensor], wanted: tuple[bool, ...]) -> list[Tensor]:
    inputs = [part.clone().requires_grad_(want) for part, want in zip(parts[:4], wanted, strict=True)]
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out, [x for x in inputs if x.requires_grad], parts[4])]


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("shape", [(1,), (7,), (1, 33)])
@pytest.mark.parametrize("wanted", [(True,) * 4, (True, False, False, False), (False, True, False, True)])
def test_values_and_gradients_are_torchs_in_float64(shape: tuple[int, ...], wanted: tuple[bool, ...]) -> None:
    parts = drawn(*shape)
    ours = with_gradients(mlp.swiglu_mlp, parts, wanted)
    for got, expected in zip(ours, with_gradients(by_torch, [p.double() for p in parts], wanted), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


def test_no_tokens_give_no_output_and_gradients_of_zero() -> None:
    out, *grads = with_gradients(mlp.swiglu_mlp, drawn(0), (True,) * 4)
    assert out.shape == (0, HIDDEN)
    assert not any(grad.any() for grad in grads)


@pytest.mark.usefixtures("short_blocks")
def test_a_forward_without_gradient_is_that_with_one_bit_for_bit() -> None:
    parts = [part.requires_grad_() for part in drawn(33)[:4]]
    with torch.no_grad():
        alone = mlp.swiglu_mlp(*parts)
    assert torch.equal(alone, mlp.swiglu_mlp(*parts))
    assert not alone.requires_grad


def test_any_strides_are_read() -> None:
    parts = drawn(5, 6)
    there = [parts[0].transpose(0, 1), *(w.t().contiguous().t() for w in parts[1:4])]
    torch.testing.assert_close(mlp.swiglu_mlp(*there), by_torch(*parts[:4]).transpose(0, 1))


def test_the_mlps_of_a_policy_are_computed_so_unless_they_have_adapters(tmp_path, monkeypatch) -> None:
    folder = str(tiny_model_dir(tmp_path))
    policy = load_policy(folder, VisionSpec.load(folder))
    found = [layer.mlp for layer in policy.vlm.model.language_model.layers]
    calls, real = [], mlp.swiglu_mlp
    monkeypatch.setattr("kernels.cpu.linear._ON_AMD", False)  # where oneDNN multiplies
    monkeypatch.setattr(mlp, "swiglu_mlp", lambda *parts: calls.append(parts) or real(*parts))

    def compute() -> int:
        calls.clear()
        for each in found:
            x = torch.randn(1, 3, each.hidden_size)
            torch.testing.assert_close(each.float()(x), type(each).forward(each, x))
        return len(calls)

    assert compute() == len(found)
    initialise(attach(policy.vlm, LoraConfig(rank=2, alpha=4, targets=("dense",)), torch.float32), seed=0)
    assert compute() == 0
