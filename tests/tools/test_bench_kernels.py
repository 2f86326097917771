"""What the kernels' benchmark compares: the bare products, the scan's loop, and the rows that a contestant is given."""

from __future__ import annotations

import torch

from kernels import gemm, linear_logprob, reference, tiles
from tests.bench.kernels import peers, tasks


def test_the_floor_multiplies_each_slice_of_the_shipped_width_three_times(monkeypatch):
    slices: dict[str, list[int]] = {"logits_tile": [], "add_hidden_grad": [], "add_weight_grad": []}

    def note(name):
        real = getattr(gemm, name)

        def noting(*args, **options):
            plane = args[2] if name == "logits_tile" else args[1]
            assert plane.is_contiguous() and plane.isfinite().all()
            slices[name].append(plane.shape[1])
            real(*args, **options)

        monkeypatch.setattr(gemm, name, noting)

    for name in slices:
        note(name)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)  # what is not written yet is a number
    hidden, weight, _, _ = tasks.inputs(8, 16, "cpu", torch.float32, 5000)
    peers.bare_products(hidden, weight)()
    width = tiles.CPU_TILE[1]
    assert list(slices.values()) == 3 * [[width, width, 5000 - 2 * width]]


def test_rows_that_are_picked_give_what_the_masked_ones_do():
    hidden, weight, target, upstream = tasks.inputs(12, 16, "cpu", torch.float32, 40)
    rows = torch.tensor([1, 4, 5, 11])
    picked = target[rows], upstream[:, rows]
    tasks.backward(tasks.of_rows(linear_logprob, rows), hidden, weight, *picked)
    assert hidden.grad is not None and weight.grad is not None
    found, of_weight = hidden.grad, weight.grad
    rest = torch.ones(12, dtype=torch.bool).index_fill_(0, rows, False)
    tasks.backward(peers.full_logits, hidden, weight, target, upstream.masked_fill(rest, 0.0))
    torch.testing.assert_close(found, hidden.grad)
    torch.testing.assert_close(of_weight, weight.grad)


def test_the_loop_beside_the_scan_computes_it_in_the_dtype_of_its_inputs():
    decay, delta = torch.rand(70, 3), torch.randn(70, 3)
    found = tasks.loop_over_time(decay, delta)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, reference.reverse_scan(decay, delta).float())
