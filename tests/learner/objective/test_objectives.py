"""Objectives against numbers worked out by hand, and against plain references on random data."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.objective.advantages import Scaling, group_advantages
from learner.objective.importance_ratios import corrected
from learner.objective.loss_records import Tokens
from learner.objective.loss_terms import kl_term
from learner.objective.objectives import loss_of
from shared.config.objective_section import ObjectiveConfig
from shared.config.objective_specs import OBJECTIVES
from tests.support.objective_episodes import packed_tokens, random_episodes
from tests.support.objective_references import REFERENCES, extras


@pytest.mark.parametrize("reward", [0.9, 6.0133, 0.1 + 0.2, -1e30, 0.0])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_equal_rewards_give_exactly_zero_advantage(reward, leave_one_out):
    assert group_advantages([reward] * 8, leave_one_out=leave_one_out).tolist() == [0.0] * 8


def test_group_advantages_are_centred_and_scaled_in_float64():
    advantages = group_advantages([1.0, 0.0, 0.0, 1.0])
    assert advantages.dtype == np.float64
    assert advantages.tolist() == [1.0, -1.0, -1.0, 1.0]
    assert group_advantages([1.0, 0.0], divide_by_std=False).tolist() == [0.5, -0.5]
    got = group_advantages([3.0, 0.0, 6.0], divide_by_std=False, leave_one_out=True)
    assert got.tolist() == [0.0, -4.5, 4.5]  # each less the mean of the others


def test_nearly_equal_rewards_do_not_explode():
    assert np.abs(group_advantages([1.0, 1.0 + 1e-12])).max() < 1e-5


def tokens_of(log_ratios, advantages=None, *, values=0.0, rewards=None, turn_end=None, entropies=0.5, **more) -> Tokens:
    """One episode whose log pi are -1, -2, -3, ..., float64."""
    count = len(log_ratios)
    column = lambda x: torch.as_tensor(x, dtype=torch.float64).expand(count).clone()  # noqa: E731
    logprobs = -torch.arange(1.0, count + 1, dtype=torch.float64)
    end = torch.zeros(count, dtype=torch.bool)
    end[-1] = True
    return Tokens(
        logprobs=logprobs.clone().requires_grad_(),
        entropies=column(entropies).requires_grad_(),
        values=column(values).requires_grad_(),
        behaviour_logprobs=logprobs - column(log_ratios),
        rewards=column(0.0 if rewards is None else rewards),
        turn_end=end if turn_end is None else torch.tensor(turn_end),
        episode_end=end,
        advantages=column(0.0 if advantages is None else advantages),
        weights=column(1.0),
        **more,
    )


def gradients(objective: str, tokens: Tokens, scale: float = 1.0, **settings) -> list[list[float]]:
    """By log pi, entropy and value."""
    loss = OBJECTIVES[objective].load_loss()(tokens, ObjectiveConfig(name=objective, **settings), Scaling(scale))
    inputs = (tokens.logprobs, tokens.entropies, tokens.values)
    found = torch.autograd.grad(loss.total, inputs, allow_unused=True)
    return [[0.0] * len(tokens.values) if g is None else g.tolist() for g in found]


def test_vtrace_at_the_level_of_tokens_by_hand():
    tokens = tokens_of([math.log(2), math.log(0.25)], values=[1.0, 3.0], rewards=[0.0, 5.0])
    own = {"value_coef": 0.5, "entropy_coef": 0.1}
    by_logprob, by_entropy, by_value = gradients("vtrace", tokens, 10.0, vtrace_clip=False, **own)
    # vs_1 = 3 + 0.25 (5 - 3) = 3.5;  vs_0 = 1 + 1 (3 - 1) + 1 (3.5 - 3) = 3.5;  A = (3.5 - 1, 5 - 3)
    assert by_logprob == pytest.approx([-1.0 * 10 * 2.5, -0.25 * 10 * 2.0])
    assert by_value == pytest.approx([0.5 * (1 - 3.5), 0.5 * (3 - 3.5)])
    assert by_entropy == pytest.approx([-0.1, -0.1])
    clipped, *others = gradients("vtrace", tokens, 10.0, **own)  # the first token is twice as likely already
    assert clipped == [0.0, by_logprob[1]] and others == [by_entropy, by_value]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_what_is_held_has_no_entropy_bonus(objective):
    tokens = tokens_of([0.0, 0.0, 0.0], advantages=[1.0, 1.0, 1.0], hold=torch.tensor([0.3, 0.0, 1e-4]).double())
    _, by_entropy, _ = gradients(objective, tokens, entropy_coef=0.1, hold_coef=2.0)
    assert by_entropy == pytest.approx([0.0, -0.1, 0.0])


@pytest.mark.parametrize(("ratio", "rho"), [("product", 0.5), ("geometric", 0.5**0.5)])
def test_vtrace_at_the_level_of_turns_by_hand(ratio, rho):
    # A turn of two tokens with ratios 2 and 1/4, then one of a single token with ratio 1.
    tokens = tokens_of(
        [math.log(2), math.log(0.25), 0.0],
        values=[1.0, 99.0, 3.0],
        rewards=[0.0, 2.0, 5.0],
        turn_end=[False, True, True],
    )
    settings = {"vtrace_level": "turn", "turn_ratio": ratio, "gamma": 0.5, "value_coef": 1.0}
    by_logprob, _, by_value = gradients("vtrace", tokens, **settings)
    # vs_1 = 3 + (5 - 3) = 5;  vs_0 = 1 + rho (2 + 0.5 * 3 - 1) + 0.5 rho (5 - 3) = 1 + 3.5 rho;  A = (2 + 2.5 - 1, 2)
    assert by_logprob == pytest.approx([-rho * 3.5, -rho * 3.5, -2.0])
    assert by_value == pytest.approx([2 * -3.5 * rho, 0.0, -2.0])  # a turn's value weighs as its tokens do


def test_grpo_clips_only_where_the_advantage_pushes_further_out():
    ratios, advantages = [1.5, 1.5, 0.5, 0.5, 1.1, 4.0], [1.0, -1.0, 1.0, -1.0, 1.0, -1.0]
    tokens = tokens_of(np.log(ratios), advantages)
    by_logprob, _, _ = gradients("grpo", tokens, pg_rho_bar=None)
    assert by_logprob == pytest.approx([0.0, 1.5, -0.5, 0.0, -1.1, 4.0])
    by_logprob, _, _ = gradients("grpo", tokens, pg_rho_bar=None, dual_clip=3.0)
    assert by_logprob == pytest.approx([0.0, 1.5, -0.5, 0.0, -1.1, 0.0])
    by_logprob, _, _ = gradients("grpo", tokens, pg_rho_bar=2.0)
    assert by_logprob == pytest.approx([0.0, 1.5, -0.5, 0.0, -1.1, 2.0])


def test_cispo_holds_large_ratios_and_lets_small_ones_fade():
    """A floor would push away a token that the policy has left with the floor's weight, for ever."""
    tokens = tokens_of([*np.log([1.0, 4.0, 4.0, 0.5, 0.01]), -200.0], [1.0, 1.0, -1.0, 1.0, -1.0, -1.0])
    by_logprob, _, _ = gradients("cispo", tokens)
    assert by_logprob == pytest.approx([-1.0, -1.28, 1.28, -0.5, 0.01, 0.0])


