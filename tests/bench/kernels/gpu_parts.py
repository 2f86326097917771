"""What the fused log-probability is made of, part by part, on a GPU: cuBLAS's products by width of tile and dtype, with
the names of their kernels, and the row kernels' bytes a second by block and warps. The last line is one JSON object.

    python -m tests.bench.kernels.gpu_parts [--rows 16384] [--hidden 4096]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kernels import gemm, linear_logprob, rows_triton, tiles
from kernels.row_records import RowGrads, RowStats, Tile
from tests.bench.kernels.gpu_times import Tasks, gpu_times

VOCABULARY = 151_936  # of Qwen3-VL
TURNS, LAUNCHES = 8, 8
WIDTHS = (4096, 7680, 8192, 8448, 12672, 16896)
BLOCKS = ((1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8))


def kernel_of(task: Callable[[], object]) -> str:
    """The name of the kernel that takes longest."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        task()
        torch.cuda.synchronize()
    longest = max(found.key_averages(), key=lambda event: event.device_time_total, default=None)
    return longest.key[:120] if longest is not None else ""


def product_tasks(x_RH: Tensor, width: int) -> Tasks:
    """The products of a tile of `width` columns, each written where the walk writes it."""
    num_rows, hidden = x_RH.shape
    w_CH = torch.randn(width, hidden, device="cuda").mul_(hidden**-0.5).bfloat16()
    narrow, wide = (torch.empty(num_rows, width, device="cuda", dtype=d) for d in (torch.bfloat16, torch.float32))
    d_RC = torch.randn(num_rows, width, device="cuda").bfloat16()
    dx, dw = torch.empty(num_rows, hidden, device="cuda"), torch.empty_like(w_CH)
    x, w = gemm.Operand(x_RH), gemm.Operand(w_CH)
    return {
        "logits, bfloat16": lambda: torch.mm(x_RH, w_CH.t(), out=narrow),
        "logits, float32": lambda: gemm.logits_tile(x, w, wide),
        "hidden's gradient, first": lambda: gemm.add_hidden_grad(dx, d_RC, w, new=True),
        "hidden's gradient, added": lambda: gemm.add_hidden_grad(dx, d_RC, w, new=False),
        "weight's gradient": lambda: gemm.add_weight_grad(dw, d_RC, x, new=True),
    }


def products(x_RH: Tensor) -> dict[str, dict[str, object]]:
    """TFLOP/s by width, all widths in turns, and the kernel that cuBLAS takes."""
    num_rows, hidden = x_RH.shape
    tasks = {width: product_tasks(x_RH, width) for width in WIDTHS}
    found: dict[str, dict[str, object]] = {f"{width} columns": {} for width in WIDTHS}
    for name in tasks[WIDTHS[0]]:
        times = gpu_times({f"{width} columns": own[name] for width, own in tasks.items()}, TURNS, 2)
        for width, own in tasks.items():
            rate = 2 * num_rows * width * hidden / times[f"{width} columns"] / 1e9
            found[f"{width} columns"][name] = [round(rate, 1), kernel_of(own[name])]
    return found


def whole(x_RH: Tensor) -> dict[str, float]:
    """Milliseconds of forward and backward by width of tile, in turns."""
    weight = torch.randn(VOCABULARY, x_RH.shape[1], device="cuda").mul_(3 * x_RH.shape[1] ** -0.5).bfloat16()
    data = x_RH.detach().requires_grad_(), weight.requires_grad_(), torch.randint(VOCABULARY, (len(x_RH),))
    upstream = torch.randn(2, len(x_RH), device="cuda")

    def run(width: int) -> None:
        shipped, tiles.GPU_COLUMNS = tiles.GPU_COLUMNS, width
        try:
            logprob, entropy = linear_logprob(*data)
            (logprob * upstream[0] + entropy * upstream[1]).sum().backward()
            data[0].grad = data[1].grad = None
        finally:
            tiles.GPU_COLUMNS = shipped

    tasks: Tasks = {f"{width} columns": (lambda width=width: run(width)) for width in WIDTHS}
    return {name: round(ms, 2) for name, ms in gpu_times(tasks, TURNS).items()}


def row_kernels(num_rows: int, width: int) -> dict[str, dict[str, float]]:
    """GB/s of the fold and of the gradient, bytes read and written counted once each."""
    logits = torch.randn(num_rows, width, device="cuda").mul_(3)
    target = torch.randint(width, (num_rows,), device="cuda")
    kept = Tile(torch.empty(num_rows, width, device="cuda", dtype=torch.bfloat16), False, logits.new_empty(num_rows))
    tile, out, out32 = Tile(logits, False), torch.empty_like(kept.values), torch.empty_like(logits)
    stats = RowStats.empty(num_rows, logits.device)
    rows_triton.fold(tile, 0, stats, target, 1.0, kept)
    _, entropy, log_sum = stats.finish(1.0)
    upstream = torch.randn(2, num_rows, device="cuda")
    grads = RowGrads.of((stats.largest, log_sum, entropy, stats.target_logit), upstream[0], upstream[1], 1.0)
    size = num_rows * width
    work: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (8 * size, lambda: out32.copy_(logits)),
        "fold": (4 * size, lambda: rows_triton.fold(tile, 0, stats, target, 1.0, None)),
        "fold, kept": (6 * size, lambda: rows_triton.fold(tile, 0, stats, target, 1.0, kept)),
        "gradient of kept": (4 * size, lambda: rows_triton.write_grad(kept, 0, grads, target, 1.0, out, None)),
        "gradient of logits": (6 * size, lambda: rows_triton.write_grad(tile, 0, grads, target, 1.0, out, None)),
    }
    found: dict[str, dict[str, float]] = {}
    shipped = rows_triton.FOLD, rows_triton.GRAD
    for block, warps in BLOCKS:
        rows_triton.FOLD = rows_triton.GRAD = {"BLOCK": block, "num_warps": warps}
        times = gpu_times({name: task for name, (_, task) in work.items()}, TURNS, LAUNCHES)
        found[f"{block} columns, {warps} warps"] = {
            name: round(count / times[name] / 1e6) for name, (count, _) in work.items()
        }
    rows_triton.FOLD, rows_triton.GRAD = shipped
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument("--hidden", type=int, default=4096)
    options = parser.parse_args()
    x_RH = torch.randn(options.rows, options.hidden, device="cuda").bfloat16()
    report: dict[str, object] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    report["products, TFLOP/s"] = products(x_RH)
    report["row kernels, GB/s, 8448 columns"] = row_kernels(options.rows, 8448)
    torch.cuda.empty_cache()
    report["forward and backward, ms"] = whole(x_RH)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
