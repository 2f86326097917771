"""SwiGLU's product in C gives what torch gives, gradients too, and a policy's MLPs are computed so where they can."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kernels.cpu import cpu_swiglu, library
from learner.model.adapt import use_fast_parts
from learner.model.policy import load_policy
from shared.vision import VisionSpec
from tests.support.small.passes import check_swiglu
from tests.support.tiny import tiny_model_dir

pytestmark = pytest.mark.skipif(library.library() is None, reason="no C compiler")


@pytest.mark.parametrize("shape", [(1, 1), (6, 7), (1, 70, 384)])
def test_values_and_gradients_are_torchs_in_float64_for_small_and_for_huge_gates(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    check_swiglu(cpu_swiglu, shape, "cpu", torch.float32)


def test_an_element_is_computed_alike_wherever_it_is_and_by_any_number_of_threads() -> None:
    torch.manual_seed(0)
    gate, up, grad = torch.randn(3, 50, 37).unbind()
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            parts = gate.clone().requires_grad_(), up.clone().requires_grad_()
            out = cpu_swiglu.swiglu(*parts)
            found.append((out, *torch.autograd.grad(out, parts, grad)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(cpu_swiglu.swiglu(gate[3:5, 5:9], up[3:5, 5:9]), found[0][0][3:5, 5:9])


def test_a_nan_stays_where_it_is() -> None:
    gate = torch.ones(2, 8)
    gate[1, 3] = torch.nan
    assert cpu_swiglu.swiglu(gate, torch.ones(2, 8)).isnan().nonzero().tolist() == [[1, 3]]


def test_the_mlps_of_a_policy_are_computed_so_in_float32_and_as_before_in_bfloat16(tmp_path, monkeypatch) -> None:
    folder = str(tiny_model_dir(tmp_path))
    policy = load_policy(folder, VisionSpec.load(folder))
    found = [layer.mlp for layer in policy.vlm.model.language_model.layers]
    calls, real = [], cpu_swiglu.swiglu
    monkeypatch.setattr("kernels.cpu.cpu_swiglu.swiglu", lambda *parts: calls.append(parts) or real(*parts))
    monkeypatch.setattr("kernels.cpu.mlp.supports_swiglu_mlp", lambda *_: False)  # which computes all of it
    for mlp in found:
        x = torch.randn(1, 3, mlp.hidden_size)
        torch.testing.assert_close(mlp.float()(x), type(mlp).forward(mlp, x))
        assert mlp.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    assert len(calls) == len(found)


class Other(nn.Module):
    """Two of its parts have the names of an MLP's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.act_fn, self.both = nn.Linear(2, 2), nn.SiLU(), nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.gate_proj(self.act_fn(gate) * up)


def test_an_mlp_of_other_parts_computes_as_it_is() -> None:
    other, x = Other(), torch.randn(3, 2)
    expected = other(x)
    use_fast_parts(nn.Sequential(other))
    assert torch.equal(other(x), expected) and "forward" not in vars(other)


def test_an_mlp_of_the_same_parts_that_multiplies_otherwise_is_refused() -> None:
    class Swapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(2, 2) for _ in range(3))
            self.act_fn = nn.SiLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))

    with pytest.raises(ValueError, match="multiply by their gate"):
        use_fast_parts(nn.Sequential(Swapped()))
