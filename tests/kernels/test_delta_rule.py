"""The gated delta rule and its convolution in chunks, over packed documents, against plain float64 loops."""

from __future__ import annotations

import sys
import types
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import delta_rule, reference
from kernels.delta_rule import (
    CHUNK,
    Piece,
    by_sequences,
    gated_delta_rule,
    next_history,
    one_step,
    plan_scan,
    short_conv,
)
from shared.families.model_sizes import DELTA_CHUNK

K, V, TAPS = 8, 6, 4
CPU = torch.device("cpu")


def test_the_plan_counts_with_the_chunks_of_the_rule():
    assert DELTA_CHUNK == CHUNK


def make(num_tokens, seed=0, heads=(2, 4), dtype=torch.float64, roots=0):
    """(query, key, value, g, beta, initial states): few heads of queries and keys, as in the published models."""
    draw = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, num_tokens, heads[0], K, generator=draw, dtype=dtype)
    value = torch.randn(num_tokens, heads[1], V, generator=draw, dtype=dtype)
    g = -torch.rand(num_tokens, heads[1], generator=draw, dtype=dtype) * 3
    beta = torch.rand(num_tokens, heads[1], generator=draw, dtype=dtype)
    return query, key, value, g, beta, torch.randn(roots, heads[1], K, V, generator=draw, dtype=dtype)


def documents(pieces):
    """Of each piece: the tokens of its document up to its end."""
    found = []
    for piece in pieces:
        before = [] if piece.parent < 0 else found[piece.parent]
        found.append([*before, *range(piece.start, piece.start + piece.count)])
    return found


def expected(pieces, inputs, states):
    """(outputs, last states) by the loop, each piece's document anew from its beginning."""
    out, last, root = torch.empty_like(inputs[2], dtype=torch.float64), [], {}
    for number, (piece, rows) in enumerate(zip(pieces, documents(pieces), strict=True)):
        root[number] = root[piece.parent] if piece.parent >= 0 else sum(p.parent < 0 for p in pieces[:number])
        whole, state = reference.gated_delta_rule(*(x[rows] for x in inputs), states[root[number]])
        out = out.index_copy(0, torch.arange(piece.start, piece.start + piece.count), whole[-piece.count :])
        last.append(state)
    return out, torch.stack(last)


def tree(lengths, parents):
    pieces, start = [], 0
    for length, parent in zip(lengths, parents, strict=True):
        pieces.append(Piece(start, length, parent))
        start += length
    return pieces


SHAPES = {
    "one": tree([5], [-1]),
    "packed": tree([3, 20, 1, 8], [-1, -1, -1, -1]),
    "chunks are full": tree([8, 16], [-1, -1]),
    "shared": tree([6, 9, 11, 3, 30, 2], [-1, 0, 0, 1, 0, 4]),
    "shared and alone": tree([9, 2, 7, 17], [-1, -1, 0, 1]),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("with_states", [False, True])
def test_values_and_gradients_are_the_loops_in_float64(name, with_states):
    pieces = SHAPES[name]
    roots = sum(piece.parent < 0 for piece in pieces)
    *inputs, states = make(sum(piece.count for piece in pieces), roots=roots)
    states = states if with_states else torch.zeros_like(states)
    plan, results = plan_scan(pieces, chunk=8), []
    for exact in (False, True):
        own = [x.clone().requires_grad_() for x in (*inputs, states)]
        if exact:
            out, last = expected(pieces, own[:5], own[5])
        else:
            out, last = gated_delta_rule(*own[:5], plan, own[5] if with_states else None)
        draw = torch.Generator().manual_seed(1)
        weights = [torch.randn(x.shape, generator=draw, dtype=x.dtype) for x in (out, last)]
        loss = sum((x * w).sum() for x, w in zip((out, last), weights, strict=True))
        results.append((out, last, *torch.autograd.grad(loss, own[: 5 + with_states])))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", SHAPES)
def test_a_rule_of_whole_sequences_gives_the_same_wave_by_wave(name):
    """With a stand-in for flash-linear-attention: its arguments, computed by the loop."""
    pieces = SHAPES[name]
    roots = sum(piece.parent < 0 for piece in pieces)
    *inputs, states = make(sum(piece.count for piece in pieces), roots=roots)
    plan, results = plan_scan(pieces, chunk=8), []
    for rule in (gated_delta_rule, partial(by_sequences, whole_sequences)):
        own = [x.clone().requires_grad_() for x in (*inputs, states)]
        out, last = rule(*own[:5], plan, own[5])
        results.append((out, last, *torch.autograd.grad(out.sin().sum() + last.cos().sum(), own)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def whole_sequences(
    query, key, value, g, beta, *, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
):
    assert output_final_state and use_qk_l2norm_in_kernel and len(query) == 1
    begin = initial_state if initial_state is not None else value.new_zeros(len(cu_seqlens) - 1, 4, K, V)
    parts = [
        reference.gated_delta_rule(*(x[0, start:stop] for x in (query, key, value, g, beta)), state)
        for (start, stop), state in zip(pairwise(cu_seqlens.tolist()), begin, strict=True)
    ]
    return torch.cat([out for out, _ in parts])[None], torch.stack([state for _, state in parts])


def test_another_kernel_is_compared_before_it_is_used(monkeypatch):
    """A rule that lets its states leak, or is not there, is not used; one line says so."""
    fla = types.ModuleType("fla.ops.gated_delta_rule")
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, fla.__name__, fla)
    monkeypatch.setattr(delta_rule, "_sequence_rule", None)
    assert "cannot be imported (ImportError" in delta_rule.use_fla(CPU)
    fla.chunk_gated_delta_rule = lambda *x, initial_state, **how: rounded(*x, initial_state=None, **how)
    assert "is off by" in delta_rule.use_fla(CPU) and delta_rule._sequence_rule is None
    fla.chunk_gated_delta_rule = rounded
    assert delta_rule.use_fla(CPU) == "" and delta_rule._sequence_rule is rounded


def rounded(query, key, value, g, beta, *, cu_seqlens, initial_state, **_):
    """The rule from bfloat16, as a kernel on a GPU computes it."""
    pieces = [Piece(start, stop - start) for start, stop in pairwise(cu_seqlens.tolist())]
    inputs = (x[0].float() for x in (query, key, value, g, beta))
    out, last = gated_delta_rule(*inputs, plan_scan(pieces), initial_state)
    return out.bfloat16()[None], last


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=5), st.integers(0, 99))
def test_documents_of_any_length_agree_with_the_loop_in_float32(lengths, seed):
    pieces = tree(lengths, [-1] * len(lengths))
    *inputs, states = make(sum(lengths), seed, dtype=torch.float32, roots=len(lengths))
    got, last = gated_delta_rule(*inputs, plan_scan(pieces))
    want, exact = expected(pieces, inputs, torch.zeros_like(states))
    assert got.dtype == last.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)
    torch.testing.assert_close(last.double(), exact, rtol=0, atol=2e-5)


