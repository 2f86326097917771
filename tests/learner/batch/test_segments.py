"""Episodes of several segments: each is read by itself, all share the episode's reward and its values."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from learner.batch.episodes import check_group, make_episode, pieces_of
from learner.batch.image_decoder import ImageDecoder
from learner.batch.packer import pack
from learner.model.policy import load_policy
from learner.objective.objectives import loss_of
from learner.recording.recorded_columns import watch
from learner.training.token_inputs import make_tokens
from learner.training.trainer import Trainer
from shared.config.objective_section import ObjectiveConfig
from shared.config.sections import RecordConfig
from shared.types import Group, Image
from tests.support.episodes import joined, learner_config, on_policy, packed, random_trajectory
from tests.support.ranks.doubled import in_float64


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
    assert whole.documents == tuple(part.documents[0] for part in alone)
    assert whole.num_tokens == sum(part.num_tokens for part in alone)
    expanded, pieces = whole.expanded(), [part.expanded() for part in alone]
    assert (expanded.input_ids == np.concatenate([piece.input_ids for piece in pieces])).all()
    assert (expanded.position_ids == np.concatenate([piece.position_ids for piece in pieces], axis=1)).all()
    starts = np.cumsum([0, *(part.num_tokens for part in alone)])
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


# ---------------------------------------------------------------------- episodes that are longer than a microbatch


def test_an_episode_longer_than_a_microbatch_is_divided_between_its_segments(spec):
    parts = [random_trajectory(spec, seed, turns=1) for seed in range(5)]
    decoder = ImageDecoder(spec)
    whole = make_episode(joined(parts), 0.5, decoder, ObjectiveConfig(), group=2, index=7)
    alone = [make_episode(part, 0.0, decoder, ObjectiveConfig()) for part in parts]
    budget = max(a.num_tokens + b.num_tokens for a, b in pairwise(alone))
    pieces = pieces_of(whole, budget)
    assert 2 <= len(pieces) < 5 and all(piece.num_tokens <= budget for piece in pieces)
    assert pieces_of(whole, whole.num_tokens) == [whole]
    assert [len(piece.documents) for piece in pieces_of(whole, 1)] == [1] * 5  # a longer segment is a piece of its own
    assert [d for piece in pieces for d in piece.documents] == list(whole.documents)
    assert [i for piece in pieces for i in piece.images] == list(whole.images)
    for name in ("behaviour_logprobs", "versions", "rewards", "turn_end"):
        assert (np.concatenate([getattr(piece, name) for piece in pieces]) == getattr(whole, name)).all()
    assert [piece.first for piece in pieces] == [0, *accumulate(p.num_sampled for p in pieces[:-1])]
    assert {(piece.advantage, piece.group, piece.index) for piece in pieces} == {(0.5, 2, 7)}
    expanded = [piece.expanded() for piece in pieces]
    assert (np.concatenate([e.input_ids for e in expanded]) == whole.expanded().input_ids).all()
    assert (np.concatenate([e.position_ids for e in expanded], axis=1) == whole.expanded().position_ids).all()
    ids = np.concatenate([e.input_ids[e.targets] for e in expanded])
    assert (ids == whole.expanded().input_ids[whole.expanded().targets]).all()


def segmented_groups(policy, spec, *, spoilt=False):
    """Return groups whose episodes have one to five segments; the second episode of each is far from the policy.
    `spoilt`: the first one's last image cannot be read."""
    made = []
    for group, lengths in enumerate(((5, 3), (1, 4), (2, 1))):
        of_group = []
        for number, count in enumerate(lengths):
            seed = 100 * group + 10 * number
            parts = [random_trajectory(spec, seed + i, turns=1 + i % 2, version=i % 2) for i in range(count)]
            episode = on_policy(policy, joined(parts) if count > 1 else parts[0], noise=0.2 + 0.6 * number)
            of_group.append(replace(episode, reward=float(number + group)))
        made.append(Group(f"g{group}", "tester", tuple(of_group)))
    if spoilt:
        first, second = made[0].trajectories
        data = bytearray(first.images[-1].data)
        data[-30:-12] = bytes(18)  # behind the head, which tells the size
        first = replace(first, images=(*first.images[:-1], Image.of(bytes(data))))
        made[0] = Group("g0", "tester", (first, second))
    return made


