"""Several updates of one step's episodes, what is known before the first, what is left out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from learner.batch.episodes import length_penalty, make_episodes
from learner.batch.image_decoder import ImageDecoder
from learner.batch.update_plan import minibatch_indices
from learner.checkpoints.restoring import load_checkpoint
from learner.checkpoints.saver import Saver
from learner.guards.entropy import EntropyGuard
from learner.model.policy import load_policy
from learner.model.sharding import freeze
from learner.recording.recorded_columns import watch
from learner.training.guard_state import GuardState
from learner.training.models import Beforehand
from learner.training.trainer import Trainer
from learner.training.update import accumulate_gradient
from shared.config.objective_section import ObjectiveConfig
from shared.config.recipe import Recipe
from shared.config.sections import EnvConfig, GuardConfig, ModelConfig, RecordConfig
from shared.types import Ending, Group
from tests.support.episodes import learner_config, on_policy, packed, random_groups


@pytest.mark.parametrize(("count", "passes", "minibatches"), [(7, 3, 3), (5, 2, 1), (2, 2, 4), (1, 2, 2)])
def test_every_pass_has_each_episode_once_in_minibatches_of_equal_size(count, passes, minibatches):
    updates = list(minibatch_indices(count, passes, minibatches, seed=3))
    of_a_pass = min(minibatches, count)
    assert len(updates) == passes * of_a_pass
    for start in range(0, len(updates), of_a_pass):
        parts = updates[start : start + of_a_pass]
        assert sorted(i for part in parts for i in part) == list(range(count))
        assert {len(part) for part in parts} <= {count // of_a_pass, -(-count // of_a_pass)}
        assert all(part == sorted(part) for part in parts)


def test_each_pass_and_each_step_is_cut_anew_and_always_in_the_same_way():
    first, other = list(minibatch_indices(20, 2, 2, seed=0)), list(minibatch_indices(20, 2, 2, seed=1))
    assert first[:2] != first[2:] and first != other and first == list(minibatch_indices(20, 2, 2, seed=0))
    assert list(minibatch_indices(3, 1, 1, seed=5)) == [[0, 1, 2]]
    assert list(minibatch_indices(0, 1, 1, seed=5)) == [
        []
    ]  # a step without episodes has an update that changes nothing


def trained(folder, spec, ranks, batches, **settings) -> tuple[torch.Tensor, dict[str, float]]:
    fixed = {"lr": 1e-3, "value_lr": 1e-2, "normalize_advantages": False, "warmup_steps": 0, "max_kl": 0.0}
    config = learner_config(**fixed | settings)
    trainer = Trainer(load_policy(str(folder), spec), config, ranks)
    for groups in batches:
        metrics = trainer.step(groups, version=0)
    return torch.nn.utils.parameters_to_vector(trainer.policy.parameters()).detach(), metrics


@pytest.mark.slow
def test_several_passes_are_several_steps_on_the_same_episodes(folder, spec, ranks):
    groups = random_groups(spec, 3, turns=2)
    passed, metrics = trained(folder, spec, ranks, [groups], passes=2)
    stepped, _ = trained(folder, spec, ranks, [groups, groups])
    assert torch.equal(passed, stepped)
    assert metrics["tokens/lag_0"] == 2 * metrics["batch/sampled_tokens"]
    assert metrics["batch/episodes"] == 3.0


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["vtrace", "grpo"])
def test_minibatches_are_steps_on_parts_of_the_episodes(folder, spec, ranks, objective):
    groups = random_groups(spec, 5, turns=2, group_size=1 if objective == "vtrace" else 2)
    episodes = [t for g in groups for t in g.trajectories]
    size = len(groups[0].trajectories)
    parts = list(minibatch_indices(len(episodes), 1, 2, seed=0))
    if objective == "vtrace":
        by_hand = [[groups[i] for i in part] for part in parts]
        at_once, _ = trained(folder, spec, ranks, [groups], objective=objective, minibatches=2)
        stepped, _ = trained(folder, spec, ranks, by_hand, objective=objective)
        assert torch.equal(at_once, stepped)
    else:  # a group may be cut; its advantages are those of the whole group
        policy = load_policy(str(folder), spec)
        trainer = Trainer(policy, learner_config(objective=objective, minibatches=2, group_size=size, max_kl=0), ranks)
        seen = []
        trainer.packer.pack = lambda chosen, pack=trainer.packer.pack: (
            seen.append([e.advantage for e in chosen]) or pack(chosen)
        )
        trainer.step(groups, version=0)
        whole = make_episodes(groups, ImageDecoder(spec), ObjectiveConfig(name=objective))
        assert seen == [[whole[i].advantage for i in part] for part in parts]


def test_the_reference_speaks_within_updates_as_it_would_beforehand(folder, spec, ranks):
    """Where each episode is trained on once; a frozen tower's images are then seen once for both."""
    groups, results = random_groups(spec, 4, turns=2), []
    for beforehand in (False, True):
        policy, reference = load_policy(str(folder), spec), load_policy(str(folder), spec)
        with torch.no_grad():
            policy.vlm.lm_head.weight.mul_(1.1)
        freeze(policy, ("vision", "projector"))
        calls = []
        policy.vlm.model.visual.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        config = learner_config(kl_coef=0.5, minibatches=2, lr=1e-3, guard=GuardConfig(max_kl=0.0))
        trainer = Trainer(policy, config, ranks, reference=reference)
        assert not trainer.models.beforehand.reference
        trainer.models.beforehand = Beforehand(policy=False, reference=beforehand)
        trainer.optimizer = torch.optim.SGD([{"params": [*policy.parameters()], "base_lr": 0.1}], lr=0.1)
        metrics = trainer.step(groups, version=0)
        assert bool(calls) == beforehand
        results.append((torch.nn.utils.parameters_to_vector(policy.parameters()).detach(), metrics))
    (ours, found), (expected, beforehand) = results
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    for name in ("reference/kl", "optim/grad_norm", "policy/entropy"):
        assert found[name] == pytest.approx(beforehand[name], rel=1e-6, abs=1e-6)
    assert found["reference/kl"] > 1e-6


