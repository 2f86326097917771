"""Episodes of several segments: each is read by itself, all share the episode's reward and its values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learner.batch.episodes import check_group, make_episode
from learner.batch.image_decoder import ImageDecoder
from learner.batch.packer import pack
from learner.model.policy import load_policy
from learner.objective.objectives import loss_of
from learner.training.token_inputs import make_tokens
from learner.training.trainer import Trainer
from shared.config.objective_section import ObjectiveConfig
from shared.types import Group
from tests.support.episodes import joined, learner_config, on_policy, packed, random_trajectory


@pytest.fixture
def policy(folder, spec):
    policy = load_policy(str(folder), spec)
    torch.manual_seed(0)
    torch.nn.init.normal_(policy.value_head.weight)
    return policy


def test_positions_and_lengths_begin_anew_in_each_segment(spec):
    parts = [random_trajectory(spec, seed, turns=1 + seed) for seed in range(3)]
    decoder = ImageDecoder(spec)
    whole = make_episode(joined(parts), 0.0, decoder, ObjectiveConfig())
    alone = [make_episode(part, 0.0, decoder, ObjectiveConfig()) for part in parts]
    assert whole.documents == tuple(part.num_tokens for part in alone)
    assert whole.num_tokens == sum(whole.documents)
    expanded, pieces = whole.expanded(), [part.expanded() for part in alone]
    assert (expanded.input_ids == np.concatenate([piece.input_ids for piece in pieces])).all()
    assert (expanded.position_ids == np.concatenate([piece.position_ids for piece in pieces], axis=1)).all()
    starts = np.cumsum([0, *whole.documents])
    targets = np.concatenate([piece.targets + start for piece, start in zip(pieces, starts, strict=False)])
    assert (expanded.targets == targets).all()


@pytest.mark.slow
@pytest.mark.parametrize("share_prefixes", [True, False])
def test_a_segment_does_not_see_the_others(policy, spec, share_prefixes):
    parts = [random_trajectory(spec, seed, turns=2) for seed in range(3)]
    parts.append(parts[0])  # its tokens are computed once, if prefixes are shared
    decoder = ImageDecoder(spec)
    with torch.no_grad():
        whole = policy(
            pack(
                [make_episode(joined(parts), 0.0, decoder, ObjectiveConfig())],
                decoder,
                torch.device("cpu"),
                share_prefixes=share_prefixes,
            ),
            1.0,
        )
        alone = [policy(packed(policy, [part]), 1.0) for part in parts]
    for name in ("logprobs", "entropies", "values"):
        expected = torch.cat([getattr(output, name) for output in alone])
        torch.testing.assert_close(getattr(whole, name), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_gradients_equal_those_of_the_segments_computed_one_by_one(policy, spec):
    parts = [random_trajectory(spec, seed, turns=2) for seed in range(3)]

    def gradients(batches):
        policy.zero_grad()
        for batch in batches:
            output = policy(batch, 1.0)
            (output.logprobs.sum() + output.values.square().sum() + output.entropies.sum()).backward()
        return {name: p.grad.clone() for name, p in policy.named_parameters()}

    whole = gradients([packed(policy, [joined(parts)])])
    for name, expected in gradients([packed(policy, [part]) for part in parts]).items():
        atol = 2e-5 * expected.abs().max().item() + 1e-5
        torch.testing.assert_close(whole[name], expected, rtol=0, atol=atol, msg=name)


@pytest.mark.slow
def test_targets_run_through_an_episode_s_segments_as_a_plain_loop_in_float64_gives_them(policy, spec):
    config = ObjectiveConfig(name="vtrace", gamma=0.9, lam=0.8)
    episode = on_policy(policy, joined([random_trajectory(spec, seed, turns=2) for seed in range(3)]), noise=0.3)
    decoder = ImageDecoder(spec)
    batch = pack([make_episode(episode, 0.0, decoder, config)], decoder, torch.device("cpu"))
    assert len(batch.lengths) == 3 and batch.sampled == (int(episode.loss_mask.sum()),)
    with torch.no_grad():
        output = policy(batch, 1.0)
        tokens = make_tokens(batch, output, None, None, torch.ones_like(batch.rewards))
        targets = loss_of(tokens, config).vs_N
    values, logprobs = output.values.double().numpy(), output.logprobs.double().numpy()
    rhos = np.minimum(np.exp(logprobs - batch.behaviour_logprobs.double().numpy()), 1.0)
    rewards, ends = batch.rewards.double().numpy(), batch.turn_end.numpy()
    expected, error, after = np.zeros(len(values)), 0.0, 0.0
    for at in reversed(range(len(values))):
        last = at == len(values) - 1
        discount = 0.0 if last else 0.9 if ends[at] else 1.0
        trace = rhos[at] * (0.8 if ends[at] else 1.0)
        error = rhos[at] * (rewards[at] + discount * after - values[at]) + discount * trace * error
        expected[at], after = values[at] + error, values[at]
    np.testing.assert_allclose(targets.double().numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["grpo", "gspo", "vtrace"])
def test_a_step_counts_episodes_and_not_segments(folder, spec, ranks, objective):
    parts = [[random_trajectory(spec, 10 * group + seed, turns=1) for seed in range(2)] for group in range(2)]
    groups = [Group("g0", "tester", tuple(joined(part) for part in parts))]
    config = learner_config(lr=1e-3, group_size=2, objective=objective)
    metrics = Trainer(load_policy(str(folder), spec), config, ranks).step(groups, version=0)
    assert np.isfinite(metrics["optim/grad_norm"]) and metrics["optim/grad_norm"] > 0
    assert metrics["optim/skipped_steps"] == 0


def test_what_a_step_could_not_train_on_is_refused_by_its_longest_segment(spec):
    parts = [random_trajectory(spec, seed, turns=2) for seed in range(3)]
    decoder = ImageDecoder(spec)
    longest = max(make_episode(part, 0.0, decoder, ObjectiveConfig()).num_tokens for part in parts)
    group = Group("g", "tester", (joined(parts),))
    check_group(group, decoder, max_context=longest)
    with pytest.raises(ValueError, match=f"an episode of {longest} tokens"):
        check_group(group, decoder, max_context=longest - 1)
