"""What episodes amount to: metrics of a batch, of an evaluation, and of the whole run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import comb

import numpy as np

from learner.guards.variance import varies
from learner.metrics.tokens import lag_name
from learner.tickets.book import EvaluationResult
from shared.learner_config import LearnerConfig
from shared.metrics import means
from shared.types import TRAINABLE_ENDINGS, Group, PolicyVersion, Trajectory


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Means over the episodes of a batch, the environment's own metrics among them, and the share of each ending."""
    episodes = [t for group in groups for t in group.trajectories]
    return {f"rollout/{name}": value for name, value in episode_means(episodes).items()}


def group_metrics(groups: Sequence[Group], version: PolicyVersion, config: LearnerConfig) -> dict[str, float]:
    """What the step's groups had to teach; `version` is the policy's that is trained.

    `groups/without_variance`: share of groups whose trainable episodes all earned the same. With one episode a group
    the step's episodes are compared instead, and it is 0 or 1.
    """
    episodes = [t for group in groups for t in group.trajectories if t.trainable]
    if not episodes:
        return {}
    if config.group_size == 1:
        equal = [not varies(groups, config)]
    else:
        equal = [not varies([group], config) for group in groups if any(t.trainable for t in group.trajectories)]
    mixed, by_lag = [], dict[str, list[float]]()
    for t in episodes:
        versions = t.policy_versions[t.loss_mask == 1]
        mixed.append(bool((versions != versions[0]).any()))
        by_lag.setdefault(lag_name(version - int(versions.min())), []).append(t.reward)
    values = {f"rollout/reward/lag_{lag}": sum(earned) / len(earned) for lag, earned in by_lag.items()}
    values["groups/without_variance"] = sum(equal) / len(equal)
    values["staleness/mixed_versions"] = sum(mixed) / len(mixed)
    return values


def evaluation_metrics(result: EvaluationResult) -> dict[str, float]:
    """Means over the evaluation's episodes, and how many tickets brought nothing."""
    values = episode_means(t for _, group in result.groups for t in group.trajectories)
    return {**values, **pass_at_k(result), "lost": float(sum(result.lost.values()))}


def in_words(values: dict[str, float], num_samples: int) -> str:
    """What `evaluation_metrics` says, in one line."""
    numbers = "  ".join(f"{key} {values[key]:.3f}" for key in ("success", "reward", "turns") if key in values)
    lost = f", {values['lost']:.0f} lost" if values["lost"] else ""
    lost += f", {100 * values['failed']:.0f} % failed" if values.get("failed") else ""
    return f"{numbers} ({num_samples} samples{lost})"


def pass_at_k(result: EvaluationResult) -> dict[str, float]:
    """`pass@k` for k = 1, 2, 4, ... and all: the chance that one of k episodes of a sample succeeds, mean over samples.

    Of n episodes with c successes it is 1 - C(n-c, k) / C(n, k) (Chen et al., 2021, equation 1), without bias. Samples
    with fewer than k sound episodes are left out; empty where every sample is played once.
    """
    counts = []
    for _, group in result.groups:
        sound = [_success(t) > 0 for t in group.trajectories if t.ending in TRAINABLE_ENDINGS]
        counts.append((len(sound), sum(sound)))
    most = max((n for n, _ in counts), default=0)
    if most < 2:
        return {}
    ks = sorted({most, *(2**i for i in range(most.bit_length()) if 2**i <= most)})
    chances = {k: [1 - comb(n - c, k) / comb(n, k) for n, c in counts if n >= k] for k in ks}
    return {f"pass@{k}": sum(values) / len(values) for k, values in chances.items()}


def _success(t: Trajectory) -> float:
    return float(t.metrics.get("success", float(t.reward > 0)))


def episode_means(episodes: Iterable[Trajectory]) -> dict[str, float]:
    """Means over the episodes that did not fail, the share `failed` of those that did, and the share of each ending.
    `success` is the environment's metric of that name, or 1 for a positive reward where it has none."""
    episodes = list(episodes)
    if not episodes:
        return {}
    rows = []
    for t in episodes:
        if t.ending not in TRAINABLE_ENDINGS:
            continue
        rows.append({**t.metrics, "success": _success(t), "reward": t.reward, "turns": len(t.turns)})
        rows[-1]["model_tokens"] = float(np.count_nonzero(t.loss_mask))
    endings = Counter(t.ending.value for t in episodes)
    shares = {f"ending/{ending}": count / len(episodes) for ending, count in endings.items()}
    return means(rows) | shares | {"failed": 1 - len(rows) / len(episodes)}


@dataclass(frozen=True, slots=True)
class RunResult:
    """The last line of a run. Success is a share of held-out samples; `minutes` run from first ticket to last step."""

    success_before: float | None
    success_after: float | None
    minutes: float
    episodes: int
    optimizer_steps: int
    policy_versions: int
    max_staleness_seen: int
    turns_per_second: float
    learner_idle_frac: float
    actor_idle_frac: float
    greedy_success_before: float | None = None
    greedy_success_after: float | None = None
    explained_variance: float | None = None  # mean over the middle half of the steps; None without a critic
    held_out: Mapping[str, float] = field(default_factory=dict)  # every other metric of the evaluations, by its name

    def as_dict(self) -> dict[str, float | int | None]:
        own = asdict(self)
        held_out = own.pop("held_out")
        values = own | {name: value for name, value in held_out.items() if name not in own}
        return {name: round(v, 4) if isinstance(v, float) else v for name, v in values.items()}


def held_out_metrics(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """What the evaluations `before` and `after`, sampled and greedy, say about the policy: NAME_before, NAME_after,
    greedy_NAME_before, greedy_NAME_after for every metric of an evaluation, the environment's own among them. The
    shares of endings and what took seconds are left to metrics.jsonl."""
    return {
        f"{prefix}{name}_{when}": value
        for when in ("before", "after")
        for prefix in ("", "greedy_")
        for name, value in results.get(prefix + when, {}).items()
        if "/" not in name and not name.endswith("_s")
    }


def middle_half(values: Sequence[float]) -> float | None:
    """The mean of a run's values from its second and third quarter; None if there are none."""
    quarter = len(values) // 4
    chosen = values[quarter : len(values) - quarter]
    return sum(chosen) / len(chosen) if chosen else None
