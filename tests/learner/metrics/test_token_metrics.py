"""Metrics over trained tokens and over groups, against a plain NumPy reference over whole episodes."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from learner.distributed import Ranks
from learner.metrics.episode_metrics import group_metrics
from learner.metrics.token_metrics import BINS, LAGS, TURNS, TokenStats, fresh_tokens, log_ratio_quantile, loss_columns
from learner.objective.loss_records import Loss, Tokens
from learner.objective.objectives import vtrace
from shared.config.learner_section import LearnerConfig
from shared.config.objective_section import ObjectiveConfig
from shared.types import Group
from tests.support.episodes import learner_config
from tests.support.wires import episode, failed_episode


def drawn_episodes(count: int, seed: int, spread: float) -> list[dict[str, np.ndarray]]:
    """Of 1 to 12 turns with 1 to 6 tokens each; columns [K], log ratios of deviation `spread`."""
    rng = np.random.default_rng(seed)
    episodes = []
    for _ in range(count):
        turn = np.repeat(np.arange(n := rng.integers(1, 13)), rng.integers(1, 7, n))
        k = len(turn)
        last = np.append(turn[1:] != turn[:-1], True)
        behaviour = -rng.exponential(1.0, k)
        episodes.append({
            "turn": turn, "turn_end": last, "rewards": np.where(last, rng.normal(size=k), 0),
            "behaviour": behaviour, "logprobs": behaviour + spread * rng.normal(size=k),
            "values": rng.normal(size=k), "entropies": rng.exponential(1.0, k), "lag": rng.integers(0, 12, k),
        })  # fmt: skip
    return episodes


def tokens_of(episodes: list[dict[str, np.ndarray]]) -> Tokens:
    def column(name: str) -> torch.Tensor:
        array = np.concatenate([e[name] for e in episodes])
        return torch.from_numpy(array if array.dtype == bool else array.astype(np.float64))

    ends = np.concatenate([np.arange(len(e["turn"])) == len(e["turn"]) - 1 for e in episodes])
    ones = torch.ones(len(ends), dtype=torch.float64)
    return Tokens(
        logprobs=column("logprobs"), entropies=column("entropies"), values=column("values"),
        behaviour_logprobs=column("behaviour"), rewards=column("rewards"), turn_end=column("turn_end"),
        episode_end=torch.from_numpy(ends), advantages=ones, weights=ones,
    )  # fmt: skip


def measured(
    episodes: list[dict[str, np.ndarray]], per_microbatch: int, level: Literal["token", "turn"] = "token"
) -> tuple[dict[str, float], list]:
    """The metrics, and each microbatch's targets and advantages for the reference."""
    stats, parts = TokenStats(torch.device("cpu")), []
    for start in range(0, len(episodes), per_microbatch):
        chosen = episodes[start : start + per_microbatch]
        tokens = tokens_of(chosen)
        loss = vtrace(tokens, ObjectiveConfig(gamma=0.9, lam=0.9, vtrace_level=level))
        stats.add(torch.from_numpy(np.concatenate([e["lag"] for e in chosen])), loss_columns(tokens, loss))
        parts.append((loss.vs_N.numpy(), loss.advantages_N.numpy()))
    stats.gather(Ranks(0, 1, torch.device("cpu"), None))  # type: ignore[arg-type]
    return stats.metrics(), parts


def test_the_engines_gap_is_of_tokens_before_which_their_episode_has_nothing_older() -> None:
    lags = torch.tensor([2, 0, 0, 0, 0, 0, 1, 0, 0])
    ends = torch.tensor([False, False, True, False, True, False, False, True, True])
    fresh = [False] * 3 + [True] * 3 + [False] * 2 + [True]
    assert fresh_tokens(lags, ends).tolist() == fresh
    episodes = drawn_episodes(40, 4, 0.1)
    for drawn in episodes[1::2]:  # versions rise within an episode
        drawn["lag"] = np.sort(drawn["lag"] % 3)[::-1].copy()
    for drawn in episodes[::2]:
        drawn["lag"] = np.zeros_like(drawn["lag"])
    metrics, _ = measured(episodes, per_microbatch=7)
    gaps = [np.abs(e["logprobs"] - e["behaviour"])[np.maximum.accumulate(e["lag"]) == 0] for e in episodes]
    assert metrics["behaviour/engine_gap"] == pytest.approx(np.concatenate(gaps).mean())
    for drawn in episodes:
        drawn["lag"] = drawn["lag"] + 1
    assert "behaviour/engine_gap" not in measured(episodes, per_microbatch=7)[0]


