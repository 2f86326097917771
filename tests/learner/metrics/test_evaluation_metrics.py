"""What evaluations amount to, and which checkpoint they make the best."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from msgspec.structs import replace

from learner.checkpoints.best_checkpoint import Best
from learner.metrics.episode_metrics import RunResult, held_out_metrics, middle_half, rollout_metrics
from learner.metrics.evaluation_metrics import (
    compared,
    episode_means,
    estimates,
    evaluation_metrics,
    in_words,
    pass_at_k,
)
from learner.tickets.ticket_book import EvaluationResult
from shared.metrics import MAX_NAMES, ReportedMetrics
from shared.types import Ending, Group, Sample, Sampling, Ticket, Trajectory
from tests.support.wires import episode, failed_episode


def result_of(*samples: list[float]) -> EvaluationResult:
    """An evaluation: per sample, its episodes' success."""
    groups = []
    for i, successes in enumerate(samples):
        ticket = Ticket(f"e/{i}", Sample(str(i)), len(successes), 0, Sampling(), 60.0, evaluation="e")
        episodes = tuple(replace(episode(), metrics={"success": s}, ending=Ending.COMPLETED) for s in successes)
        groups.append((ticket, Group(ticket.id, "a", episodes)))
    return EvaluationResult("e", tuple(groups), {})


def test_pass_at_k_is_the_share_of_subsets_of_k_episodes_with_a_success():
    samples = ([1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0])
    values = pass_at_k(result_of(*samples))
    for k in (1, 2, 4):
        shares = [
            sum(map(any, subsets)) / len(subsets) for s in samples for subsets in [list(itertools.combinations(s, k))]
        ]
        assert values[f"pass@{k}"] == pytest.approx(sum(shares) / 3)
    assert values.keys() == {"pass@1", "pass@2", "pass@4"}


def test_one_episode_a_sample_has_no_pass_at_k_and_failed_episodes_do_not_count():
    assert pass_at_k(result_of([1.0], [0.0])) == {}
    result = result_of([1.0, 0.0, 0.0])
    ticket, group = result.groups[0]
    group = replace(group, trajectories=(*group.trajectories, failed_episode()))
    values = evaluation_metrics(dataclasses.replace(result, groups=((ticket, group),)))
    assert values["pass@1"] == pytest.approx(1 / 3) and values["pass@3"] == 1.0 and values["lost"] == 0.0


def test_the_best_evaluated_step_is_remembered_over_a_restart(tmp_path):
    best = Best.load(tmp_path)
    for step, value, improves in ((10, 0.5, True), (20, 0.4, False), (30, float("nan"), False), (40, 0.6, True)):
        best.candidate = step
        assert best.result(value) is improves and best.candidate == -1
    again = Best.load(tmp_path)
    assert (again.step, again.value) == (40, 0.6)
    assert json.loads((tmp_path / "best.json").read_text())["checkpoint"] == "step_00000040"
    assert not again.result(0.9)  # no step is a candidate


@pytest.mark.parametrize("reads", [1, 2, 3])
def test_the_new_best_checkpoint_is_kept_at_any_moment_of_becoming_it(tmp_path, monkeypatch, reads):
    """Another thread asks what is kept: between any two of the result's writes, and with them between its reads."""
    best, kept, since = Best(tmp_path / "best.json", step=10, value=0.5, candidate=20), [], []

    def written(self, name, value):
        object.__setattr__(self, name, value)
        kept.append(self.kept())

    with monkeypatch.context() as patch:
        patch.setattr(Best, "__setattr__", written)
        assert best.result(0.6)
    assert kept and all("step_00000020" in names for names in kept)

    best = Best(tmp_path / "best.json", step=10, value=0.5, candidate=20)

    def read(self, name):
        value = object.__getattribute__(self, name)
        if name in ("step", "candidate", "good"):
            since.append(name)
            if len(since) == reads:
                self.result(0.6)
        return value

    monkeypatch.setattr(Best, "__getattribute__", read)
    assert "step_00000020" in best.kept() and len(since) > reads


