"""What episodes amount to: metrics of a batch and of the whole run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from learner.guards.variance import varies
from learner.metrics.evaluation import episode_means
from learner.metrics.tokens import lag_name
from shared.learner_config import LearnerConfig
from shared.types import Group, PolicyVersion

RESULT = "result.json"  # in the run's folder


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


def has_result(run_dir: Path, steps: int) -> bool:
    """Whether a run's result.json is that of a training of so many steps, its last evaluation included."""
    try:
        found = json.loads((run_dir / RESULT).read_text())
        return isinstance(found, dict) and found.get("optimizer_steps") == steps
    except (OSError, ValueError, RecursionError):
        return False


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
