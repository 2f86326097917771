"""The tasks' small twins through the whole loop, and what a broken environment does to a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.support.runs import LEARNING_S, command, finished, metrics, places, refused


def run(recipe: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return finished(command("local", arguments, f"launch/recipes/{recipe}.toml"), timeout_s=LEARNING_S)


@pytest.mark.learning
@pytest.mark.slow
def test_v_trace_teaches_a_small_model_to_name_colours_from_chance(tmp_path: Path) -> None:
    optimizer = {"lr": 7e-4, "value_lr": 3e-3, "warmup_steps": 8, "schedule": "linear"}
    learner = {"objective.name": "vtrace", "group_size": 1, "groups_per_step": 64, "total_steps": 60}
    learner |= {f"optimizer.{name}": value for name, value in optimizer.items()}
    fields = {f"learner.{name}": value for name, value in learner.items()} | {"actor.groups": 64, "eval.samples": 200}
    result = json.loads(run("colour_tiny", places(tmp_path, **fields)).stdout.splitlines()[-1])
    assert 0.1 < result["success_before"] < 0.5
    assert result["success_after"] >= 0.8
    assert result["format_before"] > 0.5 and result["format_after"] > 0.9  # the task's own metric
    assert result["explained_variance"] is not None
    with Image.open(result["curve"]) as picture:
        assert picture.format == "PNG"


@pytest.mark.learning
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["colour_tiny_qwen35", "colour_tiny_glm", "colour_text_tiny"])
def test_a_small_qwen35_a_glm_and_a_text_model_learn_to_name_colours(tmp_path: Path, recipe: str) -> None:
    result = json.loads(run(recipe, places(tmp_path, **{"eval.samples": 200})).stdout.splitlines()[-1])
    assert 0.1 < result["success_before"] < 0.5
    assert result["success_after"] >= 0.8


@pytest.mark.learning
@pytest.mark.slow
def test_adapters_alone_teach_a_small_model_to_name_colours_from_chance(tmp_path: Path) -> None:
    """Each publication proves that engines have the adapters."""
    fields = {"learner.lora.rank": 8, "eval.samples": 200}
    result = json.loads(run("colour_tiny", places(tmp_path, **fields)).stdout.splitlines()[-1])
    assert 0.1 < result["success_before"] < 0.5
    assert result["success_after"] >= 0.8
    rows = [row for row in metrics(tmp_path) if "rollout/reward" in row]
    assert rows[0]["lora/norm"] < rows[-1]["lora/norm"] < 1.0
    # Where weights come between an episode's tokens, keys and values of older ones stay: no step with such is compared.
    whole = [row for row in rows if row["staleness/mixed_versions"] == 0]
    gaps = [row["behaviour/logprob_gap/lag_0"] for row in whole if "behaviour/logprob_gap/lag_0" in row]
    assert gaps and max(gaps) < 1e-4
    proofs = [row for row in rows if "publish/checksum_gap" in row]  # told with the step after the publication
    assert len(proofs) == len(rows) - 1
    assert all(row["publish/checksum_gap"] == row["publish/checksum_skipped"] == 0 for row in proofs)


@pytest.mark.learning
@pytest.mark.slow
def test_a_small_geometry_model_learns_to_call_the_tool_in_the_right_form(tmp_path: Path) -> None:
    run("geo3k_multi_turn_tiny", places(tmp_path, **{"learner.total_steps": 30}))
    rows = metrics(tmp_path, "geo3k_multi_turn_tiny")
    before, after = (row["eval/tool_used"] for row in rows if "eval/tool_used" in row)
    assert 0.1 < before < 0.7  # calls count in all the forms that the tool reads
    assert after >= before + 0.3


@pytest.mark.learning
@pytest.mark.slow
def test_a_small_geometry_model_learns_what_answers_each_kind_of_question(tmp_path: Path) -> None:
    fields = {"learner.total_steps": 30, "learner.optimizer.schedule": "constant", "eval.greedy": "false"}
    result = json.loads(run("geo3k_answers_tiny", places(tmp_path, **fields)).stdout.splitlines()[-1])
    assert result["success_before"] < 0.2 and result["read_accuracy_before"] > 0.95
    assert result["success_after"] >= result["success_before"] + 0.2


@pytest.mark.learning
@pytest.mark.slow
def test_the_model_of_games_learns_to_cross_a_lake_that_it_only_reads(tmp_path: Path) -> None:
    fields = {"learner.total_steps": 70, "learner.optimizer.schedule": "constant", "eval.greedy": "false"}
    result = json.loads(run("frozen_lake_tiny", places(tmp_path, **fields)).stdout.splitlines()[-1])
    assert result["success_before"] < 0.35 and result["read_accuracy_before"] > 0.95
    assert result["success_after"] >= result["success_before"] + 0.2


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.parametrize(
    "recipe",
    [
        *("geo3k_tiny", "sokoban_tiny", "frozen_lake_tiny", "maze_tiny", "sliding_puzzle_tiny", "scene_tiny"),
        "scene_zoom_tiny",
    ],
)
def test_a_small_twin_runs_the_whole_loop(tmp_path: Path, recipe: str) -> None:
    fields = {"learner.total_steps": 2, "learner.groups_per_step": 8, "eval.samples": 4, "eval.greedy": "false"}
    before = recipe == "sokoban_tiny"
    ended = run(recipe, places(tmp_path, **fields, **{"eval.before": str(before).lower()}))
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["optimizer_steps"] == 2
    assert (result["success_before"] is not None, result["success_after"] is not None) == (before, True)
    assert all(row.get("rollout/failed", 0.0) == 0.0 for row in metrics(tmp_path, recipe))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_a_twin_trains_on_the_files_that_prepare_writes(tmp_path: Path) -> None:
    finished([sys.executable, "launch/prepare.py", "geo3k_multi_turn", "--make", "40", "--out", str(tmp_path / "data")])
    files = {f"data.{key}": tmp_path / "data" / f"{name}.parquet" for key, name in
             (("source", "train"), ("eval_source", "heldout"))}  # fmt: skip
    fields = {**files, "learner.total_steps": 1, "eval.samples": 4}
    ended = run("geo3k_multi_turn_tiny", places(tmp_path, **fields))
    assert "36 samples of 36 rows" in ended.stderr


BROKEN = '''
"""Fails for every seed but that of the check at the start."""
from envs.colour import *  # noqa: F403
from envs.colour import build_env as build_colour


def build_env(sample=None, args=None, **_):
    if sample.id != "check":
        raise RuntimeError("the board of this seed is lost")
    return build_colour(sample=sample, args=args)
'''


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_an_environment_that_keeps_failing_stops_the_run_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    fields = {"env.module": tmp_path / "broken.py", "eval.samples": 0}
    line, everything = refused(command("local", places(tmp_path, **fields)), codes=range(1, 256))
    assert everything.count("Traceback of the user's code:") == 1 and "broken.py" in everything
    assert "env.max_failure_share = 0.5" in line
    assert "RuntimeError: the board of this seed is lost" in line