def test_sapo_weighs_a_token_less_the_further_its_ratio_is_from_one():
    tokens = tokens_of(np.log([1.0, 1.5, 4.0, 0.25, 1.0, 4.0]), [1.0, 1.0, 1.0, 1.0, -1.0, -1.0])
    by_logprob, _, _ = gradients("sapo", tokens, sapo_tau_positive=1.0, sapo_tau_negative=2.0)
    gates = [1 / math.cosh(tau * (ratio - 1) / 2) ** 2 for tau, ratio in ((1, 1.5), (1, 4.0), (1, 0.25), (2, 4.0))]
    expected = [-1.0, -1.5 * gates[0], -4.0 * gates[1], -0.25 * gates[2], 1.0, 4.0 * gates[3]]
    assert by_logprob == pytest.approx(expected)


def test_dppo_drops_by_the_change_of_probability_and_not_by_the_ratio():
    # log pi are -1, -2, ... : a rare token may be ten times as likely as before, a frequent one not twice
    ratios, advantages = [2.0, 0.5, 2.0, 2.0, 10.0, 10.0], [1.0, 1.0, -1.0, 1.0, 1.0, -1.0]
    by_logprob, _, _ = gradients("dppo", tokens_of(np.log(ratios), advantages), pg_rho_bar=None, divergence_bound=0.1)
    assert by_logprob == pytest.approx([0.0, -0.5, 2.0, -2.0, -10.0, 10.0])
    fallen, _, _ = gradients("dppo", tokens_of(np.log([0.5, 0.5]), [-1.0, -1.0]), pg_rho_bar=None, divergence_bound=0.3)
    assert fallen == pytest.approx([0.0, 0.5])


