"""Small models of the families beside Qwen3-VL, one of them of text alone, go through the whole loop with the embedded
engine, by a user's commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from launch.engines.network import free_port
from learner.checkpoints.hf_export import export_checkpoint
from tests.support.runs import command, finished, metrics, places
from tests.support.small.families import EXPERT_SIZE, FAMILIES, NUM_EXPERTS, as_mixture

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("all_starts_forked")]

COLOURS = Path("launch/models/colour_tiny")
MADE = {name: made[0] for name, made in sorted(FAMILIES.items()) if name not in ("Qwen3-VL", "Qwen3.5-MoE")}
MADE["Qwen3-VL-MoE"] = lambda folder: as_mixture(COLOURS, folder)
LAID_OUT = {
    "Qwen2.5-VL": {"visual.blocks.0.attn.qkv.weight": [96, 32], "model.layers.1.self_attn.q_proj.bias": [64]},
    "Qwen3-VL-MoE": {
        "model.language_model.layers.1.mlp.experts.gate_up_proj": [NUM_EXPERTS, 64, 2 * EXPERT_SIZE],
        "model.language_model.layers.1.mlp.experts.down_proj": [NUM_EXPERTS, EXPERT_SIZE, 64],
    },
    "Qwen3.5": {
        "model.language_model.layers.0.linear_attn.in_proj_qkv.weight": [224, 128],
        "model.language_model.layers.0.linear_attn.conv1d.weight": [224, 1, 4],
    },
    "Qwen3": {"model.layers.1.self_attn.q_proj.weight": [64, 64]},
}
"""As the family's published checkpoints name and lay them out, in these sizes."""


OF_TEXT = {"env.args": '{"render_mode": "text"}', "model.max_context": 512}
"""The fields of a task without images."""


def shapes_in(folder: Path) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - it is no mapping


@pytest.fixture(scope="module", params=MADE)
def trained(request, tmp_path_factory):
    """(family, its model's folder, that of the run, the recipe's fields, the command's last line) after two steps."""
    place = tmp_path_factory.mktemp("run")
    folder = MADE[request.param](place / "model")
    # A model of random weights names no colour: rewards that vary, so that there is something to learn.
    (place / "reward.py").write_text("def reward(played):\n    return float(len(played.answers[-1]) % 3)\n")
    fields = {
        "model.path": folder,
        "env.reward": f"{place / 'reward.py'}:reward",
        "learner.total_steps": 2,
        "learner.groups_per_step": 4,
        "eval.samples": 4,
    }
    fields |= OF_TEXT if request.param == "Qwen3" else {}
    fields |= {"learner.objective.name": "vtrace", "learner.objective.entropy_coef": 0.1, "actor.groups": 4}
    ended = finished(command("local", places(place, **fields)))
    return request.param, folder, place, fields, json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def exported(trained):
    _, _, place, _, _ = trained
    export_checkpoint(place / "colour_tiny/checkpoints/step_00000002", place / "export", model_path="", dtype=None)
    return place / "export"


def publications(place: Path) -> list[dict]:
    return [row for row in metrics(place) if "publish/engines" in row]


def test_a_family_is_trained_published_and_evaluated(trained):
    _, _, place, _, result = trained
    assert result["optimizer_steps"] == 2 and None not in (result["success_before"], result["success_after"])
    rows = publications(place)
    assert [(row["publish/engines"], row["publish/dropped"]) for row in rows] == [(1, 0)] * 2
    proofs = [row for row in rows if "publish/canary_gap" in row]  # that of the first step is in the second's row
    assert [(row["publish/unproven"], row["publish/checksum_skipped"]) for row in proofs] == [(0, 0)]
    assert max(row["publish/canary_gap"] for row in proofs) < 1e-4
    assert rows[0]["behaviour/logprob_gap"] < 1e-4  # the engine and the learner compute the same


def test_the_export_is_laid_out_as_published_and_transformers_reads_what_was_trained(trained, exported):
    family, folder, _, _, _ = trained
    before, found = shapes_in(folder), shapes_in(exported)
    assert found.keys() == before.keys() and found.items() >= LAID_OUT.get(family, {}).items()
    for name, shape in before.items():  # those of the model that transformers made, but for the experts
        assert found[name] == ([shape[0], shape[2], shape[1]] if ".experts." in name else shape)
    old, new = (dict(FAMILIES[family][1].from_pretrained(path).named_parameters()) for path in (folder, exported))
    assert old.keys() == new.keys()
    assert [
        name for name in old if ".layers." in name and "visual" not in name and torch.equal(old[name], new[name])
    ] == []


def test_the_embedded_engine_serves_the_export_in_an_evaluation(trained, exported, tmp_path):
    own = ["--run.dir", tmp_path, "--engine.port", free_port(), "--model", exported, "--samples", 4]
    own += [part for name, value in (OF_TEXT if trained[0] == "Qwen3" else {}).items() for part in (f"--{name}", value)]
    ended = finished(command("evaluate", [str(part) for part in own]))
    assert json.loads(ended.stdout.splitlines()[-1])["episodes"] == 4


def test_the_run_is_resumed(trained):
    _, _, place, fields, _ = trained
    more = {"learner.total_steps": 3, "learner.resume": "auto", "eval.samples": 0}
    ended = finished(command("local", places(place, **fields | more)))
    assert json.loads(ended.stdout.splitlines()[-1])["optimizer_steps"] == 3
    rows = publications(place)
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[-1]["publish/unproven"] == 0
