"""What episodes of a group begin with is computed once: the same values and gradients from fewer tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import learner.batch.packing
from learner.batch.episodes import make_episodes
from learner.batch.image_decoder import ImageDecoder
from learner.batch.packer import pack
from learner.batch.packing import packing_of
from learner.batch.shared_prefixes import find_prefixes, with_prefixes
from learner.model import attention
from learner.model.attention import packed_attention
from learner.model.policy import load_policy
from learner.training.trainer import Trainer
from shared.config.objective_section import ObjectiveConfig
from shared.families.registry import FAMILIES as REGISTERED
from shared.vision import VisionSpec
from tests.support.episodes import learner_config, random_groups, random_trajectory, siblings
from tests.support.gpu.varlen import lower_right
from tests.support.small.families import FAMILIES
from tests.support.tiny import tiny_model_dir

SPEC = VisionSpec(image_token_id=600, family=REGISTERED["qwen3_vl"], min_pixels=1024, max_pixels=1 << 20)
CPU = torch.device("cpu")


def packed_groups(groups, spec=SPEC, **how):
    decoder = ImageDecoder(spec)
    return pack(make_episodes(groups, decoder, ObjectiveConfig(name="grpo")), decoder, CPU, **how)


def beside(documents, groups):
    """The prefixes of documents given as lists of ids, without images."""
    lengths = [len(ids) for ids in documents]
    places = np.concatenate([np.arange(n) for n in lengths])
    arrays = {
        "input_ids": np.concatenate(documents)[None],
        "position_ids": np.tile(places, (4, 1))[:, None],
        "visual_positions": np.zeros(0, np.int64),
        "visual_rows": np.zeros(0, np.int64),
    }
    return find_prefixes(arrays, lengths, groups)


# ---------------------------------------------------------------------- which tokens


def test_the_first_of_a_group_is_computed_whole_and_the_others_from_where_they_differ():
    found = beside([[5, 6, 7, 1], [5, 6, 8, 2], [5, 6, 7, 3, 3]], [0, 0, 0])
    assert found.positions.tolist() == [0, 1, 2, 3, 6, 7, 11, 12]
    assert found.rows.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 0, 1, 2, 6, 7]
    assert found.copies == ((4, 0, 2), (8, 0, 3)) and found.saved_pairs == 3 + 6
    assert found.cu_queries.tolist() == [0, 4, 6, 8] and found.most_queries == 4


def test_groups_that_begin_alike_have_nothing_in_common():
    assert beside([[5, 6, 7], [5, 6, 8]], [0, 1]) is None
    assert beside([[5, 6, 7], [4, 6, 8]], [0, 0]) is None
    between = beside([[5, 6, 7], [5, 6, 1], [5, 6, 8]], [0, 1, 0])
    assert between.copies == ((6, 0, 2),)


def test_an_episode_takes_most_from_the_one_that_it_is_like_for_longest():
    found = beside([[1, 2, 3, 4], [1, 5, 6, 7], [1, 5, 6, 8]], [0, 0, 0])
    assert found.positions.tolist() == [0, 1, 2, 3, 5, 6, 7, 11]
    assert found.rows.tolist() == [0, 1, 2, 3, 0, 4, 5, 6, 0, 4, 5, 7]
    assert found.copies == ((4, 0, 1), (8, 0, 1), (9, 4, 2)) and found.saved_pairs == 1 + 6


def test_a_prefix_ends_where_the_shorter_document_does_and_leaves_each_a_token():
    assert beside([[5, 6], [5, 6, 5, 6]], [0, 0]).copies == ((2, 0, 2),)
    assert beside([[5, 6, 7, 8], [5, 6, 7, 8]], [0, 0]).copies == ((4, 0, 3),)
    assert beside([[5], [5]], [0, 0]) is None


def test_what_predicts_a_token_of_several_episodes_is_computed_once_and_asked_by_each():
    group = siblings(SPEC, 3, turns=2)
    batch, whole = packed_groups([group]), packed_groups([group], share_prefixes=False)
    assert torch.equal(batch.target_ids, whole.target_ids) and batch.lengths == whole.lengths
    assert torch.equal(batch.packing.asked.positions, whole.predictors)
    places, rows = batch.packing.own.positions, batch.packing.prefixes.rows
    assert torch.equal(rows[whole.predictors], batch.predictors)
    assert torch.equal(whole.input_ids[:, places], batch.input_ids)
    assert torch.equal(whole.position_ids[..., places], batch.position_ids)
    assert torch.equal(whole.input_ids, batch.input_ids[:, rows])
    assert torch.equal(whole.position_ids, batch.position_ids[..., rows])
    prompt = int(whole.predictors[0]) + 1
    assert batch.input_ids.shape[1] == sum(whole.lengths) - 2 * prompt
    assert (batch.predictors == prompt - 1).sum() == 3


def test_a_picture_of_the_prompt_is_placed_once_and_another_one_ends_the_prefix():
    group = siblings(SPEC, 2, turns=1)
    batch, whole = packed_groups([group]), packed_groups([group], share_prefixes=False)
    tokens = len(whole.visual_positions) // 2
    assert len(batch.visual_positions) == len(batch.visual_rows) == tokens > 0
    assert (batch.input_ids[0, batch.visual_positions] == SPEC.image_token_id).all()
    other = random_trajectory(SPEC, 77, turns=1, sides=(64,)).images
    first = random_trajectory(SPEC, 78, turns=1, sides=(64,))
    seen = packed_groups([replace(group, trajectories=(first, replace(first, images=other)))])
    ((_, _, count),) = seen.packing.prefixes.copies
    assert count == int((seen.input_ids[0] == SPEC.image_token_id).nonzero()[0])


def test_a_microbatch_whose_episodes_begin_differently_is_packed_as_ever():
    batch = packed_groups(random_groups(SPEC, 2, group_size=2))
    assert batch.packing.prefixes is None and batch.packing.own is None


# ---------------------------------------------------------------------- attention


@pytest.mark.parametrize("way", ["float32", "float64", "as on a GPU"])
def test_attention_and_its_gradients_are_those_of_whole_documents(monkeypatch, way):
    """float64 takes torch's attention with a mask, float32 that in C."""
    monkeypatch.setattr(attention, "_of_documents", lower_right)
    monkeypatch.setattr(learner.batch.packing, "ROWS_AT_ONCE", 4)
    torch.manual_seed(0)
    documents = [[1, 2, 3, 4, 5, 6, 9], [1, 2, 3, 4, 5, 7, 7, 7], [9, 9], [1, 2, 3, 4, 5, 7, 7, 8, 8], [1, 2, 8, 8]]
    lengths, prefixes = tuple(map(len, documents)), beside(documents, [0, 0, 1, 0, 0])
    dtype = torch.float64 if way == "float64" else torch.float32
    x = [torch.randn(1, heads, len(prefixes.positions), 16, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    everywhere = [part[:, :, prefixes.rows] for part in x]
    plain = packing_of(lengths, causal=True)
    whole, _ = packed_attention(torch.nn.Identity(), *everywhere, None, scaling=0.25, packing=plain)
    packing = packing_of(lengths, causal=True, own=prefixes.positions.numpy(), prefixes=prefixes)
    if way == "as on a GPU":
        q, k, v = x
        got = attention._varlen(q, *(with_prefixes(part, prefixes) for part in (k, v)), 0.25, packing)[None]
    else:
        got, _ = packed_attention(torch.nn.Identity(), *x, None, scaling=0.25, packing=packing)
    expected = whole[:, prefixes.positions]
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)
    weights = torch.randn_like(got)
    found = torch.autograd.grad((got * weights).sum(), x, retain_graph=True)
    for one, other in zip(found, torch.autograd.grad((expected * weights).sum(), x), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_the_gradient_of_a_prefix_is_added_up_in_float32():
    prefixes = beside([[1, 2]] * 9, [0] * 9)
    x = torch.zeros(1, 1, len(prefixes.positions), 8, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.ones(1, 1, 18, 8, dtype=torch.bfloat16)
    upstream[:, :, 0] = 256  # one more is less than half a unit in its last place
    (with_prefixes(x, prefixes) * upstream).sum().backward()
    assert x.grad[0, 0, 0].tolist() == [264.0] * 8 and x.grad.dtype == torch.bfloat16


# ---------------------------------------------------------------------- policy and step


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_policys_values_and_gradients_are_those_of_whole_episodes(tmp_path, family):
    make, _, sides = FAMILIES[family]
    folder = make(tmp_path)
    spec = VisionSpec.load(folder, min_pixels=1024, max_pixels=1 << 20)
    check_policy(folder, spec, sides)


@pytest.mark.slow
def test_a_last_layer_that_is_asked_in_some_places_reads_prefixes_too(tmp_path, spec):
    assert check_policy(tiny_model_dir(tmp_path, layers=3), spec, (64, 96)).trimmed


def check_policy(folder, spec, sides):
    torch.manual_seed(0)
    policy = load_policy(str(folder), spec, critic_width=16)
    groups = [siblings(spec, 3, seed=seed, turns=1 + seed, sides=sides) for seed in range(2)]
    groups += random_groups(spec, 1, group_size=2, seed=5, sides=sides)
    groups.append(replace(groups[0], trajectories=(*groups[0].trajectories[:2], groups[0].trajectories[1])))
    found = []
    for share_prefixes in (True, False):
        batch = packed_groups(groups, policy.spec, share_prefixes=share_prefixes)
        policy.zero_grad()
        output = policy(batch, 0.7)
        (output.logprobs.sum() + output.values.square().sum() + output.entropies.sum()).backward()
        found.append((output[:3], {name: p.grad.clone() for name, p in policy.named_parameters()}))
    (got, gradients), (expected, expected_gradients) = found
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=2e-5 * (1 + gradient.abs().max()), msg=name)
    return policy


@pytest.mark.slow
def test_a_step_is_the_same_and_tells_how_many_tokens_were_not_computed(folder, spec, ranks):
    found = []
    for share_prefixes in (True, False):
        config = learner_config(objective="grpo", group_size=4, microbatch_tokens=4096, share_prefixes=share_prefixes)
        trainer = Trainer(load_policy(str(folder), spec), config, ranks)
        found.append(trainer.step([siblings(spec, 4, seed=seed, turns=2) for seed in range(2)], version=0))
    ours, whole = found
    assert 0.1 < ours["batch/prefix_share"] < 1 and whole["batch/prefix_share"] == 0
    for name in ("loss/policy", "optim/grad_norm", "policy/entropy", "behaviour/logprob_gap", "batch/tokens"):
        assert ours[name] == pytest.approx(whole[name], rel=1e-4), name
