"""A small Qwen2.5-VL goes through the whole loop with SGLang's real server, by a user's command: the embedded engine
serves none of its family."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from learner.export import export_checkpoint
from learner.model.policy import load_policy
from shared.vision import VisionSpec
from tests.support.runs import command, finished, metrics, places
from tests.support.sglang_rig import START_S, TOLERANCE
from tests.support.small.families import qwen25


def parameters_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_policy(str(folder), VisionSpec.load(folder)).vlm.named_parameters())


def test_a_model_is_trained_published_evaluated_and_exported(tmp_path):
    """Its preprocessor_config.json bounds images otherwise than the recipe, as those of the published models do."""
    folder = qwen25(tmp_path / "model")
    fields = {"model.path": folder, "engine.kind": "sglang", "engine.start_timeout_s": START_S}
    fields |= {"learner.total_steps": 2, "learner.groups_per_step": 4, "actor.groups": 4, "eval.samples": 4}
    fields |= {"learner.objective.name": "vtrace", "learner.objective.entropy_coef": 0.1}
    ended = finished(command("local", places(tmp_path, **fields)), timeout_s=START_S + 200)
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["optimizer_steps"] == 2 and None not in (result["success_before"], result["success_after"])
    rows = [row for row in metrics(tmp_path) if "publish/engines" in row]
    keys = ("publish/engines", "publish/dropped", "publish/unproven", "publish/checksum_skipped")
    assert [tuple(row[key] for key in keys) for row in rows] == [(1, 0, 0, 0)] * len(rows) and rows
    assert max(row["publish/canary_gap"] for row in rows) < TOLERANCE
    assert rows[0]["behaviour/logprob_gap"] < TOLERANCE
    out = tmp_path / "export"
    export_checkpoint(tmp_path / "colour_tiny/checkpoints/step_00000002", out, model_path="", dtype=None)
    before, after = parameters_of(folder), parameters_of(out)
    assert before.keys() == after.keys()
    assert [name for name in before if "language_model" in name and torch.equal(before[name], after[name])] == []
