"""Metrics of a batch's episodes, and the summary of the whole run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from learner.batch.episodes import compared_returns, episode_rewards, has_variance
from learner.metrics.evaluation_metrics import SETS, episode_means
from learner.metrics.text_metrics import text_metrics
from learner.metrics.token_metrics import lag_name
from learner.objective.advantages import most_varying
from shared.config.learner_section import LearnerConfig
from shared.metrics import ReportedMetrics
from shared.types import Ending, Group, PolicyVersion

RESULT = "result.json"  # in the run's folder


def rollout_metrics(
    groups: Sequence[Group], reported: ReportedMetrics | None = None, tasks: Sequence[str] = ()
) -> dict[str, float]:
    """Return means over the episodes of a batch, including the environment's own metrics, and the share of each ending
    (0 for those that did not occur). `reported`: what the run's earlier episodes have reported. `tasks`: the task of
    each group, in a run of several."""
    reported = reported or ReportedMetrics()
    episodes = [t for group in groups for t in group.trajectories]
    of_episodes = [task for group, task in zip(groups, tasks, strict=True) for _ in group.trajectories] if tasks else []
    values = episode_means(episodes, reported, of_episodes)
    if episodes:
        values = {f"ending/{ending.value}": 0.0 for ending in Ending} | values
    return {f"rollout/{name}": value for name, value in values.items()} | task_metrics(groups, tasks, reported)


def task_metrics(groups: Sequence[Group], tasks: Sequence[str], reported: ReportedMetrics) -> dict[str, float]:
    """Return, for each task that a batch has groups of, the means over its episodes, its share of the batch's groups,
    and the share of its groups whose episodes all earned the same. Nothing for a run of one task."""
    values: dict[str, float] = {}
    for name in dict.fromkeys(task for task in tasks if task):
        own = [group for group, task in zip(groups, tasks, strict=True) if task == name]
        episodes = [t for group in own for t in group.trajectories]
        means = episode_means(episodes, reported, [name] * len(episodes))
        means = {key: value for key, value in means.items() if "/" not in key}
        rewards = [{t.reward for t in group.trajectories if t.trainable} for group in own]
        means["without_variance"] = sum(len(each) < 2 for each in rewards) / len(own)
        means["share"] = len(own) / len(groups)
        values |= {f"tasks/{name}/{key}": value for key, value in means.items()}
    return values


def group_metrics(groups: Sequence[Group], version: PolicyVersion, config: LearnerConfig) -> dict[str, float]:
    """Return metrics of how much the step's groups can teach. `version`: that of the policy that is trained.

    `groups/without_variance`: share of groups whose trainable episodes all earned the same reward. With one episode per
    group, the step's episodes are compared instead, and it is 0 or 1.
    """
    episodes = [t for group in groups for t in group.trajectories if t.trainable]
    if not episodes:
        return {}
    if config.group_size == 1:
        equal = [not has_variance(groups, config)]
    else:
        equal = [not has_variance([group], config) for group in groups if any(t.trainable for t in group.trajectories)]
    mixed, by_lag = [], dict[str, list[float]]()
    for t in episodes:
        versions = t.policy_versions[t.loss_mask == 1]
        mixed.append(bool((versions != versions[0]).any()))
        by_lag.setdefault(lag_name(version - int(versions.min())), []).append(t.reward)
    values = {f"rollout/reward/lag_{lag}": sum(earned) / len(earned) for lag, earned in by_lag.items()}
    values["groups/without_variance"] = sum(equal) / len(equal)
    values |= text_metrics(episodes)
    if config.objective.keep_variance < 1:
        rewards = [episode_rewards(group, config.objective) for group in groups]
        values["groups/kept"] = len(most_varying(rewards, config.objective.keep_variance)) / len(groups)
    if config.objective.has_turn_advantages:
        num_compared = sum(len(r) for group in groups for r in compared_returns(group, config.objective))
        values["groups/turns_compared"] = num_compared / sum(len(t.turns) for t in episodes)
    values["staleness/mixed_versions"] = sum(mixed) / len(mixed)
    return values


@dataclass(frozen=True, slots=True)
class RunResult:
    """The summary of a run. Success is a share of held-out samples; `minutes` count from the first ticket to the last
    step."""

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
    held_out: Mapping[str, float] = field(default_factory=dict)  # all other metrics of the evaluations, by name

    def as_dict(self) -> dict[str, float | int | None]:
        own = asdict(self)
        held_out = own.pop("held_out")
        values = own | {name: value for name, value in held_out.items() if name not in own}
        return {name: round(v, 4) if isinstance(v, float) else v for name, v in values.items()}


def has_result(run_dir: Path, steps: int) -> bool:
    """Tell whether a run's result.json belongs to a training of `steps` steps, including its last evaluation."""
    try:
        result = json.loads((run_dir / RESULT).read_text())
        return isinstance(result, dict) and result.get("optimizer_steps") == steps
    except (OSError, ValueError, RecursionError):
        return False


def held_out_metrics(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the results of the evaluations `before` and `after`, sampled and greedy, for every metric, including the
    environment's own.

    Names are NAME_before, NAME_after, greedy_NAME_before and greedy_NAME_after. Shares of endings and durations are
    left out; metrics.jsonl has them. Those of a held-out set have its name: sets/SET/NAME_after.
    """
    return {
        f"{prefix}{name}_{when}": value
        for when in ("before", "after")
        for prefix in ("", "greedy_")
        for name, value in results.get(prefix + when, {}).items()
        if "/" not in re.sub(rf"^{SETS}/[^/]+/", "", name) and not name.endswith("_s")
    }


def middle_half(values: Sequence[float]) -> float | None:
    """Return the mean of a run's values in its second and third quarter; None without values."""
    quarter = len(values) // 4
    chosen = values[quarter : len(values) - quarter]
    return sum(chosen) / len(chosen) if chosen else None
