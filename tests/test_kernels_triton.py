"""The Triton kernels, in Triton's interpreter (a process of its own) and compiled for a GPU without one."""

import os
import subprocess
import sys

import pytest
import torch

from kernels import linear_logprob, reference
from kernels.row_records import RowGrads, RowStats

triton = pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the subprocess that switches the interpreter on")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="would start itself again")
def test_the_kernels_agree_with_float64_in_the_interpreter():
    here = os.path.dirname(__file__)
    files = [os.path.join(here, name) for name in ("test_kernels_triton.py", "test_kernels.py")]
    chosen = "interpreted or (agree_with_float64 and dtype0 and not 130-24) or extreme or entropy_of_the_allowed"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *files],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=280, cwd=os.path.dirname(here),
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "passed" in run.stdout


@interpreted
@pytest.mark.parametrize("num_columns", [1, 100, 4096, 4500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interpreted_rows_fold_and_write_their_gradient_in_place(num_columns, dtype):
    from kernels import rows_triton

    torch.manual_seed(0)
    buffer = torch.full((7, num_columns + 3), float("nan"))
    tile = buffer[:, :num_columns].copy_(torch.randn(7, num_columns) * 4)
    tile[:, num_columns // 3] = float("-inf")
    tile[:, 0] = 1.0
    target, temperature = torch.zeros(7, dtype=torch.int64), 0.7
    logits = tile.double().requires_grad_()
    logprobs = (logits / temperature).log_softmax(-1)
    finite = logprobs.masked_fill(logprobs == float("-inf"), 0.0)
    entropy, g, h = -(logprobs.exp() * finite).sum(-1), torch.randn(7), torch.randn(7)
    (logprobs[:, 0] * g + entropy * h).sum().backward()

    stats = RowStats.empty(7, tile.device)
    for start in range(0, num_columns, 1000):  # several tiles
        rows_triton.fold(tile[:, start : start + 1000], start, stats, target, temperature)
    logprob, our_entropy, log_sum = stats.finish(temperature)
    torch.testing.assert_close(logprob.double(), logprobs[:, 0].detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(our_entropy.double(), entropy.detach(), rtol=0, atol=1e-5)
    whole = tile.contiguous()
    grads = RowGrads(stats.largest, log_sum, our_entropy, g, h)
    got = rows_triton.grad_in_place(whole, 0, grads, target, temperature, dtype)
    assert got.dtype == dtype and got.data_ptr() == whole.data_ptr()
    torch.testing.assert_close(
        got.double(), logits.grad.nan_to_num(), rtol=1e-2 if dtype != torch.float32 else 0, atol=1e-5
    )


@interpreted
@pytest.mark.parametrize("block", [16, 64])
def test_interpreted_scan_agrees_with_the_loop(block):
    from kernels import scan_triton

    torch.manual_seed(0)
    decay, delta = torch.rand(50, 3).round(decimals=1), torch.randn(50, 3)
    got = scan_triton.reverse_scan(decay, delta, block)
    torch.testing.assert_close(got.double(), reference.reverse_scan(decay, delta))


@interpreted
def test_interpreted_rows_read_expanded_and_strided_vectors():
    hidden, weight = torch.randn(6, 8), torch.randn(300, 8, requires_grad=True)
    target = torch.arange(12)[::2]
    logprob, entropy = linear_logprob(hidden, weight, target, temperature=0.5)
    (logprob.sum() + entropy.sum()).backward()  # their gradients are one number, expanded
    exact = weight.detach().double().requires_grad_()
    sum(reference.linear_logprob(hidden, exact, target, temperature=0.5)).sum().backward()
    torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


ROWS = {
    "x_ptr": "*fp32", "x_stride": "i32", "num_rows": "i32", "num_columns": "i32", "first_column": "i32",
    "target_ptr": "*i64", "inverse": "fp32",
}  # fmt: skip
FOLD = ROWS | {"largest_ptr": "*fp32", "sum_exp_ptr": "*fp32", "sum_exp_z_ptr": "*fp32", "target_logit_ptr": "*fp32"}
GRAD = ROWS | {
    "largest_ptr": "*fp32", "log_sum_ptr": "*fp32", "entropy_ptr": "*fp32", "grad_logprob_ptr": "*fp32",
    "grad_entropy_ptr": "*fp32", "out_ptr": "*bf16", "out_stride": "i32",
}  # fmt: skip
SCAN = {"decay_ptr": "*fp32", "delta_ptr": "*fp32", "out_ptr": "*fp32", "num_steps": "i32", "stride": "i32"}


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize(
    ("module", "name", "types", "constants"),
    [
        ("rows_triton", "_fold", FOLD, {}),
        ("rows_triton", "_grad", GRAD, {"HAS_ENTROPY": True}),
        ("rows_triton", "_grad", GRAD | {"out_ptr": "*fp32"}, {"HAS_ENTROPY": False}),
        ("scan_triton", "_reverse_scan", SCAN, {}),
    ],
)
def test_the_kernels_compile_for_a_hopper_gpu(module, name, types, constants):
    import importlib

    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"kernels.{module}"), name)
    constants = constants | {"BLOCK": 1024}
    signature = {n: "constexpr" if n in constants else types[n] for n in kernel.arg_names}
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    assert "cubin" in triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm
