"""A learner records what it trained on and what failed, in a thread whose troubles end no run; and replays it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from msgspec.structs import replace

from learner.checkpoints.saver import Saver
from learner.model.policy import load_policy
from learner.recording.recorded_columns import watch
from learner.recording.recorder import QUEUED, Recorder
from learner.replay import objective_of, replay, tell
from learner.training.trainer import Trainer
from shared.config.recipe import Recipe
from shared.config.sections import RecordConfig
from shared.log import get_logger
from shared.recordings.episode_format import StepHeader
from shared.recordings.reader import RecordingError, read_image, read_step, steps
from shared.types import Ending, Group, Image, TurnNote
from tests.support.checkpoints import save
from tests.support.episodes import joined, on_policy, random_groups, random_trajectory
from tests.support.machine import until
from tests.support.small.recorder import folder_of, recipe, ticket_of

__all__ = ["recipe"]  # a fixture


@pytest.fixture
def trainer(folder, spec, ranks):
    return lambda recipe: Trainer(load_policy(str(folder), spec), recipe.learner, ranks)


def trained(recipe: Recipe, trainer: Trainer, groups: list[Group], **more) -> Recorder:
    """A recorder that has written the first step, on these groups."""
    recorder, watched = Recorder(recipe, trainer.decoder.spec), watch(groups, 1, recipe.record)
    trainer.step(groups, 0, watched)
    recorder.step(1, 0, groups, [ticket_of(group) for group in groups], watched, **more)
    recorder.close(60)
    return recorder


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective",
    [
        {},
        {"vtrace_level": "turn", "critic_width": 8},
        {"objective": "grpo"},
        {"objective": "ppo", "proximal": "learner", "mask_token_ratio": (0.9, 1.1)},
    ],
)
def test_what_is_recorded_is_what_a_replay_computes_and_the_gap_is_the_engines(recipe, trainer, spec, ranks, objective):
    made = recipe(RecordConfig(every=1, groups=2), **objective)
    learner = trainer(made) if "critic_width" not in objective else None
    if learner is None:
        learner = Trainer(load_policy(made.model.path, spec, 8), made.learner, trainer(recipe()).ranks)
    groups = random_groups(spec, 3, group_size=2, turns=2)
    noisy = [on_policy(learner.policy, t, noise=0.1) for group in groups for t in group.trajectories]
    groups = [replace(group, trajectories=tuple(noisy[2 * i : 2 * i + 2])) for i, group in enumerate(groups)]
    trained(made, learner, groups)
    (path,) = steps(folder_of(made))
    read = read_step(path)
    assert [summary.id for summary in read.summaries] == ["g0/0", "g0/1", "g1/0", "g1/1"]
    assert all(summary.trained for summary in read.summaries)
    assert ("value" in read.header.columns) == (not made.learner.objective.is_group_relative)
    found = replay(path, ranks)
    assert (
        found.verdict().startswith("NOT the same model: ")
        and "at version 0, expected at most 0.0001" in found.verdict()
    )
    critic = {"value", "target", "advantage"} if objective.get("critic_width") else set()  # its weights were random
    assert set(found.mismatch.recorded) == set(read.header.columns)
    assert max(gap for name, gap in found.mismatch.recorded.items() if name not in critic) < 1e-4
    expected = [s.mean_gap * s.tokens for s in read.summaries]
    assert found.mismatch.gap.total == pytest.approx(sum(expected), rel=1e-4)
    assert 0.01 < found.mismatch.gap.largest < 1
    assert sum(gap.tokens for gap in found.mismatch.by_turn.values()) == found.mismatch.gap.tokens
    assert list(found.mismatch.by_turn) == [1, 2] and list(found.mismatch.by_version) == [0]
    gaps = [token.gap for token in found.mismatch.worst]
    assert gaps == sorted(gaps, reverse=True) and gaps[0] == pytest.approx(found.mismatch.gap.largest, abs=1e-6)


@pytest.mark.slow
def test_episodes_of_several_segments_are_recorded_and_replayed_as_they_are(recipe, trainer, spec, ranks):
    made = recipe(RecordConfig(every=1, groups=2))
    learner = trainer(made)
    parts = [random_trajectory(spec, seed, turns=2) for seed in range(3)]
    episode = on_policy(learner.policy, joined(parts))
    trained(made, learner, [Group("g0", "tester", (episode,))])
    (path,) = steps(folder_of(made))
    read = read_step(path)
    recorded = read.episode(read.summaries[0])
    assert recorded.segments == episode.segments and len(recorded.segments) == 2
    found = replay(path, ranks)
    assert found.verdict().startswith("the same model") and found.mismatch.gap.largest < 1e-4
    assert max(found.mismatch.recorded.values()) < 1e-4


@pytest.mark.slow
def test_a_replay_with_a_checkpoint_uses_its_weights(recipe, trainer, spec, ranks, tmp_path, capsys):
    made = recipe()
    learner = trainer(made)
    groups = random_groups(spec, 2)
    trained(made, learner, groups)
    checkpoint = save(learner, ranks, tmp_path / "checkpoints")
    meta = json.loads((checkpoint / "meta.json").read_text())
    meta["recipe"]["model"]["path"] = made.model.path
    del meta["digest"]
    (checkpoint / "meta.json").write_text(json.dumps(meta))
    tell(replay(folder_of(made).parent, ranks, str(checkpoint)))
    said = capsys.readouterr().out.splitlines()
    values = json.loads(said[-2])
    assert said[-1] == values["verdict"] and said[-1].startswith("no verdict: no token was sampled from")
    moved = [on_policy(learner.policy, t) for group in groups for t in group.trajectories]
    expected = [
        np.abs(now.behaviour_logprobs - then.behaviour_logprobs).max()
        for now, then in zip(moved, (t for group in groups for t in group.trajectories), strict=True)
    ]
    assert values["gap"]["max"] == pytest.approx(max(expected), rel=1e-4)
    assert values["recorded"]["logprob"] > 1e-4  # the step has moved the policy
    assert "worst tokens:" in said and values["episodes"] == 2 and values["skipped"] == values["damaged"] == 0


def test_everything_of_an_episode_is_recorded(recipe, trainer, spec):
    made = recipe()
    (group,) = random_groups(spec, 1, turns=2)
    (t,) = group.trajectories
    notes = (TurnNote(0.5, 2.0, 0.25, 0.125, '{"moved":1}'), TurnNote(3.0, 1.0))
    t = replace(t, notes=notes, started=100.0, metrics={"success": 1.0}, weights=("0-abc",))
    group = replace(group, trajectories=(t,), played_s=7.0)
    recorder = trained(made, trainer(made), [group])
    read = read_step(steps(folder_of(made))[0])
    episode = read.episode(read.summaries[0])
    for name in ("token_ids", "loss_mask", "behaviour_logprobs", "policy_versions"):
        assert np.array_equal(getattr(episode, name).numpy(), getattr(t, name))
    assert (episode.sample_id, episode.seed, episode.label) == ("sample-1", 17, "4")
    assert json.loads(episode.prompt) == [{"role": "system", "content": "Play."}]
    assert (episode.metrics, episode.weights, episode.group_s) == ({"success": 1.0}, ("0-abc",), 7.0)
    first, second = episode.turns
    assert (first.begin_s, first.generate_s, first.wait_s, first.env_s, first.info) == (
        0.5,
        2.0,
        0.25,
        0.125,
        notes[0].info,
    )
    assert (first.first_image, first.last_image, second.first_image, second.last_image) == (0, 1, 1, 2)
    assert [turn.reward for turn in episode.turns] == [turn.reward for turn in t.turns]
    assert len(episode.pieces) == len(t.token_ids) and first.answer and first.seen
    for ref, image in zip(episode.images, t.images, strict=True):
        assert read_image(folder_of(made), ref) == image.data
        assert (ref.format, ref.tokens) == ("png", (ref.width // 32) * (ref.height // 32))
    assert read.summaries[0].expanded == len(t.token_ids) + sum(ref.tokens - 1 for ref in episode.images)
    assert recorder.metrics()["record/episodes"] == 1 and recorder.metrics()["record/dropped"] == 0


def test_failures_are_recorded_at_any_step_up_to_a_bound_with_the_reason(recipe, trainer, spec, monkeypatch):
    monkeypatch.setattr("learner.recording.recorder.RECORDED_FAILURES", 3)
    made = recipe(RecordConfig(every=10, groups=0))
    good, bad, worse = (random_groups(spec, 1, seed=seed)[0] for seed in range(3))
    (t,) = bad.trajectories
    broken = replace(t, ending=Ending.ENV_ERROR, error="KeyError: 'x'", images=(Image.of(b"no image"), *t.images[1:]))
    group = replace(good, trajectories=(*good.trajectories, broken))
    lost = replace(worse, trajectories=worse.trajectories * 4)
    trained(made, trainer(made), [group], failed=[(ticket_of(lost), lost, "env_error: ValueError")])
    (path,) = steps(folder_of(made))
    read = read_step(path)
    assert [(s.id, s.failed, s.trained) for s in read.summaries] == [
        ("g0/1", True, False),
        ("g2/0", True, False),
        ("g2/1", True, False),
    ]
    assert read.summaries[0].error == "KeyError: 'x'" and read.summaries[1].refused == "env_error: ValueError"
    assert read.episode(read.summaries[0]).images[0].format == "bin"


def test_steps_that_are_not_due_and_recipes_that_record_nothing_write_nothing(recipe, trainer, spec):
    groups = random_groups(spec, 4)
    assert [step for step in range(1, 31) if watch(groups, step, RecordConfig(every=10))] == [1, 10, 20, 30]
    assert len(watch(groups, 1, RecordConfig(groups=3)).indices) == 3
    assert watch(groups, 1, RecordConfig(groups=9)).indices == {0, 1, 2, 3}
    assert watch(groups, 1, RecordConfig(groups=0)) is None
    made = recipe(RecordConfig(every=0))
    bad = replace(groups[0], trajectories=(replace(groups[0].trajectories[0], ending=Ending.ENV_ERROR),))
    trained(made, trainer(made), [groups[1], bad])
    assert steps(folder_of(made)) == []


def test_several_updates_record_each_episode_once_as_its_first_update_saw_it(recipe, trainer, spec):
    made = recipe(passes=2, minibatches=2, lr=1e-2)
    groups = random_groups(spec, 4)
    learner, watched = trainer(made), watch(groups, 1, made.record)
    plain = trainer(made)
    learner.step(groups, 0, watched)
    assert all(watched.columns(place) is not None for place in range(4))
    before = [on_policy(plain.policy, group.trajectories[0]) for group in groups]
    same = [
        np.allclose(watched.columns(i)[0], t.behaviour_logprobs[t.loss_mask == 1], atol=1e-4)
        for i, t in enumerate(before)
    ]
    assert sum(same) == 2  # those of the first minibatch; the others' update saw a policy that had moved


def test_beyond_max_gb_the_oldest_steps_go_with_the_images_that_no_other_shows(recipe, spec):
    made = recipe(RecordConfig(every=1, max_gb=100e-6))
    groups = random_groups(spec, 12, turns=2, sides=(64,))
    shared = groups[0].trajectories[0].images[0]
    for half in range(2):  # the second recorder goes on in the folder of the first
        recorder = Recorder(made, spec)
        for step in range(1 + 6 * half, 7 + 6 * half):
            (t,) = groups[step - 1].trajectories
            group = replace(groups[step - 1], trajectories=(replace(t, images=(shared, *t.images[1:])),))
            recorder.step(step, 0, [group], watched=watch([group], step, made.record))
            done = step - 6 * half
            until(lambda done=done, r=recorder: r.metrics()["record/episodes"] == done)
        recorder.close(60)
        assert recorder.metrics()["record/dropped"] == 0
    kept = [read_step(path) for path in steps(folder_of(made))]
    assert 2 <= len(kept) < 8 and kept[-1].header.step == 12
    assert [read.header.step for read in kept] == list(range(13 - len(kept), 13))
    shown = {ref.file_name for read in kept for s in read.summaries for ref in read.episode(s).images}
    assert {path.name for path in (folder_of(made) / "images").iterdir()} == shown
    taken = sum(path.stat().st_blocks * 512 for path in folder_of(made).rglob("*") if path.is_file())
    assert taken < 200_000


def test_a_disk_that_refuses_costs_the_recording_and_is_told_once(recipe, spec, monkeypatch):
    made, groups, told = recipe(), random_groups(spec, 1), []
    monkeypatch.setattr(get_logger("recordings"), "error", lambda line, *values: told.append(line % values))
    folder_of(made).parent.mkdir()
    folder_of(made).write_text("in the way")
    recorder = Recorder(made, spec)
    for step in (1, 2, 3):
        recorder.step(step, 0, groups, watched=watch(groups, step, made.record))
        until(lambda step=step: recorder.metrics()["record/dropped"] == step)
    folder_of(made).unlink()
    recorder.step(4, 0, groups, watched=watch(groups, 4, made.record))
    recorder.close(60)
    assert recorder.metrics()["record/episodes"] == 1 and recorder.metrics()["record/dropped"] == 3
    (line,) = told
    assert line.startswith("step 1 is not recorded: FileExistsError")
    assert [path.name for path in steps(folder_of(made))] == ["step_00000004.rec"]


def test_a_disk_that_hangs_costs_the_steps_that_do_not_fit_in_the_queue(recipe, spec):
    made, groups = recipe(), random_groups(spec, 1, turns=1)
    recorder = Recorder(made, spec)
    images = folder_of(made) / "images"
    images.mkdir(parents=True)
    pipe = images / f".{groups[0].trajectories[0].images[0].content_hash}.png.partial"
    os.mkfifo(pipe)  # whoever writes there waits until somebody reads
    recorder.step(1, 0, groups, watched=watch(groups, 1, made.record))
    until(lambda: recorder._queue.empty())
    for step in range(2, 3 + QUEUED):
        recorder.step(step, 0, groups, watched=watch(groups, step, made.record))
    assert recorder.metrics()["record/dropped"] == 1
    recorder.close(0.2)
    with pipe.open("rb") as reader:
        reader.read()
    until(lambda: recorder.metrics()["record/episodes"] == 1 + QUEUED)


def test_a_recorded_objective_that_is_not_known_is_told_in_the_words_of_the_registry(tmp_path):
    header = StepHeader(step=1, version=0, time=1.0, objective='{"name": "trpo"}')
    with pytest.raises(RecordingError) as caught:
        objective_of(header, tmp_path)
    line = str(caught.value)
    assert "'trpo' is no objective; set it to one of vtrace" in line and line.endswith("objective_specs.py")


def test_what_a_replay_cannot_compute_is_left_out_and_a_user_is_told_why(recipe, spec, ranks, tmp_path):
    made = recipe()
    strange = random_groups(spec, 3)
    recorder = Recorder(made, spec)
    (t,) = strange[1].trajectories
    unknown = np.where(t.loss_mask == 1, 10_000, t.token_ids).astype(np.int32)
    strange[1] = replace(strange[1], trajectories=(replace(t, token_ids=unknown),))
    recorder.step(1, 0, strange, watched=watch(strange, 1, made.record))
    recorder.close(60)
    (path,) = steps(folder_of(made))
    read = read_step(path)
    gone = read.episode(read.summaries[2]).images[0]
    (folder_of(made) / "images" / gone.file_name).unlink()
    found = replay(path, ranks)
    assert found.mismatch.episodes == 1 and found.skipped.total() == 2
    assert any("leave the vocabulary" in reason for reason in found.skipped)
    assert any("cannot be read" in reason for reason in found.skipped)
    shutil.rmtree(folder_of(made) / "images")
    for recording, checkpoint, words in (
        (path, "", "nothing of .* can be replayed: .*cannot be read"),
        (tmp_path, "", "holds no recordings"),
        (path, str(tmp_path), "is no folder of a model"),
    ):
        with pytest.raises(ValueError, match=words):
            replay(recording, ranks, checkpoint)


@pytest.mark.slow
def test_a_user_of_replay_gets_one_line(tmp_path):
    command = [sys.executable, "-m", "learner.replay", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 2
    assert ended.stderr == f"error: {tmp_path} holds no recordings; give RUN, RUN/recordings or one of its step_*.rec\n"


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["recordings", "recordings/images", "recordings/images/*"])
def test_a_folder_of_recordings_that_was_deleted_is_made_again(recipe, trainer, spec, lost):
    made = recipe(RecordConfig(every=1, groups=2))
    learner, folder = trainer(made), folder_of(made)
    groups = random_groups(spec, 2, group_size=2)
    recorder = Recorder(made, learner.decoder.spec)
    for step in (1, 2, 3):
        watched = watch(groups, step, made.record)
        learner.step(groups, 0, watched)
        recorder.step(step, 0, groups, [ticket_of(group) for group in groups], watched)
        until(lambda step=step: recorder.metrics()["record/episodes"] == step * 4, 30)
        if step == 1:
            for path in [*folder.parent.glob(lost)]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    recorder.close(60)
    assert recorder.metrics()["record/dropped"] == 0
    read = read_step(steps(folder)[-1])
    assert len(read.summaries) == 4
    for image in read.episode(read.summaries[0]).images:
        assert read_image(folder, image)


@pytest.mark.slow
def test_a_replay_of_a_run_takes_a_step_beside_its_weights_and_ends_with_a_verdict(
    recipe, trainer, spec, ranks, tmp_path, capsys
):
    made = recipe()
    learner, folder = trainer(made), folder_of(made)
    recorder = Recorder(made, spec)
    for step in (1, 2, 3):
        groups = random_groups(spec, 2)
        groups = [
            replace(group, trajectories=tuple(on_policy(learner.policy, t) for t in group.trajectories))
            for group in groups
        ]
        for group in groups:
            for t in group.trajectories:
                t.policy_versions[t.loss_mask == 1] = step - 1
        watched = watch(groups, step, made.record)
        learner.step(groups, step - 1, watched)
        recorder.step(step, step - 1, groups, [ticket_of(group) for group in groups], watched)
        if step == 2:  # its weights sampled step 3
            saver = Saver(folder.parent / "checkpoints", learner, ranks, made)
            saver.save(2, {})
            saver.wait()
    recorder.close(60)
    for run, version in ((folder.parent, 2), (steps(folder)[0], 0)):
        tell(replay(run, ranks))
        verdict = capsys.readouterr().out.splitlines()[-1]
        assert verdict.startswith("the same model: ") and verdict.endswith(f"at version {version}"), verdict
