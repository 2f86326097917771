"""V-trace against a transcription of the paper's sums, recorded cases, and hand-made token streams."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.vtrace import token_vtrace, vtrace
from tests.support.paths import DATA

GOLDEN = [json.loads(line) for line in (DATA / "vtrace.jsonl").open()]


def equation_one(log_rhos, discounts, rewards, values, bootstrap, rho_bar, c_bar):
    """Each vs as its own sum over the rest of the trajectory: O(T^2), float64, lambda 1."""
    num_steps, rhos = len(rewards), np.exp(log_rhos)
    bar = lambda x, limit: x if limit is None else np.minimum(x, limit)  # noqa: E731
    all_values = np.concatenate([values, bootstrap[None]])
    vs = []
    for s in range(num_steps):
        total = all_values[s].copy()
        for t in range(s, num_steps):
            weight = np.prod(discounts[s:t], axis=0) * np.prod(bar(rhos[s:t], c_bar), axis=0)
            delta = bar(rhos[t], rho_bar) * (rewards[t] + discounts[t] * all_values[t + 1] - all_values[t])
            total = total + weight * delta
        vs.append(total)
    vs = np.stack(vs)
    next_vs = np.concatenate([vs[1:], all_values[-1:]])
    return vs, rewards + discounts * next_vs - values


@given(
    num_steps=st.integers(1, 12),
    batch=st.integers(1, 3),
    bars=st.tuples(*[st.one_of(st.none(), st.floats(0.3, 3.0))] * 2),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_vtrace_is_the_papers_sum_over_the_rest_of_the_trajectory(num_steps, batch, bars, seed):
    rng = np.random.default_rng(seed)
    log_rhos, rewards, values = rng.normal(size=(3, num_steps, batch))
    discounts = rng.choice([0.0, 0.9, 1.0], size=(num_steps, batch))
    bootstrap = rng.normal(size=batch)
    expected = equation_one(log_rhos, discounts, rewards, values, bootstrap, *bars)
    tensors = (torch.from_numpy(x) for x in (log_rhos, discounts, rewards, values, bootstrap))
    got = vtrace(*tensors, rho_bar=bars[0], c_bar=bars[1])
    np.testing.assert_allclose(got.vs, expected[0], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(got.advantages, expected[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", GOLDEN)
def test_vtrace_agrees_with_the_recorded_cases(case):
    names = ("log_rhos", "discounts", "rewards", "values", "bootstrap_value")
    tensors = [torch.tensor(case[name], dtype=torch.float64) for name in names]
    vs, advantages = vtrace(*tensors, rho_bar=case["rho_bar"], c_bar=case["c_bar"])
    torch.testing.assert_close(vs, torch.tensor(case["vs"], dtype=torch.float64), rtol=1e-6, atol=1e-6)
    expected = torch.tensor(case["pg_advantages"], dtype=torch.float64)
    weights = tensors[0].exp().clamp(max=np.inf if case["pg_rho_bar"] is None else case["pg_rho_bar"])
    torch.testing.assert_close(weights * advantages, expected, rtol=1e-6, atol=1e-6)


def test_on_policy_with_lambda_vtrace_gives_generalised_advantages():
    gamma, lam, rng = 0.9, 0.7, np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 6))
    deltas = rewards + gamma * np.append(values[1:], 0.3) - values
    expected = np.zeros(7)
    for t in reversed(range(6)):
        expected[t] = deltas[t] + gamma * lam * expected[t + 1]
    column = lambda x: torch.tensor(x)[:, None]  # noqa: E731
    discounts = torch.full((6, 1), gamma, dtype=torch.float64)
    args = (torch.zeros(6, 1).double(), discounts, column(rewards), column(values), torch.tensor([0.3]).double())
    got = vtrace(*args, lambdas=lam)
    np.testing.assert_allclose(got.advantages[:, 0], expected[:6], atol=1e-12)
    np.testing.assert_allclose(got.vs[:, 0].numpy() - values, expected[:6], atol=1e-12)


def test_tokens_of_a_turn_are_not_discounted_and_turns_are():
    # Two episodes: turns of 2 and 1 tokens; one turn of 2 tokens. On-policy, values 0: vs is the discounted return.
    rewards = torch.tensor([0.0, 1.0, 10.0, 0.0, 5.0])
    turn_end = torch.tensor([False, True, True, False, True])
    episode_end = torch.tensor([False, False, True, False, True])
    zeros = torch.zeros(5)
    got = token_vtrace(zeros, rewards, zeros, turn_end, episode_end, gamma=0.5, lam=1.0)
    assert got.vs.tolist() == [6.0, 6.0, 10.0, 5.0, 5.0]
    assert got.advantages.tolist() == got.vs.tolist()


def test_lambda_acts_between_turns_only():
    rewards, values = torch.tensor([0.0, 1.0, 10.0]), torch.tensor([0.0, 0.0, 4.0])
    turn_end, episode_end = torch.tensor([False, True, True]), torch.tensor([False, False, True])
    zeros = torch.zeros(3)
    got = token_vtrace(zeros, rewards, values, turn_end, episode_end, gamma=0.5, lam=0.0)
    assert got.vs.tolist() == [3.0, 3.0, 10.0]  # 1 + 0.5 * V of the next turn


def test_token_streams_of_several_episodes_equal_each_episode_alone():
    rng = torch.Generator().manual_seed(0)
    log_rhos, rewards, values = torch.randn(3, 30, generator=rng)
    turn_end = torch.rand(30, generator=rng) < 0.3
    episode_end = torch.zeros(30, dtype=torch.bool)
    episode_end[[8, 9, 29]] = True
    bars = {"rho_bar": 1.2, "c_bar": 0.9}
    together = token_vtrace(log_rhos, rewards, values, turn_end | episode_end, episode_end, gamma=0.9, lam=0.8, **bars)
    for start, stop in ((0, 9), (9, 10), (10, 30)):
        columns = (x[start:stop, None] for x in (log_rhos, rewards, values))
        log_rho, reward, value = columns
        ends = (turn_end | episode_end)[start:stop, None]
        discounts = torch.where(ends, 0.9, 1.0)
        lambdas = torch.where(ends, 0.8, 1.0)
        discounts[-1] = 0.0
        alone = vtrace(log_rho, discounts, reward, value, torch.zeros(1), lambdas=lambdas, **bars)
        torch.testing.assert_close(together.vs[start:stop], alone.vs[:, 0])
        torch.testing.assert_close(together.advantages[start:stop], alone.advantages[:, 0])


def test_targets_carry_no_gradient():
    values = torch.zeros(3, 1, requires_grad=True)
    got = vtrace(torch.zeros(3, 1), torch.ones(3, 1), torch.ones(3, 1), values, torch.zeros(1))
    assert not got.vs.requires_grad and not got.advantages.requires_grad