def test_decays_that_forget_everything_at_once_make_no_infinity():
    *inputs, _ = make(70)
    inputs[3] = torch.full_like(inputs[3], -200.0)
    pieces = tree([70], [-1])
    got, _ = gated_delta_rule(*inputs, plan_scan(pieces))
    want, _ = expected(pieces, inputs, torch.zeros(1, 4, K, V, dtype=torch.float64))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_a_document_goes_on_from_its_last_state_in_chunks_and_token_by_token():
    *inputs, _ = make(40)
    whole, end = gated_delta_rule(*inputs, plan_scan(tree([40], [-1]), chunk=8))
    first, state = gated_delta_rule(*(x[:23] for x in inputs), plan_scan(tree([23], [-1]), chunk=8))
    second, state = gated_delta_rule(*(x[23:36] for x in inputs), plan_scan(tree([13], [-1]), chunk=8), state)
    outs = [first, second]
    for t in range(36, 40):
        out, state = one_step(*(x[t : t + 1] for x in inputs), state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs), whole, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(state, end, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("with_history", [False, True])
def test_the_convolution_sees_its_document_alone_in_values_and_gradients(name, with_history):
    pieces = SHAPES[name]
    total, roots = sum(piece.count for piece in pieces), sum(piece.parent < 0 for piece in pieces)
    draw = torch.Generator().manual_seed(3)
    x, weight, history = (
        torch.randn(shape, generator=draw, dtype=torch.float64)
        for shape in ((total, 5), (5, TAPS), (roots, TAPS - 1, 5))
    )
    history = history if with_history else torch.zeros_like(history)
    grads, outs = [], []
    plan = plan_scan(pieces)
    for exact in (False, True):
        own = [each.clone().requires_grad_() for each in (x, weight, history)]
        if exact:
            parts, root = [], {}
            for number, (piece, rows) in enumerate(zip(pieces, documents(pieces), strict=True)):
                root[number] = root[piece.parent] if piece.parent >= 0 else sum(p.parent < 0 for p in pieces[:number])
                parts.append(reference.short_conv(own[0][rows], own[1], own[2][root[number]])[-piece.count :])
            out = torch.cat(parts)
        else:
            out = short_conv(own[0], own[1], plan, own[2] if with_history else None)
        outs.append(out)
        grads.append(torch.autograd.grad(out.sin().sum(), own[: 2 + with_history]))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-10, atol=1e-12)
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_the_history_of_what_follows_is_the_last_inputs_also_of_a_document_shorter_than_the_taps():
    x, history = torch.arange(5.0)[:, None], torch.tensor([[10.0, 11, 12], [20, 21, 22]])[..., None]
    plan = plan_scan([Piece(0, 4), Piece(4, 1)])
    assert next_history(x, plan, TAPS, history)[..., 0].tolist() == [[1, 2, 3], [21, 22, 4]]
    assert next_history(x, plan, TAPS)[..., 0].tolist() == [[1, 2, 3], [0, 0, 4]]
