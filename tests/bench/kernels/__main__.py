"""Time, memory and exactness of the fused log-probability and of the scan beside their peers; prints one JSON object.

`python -m tests.bench.kernels` measures for this machine: on a GPU every shape and every installed peer, interleaved
(under 10 minutes); on a CPU one shape, each contestant in a process of its own. `--small` is a quick CPU check in one
process, whose memory figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kernels import linear_logprob, reference, reverse_scan
from tests.bench.kernels.gpu_times import gpu_times
from tests.bench.kernels.peers import Contestant, bare_products, full_logits, peers
from tests.bench.kernels.tasks import backward, inputs, loop_over_time, of_rows

ROOT = Path(__file__).resolve().parents[3]
VOCAB = 151_936
HIDDEN = (2048, 2560, 4096)  # Qwen3-VL 2B, 4B, 8B
ROWS = (4096, 16384, 65536)
SHAPES = [f"{rows}x{hidden}" for hidden in HIDDEN for rows in ROWS]
PRODUCTS = "products alone"


def full_logprobs(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, None]:
    """torch's own path without the entropy."""
    return (hidden @ weight.t()).log_softmax(-1).gather(1, target[:, None])[:, 0], None


def cpu_child(name: str, num_rows: int, vocab: int, entropy: bool, turns: int) -> dict[str, float]:
    """One contestant in this process: seconds (the best turn) and the growth of the peak resident memory."""
    data = inputs(num_rows, 1024, "cpu", torch.float32, vocab)
    plain = full_logits if entropy else full_logprobs
    paths: dict[str, Contestant] = {"ours": linear_logprob, "torch": plain, **peers(entropy)[0]}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    floor = bare_products(data[0], data[1]) if name == PRODUCTS else None

    def run() -> None:
        if floor is not None:
            floor()
        else:
            backward(paths[name] if entropy else (lambda *a: (paths[name](*a)[0], None)), *data)

    wall, cpu = [], []
    for _ in range(turns):
        starts = time.perf_counter(), time.process_time()
        run()
        wall.append(time.perf_counter() - starts[0])
        cpu.append(time.process_time() - starts[1])
    extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {"wall_s": min(wall), "cpu_s": min(cpu), "extra_bytes": extra}


def in_a_process_of_its_own(name: str, num_rows: int, vocab: int, entropy: bool, turns: int) -> dict[str, float]:
    """As `cpu_child`, whose peak memory is then the contestant's alone."""
    command = [sys.executable, "-m", "tests.bench.kernels", "--child", name, "--rows", str(num_rows)]
    command += ["--vocab", str(vocab), "--turns", str(turns), *(["--entropy"] if entropy else [])]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


def cpu_bench(num_rows: int, vocab: int, turns: int, measure: Callable[..., dict[str, float]]) -> dict[str, object]:
    """Ours against the peers and the bare products, with and without entropy; CPU seconds see no other process."""
    report: dict[str, object] = {"rows": num_rows, "hidden": 1024, "vocab": vocab, "threads": torch.get_num_threads()}
    for what in ("logprob", "logprob+entropy"):
        result = {}
        found = peers()[0]
        names = [name for name in ("trl", "liger", "torch chunked") if name in found]
        if "entropy" in what:
            names = [name for name in names if name != "torch chunked"]  # it gives none
        for name in ("ours", PRODUCTS, "torch", *names):
            result[name] = measure(name, num_rows, vocab, "entropy" in what, turns)
        for peer in list(result)[1:]:
            ratios = {k: round(v / result[peer][k], 3) for k, v in result["ours"].items() if result[peer][k]}
            result[f"ours / {peer}"] = ratios
        report[what] = result
    return report


def scan_bench(device: str) -> dict[str, float]:
    """[8192, 64] in float32 against a Python loop over time in float32, in turns; the error is to float64. On a CPU
    the milliseconds are of processor time, which sees no other process."""
    decay, delta = torch.rand(8192, 64, device=device).round(decimals=1), torch.randn(8192, 64, device=device)

    timer = time.process_time if device == "cpu" else time.perf_counter

    def best_s(scan: Callable[[Tensor, Tensor], Tensor], repeats: int) -> float:
        once = lambda: scan(decay, delta).sum().item()  # noqa: E731 - waits for a GPU
        return min(timeit.repeat(once, timer=timer, number=1, repeat=repeats))

    turns = [(best_s(loop_over_time, 1), best_s(reverse_scan, 10)) for _ in range(5)]
    loop_ms, scan_ms = (1e3 * min(times) for times in zip(*turns, strict=True))
    error = (reverse_scan(decay, delta) - reference.reverse_scan(decay, delta)).abs().max().item()
    return {"float32_loop_ms": loop_ms, "scan_ms": scan_ms, "speedup": loop_ms / scan_ms, "max_error": error}


