"""The packed policy against transformers' own forward, and one learner step against arithmetic by hand."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

import learner.batch.packing
import learner.model.forwards
from learner.model.policy import load_policy
from learner.model.sharding import shard
from learner.training.trainer import Trainer
from tests.support.episodes import learner_config, packed, plain_logprobs, random_groups, random_trajectory
from tests.support.tiny import load_model, moe_policy, tiny_model_dir


@pytest.fixture
def policy(folder, spec):
    return load_policy(str(folder), spec)


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "layers"), [(1.0, 2), (0.7, 2), (1.0, 3)])
def test_packed_logprobs_equal_a_plain_forward_with_vision_ids_banned(tmp_path, spec, temperature, layers):
    folder = tiny_model_dir(tmp_path, layers=layers)
    policy = load_policy(str(folder), spec)
    assert policy.trimmed == (layers == 3)
    trajectories = [random_trajectory(spec, seed, turns=1 + seed) for seed in range(3)]  # shortest first, as packed
    model = load_model(folder)
    expected = torch.cat([plain_logprobs(model, t, spec, temperature) for t in trajectories])
    got = policy(packed(policy, trajectories), temperature).logprobs
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_bfloat16_under_fsdp_stays_near_float32_and_keeps_float32_parameters(folder, spec, policy, ranks):
    trajectories = [random_trajectory(spec, seed) for seed in range(2)]
    half = load_policy(str(folder), spec)
    shard(half, ranks, torch.bfloat16)
    expected, got = (p(packed(p, trajectories), 1.0).logprobs for p in (policy, half))
    assert got.dtype == torch.float32 and (got - expected).abs().max() < 0.1
    config = learner_config(lr=1e-3)
    metrics = Trainer(half, config, ranks).step(random_groups(spec, 2), version=0)
    assert np.isfinite(metrics["optim/grad_norm"]) and metrics["optim/skipped_steps"] == 0
    assert {p.dtype for p in half.parameters()} == {torch.float32}


@pytest.mark.slow
def test_packed_equals_unpacked_with_several_images_per_document_in_values_and_gradients(policy, spec):
    torch.nn.init.normal_(policy.value_head.weight)
    trajectories = [random_trajectory(spec, seed, turns=3) for seed in range(3)]
    trajectories.append(random_trajectory(spec, 9, turns=2, with_images=False))

    def run(batches):
        policy.zero_grad()
        outputs = [policy(batch, 1.0) for batch in batches]
        sum((o.logprobs.sum() + o.values.square().sum() + o.entropies.sum()) for o in outputs).backward()
        gradients = {name: p.grad.clone() for name, p in policy.named_parameters()}
        return [torch.cat(x).detach() for x in zip(*(o[:3] for o in outputs), strict=True)], gradients

    lengths = [sum(packed(policy, [t]).lengths) for t in trajectories]
    alone = [trajectories[i] for i in np.argsort(lengths, kind="stable")]
    together, together_gradients = run([packed(policy, trajectories)])
    apart, apart_gradients = run([packed(policy, [t]) for t in alone])
    for got, expected in zip(together, apart, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for name, expected in apart_gradients.items():
        scale = expected.abs().max().item() + 1e-6
        torch.testing.assert_close(together_gradients[name], expected, rtol=0, atol=2e-5 * scale + 1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "gpu"), [(False, False), (True, False), (False, True)])
def test_leaving_out_what_nothing_reads_of_the_last_layer_changes_no_value_and_no_gradient(
    tmp_path, spec, monkeypatch, experts, gpu
):
    folder = tiny_model_dir(tmp_path, layers=3)
    torch.manual_seed(0)
    policy = moe_policy(folder, spec) if experts else load_policy(str(folder), spec)
    torch.nn.init.normal_(policy.value_head.weight)
    monkeypatch.setattr(learner.batch.packing, "ROWS_AT_ONCE", 4)
    monkeypatch.setattr(learner.model.forwards, "_needs_all_queries", lambda x: gpu)
    batch = packed(policy, [random_trajectory(spec, seed, turns=2) for seed in range(2)])
    assert max(batch.lengths) > 8 and batch.num_tokens > 2 * 4
    last, found = policy.vlm.model.language_model.layers[-1], []
    for trimmed in (True, False):
        if not trimmed:
            policy.trimmed = False
            for module in (last, last.self_attn):
                del module.forward
        policy.zero_grad()
        output = policy(batch, 1.0)
        (output.logprobs.sum() + output.values.square().sum() + output.entropies.sum()).backward()
        found.append((output, {name: p.grad.clone() for name, p in policy.named_parameters()}))
    (got, gradients), (expected, expected_gradients) = found
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-5 * (1 + gradient.abs().max()), msg=name)


def test_a_document_does_not_see_its_neighbours(policy, spec):
    first, second, other = (random_trajectory(spec, s, turns=2, sides=(64,), turn_tokens=(4, 5)) for s in (1, 2, 3))
    with torch.no_grad():
        a = policy(packed(policy, [first, second]), 1.0).logprobs
        b = policy(packed(policy, [other, second]), 1.0).logprobs
    half = len(a) // 2
    torch.testing.assert_close(a[half:], b[half:], rtol=0, atol=1e-6)
    assert (a[:half] - b[:half]).abs().max() > 1e-3


def test_every_parameter_takes_part_also_without_images(policy, spec):
    batch = packed(policy, [random_trajectory(spec, 0, with_images=False)])
    output = policy(batch, 1.0)
    (output.logprobs.sum() + output.values.sum()).backward()
    assert [name for name, p in policy.named_parameters() if p.grad is None] == []


def test_weights_carry_hugging_face_names_and_the_tied_head_is_left_out(policy, folder):
    names = dict(policy.named_weights())
    assert names.keys() == dict(load_model(folder).named_parameters()).keys()
    assert not any("lm_head" in name for name in names)


def test_a_path_without_config_and_a_model_of_another_kind_are_one_line(tmp_path, folder, spec):
    with pytest.raises(ValueError, match=r"no config\.json in .*"):
        load_policy(str(tmp_path), spec)
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="holds a model of the family 'llama', but those that run are"):
        load_policy(str(other), spec)
