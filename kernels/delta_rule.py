"""The gated delta rule and the short convolution before it (Yang et al., 2024, "Gated Delta Networks", equation 10),
over packed documents.

A token changes the state S [K, V] of its head, which begins as zeros in each document:

    S <- exp(g) S;   S <- S + k (beta (v - k' S))';   out = q' S

It is computed in chunks: within a chunk all tokens at once, by a triangular system; from chunk to chunk the state is
handed on, for all documents side by side. A document may begin with the state that another one has somewhere, as where
both have the same first tokens.

Shape suffixes: U = tokens, H = heads, K = size of a key, V = size of a value, N = chunks, L = tokens of a chunk, C =
channels, J = taps of the convolution, R = initial states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens
SequenceRule = Callable[..., tuple[Tensor, Tensor]]
_sequence_rule: SequenceRule | None = None  # a state of the process, like torch's own choice of kernels


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of `count` tokens from `start` on, without gaps. It begins with the state after `parent`, the index of an
    earlier piece; with -1 it begins a document, with zeros or with its initial state."""

    start: int
    count: int
    parent: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class Wave:
    """Pieces that can be computed side by side as whole sequences, each from the state after its parent."""

    rows: Tensor  # int64, the pieces' tokens, one piece after another
    borders: Tensor  # int64 [pieces of the wave + 1]
    parents: Tensor  # int64, the parents' indices among all pieces in the order of the waves; of roots unused


@dataclass(frozen=True, slots=True, eq=False)
class ScanPlan:
    """The order of computation for some tokens, made on the host once for all layers. Chunks that can be computed side
    by side are a level; a chunk begins with the last state of one of the level before."""

    rows_NL: Tensor  # int64, each chunk's tokens; U = padding
    places_U: Tensor  # int64, each token's place among the N L
    sources: tuple[Tensor, ...]  # of each level int64: the chunk of the level before, of the first level the piece
    before_U: Tensor  # int64, the token before each token; U = none
    roots: Tensor  # int64 [R], the first token of each piece that begins a document
    lasts: Tensor  # int64 [pieces], the last chunk of each piece
    ends: Tensor  # int64 [pieces], its last token
    waves: tuple[Wave, ...]  # the same order for a kernel of whole sequences; the first wave are the roots
    wave_places_U: Tensor  # int64, each token's place among the waves' tokens
    wave_pieces: Tensor  # int64 [pieces], each piece's place among the waves' pieces


def plan_scan(pieces: Sequence[Piece], chunk: int = CHUNK) -> ScanPlan:
    """Return the plan for all tokens of the pieces, which cover the tokens from 0 on in their order."""
    num_tokens = sum(piece.count for piece in pieces)
    before = np.arange(-1, num_tokens - 1)
    levels: list[list[tuple[int, int, int]]] = []  # of each level (first token, number, source)
    last: list[tuple[int, int]] = []  # of each piece (level, index) of its last chunk
    roots: list[int] = []
    for piece in pieces:
        level, source = (-1, len(roots)) if piece.parent < 0 else last[piece.parent]
        if piece.parent < 0:
            before[piece.start] = num_tokens
            roots.append(piece.start)
        else:
            parent = pieces[piece.parent]
            before[piece.start] = parent.start + parent.count - 1
        for first in range(piece.start, piece.start + piece.count, chunk):
            level += 1
            if level == len(levels):
                levels.append([])
            levels[level].append((first, min(chunk, piece.start + piece.count - first), source))
            source = len(levels[level]) - 1
        last.append((level, source))
    chunks = [each for level in levels for each in level]
    offsets = np.cumsum([0, *map(len, levels)])
    inside, counts = np.arange(chunk), np.array([count for _, count, _ in chunks])[:, None]
    rows = np.where(inside < counts, np.array([first for first, _, _ in chunks])[:, None] + inside, num_tokens)
    places = np.empty(num_tokens + 1, dtype=np.int64)
    places[rows.ravel()] = np.arange(rows.size)
    return ScanPlan(
        rows_NL=torch.from_numpy(rows),
        places_U=torch.from_numpy(places[:-1].copy()),
        sources=tuple(torch.tensor([source for _, _, source in level]) for level in levels),
        before_U=torch.from_numpy(before),
        roots=torch.tensor(roots),
        lasts=torch.tensor([int(offsets[level]) + index for level, index in last]),
        ends=torch.tensor([piece.start + piece.count - 1 for piece in pieces]),
        **_waves(pieces),
    )