def gpu_case(num_rows: int, hidden_size: int, contestants: dict[str, Contestant], repeats: int) -> dict[str, object]:
    """One shape: ms, TFLOP/s at 6NHV, share of torch.mm's rate, extra bytes, error against float64 on 256 rows."""
    data = inputs(num_rows, hidden_size, "cuda", torch.bfloat16, VOCAB)
    hidden, weight, target, _ = data
    flops = 2 * num_rows * hidden_size * VOCAB
    slab = weight.detach()[:16384]
    tasks: dict[str, Callable[[], object]] = {"mm": lambda: hidden.detach() @ slab.t()}
    tasks[PRODUCTS] = bare_products(hidden, weight)
    tasks["ours forward"] = lambda: linear_logprob(hidden.detach(), weight.detach(), target)
    report: dict[str, dict[str, float | str]] = {}
    for name, path in contestants.items():
        try:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            backward(path, *data)
            report[name] = {"extra_bytes": torch.cuda.max_memory_allocated() - before}
            tasks[name] = lambda path=path: backward(path, *data)
        except (RuntimeError, ValueError, TypeError, ImportError) as error:  # a peer that fails is part of the result
            report[name] = {"failed": str(error).splitlines()[0][:200]}
            hidden.grad = weight.grad = None
    times = gpu_times(tasks, repeats)
    mm_rate = flops * 16384 / VOCAB / times.pop("mm")
    for name, ms in times.items():
        rate = flops * (1 if name == "ours forward" else 3) / ms
        figures = {"ms": ms, "tflops": rate / 1e9, "of_mm": rate / mm_rate}
        if name != "ours forward":
            figures["of_products"] = times[PRODUCTS] / ms
        report.setdefault(name, {}).update(figures)
    exact = reference.linear_logprob(hidden.detach()[:256], weight.detach(), target[:256].cuda())[0]
    for name in tasks.keys() & contestants.keys():
        logprob = contestants[name](hidden.detach()[:256], weight.detach(), target[:256])[0]
        if logprob.ndim:
            report[name]["max_error"] = float((logprob.double() - exact).abs().max())
    return {"mm_tflops": mm_rate / 1e9, **report}


def runs_here(name: str, path: Contestant, data: tuple[Tensor, ...]) -> bool:
    """Whether a peer goes through it; why it does not is said."""
    try:
        backward(path, *data)
    except (RuntimeError, ValueError, TypeError, ImportError) as error:
        print(f"{name}: {str(error).splitlines()[0][:200]}", file=sys.stderr)
        data[0].grad = data[1].grad = None
        return False
    return True


def gpu_pack(num_rows: int, hidden_size: int, contestants: dict[str, Contestant], repeats: int) -> dict[str, float]:
    """A pack as training has it: 40 % of the rows are responses, and 35 % of these have no upstream gradient. Every
    contestant picks the responses, within its time. `PEER, masked` is given all rows, with -100 on the others."""
    data = inputs(num_rows, hidden_size, "cuda", torch.bfloat16, VOCAB)
    mask = torch.rand(num_rows) < 0.4
    data[3][:, (torch.rand(num_rows) < 0.35).cuda()] = 0.0
    places = mask.nonzero()[:, 0]
    rows = places.pin_memory().cuda()
    picked = (data[0], data[1], data[2][places], data[3][:, rows])
    masked = (data[0], data[1], torch.where(mask, data[2], -100), data[3])
    ours = of_rows(contestants["ours"], rows)
    tasks: dict[str, Callable[[], object]] = {"ours": lambda: backward(ours, *picked)}
    for peer, whole in contestants.items():
        forms = {} if peer == "ours" else {peer: (of_rows(whole, rows), picked), f"{peer}, masked": (whole, masked)}
        for name, (path, given) in forms.items():
            if runs_here(name, path, given):
                tasks[name] = lambda path=path, given=given: backward(path, *given)
    torch.cuda.set_sync_debug_mode("error")  # a host synchronisation in the hot path raises
    try:
        tasks["ours"]()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return gpu_times(tasks, repeats)


def gpu_bench(repeats: int, shapes: Sequence[str]) -> dict[str, object]:
    """These shapes and a pack; the contestants that need all logits sit out where these do not fit."""
    runs, absent = peers()
    compiled = torch.compile(full_logits)
    report: dict[str, object] = {"device": torch.cuda.get_device_name(), "absent": absent}
    for shape in shapes:
        num_rows, hidden_size = map(int, shape.split("x"))
        dense: dict[str, Contestant] = {"torch": full_logits, "torch.compile": compiled} if num_rows == ROWS[0] else {}
        contestants: dict[str, Contestant] = {"ours": linear_logprob, **dense, **runs}
        turns = repeats if num_rows < ROWS[-1] else max(3, repeats // 5)
        report[f"N{num_rows} H{hidden_size}"] = found = gpu_case(num_rows, hidden_size, contestants, turns)
        print(f"{shape}: {json.dumps(found)}", file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    report["pack N16384 H4096, ms"] = gpu_pack(16384, 4096, {"ours": linear_logprob, **runs}, repeats)
    return report


def main() -> None:
    """Measure what this machine can, and print it as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a CPU check of seconds")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--shapes", nargs="*", default=SHAPES, metavar="ROWSxHIDDEN", help="on a GPU; all, if left out")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=2, help="times that a CPU contestant runs")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--entropy", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(cpu_child(args.child, args.rows, args.vocab, args.entropy, args.turns)))
        return
    report: dict[str, object] = {"torch": torch.__version__, "triton_interpret": os.environ.get("TRITON_INTERPRET")}
    if torch.cuda.is_available() and not args.small:
        report |= {"gpu": gpu_bench(args.repeats, args.shapes), "scan": scan_bench("cuda")}
    else:
        num_rows, vocab = (512, 8192) if args.small else (args.rows, args.vocab)
        report |= {
            "cpu": cpu_bench(num_rows, vocab, args.turns, cpu_child if args.small else in_a_process_of_its_own),
            "gpu": "unmeasured: no GPU here",
            "absent": peers()[1],
        }
        report["scan"] = scan_bench("cpu")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
