"""What evaluations amount to, and which checkpoint they make the best."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from msgspec.structs import replace

from learner.checkpoints.best import Best
from learner.metrics.episodes import RunResult, held_out_metrics, middle_half
from learner.metrics.evaluation import evaluation_metrics, pass_at_k
from learner.tickets.book import EvaluationResult
from shared.types import Ending, Group, Sample, Sampling, Ticket
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
