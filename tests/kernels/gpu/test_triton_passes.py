"""Norms, rotations and gated products as Triton kernels: in Triton's interpreter (a process of its own), and compiled
for a GPU without one."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch

from kernels.heads import by_token
from learner.batch.microbatch import Microbatch
from learner.model.policy import Policy, load_policy
from tests.support.episodes import packed, random_trajectory
from tests.support.paths import ROOT
from tests.support.small.families import qwen3_moe
from tests.support.small.hopper import compiled, specialised
from tests.support.small.passes import (
    check_layer_norm,
    check_norm,
    check_swiglu,
    check_turned,
    check_turned_norm,
    rounding,
)
from tests.support.tiny import tiny_model_dir

pytest.importorskip("triton")
from kernels.gpu import gpu_norm, gpu_swiglu, layer_norm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the subprocess that switches the interpreter on")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="would start itself again")
def test_the_kernels_agree_with_float64_in_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreted", __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=280, cwd=ROOT,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "passed" in run.stdout


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 6), (65, 128), (2, 13, 4, 32), (5, 2500)])
def test_interpreted_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_norm(gpu_norm, shape, "cpu", dtype, once=rounding(dtype, cuts=True))


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3), (3, 6), (65, 128), (2, 13, 40), (5, 2500)])
def test_interpreted_layer_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_layer_norm(layer_norm, shape, "cpu", dtype, once=rounding(dtype, cuts=True))


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 4, 16), (70, 3, 24), (5, 2, 128)])
def test_interpreted_turned_heads(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    once = rounding(dtype, cuts=True)
    check_turned_norm(gpu_norm, shape, "cpu", dtype, once=once)
    check_turned(gpu_norm, shape, "cpu", dtype, once=once)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (6, 7), (1, 70, 384)])
def test_interpreted_gated_products(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_swiglu(gpu_swiglu, shape, "cpu", dtype, once=rounding(dtype, cuts=True))


@interpreted
def test_interpreted_programs_share_the_rows_of_a_weights_gradient(monkeypatch) -> None:
    """More rows than programs have in one block each, and a last program with nothing to do."""
    torch.manual_seed(0)
    monkeypatch.setattr(gpu_norm, "MAX_PROGRAMS", 4)
    monkeypatch.setattr(gpu_norm, "PAIRS", 32)
    monkeypatch.setattr(layer_norm, "MAX_PROGRAMS", 4)
    monkeypatch.setattr(layer_norm, "NUMBERS", 64)
    check_layer_norm(layer_norm, (9, 64), "cpu", torch.float32)
    check_norm(gpu_norm, (9, 64), "cpu", torch.float32)
    check_turned_norm(gpu_norm, (9, 3, 16), "cpu", torch.float32)


@interpreted
def test_interpreted_heads_are_read_where_they_lie_and_in_any_order() -> None:
    torch.manual_seed(0)
    qkv, weight, angles = torch.randn(7, 3, 4, 16), torch.randn(16), torch.randn(2, 7, 16)
    with patch.object(torch.Tensor, "contiguous", side_effect=AssertionError("a copy")):
        own = by_token(qkv[:, 1])
    assert own.data_ptr() == qkv[:, 1].data_ptr()
    turned_around = qkv.transpose(1, 2).contiguous().transpose(1, 2)
    for one, other in ((qkv[:, 1], qkv[:, 1].contiguous()), (turned_around[:, 1], qkv[:, 1])):
        assert torch.equal(gpu_norm.apply_rope(one, *angles), gpu_norm.apply_rope(other, *angles))
        assert torch.equal(gpu_norm.rms_norm(one, weight, 1e-6), gpu_norm.rms_norm(other, weight, 1e-6))


@interpreted
def test_interpreted_nothing_gives_nothing_and_a_nan_stays_in_its_row() -> None:
    x, weight = torch.ones(0, 8).requires_grad_(), torch.ones(8).requires_grad_()
    outs = gpu_norm.rms_norm(x, weight, 1e-6), layer_norm.layer_norm(x, weight, weight, 1e-6), gpu_swiglu.swiglu(x, x)
    sum(out.sum() for out in outs).backward()
    assert x.grad is not None and x.grad.shape == (0, 8)
    assert weight.grad is not None and not weight.grad.any()
    x = torch.ones(4, 8)
    x[1, 3] = torch.nan
    for normed in (gpu_norm.rms_norm(x, weight, 1e-6), layer_norm.layer_norm(x, weight, weight, 1e-6)):
        assert normed.isnan().any(1).tolist() == [False, True, False, False]
    assert gpu_swiglu.swiglu(x, x).isnan().nonzero().tolist() == [[1, 3]]


@interpreted
def test_interpreted_frozen_weights_get_no_gradient() -> None:
    x, weight = torch.ones(4, 8).requires_grad_(), torch.ones(8)
    (gpu_norm.rms_norm(x, weight, 1e-6).sum() + layer_norm.layer_norm(x, weight, weight, 1e-6).sum()).backward()
    assert x.grad is not None and weight.grad is None


@interpreted
@pytest.mark.parametrize("make", [tiny_model_dir, qwen3_moe])
def test_interpreted_policies_give_the_logprobs_and_gradients_of_transformers(make, tmp_path, spec) -> None:
    policy = load_policy(str(make(tmp_path)), spec)
    batch = packed(policy, [random_trajectory(spec, seed, turn_tokens=(4, 8), sides=(64,)) for seed in range(2)])
    ours, called = gradients(policy, batch), norm_calls(policy, batch)
    with patch("learner.model.forwards._kernels_for", lambda _: None):
        theirs, none = gradients(policy, batch), norm_calls(policy, batch)
    assert called and not none
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm() + 1e-6


def gradients(policy: Policy, batch: Microbatch) -> list[torch.Tensor]:
    policy.zero_grad()
    policy(batch, 1.0).logprobs.sum().backward()
    return [parameter.grad.clone() for parameter in policy.vlm.parameters() if parameter.grad is not None]


def norm_calls(policy: Policy, batch: Microbatch) -> int:
    """0 unless norms of both kinds are computed so."""
    functions = gpu_norm._NormRope, layer_norm._LayerNorm
    with ExitStack() as stack:
        spied = [stack.enter_context(patch.object(f, "forward", wraps=f.forward)) for f in functions]
        policy(batch, 1.0)
    return min(forward.call_count for forward in spied)


def norm_args(num_rows: int, heads: int, width: int, *, turned: bool, weight: bool = True) -> list[object]:
    """As `_NormRope.forward` gives them."""
    x, scale = torch.empty(1, dtype=torch.bfloat16), torch.empty(1)
    angles = [x, x] if turned else [None, None]
    of_weight = [x, scale] if weight else [None, None]
    return [x, heads * width, of_weight[0], *angles, x, of_weight[1], num_rows, heads, width // 2, 1e-6]


def norm_grad_args(num_rows: int, heads: int, width: int, *, turned: bool, weight: bool = True) -> list[object]:
    """As `_NormRope.backward` gives them."""
    x, numbers = torch.empty(1, dtype=torch.bfloat16), torch.empty(1)
    angles = [x, x] if turned else [None, None]
    head = [x, heads * width, x, *angles, numbers] if weight else [None, 0, None, *angles, None]
    return [*head, x, heads * width, x, numbers if weight else None, num_rows, heads, width // 2, 1]


ROWS = pytest.mark.parametrize(
    ("heads", "width", "turned", "weight"),
    [(1, 2048, False, True), (1, 8192, False, True), (16, 128, True, True), (16, 64, True, False)],
    ids=["norm", "wide-norm", "normed-heads", "turned-heads"],
)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@ROWS
def test_norms_compile_for_a_hopper_gpu_as_they_are_launched(heads, width, turned, weight) -> None:
    """They read and write 16 bytes a thread at a time, and spill no register to memory."""
    rows = gpu_norm._rows_of_a_program(width)
    one_way = norm_args(13_880, heads, width, turned=turned, weight=weight)
    reads, writes, spilled, _ = compiled(gpu_norm._norm, *one_way, **rows)
    assert (reads, writes, spilled) == (2 + 2 * weight + 4 * turned, 2, 0)
    back = norm_grad_args(13_880, heads, width, turned=turned, weight=weight)
    reads, writes, spilled, _ = compiled(gpu_norm._norm_grad, *back, **rows)
    assert reads == 2 + 4 * weight + 4 * turned and writes >= 2 and spilled == 0


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("width", [1024, 1152, 1280])
def test_layer_norms_compile_for_a_hopper_gpu_as_they_are_launched(width) -> None:
    """Of the towers of Qwen3-VL and Qwen2.5-VL."""
    x, numbers = torch.empty(1, dtype=torch.bfloat16), torch.empty(1)
    rows = layer_norm._rows_of_a_program(width)
    one_way = [(x, x, x, x, numbers, numbers, num_rows, width, 1e-6) for num_rows in (1, 2, 16, 36_480)]
    back = [(x, x, numbers, numbers, x, x, numbers, numbers, num_rows, width, 1) for num_rows in (1, 2, 16, 36_480)]
    for kernel, made in ((layer_norm._layer_norm, one_way), (layer_norm._layer_norm_grad, back)):
        reads, writes, spilled, _ = compiled(kernel, *made[-1], **rows)
        assert reads >= 3 and writes >= (1 if made is one_way else 3) and spilled == 0
        assert len({specialised(kernel, *given, **rows)[0].hash() for given in made}) == 1


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
def test_gated_products_compile_for_a_hopper_gpu_as_they_are_launched() -> None:
    x = torch.empty(1, dtype=torch.bfloat16)
    reads, writes, spilled, _ = compiled(gpu_swiglu._multiply, x, x, x, 1 << 20, **gpu_swiglu.LAUNCH)
    assert (reads, writes, spilled) == (2 * 2, 2, 0)
    reads, writes, spilled, _ = compiled(gpu_swiglu._multiply_grad, x, x, x, x, x, 1 << 20, **gpu_swiglu.LAUNCH)
    assert (reads, writes, spilled) == (2 * 3, 2 * 2, 0)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@ROWS
def test_the_number_of_rows_compiles_no_norm_anew(heads, width, turned, weight) -> None:
    rows, options = gpu_norm._rows_of_a_program(width), {"turned": turned, "weight": weight}
    for kernel, args in ((gpu_norm._norm, norm_args), (gpu_norm._norm_grad, norm_grad_args)):
        made = [args(num_rows, heads, width, **options) for num_rows in (1, 2, 16, 4097)]
        assert len({specialised(kernel, *given, **rows)[0].hash() for given in made}) == 1
