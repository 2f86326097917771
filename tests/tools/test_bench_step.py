"""The benchmark of one step, as its command is, on a model of this machine's size."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from shared.families import registry
from shared.recordings.group_files import GroupWriter
from shared.vision import VisionSpec
from tests.bench import step
from tests.support.episodes import random_groups
from tests.support.runs import RECIPE


@pytest.mark.slow
def test_a_step_of_a_model_with_random_weights_is_measured(tmp_path, monkeypatch, capsys):
    tower = {"vision_depth": 18, "vision_hidden": 128, "vision_intermediate": 128}
    small = replace(registry.PUBLISHED["Qwen3-VL-2B"], hidden_size=64, num_layers=4, vocab_size=640, **tower)
    monkeypatch.setitem(registry.PUBLISHED, "Small", replace(small, num_heads=2, num_kv_heads=1, intermediate_size=96))
    monkeypatch.setattr(step, "SIDES", (64, 96))
    monkeypatch.setattr(step, "TURN_TOKENS", (4, 9))
    assert step.main(["--make", "Small", str(tmp_path)]) == 0
    own = ("--model.path", str(tmp_path), "--learner.group_size", "2", "--model.max_context", "512")
    assert step.main(["--config", RECIPE, "--tokens", "400", "--steps", "1", *own]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 200 < found["tokens"] <= 400
    assert found["seconds"] > 0 and found["speed/tflops_per_rank"] > 0
    recorder = GroupWriter(tmp_path / "recorded")
    groups = random_groups(VisionSpec.load(tmp_path), 2, group_size=2, turns=1, with_images=False)
    for group in groups:
        recorder.add(group)
    assert step.main(["--config", RECIPE, "--recording", str(recorder.folder), "--steps", "1", *own]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["tokens"] == sum(len(t.token_ids) for group in groups for t in group.trajectories)


def test_a_model_that_is_not_there_is_one_line_with_the_cure(capsys):
    assert step.main(["--model.path", "Qwen/Qwen3-VL-2B-Instruct"]) == 2
    assert "--make MODEL FOLDER" in capsys.readouterr().err
