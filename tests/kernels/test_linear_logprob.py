"""The fused log-probability against its float64 reference and against torch's own full-logits path."""

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import linear_logprob, reference
from kernels.cpu import linear as cpu_linear
from tests.support.small.logits import full_logits, gradients


def make(num_rows, hidden_size, vocab_size, dtype=torch.float32, scale=3.0, banned=(), seed=0):
    """(hidden, weight, target, upstream gradients of logprob and entropy)."""
    gen = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, hidden_size, generator=gen).to(dtype)
    weight = (torch.randn(vocab_size, hidden_size, generator=gen) * scale / hidden_size**0.5).to(dtype)
    allowed = torch.tensor([i for i in range(vocab_size) if i not in banned])
    target = allowed[torch.randint(len(allowed), (num_rows,), generator=gen)]
    return hidden, weight, target, torch.randn(2, num_rows, generator=gen)


NUM_DRAWS = 6
GRID = [
    # rows, hidden, vocabulary, temperature, banned ids, bytes of logits
    (1, 33, 17, 1.0, (), None),
    (2, 1, 1, 1.0, (), None),
    (7, 16, 1303, 0.7, (0, 1100, 1302), 7 * 1024 * 4),
    (5, 150, 257, 1.7, (3,), None),
    (3, 8, 1100, 0.9, tuple(range(1024)), 3 * 1024 * 4),  # a tile of banned tokens only
    (130, 24, 2100, 1.7, tuple(range(1024)), 128 * 1024 * 4),
    (33, 129, 4097, 1.3, (4096,), 1 << 20),
]


@pytest.fixture(params=[False, True], ids=["MKL", "oneDNN"])
def each_product(request, monkeypatch):
    """The CPU's float32 products by either library, whichever this CPU is faster with."""
    monkeypatch.setattr(cpu_linear, "_ON_AMD", True)
    monkeypatch.setattr(cpu_linear, "_can_use_onednn", lambda: request.param)


@pytest.mark.slow
@pytest.mark.usefixtures("each_product")
@pytest.mark.parametrize(("num_rows", "hidden_size", "vocab_size", "temperature", "banned", "budget"), GRID)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_agree_with_float64(
    num_rows, hidden_size, vocab_size, temperature, banned, budget, dtype
):
    """Gradients over several draws: in one draw of few rows, whose rounding is luckier decides.

    A few units of float32's precision on top: how exactly torch adds up is its library's choice on this processor (on
    Intel's with AVX-512, MKL is twice as exact as the plain sums of Triton's interpreter).
    """
    options = {"temperature": temperature, "banned_ids": banned}
    squares = torch.zeros(3, 2, dtype=torch.float64)  # of our error, torch's error and the gradient itself
    for seed in range(NUM_DRAWS):
        hidden, weight, target, upstream = make(num_rows, hidden_size, vocab_size, dtype, banned=banned, seed=seed)
        ours = gradients(
            lambda h, w, t=target: linear_logprob(h, w, t, budget_bytes=budget, **options), hidden, weight, upstream
        )
        plain = gradients(lambda h, w, t=target: full_logits(h, w, t, **options), hidden, weight, upstream)
        exact = gradients(
            lambda h, w, t=target: reference.linear_logprob(h, w, t, **options),
            hidden.double(),
            weight.double(),
            upstream,
        )
        tolerance = 1e-5 if dtype == torch.float32 else 1e-3
        for value, truth in zip(ours[:2], exact[:2], strict=True):
            torch.testing.assert_close(value, truth, rtol=1e-6, atol=tolerance)
        for i in (0, 1):
            value, yardstick, truth = ours[2 + i], plain[2 + i], exact[2 + i]
            squares[:, i] += torch.stack([(v**2).sum() for v in (value - truth, yardstick - truth, truth)])
    error, torch_error, size = squares.sqrt()
    assert (error <= 1.1 * torch_error + 4 * torch.finfo(torch.float32).eps * size + 1e-7).all()


def test_extreme_logits_keep_their_precision():
    hidden = torch.tensor([[1e4, 0.0], [-1e4, 0.0], [0.0, 0.0], [1e4, 1.0]])
    weight = torch.tensor([[1.0, 0.0], [1.0, 1.0], [-1.0, 0.0], [1.0, -1.0], [0.0, 3.0]])
    target = torch.tensor([1, 2, 4, 3])
    for temperature in (1.0, 0.7):
        got = linear_logprob(hidden, weight, target, temperature=temperature)
        want = reference.linear_logprob(hidden, weight, target, temperature=temperature)
        for value, truth in zip(got, want, strict=True):
            assert torch.isfinite(value).all()
            torch.testing.assert_close(value.double(), truth, rtol=1e-6, atol=1e-5)


def test_equal_logits_have_the_entropy_of_the_allowed_tokens():
    _, entropy = linear_logprob(
        torch.ones(3, 4), torch.ones(1500, 4), torch.tensor([0, 7, 1499]), banned_ids=list(range(8, 508))
    )
    torch.testing.assert_close(entropy, torch.full((3,), 1000.0).log())


def test_a_shard_without_rows_still_runs_its_backward_and_gives_zeros():
    hidden, weight, target, upstream = make(0, 8, 50)
    results = gradients(lambda h, w: linear_logprob(h, w, target), hidden, weight, upstream)
    assert [r.abs().sum() for r in results] == [0, 0, 0, 0]
    assert results[3].shape == weight.shape