def test_the_three_estimates_of_kl_by_hand():
    logprob, reference = torch.tensor([-1.0], requires_grad=True), torch.tensor([-1.0 - math.log(2)])
    log2 = math.log(2)
    for estimator, value, slope in (("k1", log2, log2), ("k2", log2**2 / 2, log2), ("k3", 0.5 - 1 + log2, 0.5)):
        term = kl_term(logprob, reference, estimator)
        assert term.item() == pytest.approx(value, abs=1e-6)
        assert float(torch.autograd.grad(term.sum(), logprob)[0]) == pytest.approx(slope, abs=1e-6)


# ------------------------------------------------------------------ random data against plain references

SETTINGS = [
    ("vtrace", {"vtrace_clip": False, "gamma": 0.9, "lam": 0.8, "rho_bar": 1.1, "c_bar": 0.9, "pg_rho_bar": 1.2}),
    ("vtrace", {"gamma": 0.9, "value_clip": 0.4, "aggregation": "sequence_mean"}),
    (
        "vtrace",
        {
            "vtrace_level": "turn",
            "turn_ratio": "product",
            "gamma": 0.9,
            "lam": 0.7,
            "rho_bar": None,
            "vtrace_clip": False,
        },
    ),
    ("vtrace", {"vtrace_level": "turn", "gamma": 0.9, "aggregation": "sequence_mean"}),
    ("grpo", {}),
    ("grpo", {"pg_rho_bar": None, "dual_clip": 1.3, "aggregation": "sequence_mean"}),
    ("grpo", {"pg_rho_bar": 1.5, "clip_low": 0.3, "clip_high": 0.3}),
    ("dr_grpo", {"aggregation_divisor": 7, "mask_token_ratio": (0.7, 1.5)}),
    ("dr_grpo", {"proximal": "learner"}),
    ("vtrace", {"gamma": 0.9, "aggregation": "constant", "aggregation_divisor": 5}),
    ("reinforce++", {"dual_clip": 1.3}),
    ("gspo", {"pg_rho_bar": None, "aggregation": "sequence_mean"}),
    ("gspo", {"pg_rho_bar": None, "clip_low": 0.05, "clip_high": 0.05, "dual_clip": 1.2}),
    ("cispo", {}),
    ("vtrace", {"gamma": 0.9, "lam": 0.8, "rho_noise": 0.2}),
    ("vtrace", {"vtrace_level": "turn", "turn_ratio": "product", "rho_noise": 0.3, "gamma": 0.9}),
    ("vtrace", {"gamma": 0.9, "kl_in_reward": True, "mask_token_ratio": (0.8, 1.3), "aggregation": "sequence_mean"}),
    ("ppo", {"gamma": 0.9, "lam": 0.8, "pg_rho_bar": None}),
    ("ppo", {"gamma": 0.9, "lam": 0.8, "pg_rho_bar": 1.1, "dual_clip": 1.2, "kl_in_reward": True}),
    ("ppo", {"vtrace_level": "turn", "gamma": 0.9, "lam": 0.7, "pg_rho_bar": None, "proximal": "learner"}),
    ("ppo", {"vtrace_level": "turn", "turn_ratio": "product", "gamma": 0.9, "proximal": "learner"}),
    ("ppo", {"gamma": 0.9, "lam": 0.8, "proximal": "learner", "mask_veto_ratio": 0.5}),
    ("grpo", {"proximal": "learner", "pg_rho_bar": 1.2, "dual_clip": 1.3}),
    ("grpo", {"mask_token_ratio": (0.7, 1.5), "mask_sequence_ratio": (0.8, 1.3), "aggregation": "sequence_mean"}),
    ("gspo", {"proximal": "learner", "pg_rho_bar": None, "clip_low": 0.02, "clip_high": 0.02}),
    ("gspo", {"proximal": "learner", "mask_veto_ratio": 0.6, "mask_sequence_ratio": (0.8, 1.3)}),
    ("cispo", {"mask_token_ratio": (0.7, 1.5)}),
    ("cispo", {"clip_high": 0.5, "aggregation": "sequence_mean"}),
    ("sapo", {"aggregation": "sequence_mean"}),
    ("sapo", {"sapo_tau_positive": 3.0, "sapo_tau_negative": 7.0, "proximal": "learner", "pg_rho_bar": 1.2}),
    ("sapo", {"mask_token_ratio": (0.7, 1.5), "proximal": "learner", "pg_rho_bar": None}),
    ("dppo", {"pg_rho_bar": None, "divergence_bound": 0.1}),
    ("dppo", {"proximal": "learner", "pg_rho_bar": 1.2, "aggregation": "sequence_mean"}),
    ("dppo", {"mask_veto_ratio": 0.6}),
    ("sft", {}),
    ("sft", {"aggregation": "sequence_mean"}),
]


