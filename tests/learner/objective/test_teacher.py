"""The KL to a teacher, estimated from the policy's own tokens: its gradient is that of the exact KL, in float64, and it
stands beside what rewards teach or alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from learner.objective.advantages import RunningScale
from learner.objective.loss_terms import teacher_term
from learner.objective.objectives import loss_of
from shared.config.objective_section import ObjectiveConfig
from shared.config.objective_specs import OBJECTIVES
from tests.support.objective_episodes import packed_tokens, random_episodes

BY_REWARDS = [name for name, spec in OBJECTIVES.items() if spec.learns_from_rewards]


def distributions(seed: int, words: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a policy, differentiable, and log-probabilities of a teacher and of an older policy, float64."""
    draws = torch.randn(3, words, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return draws[0].requires_grad_(), draws[1].log_softmax(0), draws[2].log_softmax(0)


def exact(direction: str, policy: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    first, second = (policy, teacher) if direction == "reverse" else (teacher, policy)
    return (first.exp() * (first - second)).sum()


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_over_all_words_are_those_of_the_exact_kl(direction, seed):
    logits, teacher, _ = distributions(seed)
    policy = logits.log_softmax(0)
    expected = exact(direction, policy, teacher)
    (by_kl,) = torch.autograd.grad(expected, logits, retain_graph=True)
    terms = teacher_term(policy, teacher, policy.detach(), direction)
    mean = (policy.detach().exp() * terms).sum()  # each word as often as the policy samples it
    (ours,) = torch.autograd.grad(mean, logits)
    torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, by_kl, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_tokens_of_an_older_policy_count_as_much_as_the_policy_would_sample_them(direction):
    logits, teacher, older = distributions(5)
    policy = logits.log_softmax(0)
    (by_kl,) = torch.autograd.grad(exact(direction, policy, teacher), logits, retain_graph=True)
    mean = (older.exp() * teacher_term(policy, teacher, older, direction)).sum()
    (ours,) = torch.autograd.grad(mean, logits, retain_graph=True)
    torch.testing.assert_close(ours, by_kl, rtol=1e-10, atol=1e-12)
    bounded = teacher_term(policy, teacher, older, direction, max_weight=0.7)
    factors = (
        torch.autograd.grad(bounded.sum(), policy)[0]
        / torch.autograd.grad(teacher_term(policy, teacher, policy.detach(), direction).sum(), policy)[0]
    )
    torch.testing.assert_close(factors, (policy - older).exp().clamp(max=0.7).detach())


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("baseline", [-3.0, 0.7])
def test_a_baseline_changes_neither_value_nor_gradient_over_all_words(direction, baseline):
    logits, teacher, _ = distributions(4)
    policy = logits.log_softmax(0)
    own = (policy, teacher, policy.detach(), direction)
    means = [(policy.detach().exp() * teacher_term(*own, baseline=b)).sum() for b in (0.0, baseline)]
    gradients = [torch.autograd.grad(mean, logits, retain_graph=True)[0] for mean in means]
    torch.testing.assert_close(means[0], means[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)


def test_a_word_that_only_one_of_them_knows_gives_finite_numbers():
    policy = torch.tensor([-800.0, -1e-9], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([-1e-9, -800.0], dtype=torch.float64)
    for direction in ("reverse", "forward"):
        term = teacher_term(policy, teacher, policy.detach(), direction)
        (gradient,) = torch.autograd.grad(term.sum(), policy)
        assert term.isfinite().all() and gradient.isfinite().all()


def taught(objective: str, **settings):
    config = ObjectiveConfig(name=objective, teacher="beside", **settings)
    episodes = random_episodes(2)
    tokens = packed_tokens(episodes, config)
    draw = torch.Generator().manual_seed(1)
    teacher = -torch.rand(len(tokens.logprobs), dtype=torch.float64, generator=draw)
    leaves = [e[name] for name in ("logprobs", "values") for e in episodes]
    return config, replace(tokens, teacher_logprobs=teacher, reference_logprobs=None), leaves


def gradient(total: torch.Tensor, leaves: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(torch.autograd.grad(total, leaves, materialize_grads=True, retain_graph=True))


@pytest.mark.parametrize("objective", BY_REWARDS)
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_loss_is_what_rewards_teach_and_the_teachers_term_each_by_its_weight(objective, direction):
    own = {"teacher_kl": direction, "teacher_weight": 0.3, "reward_weight": 0.25}
    config, tokens, leaves = taught(objective, **own)
    plain = loss_of(replace(tokens, teacher_logprobs=None), ObjectiveConfig(name=objective)).total
    assert tokens.teacher_logprobs is not None
    l = (tokens.logprobs - tokens.teacher_logprobs).detach()  # noqa: E741
    weight = (tokens.logprobs - tokens.behaviour_logprobs).detach().exp().clamp(max=1.0)
    factor = l if direction == "reverse" else 1 - (-l).exp()
    expected = 0.25 * plain + 0.3 * (tokens.weights * weight * factor * tokens.logprobs).sum()
    found = loss_of(tokens, config)
    torch.testing.assert_close(gradient(found.total, leaves), gradient(expected, leaves), rtol=1e-10, atol=1e-12)
    assert found.teacher_N is not None and not found.teacher_N.requires_grad


@pytest.mark.parametrize("objective", BY_REWARDS)
def test_without_a_weight_of_rewards_the_teacher_teaches_alone(objective):
    config, tokens, leaves = taught(objective, reward_weight=0.0)
    other = replace(tokens, rewards=tokens.rewards + 3.0, advantages=tokens.advantages * -2.0)
    one, two = (gradient(loss_of(each, config).total, leaves) for each in (tokens, other))
    assert torch.equal(one, two) and one.abs().sum() > 0
    assert not one[len(one) // 2 :].any()  # no critic


@pytest.mark.parametrize("objective", ["grpo", "vtrace"])
def test_equal_rewards_neither_slow_nor_stop_what_a_teacher_teaches(objective):
    config = ObjectiveConfig(name=objective, teacher="beside")
    assert not config.needs_variance and not config.skips_zero_advantage
    episodes = [_Alike() for _ in range(4)]
    assert RunningScale(config)(episodes).rate == 1.0
    if objective == "grpo":
        assert RunningScale(ObjectiveConfig(name=objective))(episodes).rate == 0.0


class _Alike:
    """An episode that earned what all others did."""

    def __init__(self) -> None:
        import numpy as np

        self.rewards, self.turn_end = np.array([0.0, 1.0], np.float32), np.array([False, True])
        self.advantage_size, self.signal = 0.0, 1.0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"teacher_kl": "forward"}, "teacher_kl = 'forward' without a teacher"),
        ({"reward_weight": 0.0}, "reward_weight = 0.0 without a teacher"),
        ({"teacher_weight": 2.0}, "teacher_weight = 2.0 without a teacher"),
        ({"name": "sft", "teacher": "m"}, "which learns from others' tokens"),
        ({"name": "grpo", "teacher": "m", "reward_weight": 0.0, "dynamic_sampling": True}, "with dynamic_sampling"),
    ],
)
def test_settings_that_contradict_one_another_are_one_line(settings, expected):
    with pytest.raises(ValidationError, match=expected):
        ObjectiveConfig(**settings)