@pytest.mark.slow
def test_a_bad_update_is_left_out_and_its_step_counted_once(folder, spec, ranks):
    groups = random_groups(spec, 2, turns=1)
    bad = groups[0].trajectories[0]
    turns = (replace(bad.turns[0], reward=float("nan")),)
    groups[0] = Group("bad", "tester", (replace(bad, turns=turns),))
    policy = load_policy(str(folder), spec)
    before = torch.nn.utils.parameters_to_vector(policy.parameters()).detach().clone()
    trainer = Trainer(policy, learner_config(lr=1e-3, passes=2, minibatches=2), ranks)
    metrics = trainer.step(groups, version=0)
    assert metrics["optim/skipped_steps"] == metrics["optim/bad_steps_in_a_row"] == 1.0
    after = torch.nn.utils.parameters_to_vector(policy.parameters()).detach()
    assert torch.isfinite(after).all() and not torch.equal(before, after)


def logprobs_of(policy, trajectories) -> list[np.ndarray]:
    """Of the sampled tokens, as `policy` is now."""
    with torch.no_grad():
        return [policy(packed(policy, [t]), 1.0).logprobs.numpy() for t in trajectories]


@pytest.fixture
def batches(monkeypatch) -> list:
    """The microbatches whose gradients are computed, as their losses have them, in a list that grows."""
    seen = []

    def noted(batch, *args, **kwargs):
        seen.append(batch)
        return accumulate_gradient(batch, *args, **kwargs)

    monkeypatch.setattr("learner.training.update.accumulate_gradient", noted)
    return seen


