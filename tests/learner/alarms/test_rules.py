"""Each of ten staged failures raises its own alarm and no other critical one; a healthy run raises none.

Real: the learner's own trainer makes the metrics, on small problems whose episodes fail in the way that is meant.
Edited: metrics of a real run of `make train` (tests/data/alarms) in which the numbers that are known to show the
failure, and no others, are what they would be.
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from learner.alarms.alarm_records import Alarm
from learner.alarms.alarm_replay import read_steps, recipe_of, replay
from learner.alarms.judge import Judge
from learner.alarms.rules import RULES
from learner.distributed import Ranks
from learner.guards.variance import VarianceGuard
from learner.metrics.episode_metrics import rollout_metrics
from learner.training.trainer import Trainer
from shared.types import Ending, Group, Trajectory
from tests.support import healthy_run
from tests.support.episodes import learner_config
from tests.support.small.policy import SmallPolicy
from tests.support.small.problems import PROBLEMS, UNTEACHABLE, Problem
from tests.support.small.runs import EPISODES, play

HEALTHY = Path("tests/data/alarms")  # made of a run by tests/support/healthy_run.py
Row = dict[str, float | None]
Raised = dict[str, str]  # rule -> level


def judged(recipe: dict[str, Any], rows: Iterable[Row]) -> Raised:
    """All that was raised at some step."""
    judge = Judge.of(recipe)
    changes = [change for step, row in enumerate(rows, 1) for change in judge.step(step, row)]
    return {change.rule.name: change.rule.level for change in changes if change.raised}


def healthy() -> list[Row]:
    return list(read_steps(HEALTHY / "metrics.jsonl").values())


def trained(
    problem: Problem,
    ranks: Ranks,
    *,
    steps: int = 30,
    plays: Callable[[SmallPolicy, int], Any] = lambda policy, _: policy,
    changed: Callable[[Trajectory, int, int], Trajectory] = lambda episode, *_: episode,
    problem_at: Callable[[int], Problem] | None = None,
    spread: float = 0.0,
    **settings: Any,
) -> Iterable[Row]:
    """Metrics of a run, step by step. `plays`: which policy plays at a step; `changed`: what becomes of an episode, by
    its number and step; a policy that is not the trained one is of version 0."""
    fields = {"lr": 1e-3, "value_lr": 5e-2, "group_size": 1, "total_steps": steps, **settings}
    config, rng = learner_config(**fields), np.random.default_rng(1)
    policy = SmallPolicy(problem.num_actions, 1, spread)
    trainer = Trainer(policy, config, ranks)  # type: ignore[arg-type]
    guard = VarianceGuard(config, trainer.guard)
    for step in range(steps):
        player = plays(policy, step)
        version = 0 if isinstance(player, SmallPolicy) and player is not policy else step
        episodes, _ = play(player, problem_at(step) if problem_at else problem, EPISODES, version, rng)
        episodes = [changed(t, number, step) for number, t in enumerate(episodes)]
        groups = [Group(f"{step}-{i}", "a", (t,)) for i, t in enumerate(episodes)]
        row = rollout_metrics(groups) | trainer.step(groups, step)
        guard.step(groups)
        yield row | {
            "guard/steps_without_variance": float(guard.num_steps),
            "staleness/token/mean": float(step - version),
        }


# ------------------------------------------------------------------ real


class InBfloat16:
    """An engine that computes the same weights in another dtype."""

    def __init__(self, policy: SmallPolicy) -> None:
        self._policy = deepcopy(policy).bfloat16()

    def logprobs(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._policy.logprobs(tokens).float().log_softmax(-1)


def failed(episode: Trajectory, ending: Ending) -> Trajectory:
    """As an actor reports an episode that ended so."""
    return replace(episode, ending=ending, reward=0.0, turns=(), error="of the test")


def test_a_healthy_small_run_raises_none(ranks: Ranks) -> None:
    assert judged({}, trained(PROBLEMS["corridor"], ranks, steps=62)) == {}


def test_an_engine_in_another_dtype_raises_its_own_alarm(ranks: Ranks) -> None:
    rows = trained(PROBLEMS["lock"], ranks, plays=lambda policy, _: InBfloat16(policy), steps=3, spread=1.5)
    assert raised_alone(judged({}, rows), "engine_gap")


def test_a_collapse_of_entropy_raises_its_own_alarm(ranks: Ranks) -> None:
    """Where every answer earns the same but for noise, a bonus on low entropy makes the policy give one answer."""
    settings = {"entropy_coef": -0.3, "lr": 1e-2}
    rows = trained(UNTEACHABLE["noise"], ranks, steps=60, **settings)
    assert raised_alone(judged({}, rows), "entropy_collapse")


def test_rewards_that_are_all_equal_raise_their_own_alarm(ranks: Ranks) -> None:
    assert raised_alone(judged({}, trained(UNTEACHABLE["constant"], ranks, steps=22)), "no_reward_variance")


def test_a_gradient_that_explodes_raises_its_own_alarm(ranks: Ranks) -> None:
    """From step 20 on the rewards are a thousand times as large."""
    problem = PROBLEMS["ten_arms"]
    large = with_fields(problem, means=tuple(1e3 * mean for mean in problem.means))
    rows = trained(problem, ranks, problem_at=lambda step: large if step >= 20 else problem)
    assert raised_alone(judged({}, rows), "exploding_gradient")


def test_a_critic_that_explains_nothing_raises_its_own_alarm(ranks: Ranks) -> None:
    """The returns are noise, which no critic can know."""
    assert raised_alone(judged({}, trained(UNTEACHABLE["noise"], ranks, steps=80)), "critic_explains_nothing")


def test_an_environment_that_fails_raises_its_own_alarm(ranks: Ranks) -> None:
    """In every eighth episode."""
    rows = trained(
        PROBLEMS["corridor"], ranks, changed=lambda t, n, _: failed(t, Ending.ENV_ERROR) if n % 8 == 0 else t, steps=8
    )
    assert raised_alone(judged({}, rows), "environment_failing")


def test_truncation_raises_its_own_alarm(ranks: Ranks) -> None:
    """A third of the episodes meet the token limit."""

    def cut_off(episode: Trajectory, number: int, _step: int) -> Trajectory:
        return replace(episode, ending=Ending.OUT_OF_TOKENS) if number % 3 == 0 else episode

    assert raised_alone(judged({}, trained(PROBLEMS["corridor"], ranks, changed=cut_off, steps=14)), "truncation")


def raised_alone(raised: Raised, name: str) -> bool:
    """Whether this alarm was raised and no other critical one."""
    assert name in raised, raised
    return [other for other, level in raised.items() if level == "critical" and other != name] == []


# ------------------------------------------------------------------ edited


def edited(**values: float) -> list[Row]:
    """The healthy run with these metrics instead of its own; `__` stands for a slash."""
    return [row | {name.replace("__", "/"): value for name, value in values.items()} for row in healthy()]


def test_an_engine_that_is_starved_raises_its_own_alarm() -> None:
    """Engines on GPUs of their own that mostly stand still, while the learner's queue is full."""
    recipe = recipe_of(HEALTHY)
    recipe["engine"]["device"] = "cuda"
    assert raised_alone(judged(recipe, edited(actors__idle_frac=0.85)), "engine_starved")