def lag_of(lag: np.ndarray, name: str) -> np.ndarray:
    low, _, high = name.replace("+", "-1000").partition("-")
    return (int(low) <= lag) & (lag <= int(high or low))


@pytest.mark.parametrize("spread", [1e-5, 0.02, 1.5])
def test_the_tail_of_the_ratios_and_entropy_by_age_are_those_of_all_tokens(spread: float) -> None:
    episodes = drawn_episodes(60, 3, spread)
    metrics, _ = measured(episodes, per_microbatch=7)
    joined = {name: np.concatenate([e[name] for e in episodes]) for name in episodes[0]}
    log_ratios = joined["logprobs"] - joined["behaviour"]
    parts = {f"/lag_{name}": lag_of(joined["lag"], name) for name in LAGS} | {"": np.full(len(log_ratios), True)}
    for suffix, chosen in parts.items():
        here = log_ratios[chosen]
        assert math.log(metrics[f"behaviour/ratio_max{suffix}"]) == pytest.approx(here.max(), rel=1e-6)
        assert metrics[f"behaviour/chi_square{suffix}"] == pytest.approx(np.mean((np.exp(here) - 1) ** 2), rel=1e-9)
        assert metrics[f"policy/entropy{suffix}"] == pytest.approx(joined["entropies"][chosen].mean())
        p99 = np.quantile(here, 0.99, method="inverted_cdf")
        assert math.log(metrics[f"behaviour/ratio_p99{suffix}"]) == pytest.approx(p99, rel=0.021, abs=2e-6)