def test_every_metric_of_the_evaluations_before_and_after_is_in_the_result():
    read = {"success": 0.5, "read_accuracy": 0.25, "ending/completed": 1.0, "generate_s": 3.0}
    results = {
        "before": read,
        "after": {**read, "success": 0.75},
        "greedy_after": {"read_accuracy": 1 / 3},
        "step_5": read,
    }
    found = held_out_metrics(results)
    assert found == {
        "success_before": 0.5, "read_accuracy_before": 0.25, "success_after": 0.75, "read_accuracy_after": 0.25,
        "greedy_read_accuracy_after": 1 / 3,
    }  # fmt: skip
    result = RunResult(0.5, 0.75, 1.0, 2, 3, 4, 5, 6.0, 0.1, 0.2, held_out=found)
    line = result.as_dict()
    assert list(line)[:2] == ["success_before", "success_after"] and line["greedy_success_after"] is None
    assert line["read_accuracy_before"] == 0.25 and line["greedy_read_accuracy_after"] == 0.3333
    assert "held_out" not in line


def test_the_middle_half_of_a_run_leaves_its_first_and_last_quarter_out():
    assert middle_half([9.0, 9.0, 1.0, 2.0, 3.0, 4.0, -9.0, -9.0]) == 2.5
    assert middle_half([3.0]) == 3.0
    assert middle_half([]) is None


# ------------------------------------------------------------------ what an episode counts as that was cut off


def told(*episodes: tuple[Ending, dict[str, float], float]) -> list[Trajectory]:
    return [replace(episode(), ending=ending, metrics=metrics, reward=reward) for ending, metrics, reward in episodes]


DONE, CUT = Ending.COMPLETED, Ending.OUT_OF_TOKENS


def test_an_episode_without_success_is_none_where_others_have_it_whatever_it_earned():
    episodes = told((DONE, {"success": 1.0}, 1.0), (CUT, {"tool_used": 1.0}, 0.5), (CUT, {}, 0.5), (DONE, {}, 0.5))
    assert episode_means(episodes)["success"] == 0.25
    alone = told((CUT, {}, 0.5), (DONE, {}, 0.0))
    assert episode_means(alone)["success"] == 0.5  # no episode has the word: a positive reward is a success
    reported = ReportedMetrics()
    assert episode_means(episodes, reported)["success"] == 0.25
    assert episode_means(alone, reported)["success"] == 0.0  # the run has it


def test_pass_at_k_means_and_intervals_count_the_same_successes():
    result = result_of([1.0, 0.0], [0.0, 0.0])
    silent = [
        (
            ticket,
            replace(
                group, trajectories=tuple(replace(t, ending=CUT, metrics={}, reward=0.5) for t in group.trajectories)
            ),
        )
        for ticket, group in result.groups[1:]
    ]
    result = dataclasses.replace(result, groups=(*result.groups[:1], *silent))
    values, intervals = evaluation_metrics(result), estimates(result)
    assert values["success"] == values["pass@1"] == 0.25 and values["pass@2"] == 0.5
    assert {name: intervals[name].value for name in ("success", "pass@2")} == {"success": 0.25, "pass@2": 0.5}
    comparison = compared(result_of([1.0]), dataclasses.replace(result, groups=tuple(silent)))
    assert comparison is not None and comparison.better == 1  # the other policy was cut off and is no success


def test_shares_are_of_the_same_episodes():
    """But a share that does not apply to an episode with `success`, and values that are no shares, stay out."""
    episodes = told(
        (DONE, {"success": 1.0, "answered": 1.0, "success_long": 1.0, "moves": 12.0, "grade_s": 0.5}, 1.0),
        (CUT, {}, 0.5),
        (CUT, {"tool_used": 1.0}, 0.5),
        (DONE, {"success": 1.0, "answered": 1.0, "success_short": 1.0}, 1.0),
    )
    values = episode_means(episodes)
    expected = {"answered": 0.5, "success_long": 1 / 3, "success_short": 1 / 3, "moves": 12.0, "grade_s": 0.5}
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    quiet = told((DONE, {"answered": 1.0}, 1.0), (CUT, {}, 0.0), (DONE, {}, 0.0))
    assert episode_means(quiet)["answered"] == 0.5  # nobody has `success`: those that were cut off count


def test_the_endings_of_a_step_are_of_the_episodes_of_its_success():
    episodes = told(
        (DONE, {"success": 1.0}, 1.0), (DONE, {"success": 1.0}, 1.0), (Ending.MAX_TURNS, {"success": 0.0}, 0.0)
    )
    values = rollout_metrics([Group("g", "a", tuple(episodes))])
    assert values["rollout/ending/completed"] == values["rollout/success"] == pytest.approx(2 / 3)
    assert values["rollout/ending/max_turns"] == pytest.approx(1 / 3) and values["rollout/ending/env_error"] == 0.0


