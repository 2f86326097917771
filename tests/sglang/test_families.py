"""SGLang's own class of each family takes the learner's buckets by its own `load_weights`, every parameter of them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from launch.engines.commands import STAND_INS
from learner.export import export
from learner.model.policy import Policy, load_policy
from learner.weights.buckets import buckets, gathered
from shared.vision import VisionSpec
from shared.weights.checksums import engine_name
from shared.weights.families import FAMILIES as LAYOUTS
from tests.support.small.families import FAMILIES

PYTHON = Path(".venv-sglang/bin/python")


def sent(policy: Policy) -> dict[str, torch.Tensor]:
    """What the engines get, by name."""
    found = {}
    for bucket in buckets(gathered(policy), torch.float32, 100_000):
        for (name, values), shape in zip(bucket.values(), bucket.shapes, strict=True):
            found[name] = values.view(shape).clone()
    return found


def expected(policy: Policy) -> dict[str, torch.Tensor]:
    """What SGLang's parameters must hold: what checksums are taken of."""
    layout, parts = LAYOUTS[policy.vlm.config.model_type], dict[str, list[torch.Tensor]]()
    for name, parameter in policy.named_weights():
        parts.setdefault(engine_name(layout.published_name(name)), []).append(parameter.detach().flatten())
    return {name: torch.cat(part) for name, part in parts.items()}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_sglangs_class_holds_every_parameter_as_the_learner_does(family, tmp_path):
    folder = FAMILIES[family][0](tmp_path / "model")
    policy = load_policy(str(folder), VisionSpec.load(folder))
    export(tmp_path / "export", gathered(policy), model_path=str(folder))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.vlm.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    save_file(sent(policy), tmp_path / "sent.safetensors")
    save_file(expected(policy), tmp_path / "expected.safetensors")
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(STAND_INS)}
    command = [PYTHON, "-P", "tests/sglang/load_buckets.py", tmp_path]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["class"] == FAMILIES[family][1].__name__
    assert (found["different"], found["alone"]) == ([], []) and found["count"] > 50