def test_an_engine_that_is_left_at_an_old_version_raises_its_own_alarm() -> None:
    assert judged(recipe_of(HEALTHY), edited(tickets__stale=3.0)) == {"stale_groups": "warning"}


def test_rewards_that_hardly_differ_raise_their_own_alarm_and_equal_ones_do_not() -> None:
    rows = edited(optim__rate=0.3, groups__without_variance=0.2)
    assert judged(recipe_of(HEALTHY), rows) == {"rewards_are_noise": "warning"}
    mixed = [row | {"optim/rate": float(number % 4 == 0)} for number, row in enumerate(rows)]
    assert judged(recipe_of(HEALTHY), mixed) == {}


def test_a_policy_that_no_longer_looks_raises_its_own_alarm() -> None:
    rows = [row | {"vision/image_gain": 0.5 if number < 30 else 0.1} for number, row in enumerate(edited())]
    assert judged(recipe_of(HEALTHY), rows) == {"images_ignored": "warning"}
    now_and_then = [row if n % 10 else row | {"vision/image_gain": 0.0} for n, row in enumerate([*edited(), *edited()])]
    assert judged(recipe_of(HEALTHY), now_and_then)["images_ignored"] == "warning"


def test_a_policy_that_writes_one_symbol_raises_its_own_alarm() -> None:
    assert raised_alone(
        judged(recipe_of(HEALTHY), edited(text__one_token=0.97, text__repeated=0.95)), "text_degenerates"
    )


def test_a_learner_that_is_starved_raises_its_own_alarm() -> None:
    rows = edited(learner__idle_frac=0.8, queue__ready_groups=3.0)
    assert raised_alone(judged(recipe_of(HEALTHY), rows), "learner_starved")


# ------------------------------------------------------------------ rules


def test_a_healthy_run_of_make_train_raises_none() -> None:
    rows = healthy()
    assert len(rows) >= 180
    assert judged(recipe_of(HEALTHY), rows) == {}


