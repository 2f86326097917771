"""Of each evaluation the episodes are recorded that a person wants to see."""

from __future__ import annotations

import shutil
from pathlib import Path

from msgspec.structs import replace

from learner.recording.recorded_columns import watch
from learner.recording.recorder import Recorder
from learner.replay import replay
from learner.tickets.ticket_records import EvaluationResult
from shared.config.recipe import Recipe
from shared.config.sections import RecordConfig
from shared.recordings.reader import RecordingId, read_step, recordings, steps
from shared.types import Sampling
from tests.support.episodes import random_groups
from tests.support.machine import until
from tests.support.small.recorder import folder_of, recipe, ticket_of

__all__ = ["recipe"]  # a fixture


def evaluated(recipe: Recipe, spec, rewards: list[float], temperature: float = 1.0) -> EvaluationResult:
    """A result whose i-th sample was played twice for that reward each."""
    found = []
    for i, (group, reward) in enumerate(zip(random_groups(spec, len(rewards), group_size=2), rewards, strict=True)):
        trajectories = tuple(
            replace(t, reward=reward, metrics={"success": float(reward > 0)}) for t in group.trajectories
        )
        group = replace(group, ticket_id=f"step_5/{i}-ab", trajectories=trajectories)
        sampling = Sampling(temperature, 1.0, -1, 32)
        found.append((replace(ticket_of(group), version=7, evaluation="step_5", sampling=sampling), group))
    return EvaluationResult("step_5", tuple(found), {})


def test_the_worst_episodes_of_an_evaluation_are_recorded_and_a_few_of_the_best(recipe, spec, ranks, monkeypatch):
    monkeypatch.setattr("learner.recording.recorder.RECORDED_EVALUATIONS", 8)
    made = recipe(RecordConfig(every=10))
    recorder = Recorder(made, spec)
    result = evaluated(made, spec, [1.0, -1.0, 0.5, -2.0, -0.5, 2.0], temperature=0.0)
    recorder.evaluation("step_5", 5, result, {"success": 0.5, "unknown": float("nan")})
    recorder.close(60)
    assert recordings(folder_of(made)) == [RecordingId(5, "step_5")] and steps(folder_of(made)) == []
    path = RecordingId(5, "step_5").path(folder_of(made))
    read = read_step(path)
    header = read.header
    assert (header.step, header.version, header.evaluation, header.played) == (5, 7, "step_5", 12)
    assert header.metrics == {"success": 0.5} and header.columns == ()
    expected = [
        f"step_5/{i}-ab/{j}" for i in (1, 3, 4, 5) for j in range(2)
    ]  # of 2.0 the best, of the others the worst
    assert [summary.id for summary in read.summaries] == expected
    assert not any(summary.trained for summary in read.summaries)
    episode = read.episode(read.summaries[0])
    assert (episode.seed, episode.label, episode.columns) == (17, "4", {})
    assert replay(path, ranks).mismatch.episodes == 8  # greedy ones too: their logprobs are of temperature 1


def test_an_evaluation_as_small_as_the_bound_is_recorded_whole_and_none_where_none_is_wanted(recipe, spec, monkeypatch):
    for bound, every, expected in ((4, 10, 4), (1, 10, 2), (4, 0, 0)):  # groups stay whole
        monkeypatch.setattr("learner.recording.recorder.RECORDED_EVALUATIONS", bound)
        made = recipe(RecordConfig(every=every))
        recorder = Recorder(made, spec)
        recorder.evaluation("before", 0, evaluated(made, spec, [1.0, -1.0]), {})
        recorder.evaluation("nothing", 0, EvaluationResult("nothing", (), {"env_error": 3}), {})
        recorder.close(60)
        assert recorder.metrics()["record/episodes"] == expected and recorder.metrics()["record/dropped"] == 0
        assert recordings(folder_of(made)) == ([RecordingId(0, "before")] if expected else [])
        shutil.rmtree(folder_of(made), ignore_errors=True)


def test_recordings_of_evaluations_go_with_those_of_their_time(recipe, spec):
    made = recipe(RecordConfig(every=1, max_gb=60e-6))
    recorder, groups = Recorder(made, spec), random_groups(spec, 4, turns=2, sides=(64,))
    for step in range(1, 5):
        done = recorder.metrics()["record/episodes"]
        recorder.step(step, 0, [groups[step - 1]], watched=watch([groups[step - 1]], step, made.record))
        recorder.evaluation(f"step_{step}", step, evaluated(made, spec, [0.0]), {})
        until(lambda done=done: recorder.metrics()["record/episodes"] == done + 3)
    recorder.close(60)
    kept = recordings(folder_of(made))
    assert kept == [place for n in range(1, 5) for place in (RecordingId(n), RecordingId(n, f"step_{n}"))][-len(kept) :]
    assert 1 < len(kept) < 8
    shown = {ref.file_name for place in kept for ref in _images(place.path(folder_of(made)))}
    assert {path.name for path in (folder_of(made) / "images").iterdir()} == shown


def _images(path: Path) -> list:
    read = read_step(path)
    return [ref for summary in read.summaries for ref in read.episode(summary).images]
