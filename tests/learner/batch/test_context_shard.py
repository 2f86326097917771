"""A microbatch over the ranks of a context group: how it is cut, and that attention and images fit together again.

The ranks are simulated in this process; tests/learner/training/test_learner_ranks.py has real ones.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.batch.episodes import make_episode
from learner.batch.image_decoder import ImageDecoder
from learner.batch.packer import pack
from learner.batch.packing import packing_of, rows_of
from learner.batch.zigzag import chunk, deal, gathered_rows, least_tokens, spans, token_positions
from learner.distributed import Context, check_divides
from learner.model import attention
from learner.model.attention import of_chunks, of_rows, packed_attention
from shared.config.objective_section import ObjectiveConfig
from shared.families.registry import FAMILIES, PUBLISHED
from shared.vision import VisionSpec
from tests.support.gpu.varlen import lower_right
from tests.support.ranks.cuts import CUTS, groups_of

CPU = torch.device("cpu")
SPEC = VisionSpec(image_token_id=600, family=FAMILIES["qwen3_vl"], min_pixels=1024, max_pixels=1 << 20)
DOCUMENTS = [(97,), (1, 1, 2, 3, 3, 3, 5, 8), (4,) * 16, (200, 3, 61), (31, 200)]
SIZES = st.integers(2, 8)
LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=20)


def shares_of(episodes, decoders, size):
    """Each simulated rank's microbatch."""
    return [pack(episodes, decoders[rank], CPU, Context(rank, size)) for rank in range(size)]


def episodes_of(case):
    decoder = ImageDecoder(SPEC)
    return [make_episode(t, 0.0, decoder, ObjectiveConfig()) for g in groups_of(case, SPEC) for t in g.trajectories]


# ---------------------------------------------------------------------- the layout


@given(LENGTHS, SIZES)
def test_ranks_hold_every_token_once_and_their_counts_differ_by_two_at_most(lengths, size):
    held = [token_positions(sum(lengths), size, rank) for rank in range(size)]
    assert sorted(np.concatenate(held).tolist()) == list(range(sum(lengths)))
    counts = [len(h) for h in held]
    assert max(counts) - min(counts) <= 2 and all((np.diff(h) > 0).all() for h in held)
    assert min(counts) > 0 or sum(lengths) < least_tokens(size)


@given(LENGTHS, SIZES)
def test_chunks_name_every_pair_of_a_query_and_a_key_once(lengths, size):
    parts = [chunk(lengths, *span) for rank in range(size) for span in spans(sum(lengths), size, rank)]
    assert sum(part.pairs for part in parts) == sum(n * (n + 1) // 2 for n in lengths)
    for part in parts:
        assert sum(part.queries) == part.stop - part.start and sum(part.keys) == part.stop - part.first_key


@given(st.integers(1, 2000), SIZES)
def test_what_is_gathered_from_padded_parts_is_in_the_streams_order(length, size):
    held = [token_positions(length, size, rank) for rank in range(size)]
    longest = max(map(len, held))
    gathered = np.concatenate([np.pad(h, (0, longest - len(h)), constant_values=-1) for h in held])
    assert (gathered[gathered_rows([len(h) for h in held], held)] == np.arange(length)).all()


@given(st.integers(8000, 9000), SIZES)
def test_one_long_document_costs_every_rank_the_same(length, size):
    work = [sum(chunk((length,), *span).pairs for span in spans(length, size, rank)) for rank in range(size)]
    assert max(work) < 1.01 * sum(work) / size


@given(st.lists(st.integers(1, 100), max_size=30), SIZES)
def test_no_rank_is_dealt_more_than_the_mean_and_one_item(costs, size):
    owners = deal(costs, size)
    sums = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(size)]
    assert sum(sums) == sum(costs) and max(sums) <= sum(costs) / size + max(costs, default=0)


def test_operations_of_the_parts_are_those_of_the_whole():
    sizes, lengths, images = PUBLISHED["Qwen3-VL-30B-A3B"], (700, 1300), (256, 64)
    parts = [
        sizes.part_flops(
            len(token_positions(2000, 4, rank)),
            sum(chunk(lengths, *s).pairs for s in spans(2000, 4, rank)),
            dealt,
            rows,
        )
        for rank, (dealt, rows) in enumerate([((256,), 0), ((), 100), ((64,), 300), ((), 0)])
    ]
    assert sum(parts) == pytest.approx(sizes.forward_flops(lengths, images, 400), rel=1e-12)


# ---------------------------------------------------------------------- attention


@pytest.mark.parametrize("lengths", DOCUMENTS)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("way", ["rows", "chunks"])
def test_the_ranks_attention_and_its_gradients_are_those_of_the_whole(monkeypatch, lengths, size, way):
    monkeypatch.setattr(attention, "_of_documents", lower_right)
    torch.manual_seed(0)
    total = sum(lengths)
    q, k, v = (torch.randn(1, heads, total, 16, requires_grad=True) for heads in (4, 2, 2))
    whole, _ = packed_attention(
        torch.nn.Identity(), q, k, v, None, scaling=0.25, packing=packing_of(lengths, causal=True)
    )
    weights = torch.randn_like(whole)
    expected = torch.autograd.grad((whole * weights).sum(), (q, k, v))
    found = torch.zeros_like(whole)
    for rank in range(size):
        mine = torch.from_numpy(token_positions(total, size, rank))
        packing = simulated_packing(lengths, size, rank)
        if way == "rows":
            part = of_rows(q[:, :, mine], k, v, rows_of(mine.numpy(), lengths), 0.25)
        else:
            part = of_chunks(q[:, :, mine], k, v, 0.25, packing.chunks)
        found = found.index_copy(1, mine, part[None])
    assert torch.allclose(found, whole, atol=2e-6)
    for got, gradient in zip(torch.autograd.grad((found * weights).sum(), (q, k, v)), expected, strict=True):
        assert torch.allclose(got, gradient, atol=1e-5)


