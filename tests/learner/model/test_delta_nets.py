"""Qwen3.5's gated delta nets over packed documents: what transformers does with a packed batch, and what the learner
does."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from learner.batch.episodes import make_episode
from learner.batch.image_decoder import ImageDecoder
from learner.batch.packer import pack
from learner.model.policy import load_policy
from learner.model.sharding import parallelize
from shared.config.objective_section import ObjectiveConfig
from shared.vision import VisionSpec
from tests.support.episodes import learner_config, packed, random_trajectory, siblings
from tests.support.ranks.doubled import in_float64
from tests.support.small.families import qwen3_5
from tests.support.tiny import load_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return qwen3_5(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def spec(folder):
    return VisionSpec.load(folder)


@torch.no_grad()
def test_transformers_own_layers_leak_between_packed_documents(folder):
    """Positions that begin anew keep attention apart, but neither the state nor the convolution of the other layers."""
    model = load_model(folder)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 30, 31, 32, 33, 34, 35, 36, 37, 38]])
    starts = torch.cat((torch.arange(11), torch.arange(9)))
    together = model(input_ids=ids, position_ids=starts.expand(4, 1, -1)).logits[0, 11:]
    alone = model(input_ids=ids[:, 11:]).logits[0]
    assert (together - alone).abs().max() > 0.01
    with pytest.raises(ValueError, match="flash-linear-attention"):
        borders = torch.tensor([0, 11, 20], dtype=torch.int32)
        model(input_ids=ids, position_ids=starts.expand(4, 1, -1), cu_seq_lens_q=borders)


@torch.no_grad()
def test_a_document_does_not_see_its_neighbours(folder, spec):
    policy = load_policy(str(folder), spec)
    first, second, other = (random_trajectory(spec, s, turns=2, sides=(64,), turn_tokens=(4, 5)) for s in (1, 2, 3))
    a = policy(packed(policy, [first, second]), 1.0).logprobs
    b = policy(packed(policy, [other, second]), 1.0).logprobs
    half = len(a) // 2
    torch.testing.assert_close(a[half:], b[half:], rtol=0, atol=1e-6)
    assert (a[:half] - b[:half]).abs().max() > 1e-3


def run(policy, batches):
    """(outputs, gradients) of the batches' sum."""
    policy.zero_grad()
    outputs = [policy(batch, 1.0) for batch in batches]
    sum((o.logprobs.sum() + o.values.square().sum() + o.entropies.sum()) for o in outputs).backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters()}
    return [torch.cat(x).detach() for x in zip(*(o[:3] for o in outputs), strict=True)], gradients


@pytest.mark.slow
@pytest.mark.parametrize(("double", "bound"), [(True, 1e-10), (False, 2e-5)])
def test_packed_equals_unpacked_in_values_and_gradients(folder, spec, double, bound):
    """Documents that are longer and shorter than a chunk of the rule, with and without images."""

    def compare():
        policy = load_policy(str(folder), spec)
        torch.nn.init.normal_(policy.value_head.weight)
        trajectories = [random_trajectory(spec, seed, turns=3 + 3 * seed) for seed in range(3)]
        trajectories.append(random_trajectory(spec, 9, turns=2, with_images=False))
        lengths = [sum(packed(policy, [t]).lengths) for t in trajectories]
        assert min(lengths) < 64 < max(lengths)
        alone = [trajectories[i] for i in np.argsort(lengths, kind="stable")]
        return run(policy, [packed(policy, trajectories)]), run(policy, [packed(policy, [t]) for t in alone])

    if double:
        with in_float64():
            (got, gradients), (expected, expected_gradients) = compare()
    else:
        (got, gradients), (expected, expected_gradients) = compare()
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)
    for name, gradient in expected_gradients.items():
        scale = 1 + gradient.abs().max().item()
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=bound * scale, msg=name)


@pytest.mark.slow
def test_compiled_blocks_and_recomputed_activations_compute_the_same(folder, spec, ranks):
    trajectories = [random_trajectory(spec, seed, turns=2 + seed) for seed in range(2)]
    found = []
    for changes in ({}, {"compile": True, "activation_checkpointing": True}):
        policy = load_policy(str(folder), spec)
        parallelize(policy, ranks, learner_config(**changes), torch.float32)
        found.append(run(policy, [packed(policy, trajectories)]))
    (expected, expected_gradients), (got, gradients) = found
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-5, atol=5e-5)
    for name, gradient in expected_gradients.items():
        scale = 1 + gradient.abs().max().item()
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=5e-5 * scale, msg=name)


@pytest.mark.slow
def test_a_context_of_several_ranks_is_refused_in_one_line(folder, spec, ranks):
    several = replace(ranks, context=SimpleNamespace(size=2))
    with pytest.raises(
        ValueError, match=r"learner\.parallel\.context = 2: the layers of Qwen3\.5 hand a state"
    ) as caught:
        parallelize(load_policy(str(folder), spec), several, learner_config(), torch.float32)
    assert "\n" not in str(caught.value) and str(caught.value).endswith("set it to 1")


@pytest.mark.slow
def test_a_shared_prefix_hands_its_state_on_exactly(folder, spec):
    """In float64, with prefixes that end inside of chunks, of documents that themselves begin with a prefix."""
    found = []
    with in_float64():
        policy = load_policy(str(folder), spec)
        decoder = ImageDecoder(policy.spec)
        group = siblings(spec, 4, turns=2, prompt_tokens=80)
        first = group.trajectories[1]
        again = random_trajectory(spec, 77, turns=2)
        longer = first.token_ids.copy()
        longer[-2:] = again.token_ids[-2:]  # the same up to its last tokens
        trajectories = [
            *group.trajectories,
            type(first)(**{n: getattr(first, n) for n in first.__struct_fields__} | {"token_ids": longer}),
        ]
        for share in (True, False):
            episodes = [make_episode(t, 0.0, decoder, ObjectiveConfig()) for t in trajectories]
            batch = pack(episodes, decoder, CPU, share_prefixes=share)
            assert (batch.packing.prefixes is not None) == share
            found.append(run(policy, [batch]))
    (got, gradients), (expected, expected_gradients) = found
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    for name, gradient in expected_gradients.items():
        scale = 1 + gradient.abs().max().item()
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-10 * scale, msg=name)
