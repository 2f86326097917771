"""How the fused log-probability cuts, keeps and leaves out tiles: products, copies and bytes counted on a CPU."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import gemm, linear_logprob, reference, tiles
from kernels.cpu import linear as cpu_linear

VOCAB, HIDDEN = 2500, 24
SLICES = 3  # of 1,024 columns
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def plain_products(monkeypatch):
    """One product is one operation; and a tile has 1,024 columns at most."""
    monkeypatch.setattr(cpu_linear, "_can_use_onednn", lambda: False)
    monkeypatch.setattr(tiles, "CPU_TILE", (128, 1024))


def make(num_rows, dtype=torch.float32, *, entropy=True, zeros=()):
    """(hidden, weight, target, upstream gradients), of which rows `zeros` have none."""
    gen = torch.Generator().manual_seed(1)
    hidden = torch.randn(num_rows, HIDDEN, generator=gen).to(dtype).requires_grad_()
    weight = (torch.randn(VOCAB, HIDDEN, generator=gen) * 0.6).to(dtype).requires_grad_()
    upstream = torch.randn(2, num_rows, generator=gen) * torch.tensor([[1.0], [float(entropy)]])
    upstream[:, list(zeros)] = 0.0
    return hidden, weight, torch.randint(VOCAB, (num_rows,), generator=gen), upstream


class Counted(TorchDispatchMode):
    """Which operations ran, by name and shape of what they made; the multiplications of all products."""

    def __init__(self):
        super().__init__()
        self.made, self.multiplications = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if isinstance(out, torch.Tensor):
            self.made[name, tuple(out.shape)] += 1
        if name in ("mm", "addmm_"):
            a, b = args[-2:]
            self.multiplications += a.shape[0] * a.shape[1] * b.shape[1]
        return out


def backward_counts(hidden, weight, target, upstream, budget):
    logprob, entropy = linear_logprob(hidden, weight, target, temperature=0.8, budget_bytes=budget)
    with Counted() as counted:
        torch.autograd.backward((logprob, entropy), tuple(upstream))
    return counted


def test_the_weights_gradient_is_written_where_it_belongs():
    one_chunk = backward_counts(*make(100), 1 << 24)
    several = backward_counts(*make(300), 1 << 24)
    for counted in (one_chunk, several):
        assert not [key for key in counted.made if key[0] in ("copy_", "zero_") and key[1][-1] == HIDDEN]
    rounded = backward_counts(*make(100, torch.bfloat16), 1 << 24)  # a CPU sums it in float32
    assert sum(n for (name, shape), n in rounded.made.items() if name == "copy_" and shape[-1] == HIDDEN) >= SLICES


def test_half_precision_operands_write_their_weights_gradient_without_a_wider_copy():
    dlogits, x = torch.randn(5, 7).bfloat16(), torch.randn(5, 3).bfloat16()
    place = torch.full((9, 3), float("nan"), dtype=torch.bfloat16)
    with Counted() as counted:
        gemm.add_weight_grad(place[1:8], dlogits, gemm.Operand(x), new=True)
    assert [name for name, _ in counted.made if name not in ("slice", "t")] == ["mm"]
    torch.testing.assert_close(place[1:8].float(), dlogits.float().t() @ x.float(), rtol=1e-2, atol=1e-2)


def test_the_first_slice_of_the_hidden_gradient_is_not_added_to_zeros():
    counted = backward_counts(*make(100), 1 << 24)
    assert counted.made["addmm_", (100, HIDDEN)] == SLICES - 1
    assert counted.made["mm", (100, HIDDEN)] == 1
    assert not [
        shape for name, shape in counted.made if name in ("zeros", "zero_", "fill_") and shape[-1:] == (HIDDEN,)
    ]


@pytest.mark.parametrize("budget", [1 << 24, 128 * 1024 * 4], ids=["kept", "recomputed"])
@pytest.mark.parametrize("entropy", [True, False], ids=["entropy", "logprob"])
@pytest.mark.parametrize(
    ("num_rows", "zeros"),
    [(3, (1,)), (100, range(0, 100, 3)), (300, (*range(128), 130, 299)), (300, range(299))],
    ids=["few", "one-chunk", "a-whole-chunk", "all-but-one"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_without_an_upstream_gradient_are_left_out_of_the_backward(num_rows, zeros, entropy, budget, dtype):
    hidden, weight, target, upstream = make(num_rows, dtype, entropy=entropy, zeros=zeros)
    counted = backward_counts(hidden, weight, target, upstream, budget)
    used = num_rows - len(zeros)
    products = 2 if budget > 1 << 20 else 3
    assert counted.multiplications <= products * used * HIDDEN * VOCAB
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    outputs = reference.linear_logprob(*exact, target, temperature=0.8)
    torch.autograd.backward(outputs, tuple(upstream.double()))
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-4}
    for ours, truth in zip((hidden, weight), exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), truth.grad, **tolerance)
    assert hidden.grad[list(zeros)].abs().max() == 0


def test_without_any_upstream_gradient_nothing_is_multiplied():
    hidden, weight, target, upstream = make(50, zeros=range(50))
    assert backward_counts(hidden, weight, target, upstream, None).multiplications == 0
    assert hidden.grad.abs().max() == 0 and weight.grad.abs().max() == 0


def test_kept_tiles_lie_in_one_piece_of_memory():
    hidden, weight, target, _ = make(300)
    with Counted() as counted:
        linear_logprob(hidden, weight, target, budget_bytes=5 * 128 * 1024 * 4)
    tile_sized = {key: n for key, n in counted.made.items() if key[0] == "empty" and key[1][-1] == 1024}
    assert tile_sized == {("empty", (4, 128, 1024)): 1, ("empty", (1, 128, 1024)): 1}


def test_a_row_that_is_not_finite_does_not_look_finite():
    hidden, weight, target, upstream = make(4)
    with torch.no_grad():
        hidden[1, 3] = float("nan")
    logprob, entropy = linear_logprob(hidden, weight, target)
    torch.autograd.backward((logprob, entropy), tuple(upstream))
    for value in (logprob, entropy, hidden.grad[:, 0]):
        assert value.isfinite().tolist() == [True, False, True, True]
    assert not weight.grad.isfinite().any()


def plan_on_h200(num_rows, budget=14 << 30, vocab=151_936, half=True):
    return tiles.plan(num_rows, vocab, budget, CUDA, half=half, tracked=True)


@pytest.mark.parametrize(("num_rows", "columns"), [(16384, 8448), (65536, 8448), (8192, 16896), (4096, 33792)])
def test_tiles_on_a_gpu_are_whole_waves_of_its_132_processors(num_rows, columns):
    tiling = plan_on_h200(num_rows)
    assert tiling.num_columns == columns
    assert (tiling.num_rows // 128) * (columns // 256) % 132 == 0


def test_small_packs_get_no_wider_tiles_than_the_widest():
    assert [plan_on_h200(n).num_columns for n in (1, 700, 4097, 9000)] == [33792, 33792, 16896, 8448]
    assert plan_on_h200(1, vocab=50_257).num_columns == 33792


def test_half_precision_keeps_twice_as_many_tiles():
    """65,536 rows in a tenth of an H200: of 72 tiles 24 as logits, 48 as exponentials."""
    logits, exponentials = (plan_on_h200(65536, 14 << 30, half=half).num_kept for half in (False, True))
    assert (logits, exponentials) == (26, 51)
    assert plan_on_h200(16384).num_kept == 18  # all there are


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_exists_of_logits_stays_within_the_budget(device, tracked, half):
    for budget in (1 << 20, 100_000_000, 14 << 30):
        for num_rows, vocab in ((1, 50), (129, 4097), (5000, 50_257), (40_000, 151_936)):
            tiling = tiles.plan(num_rows, vocab, budget, torch.device(device), half=half, tracked=tracked)
            logits = tiling.num_rows * tiling.num_columns
            apart = 6 if half and tracked else 4
            assert logits * (apart + tiling.num_kept * (2 if half else 4)) <= budget
            assert tracked or not tiling.num_kept


def test_the_default_budget_of_a_gpu_leaves_half_of_what_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 110 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 106 << 30)
    tight = plan_on_h200(65536, budget=None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 << 30, 140 << 30))
    roomy = plan_on_h200(65536, budget=None)
    assert tight == plan_on_h200(65536, 6 << 30)
    assert roomy == plan_on_h200(65536, 14 << 30)