@pytest.mark.usefixtures("each_product")
@pytest.mark.slow
def test_kept_and_recomputed_tiles_give_the_same_gradients_also_a_second_time():
    hidden, weight, target, upstream = make(200, 16, 3000)
    tile = 128 * 1024 * 4
    want = gradients(lambda h, w: linear_logprob(h, w, target, budget_bytes=tile), hidden, weight, upstream)
    hidden.requires_grad_()
    weight.requires_grad_()
    logprob, entropy = linear_logprob(hidden, weight, target, budget_bytes=1 << 28)
    for _ in range(2):
        hidden.grad = weight.grad = None
        (logprob * upstream[0] + entropy * upstream[1]).sum().backward(retain_graph=True)
        torch.testing.assert_close(hidden.grad.double(), want[2], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(weight.grad.double(), want[3], rtol=1e-4, atol=1e-6)


def test_only_the_wanted_gradients_and_outputs_take_part():
    hidden, weight, target, upstream = make(9, 16, 200)
    both = gradients(lambda h, w: linear_logprob(h, w, target), hidden, weight, upstream * torch.tensor([[1.0], [0.0]]))
    for name in ("hidden", "weight"):
        h, w = hidden.clone().requires_grad_(name == "hidden"), weight.clone().requires_grad_(name == "weight")
        (linear_logprob(h, w, target)[0] * upstream[0]).sum().backward()
        got, other, index = (h.grad, w.grad, 2) if name == "hidden" else (w.grad, h.grad, 3)
        torch.testing.assert_close(got.double(), both[index], rtol=1e-5, atol=1e-7)
        assert other is None
    with torch.no_grad():
        assert not linear_logprob(hidden.requires_grad_(), weight, target)[0].requires_grad


@pytest.mark.usefixtures("each_product")
def test_a_tied_embedding_gets_both_of_its_gradients():
    _, table, target, upstream = make(20, 16, 300)
    grads = []
    for function, dtype in ((linear_logprob, torch.float32), (reference.linear_logprob, torch.float64)):
        tied = table.to(dtype).clone().requires_grad_()
        hidden = torch.tanh(tied[target.flip(0)] * 2)
        logprob, entropy = function(hidden, tied, target)
        (logprob * upstream[0] + entropy * upstream[1]).sum().backward()
        grads.append(tied.grad.double())
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("each_product")
def test_strided_inputs_and_autocast_change_nothing():
    hidden, weight, target, upstream = make(20, 130, 300)
    want = gradients(lambda h, w: linear_logprob(h, w, target), hidden, weight, upstream)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gradients(
            lambda h, w: linear_logprob(h.t().contiguous().t(), torch.cat([w, w], 1)[:, :130], target),
            hidden, weight, upstream,
        )  # fmt: skip
    for value, truth in zip(got, want, strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-4, atol=2e-6)


@pytest.mark.usefixtures("each_product")
def test_uninitialised_memory_never_reaches_a_result():
    hidden, weight, target, upstream = make(150, 16, 2500, banned=(5,))
    torch.use_deterministic_algorithms(True)  # fills every new buffer with NaN
    try:
        results = gradients(
            lambda h, w: linear_logprob(h, w, target, banned_ids=(5,), budget_bytes=1 << 20), hidden, weight, upstream
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.isfinite(r).all() for r in results)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.slow
def test_no_tensor_of_rows_times_vocabulary_is_ever_made():
    hidden, weight, target, upstream = make(600, 8, 6000)
    with LargestTensor() as largest:
        gradients(lambda h, w: linear_logprob(h, w, target, budget_bytes=1 << 20), hidden, weight, upstream)
    assert largest.numel <= max(weight.numel(), (1 << 20) // 4)


def _arguments(**changes):
    hidden, weight, target, _ = make(4, 8, 20, banned=(3,))
    return {"hidden_NH": hidden, "weight_VH": weight, "target_N": target} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_N": torch.tensor([0, 20, 1, 1])}, "target 20 of row 1 is outside the vocabulary of 20"),
        ({"target_N": torch.tensor([0, 1, -1, 1])}, "target -1 of row 2 is outside"),
        ({"target_N": torch.tensor([0, 1, 2, 3]), "banned_ids": [3]}, "target 3 of row 3 is banned"),
        ({"target_N": torch.tensor([0, 1])}, "target has shape \\[2\\]"),
        ({"target_N": torch.zeros(4)}, "target is torch.float32"),
        ({"weight_VH": torch.zeros(20, 9)}, "of one H"),
        ({"weight_VH": torch.zeros(0, 8)}, "is empty"),
        ({"weight_VH": torch.zeros(20, 8).bfloat16()}, "both must be one of"),
        ({"weight_VH": torch.zeros(20, 8, device="meta")}, "on one device"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"banned_ids": range(20)}, "all 20 tokens"),
        ({"banned_ids": [20]}, "banned id 20 is outside"),
        ({"budget_bytes": 4 * 20 * 4 - 1}, "too small for one tile of 4 x 20 logits: give at least 320"),
    ],
)
def test_bad_input_is_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        linear_logprob(**_arguments(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_importing_the_kernels_does_not_import_triton():
    code = "import sys, kernels; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
