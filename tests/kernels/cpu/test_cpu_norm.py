"""RMS norms in C give what torch gives, gradients too, and a policy's norms are computed so where they can."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kernels.cpu import cpu_norm, library
from learner.model.adapt import use_fast_parts
from learner.model.policy import load_policy
from shared.vision import VisionSpec
from tests.support.small.passes import check_norm, check_turned, check_turned_norm
from tests.support.tiny import tiny_model_dir

pytestmark = pytest.mark.skipif(library.library() is None, reason="no C compiler")


@pytest.mark.parametrize("shape", [(1, 2), (3, 7), (64, 32), (65, 128), (2, 130, 4, 32)])
def test_values_and_gradients_are_torchs_in_float64(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    check_norm(cpu_norm, shape, "cpu", torch.float32)


@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 4, 16), (70, 2, 32), (65, 3, 24), (5, 2, 256)])
def test_turned_heads_and_their_gradients_are_those_of_transformers_in_float64(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    check_turned_norm(cpu_norm, shape, "cpu", torch.float32)
    check_turned(cpu_norm, shape, "cpu", torch.float32)


def test_a_row_is_computed_alike_among_others_turned_around_and_by_any_number_of_threads() -> None:
    torch.manual_seed(0)
    x, weight, grad = torch.randn(300, 32).requires_grad_(), torch.randn(32).requires_grad_(), torch.randn(300, 32)
    heads, angles = x.view(1, 100, 3, 32), torch.randn(2, 1, 100, 32)

    def gradients(threads: int) -> tuple[torch.Tensor, ...]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            rotated = cpu_norm.apply_rope(heads[0], *angles[:, 0])
            outs = cpu_norm.rms_norm(x, weight, 1e-6), cpu_norm.rms_norm_rope(heads, weight, 1e-6, *angles), rotated
            return *outs, *torch.autograd.grad(outs, (x, weight), (grad, grad.view_as(heads), grad.view_as(rotated)))
        finally:
            torch.set_num_threads(before)

    one, two = gradients(1), gradients(2)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert torch.equal(cpu_norm.rms_norm(x[7:9], weight, 1e-6), one[0][7:9])
    some = cpu_norm.rms_norm_rope(heads[:, 7:9], weight, 1e-6, *angles[:, :, 7:9])
    assert torch.equal(some, one[1][:, 7:9])
    assert torch.equal(cpu_norm.rms_norm(x.t().contiguous().t(), weight, 1e-6), one[0])


def test_a_frozen_weight_has_no_gradient_and_a_nan_stays_in_its_row() -> None:
    x, weight = torch.ones(4, 8).requires_grad_(), torch.ones(8)
    cpu_norm.rms_norm(x, weight, 1e-6).sum().backward()
    assert x.grad is not None and weight.grad is None
    x = torch.ones(4, 8)
    x[1, 3] = torch.nan
    assert cpu_norm.rms_norm(x, weight, 1e-6).isnan().any(1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("adds", [False, True])
def test_a_sum_and_its_norm_and_their_gradients_are_torchs_in_float64(adds: bool) -> None:
    torch.manual_seed(0)
    *parts, for_total, for_normed = torch.randn(4, 2, 65, 24).unbind()
    weight = torch.randn(24)

    def gradients(exact: bool) -> list[torch.Tensor]:
        own = [x.double() if exact else x.clone() for x in (*parts[: 1 + adds], weight)]
        x, *delta, own_weight = [each.requires_grad_() for each in own]
        if exact:
            total = sum(delta, x)
            normed = F.rms_norm(total, (24,), own_weight, 1e-6)
        else:
            total, normed = cpu_norm.add_rms_norm(x, delta[0] if adds else None, own_weight, 1e-6)
        given = (for_total.to(total.dtype), for_normed.to(total.dtype))
        return [total.detach(), normed.detach(), *torch.autograd.grad((total, normed), own, given)]

    for got, expected in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


def test_the_norms_of_a_policy_are_computed_so_in_float32_and_as_before_in_bfloat16(tmp_path, monkeypatch) -> None:
    folder = str(tiny_model_dir(tmp_path))
    policy = load_policy(folder, VisionSpec.load(folder))
    found = [module for module in policy.modules() if type(module).__name__.endswith("RMSNorm")]
    assert found
    calls, real = [], cpu_norm.rms_norm
    monkeypatch.setattr("kernels.cpu.cpu_norm.rms_norm", lambda *parts: calls.append(parts) or real(*parts))
    for module in found:
        x = torch.randn(3, module.weight.numel())
        torch.testing.assert_close(module.float()(x), type(module).forward(module, x))
        assert module.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    assert len(calls) == len(found)


def test_a_norm_of_another_kind_is_refused() -> None:
    class OtherRMSNorm(nn.RMSNorm):
        """Its epsilon is that of its input's dtype."""

    with pytest.raises(ValueError, match=r"does not fit: the learner needs classes called \.\.\.RMSNorm"):
        use_fast_parts(nn.Sequential(OtherRMSNorm(8)))
