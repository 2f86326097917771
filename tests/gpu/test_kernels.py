"""The Triton kernels and the products between them on a GPU, against float64 on the same GPU."""

from __future__ import annotations

import pytest
import torch

from kernels import linear_logprob, reference, reverse_scan
from kernels.gpu import gpu_norm, gpu_swiglu, layer_norm
from tests.support.small.logits import full_logits, gradients
from tests.support.small.passes import (
    check_layer_norm,
    check_norm,
    check_swiglu,
    check_turned,
    check_turned_norm,
    rounding,
)

VOCABULARY = 151_936  # of Qwen3-VL
EXACT_ROWS = 512  # of logits in float64 at once

CASES = [
    # rows, hidden, vocabulary, temperature, banned ids, bytes of kept logits
    (1, 33, 17, 1.0, (), None),
    (2, 1, 1, 1.0, (), None),
    (7, 16, 1303, 0.7, (0, 1100, 1302), 7 * 1024 * 6),
    (5, 150, 257, 1.7, (3,), None),
    (3, 8, 1100, 0.9, tuple(range(1024)), 3 * 1024 * 6),  # a tile of banned tokens only
    (130, 24, 2100, 1.7, tuple(range(1024)), 128 * 1024 * 6),
    (33, 129, 4097, 1.3, (4096,), 1 << 20),
    (1000, 256, VOCABULARY, 0.8, (151_655, 151_656), None),
    (1000, 256, VOCABULARY, 1.0, (), 1 << 28),  # most tiles are computed a second time
    (16_384, 128, VOCABULARY, 1.0, (), None),  # more than 2**31 logits
]


def drawn(num_rows, hidden_size, vocabulary, dtype, banned, seed=0):
    """Peaky logits: (hidden, weight, target on the host, upstream gradients of logprob and entropy)."""
    gen = torch.Generator("cuda").manual_seed(seed)
    hidden = torch.randn(num_rows, hidden_size, generator=gen, device="cuda").to(dtype)
    weight = torch.randn(vocabulary, hidden_size, generator=gen, device="cuda").mul_(3 / hidden_size**0.5).to(dtype)
    allowed = torch.ones(vocabulary, dtype=torch.bool)
    allowed[list(banned)] = False
    ids = allowed.nonzero()[:, 0]
    target = ids[torch.randint(len(ids), (num_rows,), generator=torch.Generator().manual_seed(seed))]
    return hidden, weight, target, torch.randn(2, num_rows, generator=gen, device="cuda")


def exact_results(hidden, weight, target, upstream, options):
    """The same from float64, some rows at a time."""
    wide = weight.double().requires_grad_()
    parts = []
    for rows in torch.arange(len(hidden)).split(EXACT_ROWS):
        own, on_gpu = hidden[rows].double().requires_grad_(), target[rows].cuda()
        logprob, entropy = reference.linear_logprob(own, wide, on_gpu, **options)
        (logprob * upstream[0, rows] + entropy * upstream[1, rows]).sum().backward()
        parts.append((logprob.detach(), entropy.detach(), own.grad))
    return [*(torch.cat(column) for column in zip(*parts, strict=True)), wide.grad]


def error(value, truth):
    return float((value - truth).norm()), float(truth.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "hidden_size", "vocabulary", "temperature", "banned", "budget"), CASES)
def test_results_and_gradients_agree_with_float64(
    num_rows, hidden_size, vocabulary, temperature, banned, budget, dtype
):
    options = {"temperature": temperature, "banned_ids": banned}
    hidden, weight, target, upstream = drawn(num_rows, hidden_size, vocabulary, dtype, banned)
    ours = gradients(
        lambda h, w: linear_logprob(h, w, target, budget_bytes=budget, **options), hidden, weight, upstream
    )
    exact = exact_results(hidden, weight, target, upstream, options)
    small = num_rows * vocabulary < 2**29
    torchs = (
        gradients(lambda h, w: full_logits(h, w, target, **options), hidden, weight, upstream) if small else [None] * 4
    )
    for value, truth in zip(ours[:2], exact[:2], strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-5, atol=1e-4)
    for value, yardstick, truth in zip(ours[2:], torchs[2:], exact[2:], strict=True):
        off, size = error(value, truth)
        least = 2e-6 if dtype == torch.float32 else 4e-3
        allowed = least * size + 1e-7
        assert off <= max(allowed, 1.5 * error(yardstick, truth)[0] if small else 0.0), (off / size, dtype)