def simulated_packing(lengths, size, rank):
    """As one rank has it."""

    class ContextShard:
        chunks = tuple(chunk(lengths, *span) for span in spans(sum(lengths), size, rank))

    return packing_of(lengths, causal=True, shard=ContextShard())


# ---------------------------------------------------------------------- microbatches


def test_the_awkward_cuts_are_what_their_names_say():
    def shares(case, size):
        return shares_of(episodes_of(case), [ImageDecoder(SPEC) for _ in range(size)], size)

    for size in (2, 4):
        assert all(len(b.shard.chunks[0].queries) == 1 for b in shares("one document across every cut", size))
        assert any(len(b.shard.chunks[0].queries) > 2 for b in shares("many short documents", 2))
        without = [not len(b.visual_positions) for b in shares("a rank without pictures", size)]
        assert any(without) and not all(without)
        assert any(not b.shard.num_predictions for b in shares("a rank without predictors", size))
        assert sum(len(b.visual_positions) > 0 for b in shares("one picture on two ranks", size)) == size
    assert len(shares("more chunks than tokens", 4)[0].lengths) == 2


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CUTS)
def test_the_parts_of_a_microbatch_are_the_whole_of_it(case, size):
    """Rows of the tower's output are numbered as the whole microbatch has them; the exchange is played through."""
    episodes = episodes_of(case)
    decoders = [ImageDecoder(SPEC) for _ in range(size)]
    whole = pack(episodes, ImageDecoder(SPEC), CPU, share_prefixes=False)
    parts = shares_of(episodes, decoders, size)
    total = whole.input_ids.shape[1]
    ids, positions = torch.full((1, max(total, least_tokens(size))), -1), torch.full((4, 1, 2000), -1)
    predictors = torch.full_like(whole.predictors, -1)
    for part in parts:
        ids[:, part.shard.positions] = part.input_ids
        positions[:, :, part.shard.positions] = part.position_ids
        if part.shard.num_predictions:
            predictors[part.shard.predictions] = part.shard.positions[part.predictors]
        assert torch.equal(part.target_ids, whole.target_ids) and len(part.predictors)
    assert torch.equal(ids[:, :total], whole.input_ids) and (ids >= 0).all()
    assert torch.equal(positions[:, :, :total], whole.position_ids) and torch.equal(predictors, whole.predictors)
    computed = [(p.patches.flatten(1).sum(1) if len(p.patches) else p.patches.new_zeros(0)).long() for p in parts]
    tokens = [c.unflatten(0, (-1, 4)).sum(1) if len(c) else c for c in computed]
    expected = whole.patches.flatten(1).sum(1).unflatten(0, (-1, 4)).sum(1) if len(whole.patches) else torch.zeros(0)
    assert sum(map(len, tokens)) == len(expected)
    for rank, part in enumerate(parts):
        if part.shard.exchange is None:
            assert not len(whole.patches)
            continue
        pieces = [
            tokens[other][parts[other].shard.exchange.rows].split(parts[other].shard.exchange.sent)[rank]
            for other in range(size)
        ]
        assert tuple(map(len, pieces)) == part.shard.exchange.received
        at = torch.searchsorted(whole.visual_positions, part.shard.positions[part.visual_positions])
        assert torch.equal(torch.cat(pieces)[part.visual_rows], expected[whole.visual_rows[at]])


def test_an_image_is_decoded_by_one_rank_alone(monkeypatch):
    groups = groups_of("one document across every cut", SPEC)
    episodes = [make_episode(t, 0.0, ImageDecoder(SPEC), ObjectiveConfig()) for g in groups for t in g.trajectories]
    decoded: list[list[str]] = []
    decode = ImageDecoder.get

    def noted(self, image):
        decoded[-1].append(image.content_hash)
        return decode(self, image)

    monkeypatch.setattr(ImageDecoder, "get", noted)
    for rank in range(2):
        decoded.append([])
        pack(episodes, ImageDecoder(SPEC), CPU, Context(rank, 2))
    assert all(decoded) and sorted(decoded[0] + decoded[1]) == sorted({i.content_hash for i in episodes[0].images})


def test_a_number_of_ranks_that_does_not_fit_is_one_line_with_those_that_do():
    with pytest.raises(ValueError) as error:
        check_divides("context", 3, 8)
    assert str(error.value) == "learner.parallel.context = 3 does not divide the 8 ranks; set it to 2 or 4"
    with pytest.raises(ValueError, match="context = 2 does not divide the 1 ranks; set it to 1"):
        check_divides("context", 2, 1)