def test_the_folder_that_is_made_of_a_run_raises_what_the_run_raises(tmp_path: Path) -> None:
    """The same alarms at the same steps, of rules on single steps and on long series, and nothing else of the run."""
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(HEALTHY / "recipe.json", run)
    rows = [
        row | {"step": step, "other/metric": 1.0, "policy/clip_fraction": 0.9 if step > 15 else 0.1234567890123}
        for step, row in enumerate(edited(value__explained_variance=1e-3, behaviour__kl=None)[:120], 1)
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "damaged\n")
    healthy_run.make(run, tmp_path / "made")
    (judge, found), (judge_made, found_made) = replay(run), replay(tmp_path / "made")
    assert [rule.name for rule in judge.raised] == [rule.name for rule in judge_made.raised]
    assert {alarm.rule for alarm in found} >= {"policies_apart", "critic_explains_nothing"} and len(found) >= 3
    assert [(alarm.step, alarm.rule, alarm.level) for alarm in found_made] == [
        (alarm.step, alarm.rule, alarm.level) for alarm in found
    ]
    made = (tmp_path / "made/metrics.jsonl").read_text()
    assert "other/metric" not in made and '"policy/clip_fraction": 0.1234568,' in made
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(row | {"step": n}) + "\n" for n in range(600) for row in rows[:1])
    )
    with pytest.raises(ValueError, match="600 steps take"):
        healthy_run.make(run, tmp_path / "long")


def test_every_metric_of_a_rule_stands_in_the_catalogue_and_every_ending_exists() -> None:
    catalogue = tomllib.loads(Path("learner/metrics/catalogue.toml").read_text(encoding="utf-8"))
    known = [re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(name)) for section in catalogue.values() for name in section]
    asked = {metric for rule in RULES for metric in rule.metrics}
    assert [name for name in asked if not any(re.fullmatch(pattern, name) for pattern in known)] == []
    assert {ending for rule in RULES for ending in rule.endings} <= {ending.value for ending in Ending}


def test_episodes_that_fail_in_any_way_raise_an_alarm_that_names_their_most_frequent_ending() -> None:
    """No single ending is above its own limit."""
    judge, row = Judge.of({}), {f"rollout/ending/{name}": 0.02 for name in ("env_error", "engine_error", "aborted")}
    row |= {"rollout/ending/wire_error": 0.04, "rollout/failed": 0.10}
    (change,) = [change for step in range(6) for change in judge.step(step, row)]
    line = Alarm.of(change).line()
    assert "episodes_failing" in line and "(rollout/failed 0.1, rollout/ending/wire_error 0.04)" in line
    (over,) = [change for step in range(6, 12) for change in judge.step(step, row | {"rollout/failed": 0.01})]
    assert not over.raised


def test_a_rule_is_raised_after_so_many_steps_and_over_after_as_many() -> None:
    judge = Judge.of({})
    high, low = {"policy/clip_fraction": 0.9}, {"policy/clip_fraction": 0.1}
    seen = [judge.step(step, row) for step, row in enumerate([high] * 9 + [low] + [high] * 30 + [low] * 20)]
    changes = [(change.step, change.raised) for found in seen for change in found]
    assert changes == [(19, True), (49, False)]


def test_a_step_that_does_not_tell_a_metric_counts_neither_way() -> None:
    judge = Judge.of({})
    rows = [{"policy/clip_fraction": 0.9}, {}] * 10
    assert [c.step for step, row in enumerate(rows) for c in judge.step(step, row)] == [18]


def test_an_alternative_that_is_told_now_and_then_is_meanwhile_what_it_was() -> None:
    """The canary's gap is told after a publication that is proven, the other one in every step."""
    judge = Judge.of({})
    gaps = [1.0] * 3 + [0.0] * 2
    told = [{} if step % 4 else {"publish/canary_gap": gaps[step // 4]} for step in range(20)]
    rows = [{"behaviour/engine_gap": 0.0} | values for values in told]
    changes = [(change.step, change.raised) for step, row in enumerate(rows) for change in judge.step(step, row)]
    assert changes == [(4, True), (13, False)]


def test_checkpoints_that_are_written_again_end_their_alarm() -> None:
    judge = Judge.of({})
    rows = [{"checkpoint/failed_in_a_row": float(value)} for value in (0, 1, 2, 0, 0, 1)]
    changes = [(change.step, change.raised) for step, row in enumerate(rows) for change in judge.step(step, row)]
    assert changes == [(1, True), (3, False), (5, True)]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_what_is_not_finite_is_above_a_limit(value: float | None) -> None:
    rows: list[Row] = [{"behaviour/kl": value}] * 5
    assert judged({}, rows) == {"policies_apart": "critical"}