def test_extreme_and_equal_logits_keep_their_precision():
    hidden = torch.tensor([[1e4, 0.0], [-1e4, 0.0], [0.0, 0.0], [1e4, 1.0]], device="cuda")
    weight = torch.tensor([[1.0, 0.0], [1.0, 1.0], [-1.0, 0.0], [1.0, -1.0], [0.0, 3.0]], device="cuda")
    target = torch.tensor([1, 2, 4, 3])
    got = linear_logprob(hidden, weight, target, temperature=0.7)
    want = reference.linear_logprob(hidden, weight, target.cuda(), temperature=0.7)
    for value, truth in zip(got, want, strict=True):
        torch.testing.assert_close(value.double(), truth, rtol=1e-6, atol=1e-5)
    ones = torch.ones(3, 4, device="cuda"), torch.ones(1500, 4, device="cuda")
    _, entropy = linear_logprob(*ones, torch.tensor([0, 7, 1499]), banned_ids=list(range(8, 508)))
    torch.testing.assert_close(entropy, torch.full((3,), 1000.0, device="cuda").log())


def test_rows_without_upstream_gradient_and_a_pack_without_rows_give_what_zeros_give():
    hidden, weight, target, upstream = drawn(600, 64, 20_000, torch.bfloat16, ())
    upstream[:, torch.rand(600, device="cuda") < 0.4] = 0.0
    ours = gradients(lambda h, w: linear_logprob(h, w, target), hidden, weight, upstream)
    exact = exact_results(hidden, weight, target, upstream, {})
    for value, truth in zip(ours[2:], exact[2:], strict=True):
        off, size = error(value, truth)
        assert off <= 4e-3 * size
    assert (ours[2][(upstream == 0).all(0)] == 0).all()
    none = gradients(lambda h, w: linear_logprob(h, w, target[:0]), hidden[:0], weight, upstream[:, :0])
    assert none[3].shape == weight.shape and not none[3].any()


def test_the_hot_path_asks_the_gpu_for_no_number():
    hidden, weight, target, upstream = drawn(2000, 256, VOCABULARY, torch.bfloat16, ())
    hidden.requires_grad_()
    weight.requires_grad_()
    for mode in ("default", "error"):  # compiled first
        torch.cuda.set_sync_debug_mode(mode)
        try:
            logprob, entropy = linear_logprob(hidden, weight, target)
            (logprob * upstream[0] + entropy * upstream[1]).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (513, 70), (8192, 64)])
def test_the_scan_is_the_loop_over_time(shape):
    torch.manual_seed(0)
    decay, delta = torch.rand(shape, device="cuda").round(decimals=1), torch.randn(shape, device="cuda")
    want = reference.reverse_scan(decay.double().cpu(), delta.double().cpu())
    torch.testing.assert_close(reverse_scan(decay, delta).double().cpu(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_turned_heads_and_gated_products_are_those_of_torch_in_float64(dtype):
    """Of Qwen3-VL's sizes, from 2B to 32B."""
    torch.manual_seed(0)
    how, once = ("cuda", dtype), rounding(dtype, cuts=False)
    for width in (2048, 2560, 4096, 5120):
        check_norm(gpu_norm, (1, 3001, width), *how, once=once)
    check_turned_norm(gpu_norm, (3001, 16, 128), *how, once=once)
    check_turned_norm(gpu_norm, (3001, 8, 128), *how, once=once)
    for width in (1024, 1152, 1280):
        check_layer_norm(layer_norm, (3001, width), *how, once=once)
    for size in (64, 72):
        check_turned(gpu_norm, (3001, 16, size), *how, once=once)
    check_swiglu(gpu_swiglu, (1, 3001, 6144), *how, once=once)
