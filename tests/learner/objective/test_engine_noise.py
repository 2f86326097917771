"""Noise of bfloat16's size between engine and learner, on long episodes: what is left of credit and of clips."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.model.policy import load_policy
from learner.model.sharding import parallelize
from learner.objective.loss_records import Tokens
from learner.objective.objectives import loss_of
from learner.training.trainer import Trainer
from learner.vtrace import token_vtrace, trace_lengths, turn_ratios, turn_vtrace, without_noise
from shared.config.objective_section import ObjectiveConfig
from shared.types import Group
from tests.support.episodes import learner_config, on_policy, random_groups

LENGTH, TURN, NOISE = 2000, 100, 0.02  # tokens of an episode and of its turns; deviation of a logprob


def long_episodes(count: int = 8, *, policy_moved: float = 0.0, seed: int = 0) -> Tokens:
    """Whose last token earns 1, with values of 0: what is left of 1 at the first turn is what credit reaches it."""
    rng = torch.Generator().manual_seed(seed)
    prox = -torch.rand(count * LENGTH, generator=rng, dtype=torch.float64)
    noise, moved = NOISE * torch.randn(2, count * LENGTH, generator=rng, dtype=torch.float64)
    place = torch.arange(count * LENGTH) % LENGTH
    return Tokens(
        logprobs=(prox + policy_moved * moved / NOISE).requires_grad_(),
        entropies=torch.zeros_like(prox),
        values=torch.zeros_like(prox),
        behaviour_logprobs=prox + noise,
        rewards=(place == LENGTH - 1).double(),
        turn_end=place % TURN == TURN - 1,
        episode_end=place == LENGTH - 1,
        advantages=torch.arange(count).repeat_interleave(LENGTH).double() % 2 * 2 - 1,
        weights=torch.ones_like(prox),
        proximal_logprobs=prox,
    )


def of_first_turn(column_N: torch.Tensor) -> torch.Tensor:
    return column_N.view(-1, LENGTH)[:, :TURN].mean()


def test_credit_reaches_the_first_turn_of_a_long_episode_with_a_dead_band_and_not_without():
    tokens = long_episodes()
    plain = loss_of(tokens, ObjectiveConfig())
    quiet = loss_of(tokens, ObjectiveConfig(rho_noise=0.08))
    by_turns = loss_of(tokens, ObjectiveConfig(vtrace_level="turn"))
    assert of_first_turn(plain.vs_N) < 1e-5 and of_first_turn(plain.advantages_N) < 1e-5
    assert of_first_turn(quiet.vs_N) > 0.95 and of_first_turn(quiet.advantages_N) > 0.95
    assert of_first_turn(by_turns.advantages_N) > 0.9
    reach = [float(loss.trace_N.sum() / loss.whole_trace_N.sum()) for loss in (plain, quiet, by_turns)]
    assert reach[0] < 0.15 and reach[1] > 0.99 and reach[2] > 0.9
    assert quiet.whole_trace_N.mean() == pytest.approx((LENGTH + 1) / 2)


def test_a_dead_band_leaves_the_correction_of_what_has_really_moved():
    log_rhos = torch.tensor([0.05, -0.05, 0.3, -0.4, -0.08])
    assert without_noise(log_rhos, 0.08).tolist() == pytest.approx([0.0, 0.0, 0.3, -0.4, 0.0])
    assert without_noise(log_rhos, 0.0) is log_rhos


def test_gspo_at_its_papers_clip_clips_noise_with_the_actors_logprobs_and_none_with_the_learners():
    narrow = {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "pg_rho_bar": None, "aggregation": "sequence_mean"}
    tokens = long_episodes(64)
    config = ObjectiveConfig(**narrow, proximal="learner")
    behaviour = Tokens(**{name: getattr(tokens, name) for name in Tokens.__slots__} | {"proximal_logprobs": None})
    clipped = loss_of(behaviour, ObjectiveConfig(**narrow)).clipped_N.double().mean()
    assert 0.1 < clipped < 0.45  # the mean of 2,000 tokens has a deviation of 4.5e-4; half of the sides are free
    loss = loss_of(tokens, config)
    assert not loss.clipped_N.any()
    (gradient,) = torch.autograd.grad(loss.total, tokens.logprobs)
    assert torch.allclose(gradient, -tokens.advantages, rtol=3e-3)


def test_with_the_learners_logprobs_gspo_clips_what_the_policy_has_moved():
    config = ObjectiveConfig(name="gspo", clip_low=3e-4, clip_high=4e-4, proximal="learner")
    tokens = long_episodes(64, policy_moved=0.1)
    moved = (tokens.logprobs - tokens.proximal_logprobs).detach().view(64, LENGTH).mean(1).exp()
    up = tokens.advantages.view(64, LENGTH)[:, 0] > 0
    expected = torch.where(up, moved > 1 + 4e-4, moved < 1 - 3e-4)
    assert 0 < expected.sum() < 64
    assert torch.equal(loss_of(tokens, config).clipped_N.view(64, LENGTH)[:, 0], expected)


@pytest.mark.slow
@pytest.mark.parametrize(("proximal", "least", "most"), [("behaviour", 0.1, 0.5), ("learner", 0.0, 0.0)])
def test_a_step_in_bfloat16_clips_no_noise_of_its_own_either(folder, spec, ranks, proximal, least, most):
    """The forward that finds the proximal policy packs episodes in another way than the updates do."""
    narrow = {"objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "minibatches": 2, "microbatch_tokens": 400}
    config = learner_config(**narrow, proximal=proximal, lr=1e-12)
    policy = load_policy(str(folder), spec)
    groups = random_groups(spec, 4, group_size=2, turns=3, turn_tokens=(30, 60))
    played = [[on_policy(policy, t, noise=NOISE) for t in group.trajectories] for group in groups]
    parallelize(policy, ranks, config, torch.bfloat16)
    trainer = Trainer(policy, config, ranks)
    metrics = trainer.step([Group(f"g{i}", "tester", tuple(group)) for i, group in enumerate(played)], version=0)
    assert metrics["behaviour/logprob_gap"] == pytest.approx(NOISE * 0.8, rel=0.4)
    assert least <= metrics["policy/clip_fraction"] <= most


# ------------------------------------------------------------------ against sums written out

PLACES = st.tuples(st.integers(1, 14), st.integers(0, 10**6))


def drawn(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    log_rhos = torch.randn(size, generator=rng, dtype=torch.float64)
    episode_end = torch.rand(size, generator=rng) < 0.2
    episode_end[-1] = True
    return log_rhos, (torch.rand(size, generator=rng) < 0.4) | episode_end, episode_end


def bar(x: float, limit: float | None) -> float:
    return x if limit is None else min(x, limit)


@given(place=PLACES, c_bar=st.sampled_from([None, 1.0, 0.7]), level=st.sampled_from(["token", "turn"]))
@settings(max_examples=60, deadline=None)
def test_the_length_of_a_trace_is_the_sum_of_the_products_of_c(place, c_bar, level):
    """O(T^2): actions after one another until the episode ends, each counting its tokens."""
    log_rhos, turn_end, episode_end = drawn(*place)
    ends = turn_end if level == "turn" else torch.ones_like(turn_end)
    action_log_rhos = turn_ratios(log_rhos, ends, "product")
    last = ends.nonzero()[:, 0].tolist()
    sizes = [b - a for a, b in zip([-1, *last], last, strict=False)]
    lengths = []
    for i in range(len(last)):
        total, kept = 0.0, 1.0
        for k in range(i, len(last)):
            total += kept * sizes[k]
            kept *= bar(float(action_log_rhos[last[k]].exp()), c_bar) * (0.8 if turn_end[last[k]] else 1.0)
            if episode_end[last[k]]:
                break
        lengths += [total] * sizes[i]
    got = trace_lengths(action_log_rhos, turn_end, episode_end, lam=0.8, c_bar=c_bar, level=level)
    torch.testing.assert_close(got, torch.tensor(lengths, dtype=torch.float64))


@given(place=PLACES, noise=st.sampled_from([0.1, 0.5, 2.0]), level=st.sampled_from(["token", "turn"]))
@settings(max_examples=60, deadline=None)
def test_targets_with_a_dead_band_are_the_papers_sum_with_small_ratios_as_1(place, noise, level):
    """O(T^2) in Python numbers: each vs is its own sum over the rest of its episode (equation 1)."""
    log_rhos, turn_end, episode_end = drawn(*place)
    rewards, values = torch.randn(2, len(log_rhos), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    heard = [0.0 if abs(x) <= noise else x for x in log_rhos.tolist()]
    actions, start = [], 0  # (log rho, reward, value, tokens, gamma after it)
    for t in range(len(heard)):
        if level == "token" or turn_end[t]:
            gamma = 0.0 if episode_end[t] else 0.9 if turn_end[t] else 1.0
            log_rho, reward = sum(heard[start : t + 1]), float(rewards[start : t + 1].sum())
            actions.append((min(1.0, 2.718281828459045**log_rho), reward, float(values[start]), t + 1 - start, gamma))
            start = t + 1
    expected = []
    for s, (_, _, value, size, _) in enumerate(actions):
        total, weight = value, 1.0
        for t in range(s, len(actions)):
            rho, reward, own, _, gamma = actions[t]
            after = actions[t + 1][2] if t + 1 < len(actions) else 0.0
            total += weight * rho * (reward + gamma * after - own)
            weight *= gamma * rho
        expected += [total] * size
    compute, more = (token_vtrace, {}) if level == "token" else (turn_vtrace, {"ratio": "product"})
    got = compute(without_noise(log_rhos, noise), rewards, values, turn_end, episode_end, gamma=0.9, lam=1.0, **more)
    torch.testing.assert_close(got.vs, torch.tensor(expected, dtype=torch.float64))


def test_the_weight_of_prox_over_mu_is_free_of_noise_too():
    """With the policy at prox, a dead band that holds all noise leaves every correction at 1."""
    tokens = long_episodes(2)
    config = ObjectiveConfig(rho_noise=10 * NOISE, proximal="learner", pg_rho_bar=None)
    exact = replace(tokens, behaviour_logprobs=tokens.proximal_logprobs)
    torch.testing.assert_close(loss_of(tokens, config).policy_N, loss_of(exact, config).policy_N)
    noisy = loss_of(tokens, config.model_copy(update={"rho_noise": 0.0})).policy_N
    assert not torch.allclose(noisy, loss_of(exact, config).policy_N)