def two_steps(folder, spec, ranks, settings, microbatch_tokens, *, spoilt=False):
    """Return the metrics of two steps, the columns recorded in the first, and the weights after them."""
    torch.manual_seed(0)
    policy = load_policy(str(folder), spec)
    torch.nn.init.normal_(policy.value_head.weight)
    fixed = {"lr": 1e-3, "group_size": 2, "warmup_steps": 0, "microbatch_tokens": microbatch_tokens}
    config = learner_config(**fixed | settings)
    reference = None
    if config.objective.has_reference:
        reference = load_policy(str(folder), spec)
        with torch.no_grad():
            for p in reference.vlm.parameters():
                p.mul_(1.1)
        reference.requires_grad_(False)
    trainer = Trainer(policy, config, ranks, reference=reference)
    groups = segmented_groups(policy, spec, spoilt=spoilt)
    recorded = watch(groups, 1, RecordConfig(every=1, groups=3))
    metrics = [trainer.step(groups, 1, recorded), trainer.step(groups, 2)]
    columns = {index: recorded.columns(index) for index in recorded.indices}
    return metrics, columns, {n: p.detach().clone() for n, p in policy.named_parameters()}


COUPLED = {
    "vtrace": {},
    "vtrace by turn": {
        "vtrace_level": "turn",
        "turn_ratio": "product",
        "rho_noise": 0.1,
        "aggregation": "sequence_mean",
    },
    "ppo, several updates": {"objective": "ppo", "passes": 2, "minibatches": 2, "proximal": "learner"},
    "vtrace, KL in the reward": {"kl_coef": 0.3, "kl_in_reward": True},
    "vtrace, masks of episodes": {"mask_sequence_ratio": (0.8, 1.2), "mask_veto_ratio": 0.05, "entropy_coef": 0.01},
    "grpo": {"objective": "grpo"},
    "grpo, turns compared": {"objective": "grpo", "turn_advantage": "returns", "gamma": 0.9},
    "grpo, turns compared, KL in the reward": {
        "objective": "grpo",
        "turn_advantage": "returns",
        "divide_by_std": False,
        "kl_coef": 0.3,
        "kl_in_reward": True,
    },
    "grpo, an entropy bonus": {"objective": "grpo", "entropy_coef": 0.01, "aggregation": "sequence_mean"},
    "gspo": {"objective": "gspo", "clip_low": 0.3, "clip_high": 0.3, "aggregation": "sequence_mean"},
    "cispo, masks of episodes": {"objective": "cispo", "mask_sequence_ratio": (0.8, 1.2)},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", COUPLED)
def test_a_step_on_divided_episodes_is_that_on_whole_ones(folder, spec, ranks, case):
    """In float64. The second step begins with other weights and running moments."""
    with in_float64():
        results = [two_steps(folder, spec, ranks, COUPLED[case], tokens) for tokens in (100_000, 60)]
    (whole, whole_columns, weights), (divided, columns, others) = results
    assert divided[0]["batch/microbatches"] > 3 * whole[0]["batch/microbatches"]
    for one, other in zip(whole, divided, strict=True):
        names = [n for n in one if not n.startswith(("time/", "speed/", "batch/")) and n != "optim/flops"]
        assert {n: other[n] for n in names} == pytest.approx({n: one[n] for n in names}, rel=1e-9, abs=1e-12)
    for index, expected in whole_columns.items():
        assert (columns[index] is None) == (expected is None)
        if expected is not None:
            np.testing.assert_allclose(columns[index], expected, rtol=1e-6, atol=1e-9)
    for name, expected in weights.items():
        torch.testing.assert_close(others[name], expected, rtol=0, atol=1e-10, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["vtrace", "gspo"])
def test_an_image_that_cannot_be_read_takes_out_all_pieces_of_its_episode(folder, spec, ranks, case):
    with in_float64():
        (whole, divided), (sound, _) = [
            [two_steps(folder, spec, ranks, COUPLED[case], tokens, spoilt=spoilt) for tokens in (100_000, 60)]
            for spoilt in (True, False)
        ]
    assert [one[0][0]["images/unreadable"] > 0 for one in (whole, divided, sound)] == [True, True, False]
    for name, expected in whole[2].items():
        torch.testing.assert_close(divided[2][name], expected, rtol=0, atol=1e-10, msg=name)
    assert any(not torch.equal(expected, sound[2][name]) for name, expected in whole[2].items())