def test_a_quantile_of_the_histogram_lies_in_its_bin_by_proportion() -> None:
    histogram = torch.zeros(BINS, dtype=torch.float64)
    histogram[BINS // 2], histogram[BINS // 2 + 1] = 98, 2
    assert log_ratio_quantile(histogram, 0.99) == pytest.approx(1e-4 * math.sinh(0.02 * 1.5))
    assert log_ratio_quantile(histogram, 0.49) == pytest.approx(1e-4 * math.sinh(0.02 * 0.5))


def test_a_ratio_without_a_bin_or_a_number_is_counted_and_breaks_nothing() -> None:
    episodes = drawn_episodes(3, 0, 0.1)
    episodes[0]["logprobs"][0], episodes[1]["logprobs"][0] = math.nan, episodes[1]["behaviour"][0] - 1e4
    metrics, _ = measured(episodes, per_microbatch=3)
    assert not math.isfinite(metrics["behaviour/ratio_max"])
    episodes[0]["logprobs"][0] = episodes[0]["behaviour"][0] + 30
    assert math.log(measured(episodes, 3)[0]["behaviour/ratio_max"]) == pytest.approx(30)


@pytest.mark.parametrize("log_ratio", [-60.0, -1e4])
def test_ratios_so_small_that_their_squares_vanish_are_few_effective_samples(log_ratio: float) -> None:
    episodes = drawn_episodes(1, 0, 0.1)
    episodes[0]["logprobs"][:] = np.asarray(episodes[0]["behaviour"]) + log_ratio
    assert measured(episodes, 1)[0]["behaviour/ess"] == pytest.approx(1.0 if log_ratio > -100 else 0.0)


@pytest.mark.parametrize("level", ["token", "turn"])
def test_advantage_and_explained_variance_of_a_turn_are_those_of_the_tokens_where_the_critic_learns(
    level: Literal["token", "turn"],
) -> None:
    episodes = drawn_episodes(50, 5, 0.1)
    metrics, parts = measured(episodes, per_microbatch=9, level=level)
    turn, values = (np.concatenate([e[name] for e in episodes]) for name in ("turn", "values"))
    first = np.concatenate([np.append(True, e["turn"][1:] != e["turn"][:-1]) for e in episodes])
    length = np.concatenate([np.bincount(e["turn"])[e["turn"]] for e in episodes])
    weights = np.ones(len(turn)) if level == "token" else first * length
    vs, advantages = (np.concatenate(column) for column in zip(*parts, strict=True))

    def explained(chosen: np.ndarray) -> float:
        errors, targets = np.cov([(vs - values)[chosen], vs[chosen]], aweights=weights[chosen], ddof=0).diagonal()
        return 1 - errors / targets

    assert metrics["value/explained_variance"] == pytest.approx(explained(turn >= 0))
    lags = np.concatenate([e["lag"] for e in episodes])
    for name in LAGS:
        assert metrics[f"value/explained_variance/lag_{name}"] == pytest.approx(explained(lag_of(lags, name)))
    for number, name in enumerate(TURNS):
        here = turn == number if number < 8 else turn >= 8
        assert here.any()
        assert metrics[f"policy/advantage/turn_{name}"] == pytest.approx(advantages[here].mean())
        assert metrics[f"policy/advantage_rms/turn_{name}"] == pytest.approx(np.sqrt(np.mean(advantages[here] ** 2)))
        assert metrics[f"value/explained_variance/turn_{name}"] == pytest.approx(explained(here))


@pytest.mark.parametrize("target", [0.1, -0.1, 100.1, 1e5])
@pytest.mark.parametrize("error", [0.0, 1e-7])
def test_targets_that_are_equal_but_for_rounding_have_no_explained_variance(target: float, error: float) -> None:
    stats = TokenStats(torch.device("cpu"))
    for seed in range(20):
        noise = torch.randn(300, generator=torch.Generator().manual_seed(seed))
        vs = torch.full((300,), target) * (1 + error * noise)
        stats.add(torch.zeros(300, dtype=torch.long), loss_columns(*of_values(vs, torch.full((300,), 0.3))))
    assert not [name for name in stats.metrics() if name.startswith("value/explained_variance")]


def test_targets_that_vary_little_beside_their_size_have_their_explained_variance() -> None:
    stats = TokenStats(torch.device("cpu"))
    vs = 100 + torch.linspace(-0.5, 0.5, 400)
    stats.add(torch.zeros(400, dtype=torch.long), loss_columns(*of_values(vs, 100 + (vs - 100) / 2)))
    assert stats.metrics()["value/explained_variance"] == pytest.approx(0.75, rel=1e-3)


def of_values(vs: torch.Tensor, values: torch.Tensor) -> tuple[Tokens, Loss]:
    """Tokens of one episode with these targets and values, and their loss."""
    zeros, end = torch.zeros_like(vs), torch.zeros(len(vs), dtype=torch.bool)
    end[-1] = True
    tokens = Tokens(zeros, zeros, values, zeros, zeros, end, end, zeros, torch.ones_like(vs))
    return tokens, Loss(zeros.sum(), zeros, end, zeros, zeros, vs, torch.ones_like(vs))


# ------------------------------------------------------------------ groups


def group(*rewards: float, versions: tuple[int, int] = (3, 3)) -> Group:
    mask = np.array([0, 0, 1, 1, 0, 0, 1])
    policy_versions = np.where(mask, [0, 0, versions[0], versions[0], 0, 0, versions[1]], -1).astype(np.int32)
    return Group("g", "a", tuple(episode(reward=r, policy_versions=policy_versions) for r in rewards))


GRPO, ALONE = learner_config(objective="grpo"), learner_config()


@pytest.mark.parametrize("config", [GRPO, learner_config(group_size=2)])
def test_groups_without_variance_are_those_whose_episodes_all_earned_the_same(config: LearnerConfig) -> None:
    groups = [group(1.0, 1.0), group(0.0, 1.0), group(0.0, 0.0), group(0.0, 0.5)]
    failed = Group("g", "a", (failed_episode(), failed_episode()))
    assert group_metrics([*groups, failed], 3, config)["groups/without_variance"] == 0.5
    half = Group("g", "a", (groups[1].trajectories[0], failed_episode()))  # one sound episode compares with nothing
    assert group_metrics([groups[1], half], 3, config)["groups/without_variance"] == 0.5


def test_groups_of_one_are_compared_over_the_step() -> None:
    same, different = [group(0.2)] * 3, [group(0.2), group(0.2), group(0.3)]
    assert group_metrics(same, 3, ALONE)["groups/without_variance"] == 1.0
    assert group_metrics(different, 3, ALONE)["groups/without_variance"] == 0.0
    assert group_metrics([Group("g", "a", (failed_episode(),))], 3, ALONE) == {}


def test_reward_by_age_counts_an_episode_by_its_oldest_token_and_mixed_versions_are_a_share() -> None:
    groups = [group(1.0, 0.0), group(4.0, versions=(2, 3)), group(2.0, versions=(0, 3))]
    values = group_metrics(groups, 3, GRPO)
    assert values["rollout/reward/lag_0"] == 0.5
    assert values["rollout/reward/lag_1"] == 4.0
    assert values["rollout/reward/lag_3-4"] == 2.0
    assert values["staleness/mixed_versions"] == 0.5
    unsampled = replace(groups[0].trajectories[0], ending=failed_episode().ending)
    assert group_metrics([Group("g", "a", (unsampled,)), groups[1]], 3, GRPO)["staleness/mixed_versions"] == 1.0
