"""`launch/evaluate.py`: what it says of known policies, what it refuses, and that it plays as a run does."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from launch import evaluate
from launch.dashboard_server.recorded import recorded, step_page
from launch.dashboard_server.runs import Runs
from launch.engines.network import free_port
from launch.evaluation.evaluation_report import difference_of, failures_of, is_shown, lines_of, record_of
from learner.metrics.evaluation_metrics import compared, evaluation_metrics
from learner.tickets.ticket_book import EvaluationResult
from shared.recordings.reader import read_step, recordings
from shared.types import Ending, Group, Sample, Sampling, Ticket
from tests.support.machine import children_of, is_there, until
from tests.support.runs import RECIPE, command, finished, local, places
from tests.support.wires import episode, failed_episode

MODEL = "launch/models/colour_tiny"


def played(chances, seed, repeats=1) -> EvaluationResult:
    """By a policy that succeeds on each sample with the sample's chance."""
    rng, groups = np.random.default_rng(seed), []
    for i, chance in enumerate(chances):
        ticket = Ticket(f"e/{i}", Sample(str(i)), repeats, 0, Sampling(), 60.0, evaluation="e", seed=i)
        won = (rng.random(repeats) < chance).astype(float)
        made = tuple(replace(episode(), metrics={"success": s}, reward=s, ending=Ending.COMPLETED) for s in won)
        groups.append((ticket, Group(ticket.id, "a", made)))
    return EvaluationResult("e", tuple(groups), {})


def test_the_record_has_what_an_evaluation_beside_the_training_has_with_intervals_around_it():
    result = played([0.2] * 30 + [0.9] * 30, seed=1, repeats=4)
    found, expected = record_of(result), evaluation_metrics(result)
    assert found["success"] == pytest.approx(expected["success"], abs=1e-6)
    assert found["low"] < found["success"] < found["high"]
    assert (found["samples"], found["episodes"], found["lost"]) == (60, 240, 0)
    for name in ("reward", "turns", "pass@1", "pass@2", "pass@4", "failed"):
        said = found["metrics"][name]
        assert said["value"] == pytest.approx(expected[name], abs=1e-6) and said["low"] <= said["value"] <= said["high"]
    assert found["endings"]["completed"]["value"] == 1.0 and found["endings"]["completed"]["low"] < 1.0
    lines = list(lines_of(found))
    assert lines[0].startswith("success") and f"[{found['low']:.3f}, {found['high']:.3f}]" in lines[0]
    json.dumps(found, allow_nan=False)


def test_an_evaluation_of_failures_alone_says_so_and_has_no_success():
    ticket = Ticket("e/0", Sample("0"), 1, 0, Sampling(), 60.0, evaluation="e")
    result = EvaluationResult("e", ((ticket, Group("e/0", "a", (failed_episode(),))),), {"env_error": 2})
    found = record_of(result)
    assert found["success"] is None and found["lost"] == 2 and found["metrics"]["failed"]["value"] == 1.0
    assert any(line.startswith("failed") for line in lines_of(found))
    (first, second) = failures_of(result)
    assert first.startswith(f"1 of the episodes ended as {failed_episode().ending}, the first of sample 0: ")
    assert failed_episode().error in first and second == "2 of the samples have no episodes: env_error"
    assert compared(result, played([0.5], seed=0)) is None


@pytest.mark.parametrize("repeats", [1, 4])
def test_a_comparison_finds_the_difference_between_two_known_policies(repeats):
    chances = np.random.default_rng(0).random(200) * 0.6
    comparison = compared(played(chances + 0.25, 1, repeats), played(chances, 2, repeats))
    found = difference_of(comparison)
    assert 0 < found["low"] < 0.25 < found["high"] < 0.5 and found["pairs"] == 200
    assert found["better"] > found["worse"] > 0
    assert found["metrics"]["reward"]["value"] == pytest.approx(found["success"])


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [1, 4])
def test_a_comparison_finds_none_between_equal_policies_but_in_one_of_twenty(repeats):
    chances = np.random.default_rng(0).random(60)
    wrong = 0
    for seed in range(200):
        found = difference_of(compared(played(chances, 2 * seed, repeats), played(chances, 2 * seed + 1, repeats)))
        wrong += not found["low"] <= 0 <= found["high"]
    assert wrong <= 20


