"""Losses against gradients derived by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from learner.objectives import group_advantages, grpo_loss, policy_term, vtrace_loss


@pytest.mark.parametrize("reward", [0.9, 6.0133, 0.1 + 0.2, -1e30, 0.0])
def test_equal_rewards_give_exactly_zero_advantage(reward):
    assert group_advantages([reward] * 8).tolist() == [0.0] * 8


def test_group_advantages_are_centred_and_scaled_in_float64():
    advantages = group_advantages([1.0, 0.0, 0.0, 1.0])
    assert advantages.dtype == np.float64
    assert advantages.tolist() == [1.0, -1.0, -1.0, 1.0]
    assert group_advantages([1.0, 0.0], divide_by_std=False).tolist() == [0.5, -0.5]


def test_nearly_equal_rewards_do_not_explode():
    assert np.abs(group_advantages([1.0, 1.0 + 1e-12])).max() < 1e-5


def gradient(loss: torch.Tensor, *inputs: torch.Tensor) -> list[list[float]]:
    return [g.tolist() for g in torch.autograd.grad(loss, inputs)]


def test_vtrace_loss_has_the_gradient_of_actor_and_critic():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    entropies = torch.tensor([0.5, 0.7], requires_grad=True)
    values = torch.tensor([1.0, 3.0], requires_grad=True)
    behaviour = torch.tensor([-1.0 - math.log(2), -2.0 + math.log(4)])  # ratios 2 and 1/4
    advantages, vs = torch.tensor([3.0, -2.0]), torch.tensor([2.0, 2.5])
    settings = {"num_tokens": 10, "value_coef": 0.5, "entropy_coef": 0.1}
    loss = vtrace_loss(logprobs, entropies, values, behaviour, advantages, vs, max_weight=1.0, **settings)
    by_logprob, by_entropy, by_value = gradient(loss.total, logprobs, entropies, values)
    assert by_logprob == pytest.approx([-3.0 / 10, 0.25 * 2.0 / 10])  # -min(1, ratio) A / tokens
    assert by_entropy == pytest.approx([-0.01, -0.01])
    assert by_value == pytest.approx([0.5 * -1.0 / 10, 0.5 * 0.5 / 10])  # value_coef (V - vs) / tokens


def test_grpo_clips_only_where_the_advantage_pushes_further_out():
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    logprobs = torch.full((5,), -1.0, requires_grad=True)
    behaviour = -1.0 - ratios.log()
    loss = grpo_loss(logprobs, torch.zeros(5), behaviour, advantages, num_tokens=1, entropy_coef=0.0, clip=(0.2, 0.28))
    (by_logprob,) = gradient(loss.total, logprobs)
    assert by_logprob == pytest.approx([0.0, 1.5, -0.5, 0.0, -1.1])
    assert loss.clipped_N.tolist() == [True, False, False, True, False]


def test_the_policy_term_has_the_gradient_of_the_clipped_surrogate():
    rng = torch.Generator().manual_seed(0)
    logprobs = (-torch.rand(200, generator=rng)).requires_grad_()
    behaviour, advantages = -torch.rand(200, generator=rng), torch.randn(200, generator=rng)
    ratios = (logprobs - behaviour).exp()
    surrogate = -torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.28) * advantages).sum()
    ours = policy_term(logprobs, behaviour, advantages, clip=(0.2, 0.28)).loss_N.sum()
    for got, expected in zip(gradient(ours, logprobs), gradient(surrogate, logprobs), strict=True):
        assert got == pytest.approx(expected, abs=1e-6)


def test_importance_weights_are_truncated():
    logprobs = torch.tensor([0.0], requires_grad=True)
    term = policy_term(logprobs, torch.tensor([-5.0]), torch.tensor([-1.0]), max_weight=2.0)
    assert gradient(term.loss_N.sum(), logprobs) == [[2.0]]


def test_the_loss_is_divided_by_the_global_number_of_tokens_alone():
    def total(parts: list[slice]) -> float:
        logprobs, advantages = torch.arange(-6.0, 0.0), torch.arange(6.0)
        losses = [
            grpo_loss(x, torch.zeros_like(x), x, a, num_tokens=6, entropy_coef=0.0, clip=(1.0, 1.0))
            for x, a in ((logprobs[p], advantages[p]) for p in parts)
        ]
        return float(sum(loss.total for loss in losses))

    assert total([slice(0, 6)]) == pytest.approx(total([slice(0, 1), slice(1, 6)]))
