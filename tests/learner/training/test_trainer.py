"""The learner's step against arithmetic by hand, and what it does with episodes that teach nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from learner.batch.episodes import is_uninformative, make_episodes
from learner.batch.image_decoder import ImageDecoder
from learner.batch.packer import pack
from learner.coordinator import RemoteCoordinator
from learner.learner_loop import check_step
from learner.model.policy import load_policy
from learner.model.sharding import freeze
from learner.training.trainer import Trainer
from shared.config.objective_section import ObjectiveConfig
from shared.config.sections import GuardConfig
from shared.types import Ending, Group
from tests.support.episodes import learner_config, on_policy, random_groups

CPU = torch.device("cpu")


@pytest.fixture
def policy(folder, spec):
    return load_policy(str(folder), spec)


def packed(policy, trajectories):
    decoder = ImageDecoder(policy.spec)
    return pack(make_episodes([Group("g", "a", tuple(trajectories))], decoder, ObjectiveConfig()), decoder, CPU)


def weights_of(policy):
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


@pytest.mark.slow
def test_one_sgd_step_gives_the_weights_computed_by_hand(policy, spec, ranks):
    config = learner_config(
        value_lr=0.5, lr=0.5, weight_decay=0, max_grad_norm=1e9, normalize_advantages=False, gamma=0.9, lam=0.8,
        value_coef=0.25, entropy_coef=0.01, microbatch_tokens=100, vtrace_clip=False,
    )  # fmt: skip
    trainer = Trainer(policy, config, ranks)
    trainer.optimizer = torch.optim.SGD([{"params": list(policy.parameters()), "base_lr": 0.5}], lr=0.5)
    groups = random_groups(spec, 3, turns=2)
    groups = [Group(g.ticket_id, g.actor, (on_policy(policy, g.trajectories[0], noise=0.3),)) for g in groups]
    before = weights_of(policy)
    expected = _gradient_by_hand(policy, [g.trajectories[0] for g in groups], gamma=0.9, lam=0.8, value_coef=0.25)
    trainer.step(groups, version=0)
    for name, p in policy.named_parameters():
        scale = expected[name].abs().max().item() + 1e-8
        moved = (before[name] - p.detach()) / 0.5
        torch.testing.assert_close(moved, expected[name], rtol=1e-3, atol=2e-4 * scale + 3e-7)


def _gradient_by_hand(policy, trajectories, *, gamma, lam, value_coef):
    """The loss written out token by token in plain Python, differentiated by autograd."""
    num_tokens = sum(int(t.loss_mask.sum()) for t in trajectories)
    total = torch.zeros(())
    for t in trajectories:
        output = policy(packed(policy, [t]), 1.0)
        places = np.flatnonzero(t.loss_mask)
        ends = {turn.end - 1: turn.reward for turn in t.turns}
        rhos = (output.logprobs.detach().numpy() - t.behaviour_logprobs[places]).clip(-50, 50)
        rhos, values = np.minimum(1.0, np.exp(rhos)), output.values.detach().numpy()
        error_next, value_next = 0.0, 0.0
        for k in reversed(range(len(places))):
            last, end = k == len(places) - 1, int(places[k]) in ends
            discount, lambda_ = (0.0 if last else gamma, lam) if end else (1.0, 1.0)
            reward = ends.get(int(places[k]), 0.0)
            advantage = reward + discount * (value_next + lambda_ * error_next) - values[k]
            delta = rhos[k] * (reward + discount * value_next - values[k])
            error = delta + discount * lambda_ * rhos[k] * error_next
            total = total - rhos[k] * advantage * output.logprobs[k] - 0.01 * output.entropies[k]
            total = total + value_coef * 0.5 * (output.values[k] - (values[k] + error)) ** 2
            error_next, value_next = error, values[k]
    policy.zero_grad()
    (total / num_tokens).backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters()}
    policy.zero_grad()
    return gradients


@pytest.mark.slow
def test_microbatches_change_nothing_but_rounding(folder, spec, ranks):
    groups = random_groups(spec, 4, turns=2, group_size=2)
    after = []
    for budget in (10_000, 60):
        policy = load_policy(str(folder), spec)
        config = learner_config(lr=1e-3, microbatch_tokens=budget)
        Trainer(policy, config, ranks).step(groups, version=0)
        after.append(policy.state_dict())
    for name, value in after[0].items():
        torch.testing.assert_close(after[1][name], value, rtol=0, atol=2e-4)


def test_equal_rewards_change_nothing_under_grpo_and_cost_no_microbatch_but_one_without_gradient(policy, spec, ranks):
    trainer = Trainer(policy, learner_config(objective="grpo", lr=1.0, weight_decay=0.0), ranks)
    same = [replace(t, reward=0.9) for t in random_groups(spec, 1, group_size=4)[0].trajectories]
    before, forwards = weights_of(policy), []
    policy.register_forward_hook(lambda _, inputs, output: forwards.append((inputs[0], output)))
    metrics = trainer.step([Group("g", "a", tuple(same))], version=0)
    assert metrics["optim/grad_norm"] == 0.0 and metrics["batch/microbatches"] == 0.0
    ((batch, output),) = forwards  # one of the four episodes, for the metrics
    assert batch.indices == (0,) and not output.logprobs.requires_grad
    assert all(torch.equal(before[name], p) for name, p in policy.named_parameters())


@pytest.mark.slow
def test_grpo_raises_the_logprob_of_what_was_rewarded(policy, spec, ranks):
    trainer = Trainer(policy, learner_config(objective="grpo", lr=3e-3, weight_decay=0.0), ranks)
    group = random_groups(spec, 1, group_size=4, turns=1)[0]
    played = [replace(on_policy(policy, t), reward=0.0) for t in group.trajectories]
    played[0] = replace(played[0], reward=1.0)
    for _ in range(3):
        trainer.step([Group("g", "a", tuple(played))], version=0)
    after = on_policy(policy, played[0])
    assert after.behaviour_logprobs.sum() > played[0].behaviour_logprobs.sum() + 0.5


@pytest.mark.slow
def test_a_non_finite_loss_skips_the_step_and_is_counted(policy, spec, ranks):
    trainer = Trainer(policy, learner_config(lr=1.0), ranks)
    group = random_groups(spec, 1)[0]
    first = group.trajectories[0]
    bad = replace(first, turns=(replace(first.turns[0], reward=float("nan")),))
    before = weights_of(policy)
    metrics = trainer.step([Group("g", "a", (bad,))], version=0)
    assert metrics["optim/skipped_steps"] == metrics["optim/bad_steps_in_a_row"] == 1.0
    assert all(torch.equal(before[name], p) for name, p in policy.named_parameters())
    metrics = trainer.step([group], version=0)
    assert metrics["optim/skipped_steps"] == 1.0 and np.isfinite(metrics["optim/grad_norm"])
    assert metrics["optim/bad_steps_in_a_row"] == 0.0


def test_the_run_stops_after_too_many_bad_steps_in_a_row(policy, ranks):
    trainer = Trainer(policy, learner_config(), ranks)
    trainer.guard.bad_steps = 4
    check_step(trainer, RemoteCoordinator(ranks), [])
    trainer.guard.bad_steps = 5
    with pytest.raises(ValueError, match="5 steps in a row"):
        check_step(trainer, RemoteCoordinator(ranks), [])


def test_a_step_without_any_trainable_episode_is_skipped(policy, ranks):
    metrics = Trainer(policy, learner_config(), ranks).step([], version=0)
    assert metrics["optim/skipped_steps"] == 1.0 and metrics["batch/episodes"] == 0.0


@pytest.mark.slow
def test_metrics_are_split_by_version_lag(policy, spec, ranks):
    groups = [random_groups(spec, 1, seed=s, version=v)[0] for s, v in ((0, 5), (1, 4), (2, 4))]
    groups = [Group(g.ticket_id, g.actor, (on_policy(policy, g.trajectories[0]),)) for g in groups]
    metrics = Trainer(policy, learner_config(), ranks).step(groups, version=5)
    tokens = metrics["tokens/lag_0"] + metrics["tokens/lag_1"]
    assert tokens == metrics["batch/sampled_tokens"] and "tokens/lag_2" not in metrics
    names = [f"behaviour/{name}" for name in ("kl", "ratio_mean", "ess")]
    names += ["policy/clip_fraction", "value/explained_variance"]
    assert all(f"{name}/lag_{lag}" in metrics for name in names for lag in (0, 1))
    assert metrics["behaviour/logprob_gap"] < 1e-4
    assert metrics["behaviour/ess"] == pytest.approx(1.0, abs=1e-4)


def test_the_time_of_a_step_is_split_and_its_operations_are_counted(policy, spec, ranks):
    metrics = Trainer(policy, learner_config(), ranks).step(random_groups(spec, 2), version=0)
    parts = [metrics[f"time/{name}_s"] for name in ("prepare", "forward", "backward", "optimizer")]
    assert min(parts) > 0
    flops = metrics["speed/tflops_per_rank"] * 1e12 * sum(parts)
    assert flops > 6 * 1e5 * metrics["batch/tokens"]  # the model has more than 100,000 parameters in its layers
    assert "speed/mfu" not in metrics  # a CPU has no known peak


def test_temperature_zero_cannot_be_trained_on(policy, ranks):
    with pytest.raises(ValueError, match=r"sampling\.temperature = 0"):
        Trainer(policy, learner_config(), ranks, temperature=0.0)


def test_episodes_cut_off_by_a_limit_are_masked_or_penalised_as_the_recipe_says(spec):
    first, second = random_groups(spec, 1, group_size=2)[0].trajectories
    cut = replace(second, ending=Ending.OUT_OF_TOKENS, reward=1.0)
    group = Group("g", "a", (replace(first, reward=1.0), cut))

    def made(**settings):
        return make_episodes([group], ImageDecoder(spec), ObjectiveConfig(name="grpo", **settings))

    assert [e.advantage for e in made()] == [0.0, 0.0]
    assert len(made(overlong="mask")) == 1
    plain, penalised = made(), made(overlong="penalise", overlong_penalty=0.5)
    assert is_uninformative(group, ObjectiveConfig())
    assert not is_uninformative(group, ObjectiveConfig(overlong="penalise", overlong_penalty=0.5))
    assert [e.advantage for e in penalised] == [1.0, -1.0]
    assert penalised[1].rewards[-1] == pytest.approx(plain[1].rewards[-1] - 0.5)
    assert np.array_equal(penalised[0].rewards, plain[0].rewards)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_to_the_reference_holds_the_policy_back(folder, spec, ranks, estimator):
    group = random_groups(spec, 1, group_size=4, turns=1)[0]
    moved = {}
    for coef in (0.0, 30.0):
        policy, reference = load_policy(str(folder), spec), load_policy(str(folder), spec) if coef else None
        played = [on_policy(policy, t) for t in group.trajectories]
        config = learner_config(objective="grpo", lr=3e-3, kl_coef=coef, kl_estimator=estimator, pg_rho_bar=None)
        trainer = Trainer(policy, config, ranks, reference=reference)
        metrics = [trainer.step([Group("g", "a", tuple(played))], version=0) for _ in range(4)]
        assert metrics[0].get("reference/kl") == (pytest.approx(0.0, abs=1e-5) if coef else None)
        moved[coef] = metrics[-1]["behaviour/kl"]
    assert moved[30.0] < 0.5 * moved[0.0]


def test_a_tower_that_is_not_trained_sees_once_for_policy_and_reference(folder, spec, ranks):
    groups, kl = random_groups(spec, 2, turns=1), {}
    for parts in ((), ("vision", "projector")):
        policy, reference = load_policy(str(folder), spec), load_policy(str(folder), spec)
        with torch.no_grad():
            policy.vlm.lm_head.weight.mul_(1.1)
        freeze(policy, parts)
        calls = []
        policy.vlm.model.visual.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        config = learner_config(kl_coef=0.1, guard=GuardConfig(max_kl=0.0))
        trainer = Trainer(policy, config, ranks, reference=reference)
        kl[parts] = trainer.step(groups, version=0)["reference/kl"]
        assert bool(calls) == (not parts)
    assert kl[()] == pytest.approx(kl["vision", "projector"], rel=1e-6)
    assert kl[()] > 1e-6


def test_a_reference_is_asked_for_only_where_its_weight_is_not_zero(policy, ranks):
    for name in ("kl_coef", "hold_coef"):
        with pytest.raises(ValueError, match=name):
            Trainer(policy, learner_config(**{name: 0.1}), ranks)
    with pytest.raises(ValueError, match="kl_coef"):
        Trainer(policy, learner_config(), ranks, reference=policy)


@pytest.mark.slow
def test_sequence_mean_weighs_a_short_episode_as_much_as_a_long_one(folder, spec, ranks):
    """Under SGD, a step on two episodes is the mean of the steps on each alone."""
    groups = [random_groups(spec, 1, seed=s, turns=t)[0] for s, t in ((0, 1), (1, 3))]
    config = learner_config(aggregation="sequence_mean", normalize_advantages=False, max_grad_norm=1e9)
    moves = []
    for chosen in (groups, groups[:1], groups[1:]):
        trainer = Trainer(load_policy(str(folder), spec), config, ranks)
        parameters = list(trainer.policy.parameters())
        trainer.optimizer = torch.optim.SGD([{"params": parameters, "base_lr": 0.1}], lr=0.1)
        before = torch.nn.utils.parameters_to_vector(parameters).detach().clone()
        trainer.step(chosen, version=0)
        moves.append(torch.nn.utils.parameters_to_vector(parameters).detach() - before)
    torch.testing.assert_close(moves[0], (moves[1] + moves[2]) / 2, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_constant_divides_the_sum_over_an_episodes_tokens_however_many_they_are(folder, spec, ranks):
    """Under SGD, steps on one episode whose tokens are few and many move the policy by their sums, not their means."""
    groups = [random_groups(spec, 1, seed=s, turns=t)[0] for s, t in ((0, 1), (1, 3))]
    moves = {}
    for aggregation in ("constant", "token_mean"):
        settings = {"normalize_advantages": False, "max_grad_norm": 1e9, "aggregation_divisor": 40}
        config = learner_config(aggregation=aggregation, **settings)
        for number, group in enumerate(groups):
            trainer = Trainer(load_policy(str(folder), spec), config, ranks)
            parameters = list(trainer.policy.parameters())
            trainer.optimizer = torch.optim.SGD([{"params": parameters, "base_lr": 0.1}], lr=0.1)
            before = torch.nn.utils.parameters_to_vector(parameters).detach().clone()
            trainer.step([group], version=0)
            moves[aggregation, number] = torch.nn.utils.parameters_to_vector(parameters).detach() - before
    for number, group in enumerate(groups):
        share = int(group.trajectories[0].loss_mask.sum()) / 40
        torch.testing.assert_close(moves["constant", number], share * moves["token_mean", number], rtol=1e-3, atol=1e-6)
