"""Attention of packed documents in C gives what torch gives, gradients too, whatever lies beside a document."""

from __future__ import annotations

from itertools import accumulate, groupby

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu import library
from kernels.cpu import packed_attention as cpu_attention
from learner.batch.packing import packing_of
from learner.model import attention

LENGTHS = (37, 1, 130, 16, 16, 65)
SHAPES = [(4, 2, 32), (4, 4, 16), (2, 1, 64), (3, 1, 24), (4, 2, 128), (2, 2, 72), (2, 2, 8)]
pytestmark = pytest.mark.skipif(library.library() is None, reason="no C compiler")


def drawn(num_heads: int, num_kv: int, size: int, tokens: int = sum(LENGTHS)) -> list[Tensor]:
    """Query, key and value [1, heads, tokens, size], each with another layout, and a gradient of the output."""
    torch.manual_seed(0)
    query = torch.randn(1, tokens, num_heads, size).transpose(1, 2)
    key, value = torch.randn(2, 1, num_kv, tokens, size)
    return [query, key, value, torch.randn(1, tokens, num_heads, size)]


def by_torch(parts: list[Tensor], lengths: tuple[int, ...], causal: bool, rows: np.ndarray | None = None):
    """In float64: each document by itself, and of its outputs those of `rows`."""
    query, key, value = (x.detach().double().requires_grad_() for x in parts[:3])
    outputs = []
    for end, length in zip(accumulate(lengths), lengths, strict=True):
        read = (x[:, :, end - length : end] for x in (query, key, value))
        outputs.append(F.scaled_dot_product_attention(*read, is_causal=causal, enable_gqa=True).transpose(1, 2))
    out = torch.cat(outputs, 1)
    if rows is not None:
        out = out[:, rows]
    out.backward(parts[3].double() if rows is None else parts[3][:, : len(rows)].double())
    return out, query.grad, key.grad, value.grad


def by_packing(parts: list[Tensor], lengths: tuple[int, ...], causal: bool, rows: np.ndarray | None = None):
    packing = packing_of(lengths, causal=causal, asked=rows)
    query, key, value = (x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in parts[:3])
    asking = query if rows is None else query[:, :, rows]
    grad, scale = (parts[3] if rows is None else parts[3][:, : len(rows)]), query.shape[3] ** -0.5
    asked = {"only_asked": rows is not None}
    out, _ = attention.packed_attention(
        torch.nn.Module(), asking, key, value, None, scaling=scale, packing=packing, **asked
    )
    out.backward(grad)
    return out, query.grad, key.grad, value.grad


def assert_near(got, expected) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=2e-6 * float(theirs.detach().abs().max()))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_are_torchs_in_float64(shape: tuple[int, int, int], causal: bool) -> None:
    parts = drawn(*shape)
    assert_near(by_packing(parts, LENGTHS, causal), by_torch(parts, LENGTHS, causal))


def test_some_places_ask_and_all_are_read() -> None:
    """The second document is not asked at all, and pieces of one mask are of 128 places at most."""
    parts = drawn(4, 2, 32, 500)
    lengths, rows = (300, 20, 180), np.array([*range(3, 300), *range(330, 500, 3)])
    assert_near(by_packing(parts, lengths, True, rows), by_torch(parts, lengths, True, rows))


def test_a_document_is_computed_alike_whatever_lies_beside_it() -> None:
    """Bit for bit, and with any number of threads."""
    parts = drawn(4, 2, 32)
    packed = by_packing(parts, LENGTHS, True)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        again = by_packing(parts, LENGTHS, True)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(packed, again, strict=True))
    end = sum(LENGTHS[:3])
    start = end - LENGTHS[2]
    cut = [x[:, :, start:end] for x in parts[:3]] + [parts[3][:, start:end]]
    alone = by_packing(cut, LENGTHS[2:3], True)
    assert torch.equal(packed[0][:, start:end], alone[0])
    assert all(torch.equal(a[:, :, start:end], b) for a, b in zip(packed[1:], alone[1:], strict=True))


def test_no_rows_and_huge_scores_are_no_trouble_and_a_nan_stays_in_its_document() -> None:
    parts = drawn(2, 1, 16, 40)
    parts[0] = parts[0] * 1e4
    assert_near(by_packing(parts, (40,), True)[:1], by_torch(parts, (40,), True)[:1])
    parts[2] = parts[2].clone()
    parts[2][0, 0, 20, 0] = torch.nan
    out, *grads = by_packing(parts, (24, 16), True)
    assert out[:, 20:24, :, 0].isnan().all() and not out[:, 24:].isnan().any()
    assert not any(grad[:, :, 24:].isnan().any() for grad in grads)
    empty = np.array([], dtype=np.int64)
    out, *grads = by_packing(drawn(2, 1, 16, 40), (40,), True, empty)
    assert out.shape == (1, 0, 2, 16) and not any(grad.any() for grad in grads)


def test_without_it_torch_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, rows = drawn(4, 2, 32), np.arange(0, sum(LENGTHS), 3)
    ours = [by_packing(parts, LENGTHS, True), by_packing(parts, LENGTHS, True, rows)]
    monkeypatch.setattr(cpu_attention, "supports_layer", lambda *_: False)
    theirs = [by_packing(parts, LENGTHS, True), by_packing(parts, LENGTHS, True, rows)]
    for got, expected in zip(ours, theirs, strict=True):
        assert_near(got, [x.double() for x in expected])


def test_which_keys_are_seen_is_known_from_the_lengths() -> None:
    runs = tuple((len(list(group)), length) for length, group in groupby((2, 2, 3)))
    documents = cpu_attention.whole_documents(runs, True)
    assert documents.borders.tolist() == [[0, 2, 0], [2, 2, 2], [4, 3, 4]]
    assert documents.seen.tolist() == [1, 2, 1, 2, 1, 2, 3]
    assert cpu_attention.whole_documents(runs, False).seen.tolist() == [2, 2, 2, 2, 3, 3, 3]