def divisor_of(weights_N: torch.Tensor, episodes: list[dict[str, torch.Tensor]], config: ObjectiveConfig) -> float:
    """Return what the sum over tokens of these weights is divided by."""
    return len(episodes) if config.aggregation == "constant" else float(weights_N.sum())


@pytest.mark.parametrize(("objective", "settings"), SETTINGS)
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_an_objective_has_the_gradient_of_its_plain_reference(objective, settings, estimator):
    own = {"kl_coef": 0.3, "kl_estimator": estimator, "entropy_coef": 0.2}
    config, num_dropped = ObjectiveConfig(name=objective, **own | settings), 0
    for seed in range(3):
        episodes = random_episodes(seed)
        leaves = [e[name] for name in ("logprobs", "entropies", "values") for e in episodes]
        expected = REFERENCES[objective](episodes, config) + extras(episodes, config)
        by_reference = torch.autograd.grad(expected, leaves, allow_unused=True)
        tokens = packed_tokens(episodes, config)
        loss = loss_of(tokens, config)
        kept = tokens.weights if loss.dropped is None else tokens.weights[~loss.dropped.any_N]
        num_dropped += len(tokens.weights) - len(kept)
        by_ours = torch.autograd.grad(loss.total / divisor_of(kept, episodes, config), leaves, allow_unused=True)
        for ours, reference in zip(by_ours, by_reference, strict=True):
            assert (ours is None) == (reference is None)
            if ours is not None:
                torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-12)
    assert (num_dropped > 0) == any(name.startswith("mask_") for name in settings)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_kl_holds_tokens_of_which_the_reference_is_sure_and_no_other(objective):
    """With `kl_max_entropy`, the loss less the one without a KL is the KL of those tokens."""
    episodes, limit = random_episodes(3), 0.7
    held = ObjectiveConfig(name=objective, kl_coef=0.3, kl_estimator="k2", kl_max_entropy=limit)
    free = ObjectiveConfig(name=objective)
    tokens = packed_tokens(episodes, held)
    entropies = torch.rand(len(tokens.logprobs), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sure = entropies <= limit
    assert 0 < sure.sum() < len(sure) and tokens.reference_logprobs is not None
    found = loss_of(replace(tokens, reference_entropies=entropies), held)
    plain = loss_of(replace(tokens, reference_logprobs=None), free)
    kl = kl_term(tokens.logprobs, tokens.reference_logprobs, "k2") * sure
    torch.testing.assert_close(found.total - plain.total, 0.3 * (tokens.weights * kl).sum(), rtol=1e-9, atol=1e-12)
    assert torch.equal(found.kl_N, kl.detach())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_certain_tokens_have_no_policy_term_and_keep_every_other(objective):
    """With `min_entropy`, the gradient is that of the plain reference without the policy term's rows of such tokens."""
    episodes, own = random_episodes(3), {"name": objective, "kl_coef": 0.3, "entropy_coef": 0.2}
    for e in episodes:
        e["entropies"] = (e["entropies"].detach() + 1).exp().requires_grad_()
    limit = torch.cat([e["entropies"] for e in episodes]).median().item()
    plain, config = ObjectiveConfig(**own), ObjectiveConfig(**own, min_entropy=limit)

    def gradients_of(total: torch.Tensor) -> list[torch.Tensor]:
        leaves = [[e[name] for e in episodes] for name in ("logprobs", "entropies", "values")]
        return [torch.cat(torch.autograd.grad(total, of, retain_graph=True, materialize_grads=True)) for of in leaves]

    policy_and_value = gradients_of(REFERENCES[objective](episodes, plain))
    others = gradients_of(extras(episodes, plain))
    certain = torch.cat([e["entropies"] for e in episodes]) < limit
    assert 0 < certain.sum() < len(certain)
    policy_and_value[0] = policy_and_value[0].masked_fill(certain, 0.0)
    tokens = packed_tokens(episodes, config)
    found = gradients_of(loss_of(tokens, config).total / divisor_of(tokens.weights, episodes, config))
    for ours, one, other in zip(found, policy_and_value, others, strict=True):
        torch.testing.assert_close(ours, one + other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_parts_of_a_step_add_up_to_the_whole(objective):
    config, episodes = ObjectiveConfig(name=objective), random_episodes(7)
    total = lambda part: float(loss_of(packed_tokens(part, config), config).total)  # noqa: E731
    assert total(episodes) == pytest.approx(total(episodes[:2]) + total(episodes[2:]))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_without_correction_a_stale_token_counts_as_one_of_the_current_policy(objective):
    advantages = [1.0, -2.0, 1.0]
    rewards = [0.0, 0.0, 3.0]
    stale = tokens_of([0.9, -0.7, 0.4], advantages, values=0.5, rewards=rewards)
    fresh = tokens_of([0.0, 0.0, 0.0], advantages, values=0.5, rewards=rewards)
    config = ObjectiveConfig(name=objective, correction="none")
    loss_of(stale, config).total.backward()
    OBJECTIVES[objective].load_loss()(fresh, ObjectiveConfig(name=objective), Scaling()).total.backward()
    assert stale.logprobs.grad.abs().sum() > 0
    assert torch.equal(stale.logprobs.grad, fresh.logprobs.grad)
    if objective == "vtrace":
        assert torch.equal(stale.values.grad, fresh.values.grad)


def test_without_correction_a_token_counts_as_the_proximal_policys_own_where_there_is_one():
    tokens = tokens_of([0.9, -0.7], proximal_logprobs=torch.tensor([-1.5, -2.5], dtype=torch.float64))
    assert torch.equal(
        corrected(tokens, ObjectiveConfig(correction="none")).behaviour_logprobs, tokens.proximal_logprobs
    )


def test_importance_correction_leaves_the_tokens_as_they_are():
    tokens = tokens_of([0.9, -0.7])
    assert corrected(tokens, ObjectiveConfig()) is tokens


@pytest.mark.parametrize("objective", list(OBJECTIVES))
@pytest.mark.parametrize("settings", [{}, {"rho_bar": None, "c_bar": None}, {"level": "turn", "ratio": "product"}])
def test_a_ratio_beyond_all_numbers_is_finite_in_the_loss_where_the_token_weighs_nothing(objective, settings):
    """0 times infinity is no number, and the step would be skipped."""
    own = {"pg_rho_bar": None, "dual_clip": None}
    if objective in ("vtrace", "ppo"):
        levels = {"vtrace_level": "turn", "turn_ratio": "product"} if "level" in settings else settings
        own |= levels
    for advantages, weights in ((0.0, 1.0), (1.0, 0.0)):
        tokens = tokens_of([200.0, 0.1], advantages, rewards=[0.0, 0.0])
        tokens = replace(
            tokens,
            weights=torch.full((2,), weights, dtype=torch.float32),
            **{
                name: getattr(tokens, name).detach().float().requires_grad_(name == "logprobs")
                for name in ("logprobs", "entropies", "values", "behaviour_logprobs", "rewards", "advantages")
            },
        )
        loss = OBJECTIVES[objective].load_loss()(tokens, ObjectiveConfig(name=objective, **own), Scaling())
        loss.total.backward()
        assert torch.isfinite(loss.total) and torch.isfinite(tokens.logprobs.grad).all()


def test_the_kl_estimate_of_a_token_that_the_policy_has_given_up_is_finite():
    assert torch.isfinite(kl_term(torch.tensor([-200.0]), torch.tensor([-0.1]), "k3")).all()
