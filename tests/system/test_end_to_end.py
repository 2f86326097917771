"""The whole loop with real processes: torchrun with two learner ranks, an engine, an actor."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.recordings.reader import read_step, steps
from tests.support.machine import children_of, is_there
from tests.support.runs import LEARNING_S, command, finished, local, metrics, places, refused

TWO_RANKS = [sys.executable, "launch/processes/torchrun.py", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.learning
@pytest.mark.slow
def test_two_ranks_learn_to_name_colours_from_chance(tmp_path: Path) -> None:
    fields = {"learner.total_steps": 60, "eval.every_steps": 15, "learner.checkpoint.keep": 1}
    fields["learner.publish.pause_mode"] = "retract"  # so that no token stands on what older weights computed
    fields["learner.objective.entropy_coef"] = 0.01  # so that no colour is given up before it was named
    run = finished(local([*places(tmp_path, **fields), "--ranks", "2"]), timeout_s=LEARNING_S)
    assert "Warning" not in run.stderr, run.stderr[:3000]
    result = json.loads(run.stdout.splitlines()[-1])
    rows = [row for row in metrics(tmp_path) if "rollout/reward" in row]
    first = sum(row["rollout/reward"] for row in rows[:2]) / 2
    assert 0.1 < first < 0.5
    assert 0.1 < result["success_before"] < 0.5
    assert result["success_after"] >= 0.9
    assert result["max_staleness_seen"] <= 2
    assert result["policy_versions"] == result["optimizer_steps"] == len(rows)
    assert all(
        row["tickets/issued"] == row["tickets/trained"] + row["tickets/dropped"] + row["tickets/open"] for row in rows
    )
    gaps = [row["behaviour/logprob_gap/lag_0"] for row in rows if "behaviour/logprob_gap/lag_0" in row]
    assert gaps
    assert max(gaps) < 1e-4
    recordings = [read_step(path) for path in steps(tmp_path / "colour_tiny" / "recordings")]
    assert [read.header.step for read in recordings] == [1, 10, 20, 30, 40, 50, 60]
    assert all(len(read.summaries) == 32 and not read.damages for read in recordings)
    ours = [summary for summary in recordings[0].summaries if summary.trained]
    assert ours and max(summary.max_gap for summary in ours) < 1e-4  # both have the weights of version 0
    assert sum(summary.trained for read in recordings for summary in read.summaries) > 20
    assert rows[-1]["record/episodes"] >= 128 and rows[-1]["record/dropped"] == 0
    command = [sys.executable, "-m", "learner.replay", str(recordings[0].path)]
    replayed = json.loads(finished(command).stdout.splitlines()[-2])  # the last line is its verdict
    assert replayed["episodes"] == 32 and replayed["gap"]["max"] < 1e-4
    assert max(replayed["recorded"].values()) < 1e-4
    _, *successes = [row["eval/success"] for row in metrics(tmp_path) if "eval/success" in row]
    evaluated = dict(zip((15, 30, 45, 60), successes, strict=True))
    folder = tmp_path / "colour_tiny" / "checkpoints"
    best = json.loads((folder / "best.json").read_text())
    assert best["value"] == max(successes) == evaluated[best["step"]]
    assert {p.name for p in folder.glob("step_*")} == {best["checkpoint"], "step_00000060"}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_two_ranks_that_share_each_microbatch_train_and_publish(tmp_path: Path) -> None:
    """As the page on model parallelism starts them: torchrun, and the actors beside it. Where weights come between an
    episode's tokens, keys and values of older ones stay: the gap of such a step is not compared."""
    fields = {"learner.parallel.context": 2, "learner.total_steps": 2, "eval.samples": 0}
    arguments = places(tmp_path, **fields)
    started = [*TWO_RANKS, *command("learner", arguments)[1:]]
    learner = subprocess.Popen(started, stdout=subprocess.PIPE, text=True)
    try:
        finished(command("actors", arguments))
        assert json.loads(learner.communicate(timeout=60)[0].splitlines()[-1])["optimizer_steps"] == 2
    finally:
        learner.kill()
    rows = [row for row in metrics(tmp_path) if "rollout/reward" in row]
    for row in rows:
        assert row.get("behaviour/logprob_gap/lag_0", 0.0) < 1e-4 or row["staleness/mixed_versions"] > 0
        assert 1.0 <= row["parallel/imbalance"] < 2.0
        assert row["parallel/tokens_max"] - row["parallel/tokens_mean"] <= 2 * row["batch/microbatches"]
    assert [row["policy_version"] for row in rows] == [1, 2] and "behaviour/logprob_gap/lag_0" in rows[0]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_a_dense_model_with_dealt_experts_is_refused_in_one_line_by_all_ranks(tmp_path: Path) -> None:
    start = [sys.executable, "launch/processes/torchrun.py", "--standalone", "--nproc-per-node", "2"]
    line, _ = refused([*start, *command("learner", places(tmp_path, **{"learner.parallel.expert": 2}))[1:]])
    assert line == "error: learner.parallel.expert = 2, but qwen3_vl has no experts; set it to 1"


@pytest.mark.slow
def test_ctrl_c_stops_everything_within_ten_seconds_and_leaves_no_process(tmp_path: Path) -> None:
    process = subprocess.Popen(local([*places(tmp_path), "--learner.total_steps", "100000"]), stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "colour_tiny" / "metrics.jsonl").exists() or not metrics(tmp_path):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.5)
        family = children_of(process.pid)
        assert len(family) >= 4
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert time.monotonic() - started < 10
        assert not [pid for pid in family if is_there(pid)]
    finally:
        if process.poll() is None:
            process.kill()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_a_run_stopped_half_way_resumes_and_finishes(tmp_path: Path) -> None:
    fields = {"learner.total_steps": 6, "learner.checkpoint.every": 3, "learner.resume": "auto", "eval.samples": 0}
    finished(local(places(tmp_path, **{**fields, "learner.total_steps": 3})))
    finished(local(places(tmp_path, **fields)))
    rows = [row for row in metrics(tmp_path) if "rollout/reward" in row]
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert rows[-1]["tickets/trained"] == 6 * 16
    (tmp_path / "colour_tiny" / "result.json").unlink()  # as if stopped before its last evaluation was complete
    finished(local(places(tmp_path, **{**fields, "eval.samples": 8})))
    *before, evaluated = metrics(tmp_path)
    assert before[-1]["step"] == evaluated["step"] == 6 and "eval/success" in evaluated
    result = json.loads((tmp_path / "colour_tiny" / "result.json").read_text())
    assert (result["optimizer_steps"], result["success_after"]) == (6, evaluated["eval/success"])
    line, _ = refused(command("learner", places(tmp_path, **fields)))
    assert "has its 6 steps" in line


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_actors_give_up_on_a_learner_that_is_not_there(tmp_path: Path) -> None:
    arguments = command("actors", places(tmp_path, **{"actor.connect_timeout_s": 2}))
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert run.returncode != 0
    assert "is silent for" in run.stderr
    assert "Traceback" not in run.stderr