def test_a_new_name_in_every_episode_makes_no_endless_rows():
    episodes = told(*((DONE, {"success": 1.0, f"at_{i}": 2.0}, 1.0) for i in range(2 * MAX_NAMES)))
    reported = ReportedMetrics()
    values = episode_means(episodes, reported)
    assert values["success"] == 1.0 and sum(name.startswith("at_") for name in values) == MAX_NAMES - 1
    assert reported.left_out and len(reported.left_out) <= MAX_NAMES


def test_durations_are_not_compared():
    a, b = ({"success": 1.0, "generate_s": 1.0, "moves": 3.0}, {"success": 0.0, "generate_s": 9.0, "moves": 5.0})
    results = [
        dataclasses.replace(
            result_of([1.0]),
            groups=tuple((t, replace(g, trajectories=tuple(told((DONE, m, 0.0))))) for t, g in result_of([1.0]).groups),
        )
        for m in (a, b)
    ]
    comparison = compared(*results)
    assert comparison is not None and "generate_s" not in comparison.differences
    assert comparison.differences["moves"].value == -2.0


def test_the_best_step_stays_where_a_later_one_is_only_as_good(tmp_path):
    best = Best.load(tmp_path)
    for step, value in ((10, 0.5), (20, 0.5)):
        best.candidate = step
        best.result(value)
    assert (best.step, best.value) == (10, 0.5)


def of_task(result: EvaluationResult, task: str, held_out: str) -> EvaluationResult:
    """Return the result with samples of a task and a held-out set."""
    groups = tuple(
        (replace(ticket, sample=replace(ticket.sample, task=task, held_out=held_out)), group)
        for ticket, group in result.groups
    )
    return dataclasses.replace(result, groups=groups)


def test_each_held_out_set_has_metrics_of_its_own_with_intervals():
    easy, hard = of_task(result_of([1.0], [1.0]), "a", "easy"), of_task(result_of([0.0], [1.0]), "a", "hard")
    both = EvaluationResult("e", (*easy.groups, *hard.groups), {"env_error": 1})
    values = evaluation_metrics(both)
    assert (values["success"], values["sets/easy/success"], values["sets/hard/success"]) == (0.75, 1.0, 0.5)
    assert values["lost"] == 1.0 and "sets/easy/lost" not in values
    assert in_words(values, 5).endswith("(5 samples, 1 lost); success of easy 1.000, hard 0.500")
    found = estimates(both)
    assert found.keys() == values.keys() - {"lost"}
    assert found["sets/hard/success"].interval is not None
    kept = held_out_metrics({"after": values})
    assert (kept["success_after"], kept["sets/hard/success_after"]) == (0.75, 0.5)
    assert not [name for name in kept if "ending" in name]
    assert "sets/e/success" not in evaluation_metrics(result_of([1.0]))  # the only set has no name


def test_success_is_of_each_task_by_itself():
    """An environment without the metric is successful by its rewards, whatever other tasks report."""
    silent = tuple(replace(episode(reward=reward), metrics={}) for reward in (1.0, 0.0))
    telling = tuple(replace(episode(reward=0.0), metrics={"success": 1.0}) for _ in range(2))
    groups = [Group("0-n", "a", silent), Group("1-n", "a", telling)]
    values = rollout_metrics(groups, tasks=["a", "b"])
    assert (values["tasks/a/success"], values["tasks/b/success"], values["rollout/success"]) == (0.5, 1.0, 0.75)
    assert (values["tasks/a/share"], values["tasks/a/without_variance"]) == (0.5, 0.0)
    assert values["tasks/b/without_variance"] == 1.0
    assert rollout_metrics(groups)["rollout/success"] == 0.5  # as one task
    assert not [name for name in rollout_metrics(groups) if name.startswith("tasks/")]
    parts = [
        of_task(EvaluationResult("e", ((ticket("x"), group),), {}), task, task)
        for task, group in zip("ab", groups, strict=True)
    ]
    evaluated = evaluation_metrics(EvaluationResult("e", (*parts[0].groups, *parts[1].groups), {}))
    assert (evaluated["sets/a/success"], evaluated["sets/b/success"], evaluated["pass@2"]) == (0.5, 1.0, 1.0)


def ticket(ticket_id: str) -> Ticket:
    return Ticket(ticket_id, Sample("s"), 2, 0, Sampling(), 60.0, evaluation="e")