@pytest.mark.slow
def test_the_proximal_policy_is_the_one_with_which_the_step_began(folder, spec, ranks, batches):
    settings = {"objective": "grpo", "proximal": "learner", "passes": 2, "minibatches": 2, "microbatch_tokens": 150}
    config = learner_config(lr=1e-3, clip_low=1e-3, clip_high=1e-3, max_kl=0.0, **settings)
    trainer = Trainer(load_policy(str(folder), spec), config, ranks)
    groups = random_groups(spec, 3, turns=2, group_size=2)
    trajectories = [t for g in groups for t in g.trajectories]
    before = logprobs_of(trainer.policy, trajectories)
    metrics = trainer.step(groups, version=0)
    assert metrics["policy/clip_fraction"] > 0.1  # in later updates the policy has moved away from it
    assert sum(len(batch.indices) for batch in batches) == 2 * len(trajectories)
    for batch in batches:
        expected = np.concatenate([before[index] for index in batch.indices])
        np.testing.assert_allclose(batch.proximal_logprobs.numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_in_the_only_update_of_a_step_nothing_is_clipped_against_the_proximal_policy_and_no_forward_is_added(
    folder, spec, ranks
):
    for proximal, clips in (("behaviour", True), ("learner", False)):
        narrow = {"clip_low": 1e-6, "clip_high": 1e-6, "max_kl": 0.0}
        config = learner_config(objective="grpo", proximal=proximal, lr=1e-3, **narrow)
        trainer = Trainer(load_policy(str(folder), spec), config, ranks)
        forwards = []
        trainer.policy.register_forward_hook(lambda *_, forwards=forwards: forwards.append(1))
        metrics = trainer.step(random_groups(spec, 2, turns=1, group_size=2), version=0)
        assert (metrics["policy/clip_fraction"] > 0.1) == clips
        assert len(forwards) == metrics["batch/microbatches"]


@pytest.mark.slow
def test_the_kl_in_the_rewards_changes_group_relative_advantages_by_each_episodes_own(folder, spec, ranks, batches):
    settings = {"objective": "grpo", "kl_coef": 0.5, "kl_in_reward": True, "divide_by_std": False, "max_kl": 0}
    policy, reference = load_policy(str(folder), spec), load_policy(str(folder), spec)
    with torch.no_grad():
        for p in reference.vlm.parameters():
            p.mul_(1.02)
    trainer = Trainer(policy, learner_config(**settings), ranks, reference=reference)
    groups = random_groups(spec, 2, turns=1, group_size=3)
    expected = []
    for group in groups:
        own, other = (logprobs_of(p, group.trajectories) for p in (policy, reference))
        rewards = np.array(
            [t.reward - 0.5 * (a - b).sum() for t, a, b in zip(group.trajectories, own, other, strict=True)]
        )
        expected.extend(rewards - rewards.mean())
    trainer.step(groups, version=0)
    ends = np.cumsum([0, *batches[-1].sampled])[:-1]
    found = dict(zip(batches[-1].indices, batches[-1].advantages[ends].tolist(), strict=True))
    assert found == pytest.approx(dict(enumerate(expected)), rel=1e-3, abs=1e-4)


@pytest.mark.slow
def test_what_masks_leave_out_counts_neither_in_the_gradient_nor_in_what_it_is_divided_by(folder, spec, ranks):
    """Under SGD a step on three episodes of which one is vetoed is the step on the two others."""
    groups = random_groups(spec, 3, turns=1)
    far = groups[2].trajectories[0]
    logprobs = np.where(far.loss_mask, -1e-3, 0).astype(np.float32)  # as if the actor had been all but certain
    groups[2] = Group("far", "tester", (replace(far, behaviour_logprobs=logprobs),))
    moves = []
    for chosen, veto in ((groups, 5e-3), (groups[:2], None)):
        config = learner_config(mask_veto_ratio=veto, normalize_advantages=False, max_grad_norm=1e9)
        trainer = Trainer(load_policy(str(folder), spec), config, ranks)
        parameters = list(trainer.policy.parameters())
        trainer.optimizer = torch.optim.SGD([{"params": parameters, "base_lr": 0.1}], lr=0.1)
        before = torch.nn.utils.parameters_to_vector(parameters).detach().clone()
        metrics = trainer.step(chosen, version=0)
        moves.append(torch.nn.utils.parameters_to_vector(parameters).detach() - before)
        tokens = int(far.loss_mask.sum()) / metrics["batch/sampled_tokens"]
        assert metrics.get("policy/masked_veto") == (pytest.approx(tokens) if veto else None)
    torch.testing.assert_close(moves[0], moves[1], rtol=1e-3, atol=1e-7)


def test_the_penalty_of_length_grows_over_the_buffer_and_is_whole_where_a_limit_cut_the_episode_off(spec):
    """DAPO's equation 13, times the penalty: 0 up to L_max - L_cache, then linear, 1 from L_max on."""
    objective = ObjectiveConfig(overlong="penalise", overlong_penalty=0.5, overlong_tokens=10, overlong_buffer=4)
    base = random_groups(spec, 1, turns=1)[0].trajectories[0]
    for length, expected in ((3, 0.0), (6, 0.0), (7, 0.125), (9, 0.375), (10, 0.5), (12, 0.5)):
        mask = np.zeros(20, dtype=np.uint8)
        mask[5 : 5 + length] = 1
        played = replace(base, token_ids=np.arange(20, dtype=np.int32), loss_mask=mask)
        assert length_penalty(played, objective) == pytest.approx(expected)
        assert length_penalty(replace(played, ending=Ending.OUT_OF_TOKENS), objective) == 0.5
        assert length_penalty(replace(played, ending=Ending.OUT_OF_TOKENS), ObjectiveConfig()) == 0.0
    assert length_penalty(base, ObjectiveConfig(overlong="penalise")) == 0.0


@pytest.mark.slow
def test_updates_are_left_out_once_the_policy_has_moved_far_enough(folder, spec, ranks):
    played = [on_policy(load_policy(str(folder), spec), g.trajectories[0]) for g in random_groups(spec, 4, turns=1)]
    groups = [Group(f"g{i}", "tester", (t,)) for i, t in enumerate(played)]
    _, metrics = trained(folder, spec, ranks, [groups], passes=6, lr=3e-2, max_kl=0.05)
    assert 1 <= metrics["guard/updates_left_out"] <= 5 and metrics["guard/kl_step"] > 0.05
    _, free = trained(folder, spec, ranks, [groups], passes=6, lr=3e-2, max_kl=0.0)
    assert free["guard/updates_left_out"] == 0.0 and "guard/kl_step" not in free
    _, short = trained(folder, spec, ranks, [groups], passes=2, lr=1e-6, max_kl=0.05)
    assert short["guard/updates_left_out"] == 0.0 and 0 <= short["guard/kl_step"] < 1e-3


@pytest.mark.slow
def test_the_guards_state_and_the_moments_of_advantages_are_resumed(folder, spec, ranks, tmp_path):
    config = learner_config(in_background=False)
    recipe = Recipe(model=ModelConfig(path="m"), env=EnvConfig(module="envs.colour"), learner=config)
    trainers = [Trainer(load_policy(str(folder), spec), config, ranks) for _ in range(2)]
    trainers[0].step(random_groups(spec, 2), version=0)
    trainers[0].guard = GuardState(brake=0.5, ceiling=0.5, start_entropy=1.5, num_rewinds=1)
    path = Saver(tmp_path, trainers[0], ranks, recipe).save(1, {})
    load_checkpoint(path, trainers[1], ranks, recipe)
    assert trainers[1].guard == trainers[0].guard
    np.testing.assert_array_equal(trainers[1].scale.moments, trainers[0].scale.moments)
    old = {"num_steps": 3, "num_skipped": 0, "advantage_moment": 0.5}  # of a checkpoint from before there were guards
    trainers[1].load_state(old)
    assert trainers[1].scale.moments is None and trainers[1].guard == GuardState()


@pytest.mark.slow
def test_the_brake_is_on_the_policy_and_not_on_the_value_head(folder, spec, ranks):
    config = learner_config(lr=1e-3, value_lr=1e-2, normalize_advantages=False)
    trainer = Trainer(load_policy(str(folder), spec), config, ranks)
    trainer.guard.brake = 0.25
    metrics = trainer.step(random_groups(spec, 2), version=0)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [2.5e-4, 2.5e-4, 1e-2]
    assert metrics["optim/lr"] == 2.5e-4


def value_bias(trainer: Trainer) -> float:
    return trainer.policy.value_head.bias.item()


def returns_of_tokens(groups: list[Group]) -> Iterator[float]:
    for t in (t for group in groups for t in group.trajectories):
        for index, turn in enumerate(t.turns):
            yield from [sum(later.reward for later in t.turns[index:])] * (turn.end - turn.start)


@pytest.mark.parametrize("critic_width", [0, 8])
def test_a_new_critic_begins_at_the_mean_return_and_only_then(folder, spec, ranks, critic_width):
    groups = random_groups(spec, 2)
    shifted = [
        replace(
            g,
            trajectories=tuple(
                replace(t, turns=(*t.turns[:-1], replace(t.turns[-1], reward=t.turns[-1].reward + 100)))
                for t in g.trajectories
            ),
        )
        for g in groups
    ]
    policies = []
    for each in (groups, shifted):
        policy = load_policy(str(folder), spec, critic_width=critic_width)
        trainer = Trainer(policy, learner_config(lr=1e-3, value_lr=1e-9, critic_width=critic_width), ranks)
        trainer.start_critic(each)
        start = value_bias(trainer)
        trainer.step(each, version=0)
        assert start == pytest.approx(np.mean(list(returns_of_tokens(each))), rel=1e-6)
        trainer.start_critic(random_groups(spec, 3))
        assert value_bias(trainer) == pytest.approx(start, rel=1e-6)  # the critic is no longer new
        policies.append(torch.nn.utils.parameters_to_vector(policy.vlm.parameters()).detach())
    # AdamW's first step is the sign of each gradient, also where that is hardly more than the rounding of 100
    assert (policies[0] - policies[1]).abs().mean() < 0.01 * 1e-3


@pytest.mark.slow
def test_columns_that_are_recorded_are_those_of_the_first_pass(folder, spec, ranks):
    groups, seen = random_groups(spec, 2, turns=1), []
    for passes in (1, 3):
        config = learner_config(passes=passes, lr=1e-2, warmup_steps=0, max_kl=0.0)
        recorded = watch(groups, 1, RecordConfig(every=1, groups=2))
        Trainer(load_policy(str(folder), spec), config, ranks).step(groups, 0, recorded)
        seen.append([recorded.columns(index) for index in sorted(recorded.indices)])
    for once, first in zip(*seen, strict=True):
        np.testing.assert_array_equal(once, first)


# ------------------------------------------------------------------ episodes that no update computes


def equal_groups(spec, count: int, size: int = 4) -> list[Group]:
    """Groups whose episodes all earn the same."""
    return [
        replace(group, trajectories=tuple(replace(t, reward=0.5) for t in group.trajectories))
        for group in random_groups(spec, count, group_size=size, turns=1)
    ]


def sharpened(folder, spec, factor: float):
    policy = load_policy(str(folder), spec)
    with torch.no_grad():
        policy.vlm.lm_head.weight.mul_(factor)
    return policy


@pytest.mark.parametrize("objective", ["grpo", "gspo", "cispo"])
def test_a_policy_that_has_collapsed_is_seen_although_no_group_varies(folder, spec, ranks, objective):
    config = learner_config(objective=objective, group_size=4, lr=1e-3)
    for factor, collapsed in ((1.0, False), (300.0, True)):
        trainer = Trainer(sharpened(folder, spec, factor), config, ranks)
        before = torch.nn.utils.parameters_to_vector(trainer.policy.parameters()).detach().clone()
        metrics = trainer.step(equal_groups(spec, 3), version=0)
        assert (metrics["policy/entropy"] < 0.5) is collapsed and "behaviour/kl" in metrics
        assert metrics["optim/rate"] == 0.0 and not any(name.startswith(("tokens/", "loss/")) for name in metrics)
        assert torch.equal(torch.nn.utils.parameters_to_vector(trainer.policy.parameters()), before)
        guard = EntropyGuard(GuardConfig(entropy_min=0.5), trainer.guard)
        for _ in range(3):
            guard.step(metrics.get("policy/entropy"))
        assert guard.out is collapsed


def test_the_entropy_is_that_of_all_tokens_and_one_in_sixteen_that_no_update_computes_is_measured(folder, spec, ranks):
    varying, equal = random_groups(spec, 1, group_size=4, turns=1, seed=9), equal_groups(spec, 8)
    config, policy = learner_config(objective="grpo", group_size=4, lr=1e-3), load_policy(str(folder), spec)
    episodes = make_episodes(equal, ImageDecoder(spec), config.objective)
    chosen = [t for group in equal for t in group.trajectories][::16]
    measured = [float(e) for t in chosen for e in policy(packed(policy, [t]), 1.0).entropies]
    alone = Trainer(load_policy(str(folder), spec), config, ranks).step(varying, version=0)
    mixed = Trainer(load_policy(str(folder), spec), config, ranks).step([*varying, *equal], version=0)
    num_equal, num_varying = sum(e.num_sampled for e in episodes), alone["batch/sampled_tokens"]
    expected = (num_varying * alone["policy/entropy"] + num_equal * np.mean(measured)) / (num_varying + num_equal)
    assert mixed["policy/entropy"] == pytest.approx(expected, rel=1e-5)
    assert mixed["tokens/lag_0"] == alone["tokens/lag_0"] and mixed["behaviour/kl"] == alone["behaviour/kl"]