def test_equal_results_differ_by_nothing_and_still_have_an_interval():
    found = difference_of(compared(played([0.5] * 40, 3), played([0.5] * 40, 3)))
    assert (found["success"], found["better"], found["worse"]) == (0.0, 0, 0) and found["low"] < 0 < found["high"]


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [(0.1, 0.2, True), (-0.2, -0.1, True), (0.0, 0.2, False), (-0.2, 0.0, False), (None, None, False)],
)
def test_a_difference_is_shown_by_an_interval_without_zero_alone(low, high, shown):
    assert is_shown({"low": low, "high": high}) is shown


# ------------------------------------------------------------------ mistakes


def llm(folder: Path) -> Path:
    """A model that reads no images."""
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config["text_config"], "model_type": "llama"}))
    return folder


def without_weights(folder: Path) -> Path:
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def run_folder(folder: Path) -> Path:
    (folder / "checkpoints" / "step_00000007").mkdir(parents=True)
    (folder / "checkpoints" / "step_00000007" / "meta.json").write_text("{}")
    return folder


def rows(folder: Path, **row: str) -> Path:
    folder.mkdir()
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return folder / "rows.jsonl"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (lambda at: ["--model", at / "nothing"], "there is no such folder"),
        (lambda at: ["--model", "nothing"], "neither a folder here nor a hub name"),
        (lambda at: ["--model", llm(at / "llm")], "a model of the family 'llama', but those that run are qwen3_vl"),
        (lambda at: ["--model", without_weights(at / "bare")], "no weights"),
        (lambda at: ["--model", run_folder(at / "run")], "give one of its checkpoints, such as"),
        (
            lambda at: ["--model", run_folder(at / "run") / "checkpoints/step_00000007"],
            "no description of a checkpoint",
        ),
        (lambda at: ["--against", at / "nothing"], "--against"),
        (lambda at: ["--dataset", at / "nothing.jsonl"], "no dataset file"),
        (lambda at: ["--dataset", rows(at / "r", problem="1+1")], "has no column answer; it has: problem"),
        (lambda at: ["--samples", "0"], "say how many with --samples"),
        (lambda at: ["--samples", "few"], "eval.samples = 'few'"),
        (lambda at: ["--greedy", "--repeats", "4"], "greedy episodes of one sample are equal"),
        (lambda at: ["--repaets", "4"], "unknown option --repaets"),
        (lambda at: ["--engine.urls", '["http://127.0.0.1:1"]'], "engine.urls is set"),
        (lambda at: ["--env.module", "envs.nothing"], "no module 'envs.nothing'"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(tmp_path, capsys, monkeypatch, options, expected):
    monkeypatch.setattr(evaluate, "evaluate", lambda *_: pytest.fail("it was not refused"))
    given = [str(word) for word in options(tmp_path)]
    try:
        code = evaluate.main(["--config", RECIPE, *places(tmp_path), *given])
    except SystemExit as ended:  # of a recipe
        code = ended.code
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1 and expected in errors[0], errors


def test_a_folder_that_holds_something_is_not_written_into(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").touch()
    with pytest.raises(ValueError, match="is not empty: choose another folder"):
        evaluate.make_folder(evaluate.load(RECIPE, []), str(tmp_path / "out"))


# ------------------------------------------------------------------ real engines and actors


def alone(tmp_path: Path, *options: object) -> list[str]:
    fields = ["--run.dir", str(tmp_path), "--engine.port", str(free_port())]
    return command("evaluate", [*fields, *map(str, options)])


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_it_agrees_with_a_runs_own_final_evaluation_and_the_viewer_opens_its_recording(tmp_path):
    fields = {"learner.total_steps": 2, "learner.groups_per_step": 4, "eval.samples": 24, "eval.greedy": "true"}
    run = json.loads(finished(local(places(tmp_path, **fields))).stdout.splitlines()[-1])
    checkpoint, out = tmp_path / "colour_tiny/checkpoints/step_00000002", tmp_path / "evaluated"
    ended = finished(alone(tmp_path, "--model", checkpoint, "--samples", 24, "--greedy", "--out", out))
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found == json.loads((out / "result.json").read_text())
    assert round(24 * found["success"]) == round(24 * run["greedy_success_after"]) > 0
    assert found["metrics"]["format"]["value"] == pytest.approx(run["greedy_format_after"], abs=1e-4)
    assert found["samples"] == found["episodes"] == 24 and found["low"] < found["success"] < found["high"]
    (place,) = recordings(out / "model" / "recordings")
    written = read_step(place.path(out / "model" / "recordings"))
    assert len(written.summaries) == 24 and not written.damages
    assert all(written.episode(summary).turns[0].answer for summary in written.summaries)
    (shown,) = Runs([out]).all()
    assert recorded(shown) == [place] and len(step_page(shown, place)["episodes"]) == 24
    assert not list(out.glob(".weights-*"))


def speechless(folder: Path) -> Path:
    """The model with an output head of zeros: it says anything, all tokens alike."""
    shutil.copytree(MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    name = "lm_head.weight" if "lm_head.weight" in weights else "model.language_model.embed_tokens.weight"
    save_file({**weights, name: weights[name] * 0}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_two_known_models_are_told_apart(tmp_path):
    other = speechless(tmp_path / "speechless")
    ended = finished(alone(tmp_path, "--model", MODEL, "--against", other, "--samples", 64, "--repeats", 2))
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["against"]["success"] < 0.05 < found["success"]
    assert 0 < found["difference"]["low"] < found["difference"]["success"] < found["difference"]["high"]
    assert found["difference"]["pairs"] == 64 and found["metrics"]["pass@2"]["value"] >= found["success"]
    assert "the policies differ" in ended.stderr
    shown = Runs([Path(found["folder"]).parent]).all()
    assert {run.name: run.state() for run in shown} == {"model": "finished", "against": "finished"}
    first = json.loads((Path(found["folder"]) / "result.json").read_text())  # of before the other one played
    assert first["success"] == found["success"] and "against" not in first


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_two_equal_models_are_not_told_apart(tmp_path):
    same = shutil.copytree(MODEL, tmp_path / "same")
    ended = finished(alone(tmp_path, "--model", MODEL, "--against", same, "--samples", 48, "--repeats", 2))
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["difference"]["low"] <= 0 <= found["difference"]["high"] and 0 < found["success"] < 1
    assert "no difference of success is shown" in ended.stderr


INTERRUPTED = """
import sys, time
from pathlib import Path
from launch.processes import children
from launch.processes.children import Stopped, raise_on_signals, start, stop_all

CHILD = '''
import os, pathlib, signal, sys, time

def end(*_):
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(0.5)
    os._exit(7)

signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[1]).touch()
time.sleep(100)
'''
children.TERMINATE_S = 60.0  # on a busy machine the child may not get to its end sooner
raise_on_signals()
child = start("child", [sys.executable, "-c", CHILD, sys.argv[1]])
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
try:
    stop_all([child], last=False)
except Stopped as signal:
    print(signal, child.process.returncode)
"""


def test_ctrl_c_between_two_policies_is_heard_when_the_first_ones_processes_have_ended(tmp_path):
    arguments = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "up")]
    ended = finished(arguments, timeout_s=120)
    assert ended.stdout.split() == ["SIGINT", "7"], ended.stderr[-3000:]


@pytest.mark.slow
def test_ctrl_c_ends_all_its_processes(tmp_path):
    arguments = alone(tmp_path, "--samples", 50_000, "--out", tmp_path / "out")
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "is here, with engines" in line:
                break
        family = children_of(process.pid)
        assert len(family) >= 2
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(30) == 130
        until(lambda: not any(is_there(pid) for pid in family), 10)
    finally:
        if process.poll() is None:
            process.kill()
