"""Norms and rotary embeddings in fewer passes are transformers' own, in values and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm, apply_rotary_pos_emb

from kernels.cpu_rows import turned, use_fast_norms

SHAPES = [(1, 7, 64), (1, 33, 4, 32), (5, 128), (1, 1, 2, 8)]


def gradients(function: Any, *inputs: Tensor) -> list[Tensor]:
    """The value and, of an upstream gradient that differs everywhere, those of the inputs."""
    own = [x.detach().clone().requires_grad_() for x in inputs]
    value = function(*own)
    value.backward(torch.linspace(-1, 1, value.numel(), dtype=value.dtype).view(value.shape))
    return [value.detach(), *(x.grad for x in own if x.grad is not None)]


def norm(size: int, dtype: torch.dtype = torch.float32) -> Qwen3VLTextRMSNorm:
    module = Qwen3VLTextRMSNorm(size, eps=1e-6)
    torch.nn.init.normal_(module.weight)
    return module.to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])  # at the smallest the epsilon matters
def test_a_norm_and_its_gradients_are_those_of_float64(shape: tuple[int, ...], size: float) -> None:
    torch.manual_seed(0)
    fast, exact, x = norm(shape[-1]), norm(shape[-1]), size * torch.randn(shape)
    exact.load_state_dict(fast.state_dict())
    use_fast_norms(fast)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + exact.variance_epsilon))

    got = gradients(fast, x)
    got.insert(2, fast.weight.grad)
    for mine, theirs in zip(got, gradients(plain, x.double(), exact.weight.double()), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=2e-6 * float(theirs.abs().max()))


def test_a_norm_of_other_dtypes_is_transformers_own_and_a_copy_has_its_own_weight() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        fast, x = norm(16, dtype), torch.randn(3, 16, dtype=dtype)
        expected = fast(x)
        use_fast_norms(fast)
        assert torch.equal(fast(x), expected)
    fast = norm(16)
    use_fast_norms(fast)
    other = copy.deepcopy(fast)
    torch.nn.init.zeros_(other.weight)
    assert float(fast(torch.ones(2, 16)).detach().abs().sum()) > 0 == float(other(torch.ones(2, 16)).detach().sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("heads", [1, 3])
def test_turned_heads_and_their_gradients_are_those_of_transformers(heads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 5, heads, 8, dtype=dtype).transpose(1, 2)  # [1,A,T,D] as it comes out of a projection
    cos, sin = torch.randn(2, 1, 5, 8, dtype=dtype)  # of any values: halves need not be equal
    expected = gradients(lambda x: apply_rotary_pos_emb(x, x[:, :0], cos, sin)[0], x)
    for mine, theirs in zip(gradients(lambda x: turned(x, cos[:, None], sin[:, None]), x), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
