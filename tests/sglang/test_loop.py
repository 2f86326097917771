"""Small models of several families go through the whole loop with SGLang's real server, by a user's command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from learner.checkpoints.hf_export import export_checkpoint
from learner.model.policy import load_policy
from shared.vision import VisionSpec
from tests.support.runs import command, finished, metrics, places
from tests.support.sglang_rig import START_S, TOLERANCE
from tests.support.small.families import glm4v, qwen3, qwen25

COLOURS = Path("launch/models/colour_tiny")
MODELS = {"Qwen2.5-VL": qwen25, "Qwen3-VL": lambda _: COLOURS, "GLM-4V": glm4v, "Qwen3": qwen3}


def parameters_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_policy(str(folder), VisionSpec.load(folder)).vlm.named_parameters())


@pytest.mark.parametrize("family", MODELS)
def test_a_model_is_trained_published_evaluated_exported_and_resumed(family, tmp_path):
    """The preprocessor_config.json of the Qwen2.5-VL bounds images otherwise than the recipe, as published ones do."""
    folder = MODELS[family](tmp_path / "model")
    # A model of random weights names no colour: rewards that vary, so that there is something to learn.
    (tmp_path / "reward.py").write_text("def reward(played):\n    return float(len(played.answers[-1]) % 3)\n")
    fields = {
        "model.path": folder,
        "env.reward": f"{tmp_path / 'reward.py'}:reward",
        "engine.kind": "sglang",
        "engine.start_timeout_s": START_S,
    }
    fields |= {"learner.total_steps": 2, "learner.groups_per_step": 4, "actor.groups": 4, "eval.samples": 4}
    fields |= {"env.args": '{"render_mode": "text"}', "model.max_context": 512} if family == "Qwen3" else {}
    fields |= {"learner.objective.name": "vtrace", "learner.objective.entropy_coef": 0.1}
    ended = finished(command("local", places(tmp_path, **fields)), timeout_s=START_S + 200)
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["optimizer_steps"] == 2 and None not in (result["success_before"], result["success_after"])
    rows = [row for row in metrics(tmp_path) if "publish/engines" in row]
    assert [(row["publish/engines"], row["publish/dropped"]) for row in rows] == [(1, 0)] * 2
    proofs = [row for row in rows if "publish/canary_gap" in row]  # that of the first step is in the second's row
    assert [row["publish/unproven"] for row in proofs] == [0]
    assert max(row["publish/canary_gap"] for row in proofs) < TOLERANCE
    assert rows[0]["behaviour/logprob_gap"] < TOLERANCE
    out = tmp_path / "export"
    export_checkpoint(tmp_path / "colour_tiny/checkpoints/step_00000002", out, model_path="", dtype=None)
    before, after = parameters_of(folder), parameters_of(out)
    assert before.keys() == after.keys()
    assert [
        name for name in before if "layers" in name and "visual" not in name and torch.equal(before[name], after[name])
    ] == []
    fields |= {"learner.total_steps": 3, "learner.resume": "auto"}
    ended = finished(command("local", places(tmp_path, **fields)), timeout_s=START_S + 200)
    assert json.loads(ended.stdout.splitlines()[-1])["optimizer_steps"] == 3
    trained = [row for row in metrics(tmp_path) if "publish/engines" in row]
    assert [row["step"] for row in trained] == [1, 2, 3] and trained[-1]["publish/canary_gap"] < TOLERANCE
    assert trained[-1]["publish/unproven"] == 0