def _waves(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Return the fields of `ScanPlan` about waves."""
    depth: list[int] = []
    for piece in pieces:
        depth.append(0 if piece.parent < 0 else depth[piece.parent] + 1)
    order = sorted(range(len(pieces)), key=lambda number: depth[number])
    place = {number: at for at, number in enumerate(order)}
    waves, rows = [], [np.arange(p.start, p.start + p.count) for p in (pieces[number] for number in order)]
    for level in range(max(depth) + 1):
        own = [number for number in order if depth[number] == level]
        tokens = np.concatenate([rows[place[number]] for number in own])
        borders = np.cumsum([0, *(pieces[number].count for number in own)])
        parents = [place.get(pieces[number].parent, 0) for number in own]
        waves.append(Wave(torch.from_numpy(tokens), torch.from_numpy(borders), torch.tensor(parents)))
    return {
        "waves": tuple(waves),
        "wave_places_U": torch.from_numpy(np.concatenate(rows).argsort()),
        "wave_pieces": torch.tensor([place[number] for number in range(len(pieces))]),
    }


def on_device(plan: ScanPlan, device: torch.device) -> ScanPlan:
    """Return the plan with its tensors on a device."""
    return _moved(plan, device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_moved(item, device) for item in value)
    return type(value)(**{each.name: _moved(getattr(value, each.name), device) for each in fields(value)})


def gated_delta_rule(
    query_UHK: Tensor,
    key_UHK: Tensor,
    value_UHV: Tensor,
    g_UH: Tensor,
    beta_UH: Tensor,
    plan: ScanPlan,
    initial_RHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the rule in float32 or wider: (out [U,H,V] in the dtype of values, the state after each piece).

    Queries and keys are L2-normed first, and queries divided by the root of K; fewer heads of these serve neighbouring
    heads of values alike. `g` <= 0 is the logarithm of the decay. `initial`: the state with which each piece without a
    parent begins; None = zeros.

    On a GPU, whole sequences are computed by flash-linear-attention if `use_fla` has found that it fits.
    """
    if _sequence_rule is not None and value_UHV.is_cuda and value_UHV.dtype in (torch.bfloat16, torch.float16):
        inputs = (query_UHK, key_UHK, value_UHV, g_UH, beta_UH)
        return by_sequences(_sequence_rule, *inputs, plan, initial_RHKV)
    dtype = torch.promote_types(value_UHV.dtype, torch.float32)
    query, key = _query_and_key(query_UHK, key_UHK, value_UHV.shape[1], dtype)
    beta_UH1 = beta_UH.to(dtype)[..., None]
    q, k, v, kb = (_chunked(x, plan) for x in (query, key, value_UHV.to(dtype) * beta_UH1, key * beta_UH1))
    total_NHL1 = _chunked(g_UH.to(dtype)[..., None], plan).cumsum(-2)
    decay = total_NHL1 - total_NHL1.mT
    upper = torch.ones(decay.shape[-2:], dtype=torch.bool, device=decay.device).triu(1)
    decay = decay.masked_fill(upper, -torch.inf).exp()
    system = (kb @ k.mT) * decay
    both = torch.cat((v, kb * total_NHL1.exp()), -1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    new, read = solved.split((v.shape[-1], kb.shape[-1]), -1)
    within = (q @ k.mT) * decay
    q = q * total_NHL1.exp()
    final_NH11 = total_NHL1[..., -1:, :]
    k = k * (final_NH11 - total_NHL1).exp()
    kept_NH11 = final_NH11.exp()
    if initial_RHKV is None:
        state = value_UHV.new_zeros(len(plan.roots), v.shape[1], k.shape[-1], v.shape[-1], dtype=dtype)
    else:
        state = initial_RHKV.to(dtype)
    outs, states = [], []
    sizes = [len(source) for source in plan.sources]
    parts = zip(plan.sources, *(x.split(sizes) for x in (q, k, new, read, within, kept_NH11)), strict=True)
    for source, q_n, k_n, new_n, read_n, within_n, kept_n in parts:
        state = state.index_select(0, source)
        added = new_n - read_n @ state
        outs.append(q_n @ state + within_n @ added)
        state = state * kept_n + k_n.mT @ added
        states.append(state)
    out_NLHV = torch.cat(outs).transpose(1, 2)
    out_UHV = out_NLHV.flatten(0, 1).index_select(0, plan.places_U)
    return out_UHV.to(value_UHV.dtype), torch.cat(states).index_select(0, plan.lasts)


def by_sequences(
    rule: SequenceRule,
    query_UHK: Tensor,
    key_UHK: Tensor,
    value_UHV: Tensor,
    g_UH: Tensor,
    beta_UH: Tensor,
    plan: ScanPlan,
    initial_RHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute what `gated_delta_rule` does, wave by wave, with a rule of whole sequences that has the arguments of
    flash-linear-attention's `chunk_gated_delta_rule`."""
    outs, states = [], list[Tensor]()
    for number, wave in enumerate(plan.waves):
        begin = torch.cat(states).index_select(0, wave.parents) if number else initial_RHKV
        inputs = (x.index_select(0, wave.rows)[None] for x in (query_UHK, key_UHK, value_UHV, g_UH, beta_UH))
        out, state = rule(
            *inputs,
            initial_state=begin,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=wave.borders,
        )
        outs.append(out[0])
        states.append(state)
    return torch.cat(outs).index_select(0, plan.wave_places_U), torch.cat(states).index_select(0, plan.wave_pieces)


def use_fla(device: torch.device) -> str:
    """Let flash-linear-attention compute the rule on this GPU if it gives the same values and gradients as this module.
    Return "", or why it is not used, in one line."""
    global _sequence_rule
    _sequence_rule = None
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except Exception as error:  # noqa: BLE001 - another version of Triton or torch may raise anything at its import
        return f"flash-linear-attention cannot be imported ({type(error).__name__}: {str(error).splitlines()[0]})"
    try:
        off = _difference(chunk_gated_delta_rule, device)
    except Exception as error:  # noqa: BLE001 - a kernel that does not build raises anything
        return f"flash-linear-attention fails ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
    if not off < 0.05:
        return f"flash-linear-attention is off by {off:.2g} where bfloat16 allows 0.05"
    _sequence_rule = chunk_gated_delta_rule
    return ""


def _difference(rule: SequenceRule, device: torch.device) -> float:
    """Return the largest difference of outputs, states and gradients between a rule in bfloat16 and this module's in
    float32, relative to the largest value of each, for documents of which one goes on from another."""
    draw = torch.Generator().manual_seed(0)
    pieces = (Piece(0, 70), Piece(70, 40), Piece(110, 90, 0), Piece(200, 5, 1))
    keys, heads, size = 2, 4, 64
    shapes = ((205, keys, size), (205, keys, size), (205, heads, size))
    rounded = [torch.randn(shape, generator=draw).bfloat16().to(device) for shape in shapes]
    gates = [-torch.rand(205, heads, generator=draw).to(device), torch.rand(205, heads, generator=draw).to(device)]
    plan, found = on_device(plan_scan(pieces), device), []
    for exact in (False, True):
        own = [x.float() if exact else x for x in rounded] + gates
        q, k, v, g, beta = own = [x.detach().clone().requires_grad_() for x in own]
        if exact:
            out, state = gated_delta_rule(q, k, v, g, beta, plan)
        else:
            out, state = by_sequences(rule, q, k, v, g, beta, plan)
        loss = out.float().sin().sum() + state.float().sin().sum()
        found.append([out, state, *torch.autograd.grad(loss, own)])
    pairs = [(a.detach().float(), b.detach().float()) for a, b in zip(*found, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def one_step(
    query_RHK: Tensor, key_RHK: Tensor, value_RHV: Tensor, g_RH: Tensor, beta_RH: Tensor, state_RHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the rule for one token of each of R sequences from their states: (out [R,H,V], the new states)."""
    dtype = state_RHKV.dtype
    query, key = _query_and_key(query_RHK, key_RHK, value_RHV.shape[1], dtype)
    state = state_RHKV * g_RH.to(dtype).exp()[..., None, None]
    read = (key[..., None, :] @ state).squeeze(-2)
    added = (value_RHV.to(dtype) - read) * beta_RH.to(dtype)[..., None]
    state = state + key[..., :, None] * added[..., None, :]
    out = (query[..., None, :] @ state).squeeze(-2)
    return out.to(value_RHV.dtype), state


def short_conv(x_UC: Tensor, weight_CJ: Tensor, plan: ScanPlan, history_RJC: Tensor | None = None) -> Tensor:
    """Compute a causal convolution of each channel over the tokens of its document, and SiLU: [U,C] -> [U,C].

    `history`: the J-1 inputs before each piece without a parent; None = zeros.
    """
    taps = weight_CJ.shape[1]
    padded, rows_U, before = _with_history(x_UC, plan, taps - 1, history_RJC)
    out = x_UC * weight_CJ[:, taps - 1]
    for tap in reversed(range(taps - 1)):
        rows_U = before[rows_U]
        out = out + padded.index_select(0, rows_U) * weight_CJ[:, tap]
    return F.silu(out)


def next_history(x_UC: Tensor, plan: ScanPlan, taps: int, history_RJC: Tensor | None = None) -> Tensor:
    """Return the last J-1 inputs of the convolution up to each piece's end, [pieces,J-1,C]: the history of what
    follows."""
    padded, _, before = _with_history(x_UC, plan, taps - 1, history_RJC)
    rows = [plan.ends]
    for _ in range(taps - 2):
        rows.append(before[rows[-1]])
    return padded[torch.stack(rows[::-1], 1)]


def _with_history(
    x_UC: Tensor, plan: ScanPlan, length: int, history_RJC: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (the inputs, then a row of zeros, then the histories; the tokens' rows in it; the row before each)."""
    num_tokens = len(x_UC)
    rows_U = torch.arange(num_tokens, device=x_UC.device)
    none = rows_U.new_full((1,), num_tokens)
    before = torch.cat((plan.before_U, none))
    if history_RJC is None:
        return F.pad(x_UC, (0, 0, 0, 1)), rows_U, before
    first = num_tokens + 1 + length * torch.arange(len(plan.roots), device=x_UC.device)
    inside = first[:, None] + torch.arange(-1, length - 1, device=x_UC.device)
    inside[:, 0] = num_tokens
    before = torch.cat((before, inside.flatten()))
    before[plan.roots] = first + length - 1
    return torch.cat((F.pad(x_UC, (0, 0, 0, 1)), history_RJC.flatten(0, 1).to(x_UC.dtype))), rows_U, before


def log_decay(a: Tensor, log_rate_H: Tensor, bias_H: Tensor) -> Tensor:
    """Compute g [..., H] of the rule from what a layer projects, in float32 or wider."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return -log_rate_H.to(wide).exp() * F.softplus(a.to(wide) + bias_H)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute the norm after the rule: that of x [..., V] times its weight and SiLU of the gate, in float32 or
    wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = F.rms_norm(x.to(wide), x.shape[-1:], None, eps).to(x.dtype) * weight
    return (normed * F.silu(gate.to(wide))).to(x.dtype)


def _query_and_key(query_UHK: Tensor, key_UHK: Tensor, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return both L2-normed and repeated for all heads, and queries divided by the root of K."""
    shared = heads // key_UHK.shape[1]
    query, key = (_l2_normed(x.to(dtype)).repeat_interleave(shared, 1) for x in (query_UHK, key_UHK))
    return query * key.shape[-1] ** -0.5, key


def _l2_normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _chunked(x_UHD: Tensor, plan: ScanPlan) -> Tensor:
    """Return the chunks' rows, zeros where a chunk is not full: [U,H,D] -> [N,H,L,D]."""
    padded = F.pad(x_UHD, (0, 0, 0, 0, 0, 1))
    rows_NLHD = padded.index_select(0, plan.rows_NL.flatten()).unflatten(0, plan.rows_NL.shape)
    return rows_NLHD.transpose(1, 2)
