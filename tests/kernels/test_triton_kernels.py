"""The Triton kernels, in Triton's interpreter (a process of its own) and compiled for a GPU without one."""

import importlib
import os
import re
import subprocess
import sys

import pytest
import torch

from kernels import gemm, linear_logprob, reference, tiles
from kernels.row_records import RowGrads, RowStats, Tile
from tests.support.paths import ROOT
from tests.support.small.hopper import compiled, specialised

triton = pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the subprocess that switches the interpreter on")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="would start itself again")
def test_the_kernels_agree_with_float64_in_the_interpreter():
    files = ["tests/kernels/test_triton_kernels.py", "tests/kernels/test_linear_logprob.py"]
    chosen = "interpreted or (agree_with_float64 and dtype0 and not 130-24) or extreme or entropy_of_the_allowed"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *files],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=280, cwd=ROOT,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "passed" in run.stdout


def rows_of_logits(num_columns, entropy):
    """(a strided tile [7, num_columns] of logits with one banned column, targets, upstream gradients of 7 rows)."""
    torch.manual_seed(0)
    buffer = torch.full((7, num_columns + 3), float("nan"))
    tile = buffer[:, :num_columns].copy_(torch.randn(7, num_columns) * 4)
    tile[:, num_columns // 3] = float("-inf")
    tile[:, 0] = 1.0
    return tile, torch.zeros(7, dtype=torch.int64), torch.randn(7), torch.randn(7) if entropy else None


@interpreted
@pytest.mark.parametrize("num_columns", [1, 100, 1024, 2500])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", [False, True], ids=["logits", "exponentials"])
def test_interpreted_rows_fold_and_write_their_gradient(num_columns, entropy, dtype, keep):
    from kernels import rows_triton

    tile, target, g, h = rows_of_logits(num_columns, entropy)
    temperature = 0.7
    logits = tile.double().requires_grad_()
    logprobs = (logits / temperature).log_softmax(-1)
    finite = logprobs.masked_fill(logprobs == float("-inf"), 0.0)
    exact_entropy = -(logprobs.exp() * finite).sum(-1)
    (logprobs[:, 0] * g + (exact_entropy * h if entropy else 0.0)).sum().backward()

    stats, places = RowStats.empty(7, tile.device), []
    for start in range(0, num_columns, 1000):  # several tiles
        part = Tile(tile[:, start : start + 1000], True)
        kept = Tile(torch.empty_like(part.values, dtype=torch.bfloat16), True, torch.empty(7)) if keep else None
        rows_triton.fold(part, start, stats, target, temperature, kept)
        places.append((start, kept or part))
    logprob, our_entropy, log_sum = stats.finish(temperature)
    torch.testing.assert_close(logprob.double(), logprobs[:, 0].detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(our_entropy.double(), exact_entropy.detach(), rtol=0, atol=1e-5)
    grads = RowGrads.of((stats.largest, log_sum, our_entropy, stats.target_logit), g, h, temperature)
    once = 1.01 * 2**-7  # of a number in bfloat16: the interpreter cuts off where a GPU rounds
    exact = logits.grad.nan_to_num()
    allowed = 1e-6 + (1e-5 + once * (keep + (dtype != torch.float32))) * exact.abs()
    if keep and entropy:
        allowed += once * (logprobs.exp() * h.abs()[:, None] / temperature).detach()
    source = torch.tensor([5, 1, 2])
    for start, part in places:
        want, most = exact[:, start : start + 1000], allowed[:, start : start + 1000]
        out = torch.full((3, want.shape[1]), float("nan"), dtype=dtype)
        rows_triton.write_grad(part, start, grads.rows(source), target[source], temperature, out, source)
        assert ((out.double() - want[source]).abs() <= most[source]).all()
        place = part.values if part.values.dtype == dtype else torch.empty(want.shape, dtype=dtype)
        rows_triton.write_grad(part, start, grads, target, temperature, place, None)
        assert ((place.double() - want).abs() <= most).all()
        if start == 0 and dtype == torch.float32:  # the target's is exact, whatever was kept of its logit
            torch.testing.assert_close(place[:, 0].double(), want[:, 0], rtol=1e-5, atol=1e-6)


@pytest.fixture
def products_of_a_gpu(monkeypatch):
    """A CPU multiplies bfloat16 operands as a GPU does: unwidened, into float32."""

    def add_product(total, a, b, *, new):
        result = a.float() @ b.float()
        total.copy_(result) if new else total.add_(result)

    monkeypatch.setattr(gemm, "widened", lambda x: x)
    monkeypatch.setattr(gemm, "_add_product", add_product)
    monkeypatch.setattr(tiles, "SMALLEST_TILE", (8, 512))
    monkeypatch.setattr(tiles, "CPU_TILE", (8, 512))


@interpreted
@pytest.mark.usefixtures("products_of_a_gpu")
@pytest.mark.parametrize(("num_rows", "zeros"), [(5, ()), (5, (0, 4)), (20, range(0, 20, 2))])
@pytest.mark.parametrize("num_kept", [0, 2, 99])
@pytest.mark.parametrize("entropy", [True, False])
def test_interpreted_kept_exponentials_are_as_exact_as_gradients_in_bfloat16(num_rows, zeros, num_kept, entropy):
    torch.manual_seed(1)
    hidden, weight = torch.randn(num_rows, 16).bfloat16(), torch.randn(1303, 16).bfloat16()
    target, upstream = torch.randint(1, 1303, (num_rows,)), torch.randn(2, num_rows)
    upstream[:, list(zeros)] = 0.0
    tile = min(num_rows, 8) * 512
    results = []
    for function, dtype, options in (
        (linear_logprob, torch.bfloat16, {"budget_bytes": tile * (6 + 2 * num_kept)}),
        (reference.linear_logprob, torch.float64, {}),
    ):
        inputs = [t.to(dtype).requires_grad_() for t in (hidden.clone(), weight.clone())]
        outputs = function(*inputs, target, temperature=0.7, banned_ids=(0,), **options)
        loss = (outputs[0] * upstream[0]).sum() + ((outputs[1] * upstream[1]).sum() if entropy else 0.0)
        loss.backward()
        results.append([t.detach().double() for t in (*outputs, *(t.grad for t in inputs))])
    ours, exact = results
    for value, truth in zip(ours[:2], exact[:2], strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-6, atol=2e-5)
    for value, truth in zip(ours[2:], exact[2:], strict=True):
        # the interpreter cuts off twice, exponentials and gradients, by 0.4 * 2^-7 of each on average
        assert (value - truth).norm() <= 2**-7 * truth.norm()
    if zeros:
        assert ours[2][list(zeros)].abs().max() == 0


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


def fold_args(num_rows=64, columns=8448, keep=True, shift=0, first_column=8448):
    """As `rows_triton.fold` gives them; `shift`: how far from an aligned address the vectors of rows begin."""
    x, vector = torch.empty(num_rows, columns), torch.empty(num_rows + shift)[shift:]
    kept = (torch.empty(num_rows, columns, dtype=torch.bfloat16), columns, vector) if keep else (None, 0, None)
    target = torch.empty(num_rows + shift, dtype=torch.int64)[shift:]
    head = (x, columns, kept[0], kept[1], kept[2], target, 1.0)
    return (*head, vector, vector, vector, vector, columns, first_column)


def grad_args(num_rows=64, columns=8448, keep=True, source=False, entropy=True, shift=0, first_column=8448):
    """As `rows_triton.write_grad` gives them."""
    x = torch.empty(num_rows, columns, dtype=torch.bfloat16 if keep else torch.float32)
    vector = torch.empty(num_rows + shift)[shift:]
    numbers = torch.empty(num_rows + shift, dtype=torch.int64)[shift:]
    out = torch.empty(num_rows, columns, dtype=torch.bfloat16)
    head = (x, columns, numbers if source else None, vector if keep else None, out, columns, numbers, 1.0)
    return (*head, vector, vector, vector if entropy else None, vector, columns, first_column)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize(
    ("name", "args", "reads", "writes", "shuffles"),
    [
        ("FOLD", fold_args(keep=False), 8, 0, 3 * (5 + 2)),  # three reductions of 32 threads, then of 4 warps
        ("FOLD", fold_args(), 8, 2, 3 * (5 + 2)),
        ("GRAD", grad_args(keep=False), 2, 1, 0),
        ("GRAD", grad_args(source=True, entropy=False), 1, 1, 0),
        ("GRAD", grad_args(), 1, 1, 0),
    ],
    ids=["fold", "fold-and-keep", "gradient-of-logits", "gradient-of-kept", "gradient-of-kept-with-entropy"],
)
def test_the_row_kernels_compile_for_a_hopper_gpu_as_they_are_launched(name, args, reads, writes, shuffles):
    """Rows are read and written 16 bytes a thread at a time; reductions stand outside of the loop over columns; no
    register is spilled to memory."""
    from kernels import rows_triton

    kernel, options = getattr(rows_triton, f"_{name.lower()}"), getattr(rows_triton, name)
    *found, ptx = compiled(kernel, *args, **options)
    assert found == [reads, writes, 0]
    assert len(re.findall(r"shfl\.sync", ptx)) == shuffles
    assert "local" not in ptx


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
def test_neither_the_number_of_rows_nor_where_they_lie_compiles_a_kernel_anew():
    from kernels import rows_triton

    for name, args in (("FOLD", fold_args), ("GRAD", grad_args)):
        kernel, options, found = getattr(rows_triton, f"_{name.lower()}"), getattr(rows_triton, name), set()
        for num_rows in (1, 2, 16, 4097):
            for shift, first_column, columns in ((0, 0, 8448), (1, 1, 8448), (3, 8448, 8320), (0, 101_376, 33_792)):
                made = args(num_rows, columns, shift=shift, first_column=first_column)
                found.add(specialised(kernel, *made, **options)[0].hash())
        assert len(found) == 1


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
def test_the_scan_compiles_for_a_hopper_gpu():
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = importlib.import_module("kernels.scan_triton")._reverse_scan
    types = {"decay_ptr": "*fp32", "delta_ptr": "*fp32", "out_ptr": "*fp32", "num_steps": "i32", "stride": "i32"}
    source = ASTSource(kernel, signature=types | {"BLOCK": "constexpr"}, constexprs={"BLOCK": 1024})
    assert "cubin" in triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm
