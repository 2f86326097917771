"""What each rank of a tensor-parallel server holds: whole heads, equal parts, zeros behind, and together all of it."""

from __future__ import annotations

import pytest
import torch

from learner.weights.shards import Heads, held
from shared.weights.layout import Layout

HEADS = Heads(query=4, key=2, vision=4)
LAYER, BLOCK = "model.language_model.layers.0", "model.visual.blocks.0"


def server(ranks, fills="gpu", **fields):
    return Layout("a server", "gpu", ranks, fills=fills, **fields)


def parts(name, values, layout, heads=HEADS):
    found = [held(name, values, layout, heads, rank) for rank in range(layout.num_ranks)]
    assert all(part is not None for part in found)
    return found


def numbered(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


@pytest.mark.parametrize(
    ("name", "shape", "dim"),
    [
        (f"{LAYER}.self_attn.q_proj.weight", (16, 6), 0),
        (f"{LAYER}.self_attn.q_proj.bias", (16,), 0),
        (f"{LAYER}.self_attn.k_proj.weight", (8, 6), 0),
        (f"{LAYER}.self_attn.o_proj.weight", (6, 16), 1),
        (f"{LAYER}.mlp.up_proj.weight", (10, 6), 0),
        (f"{LAYER}.mlp.down_proj.weight", (6, 10), 1),
        (f"{LAYER}.mlp.experts.down_proj", (3, 6, 10), 2),
        (f"{BLOCK}.attn.proj.weight", (8, 8), 1),
        (f"{BLOCK}.mlp.linear_fc1.bias", (12,), 0),
        (f"{BLOCK}.mlp.linear_fc2.weight", (8, 12), 1),
        ("model.visual.deepstack_merger_list.1.linear_fc1.weight", (32, 32), 0),
        ("visual.merger.mlp.2.weight", (6, 32), 1),
        ("lm_head.weight", (128, 6), 0),
    ],
)
def test_ranks_share_a_parameter_equally_and_in_order(name, shape, dim):
    values = numbered(*shape)
    assert torch.equal(torch.cat(parts(name, values, server(2)), dim), values)
    assert len({part.shape for part in parts(name, values, server(2))}) == 1
    assert torch.equal(held(name, values, Layout("embedded", "sha256"), HEADS, 0), values)


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.input_layernorm.weight",
        f"{LAYER}.self_attn.k_norm.weight",
        f"{LAYER}.mlp.gate.weight",
        f"{BLOCK}.norm1.bias",
        f"{BLOCK}.attn.proj.bias",
        f"{BLOCK}.mlp.linear_fc2.bias",
        "visual.blocks.0.mlp.down_proj.bias",
        "model.visual.patch_embed.proj.weight",
        "visual.merger.ln_q.weight",
        "visual.merger.mlp.2.bias",
        "model.language_model.norm.weight",
    ],
)
def test_every_rank_has_all_of_what_each_needs(name):
    values = numbered(6)
    assert all(torch.equal(part, values) for part in parts(name, values, server(4)))


def test_neighbours_hold_the_same_head_of_keys_where_there_are_fewer_than_ranks():
    values = numbered(8, 3)
    found = parts(f"{LAYER}.self_attn.v_proj.weight", values, server(4))
    assert [torch.equal(part, values[:4]) for part in found] == [True, True, False, False]
    assert [torch.equal(part, values[4:]) for part in found] == [False, False, True, True]


def test_queries_keys_and_values_in_one_matrix_are_cut_each():
    values = numbered(24, 8)
    first, second = parts(f"{BLOCK}.attn.qkv.weight", values, server(2))
    assert torch.equal(first, torch.cat([values[0:4], values[8:12], values[16:20]]))
    assert torch.equal(second, torch.cat([values[4:8], values[12:16], values[20:24]]))


def test_experts_are_shared_out_among_groups_and_cut_within_one():
    values, name = numbered(4, 8, 3), f"{LAYER}.mlp.experts.gate_up_proj"
    found = parts(name, values, server(4, expert_groups=2))
    gate, up = values.chunk(2, dim=1)
    assert torch.equal(found[1], torch.cat([gate[:2, 2:], up[:2, 2:]], 1))
    assert torch.equal(found[2], torch.cat([gate[2:, :2], up[2:, :2]], 1))


def test_a_vocabulary_is_filled_up_until_every_rank_has_as_much():
    values, name = numbered(70, 2), "model.language_model.embed_tokens.weight"
    assert [len(part) for part in parts(name, values, server(2))] == [64, 64]
    assert [len(part) for part in parts(name, values, server(3))] == [64, 64, 64]  # 128 is no multiple of 3
    assert torch.equal(torch.cat(parts(name, values, server(3)))[:70], values)
    assert not torch.cat(parts(name, values, server(3)))[70:].any()


def test_the_tower_of_qwen25_is_filled_up_to_a_multiple_of_eight():
    values = numbered(12, 2)
    first, second = parts("visual.blocks.0.mlp.up_proj.weight", values, server(2))
    assert torch.equal(first, values[:8]) and torch.equal(second[:4], values[8:]) and not second[4:].any()


def test_a_cpu_fills_up_heads_and_hidden_layers():
    heads, queries, keys = Heads(2, 1, 3), numbered(8, 2), numbered(4, 2)
    found = parts(f"{LAYER}.self_attn.q_proj.weight", queries, server(2, "cpu"), heads)
    assert torch.equal(found[0], queries) and not found[1].any()
    found = parts(f"{LAYER}.self_attn.k_proj.weight", keys, server(2, "cpu"), heads)
    assert torch.equal(found[0], keys) and not found[1].any()
    found = parts(f"{LAYER}.mlp.up_proj.weight", numbered(40, 2), server(2, "cpu"), heads)
    assert [len(part) for part in found] == [32, 32] and not found[1][8:].any()


def test_a_tower_that_is_not_cut_is_whole_on_each_rank():
    values = numbered(24, 8)
    found = parts(f"{BLOCK}.attn.qkv.weight", values, server(3, whole_tower=True))
    assert all(torch.equal(part, values) for part in found)
    assert len(parts(f"{LAYER}.mlp.up_proj.weight", values, server(3, whole_tower=True))[0]) == 8


def test_of_a_parameter_without_a_rule_nothing_is_known_but_where_it_is_whole():
    values = numbered(4, 4)
    assert held(f"{LAYER}.novelty.weight", values, server(2), HEADS, 0) is None
    assert held(f"{LAYER}.novelty.weight", values, Layout("embedded", "sha256"), HEADS, 0) is values
