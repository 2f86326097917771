"""SGLang's own class of each family takes the learner's buckets by its own `load_weights`, and each rank of a server
then holds what it loads from the learner's export, byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from launch.engines.kinds.sglang_engine import STAND_INS
from learner.checkpoints.hf_export import export
from learner.model.policy import Policy, load_policy
from learner.weights.gathering import Bucket, buckets, gathered
from shared.vision import VisionSpec
from tests.support.small.families import FAMILIES, as_mixture
from tests.support.tiny import tiny_model_dir

PYTHON = Path(".venv-sglang/bin/python")
pytestmark = pytest.mark.timeout(900)  # the process that loads has 600 s of its own


@dataclass(frozen=True)
class Case:
    """A server: how many ranks it has, as on which device its loaders cut, and its further settings."""

    name: str
    ranks: int
    like: str
    settings: tuple[tuple[str, int | bool], ...] = ()

    @property
    def flags(self) -> list[str]:
        names = [(f"--{name.replace('_', '-')}", value) for name, value in self.settings]
        return [part for name, value in names for part in ([name] if value is True else [name, str(value)])]


LEAST = {"Qwen2.5-VL": 50, "Qwen3-VL": 50, "Qwen3-VL-MoE": 50}  # parameters that are more than so many; others 15
CASES = {
    family: (
        Case("cpu1", 1, "cpu"),
        Case("cpu2", 2, "cpu"),
        Case("gpu1", 1, "gpu"),
        Case("gpu2", 2, "gpu"),
        *more,
    )
    for family, more in {
        "Qwen2.5-VL": (Case("cpu3", 3, "cpu"), Case("tower2", 2, "gpu", (("mm_enable_dp_encoder", True),))),
        "Qwen3-VL": (Case("tower4", 4, "gpu", (("mm_enable_dp_encoder", True),)),),
        "Qwen3-VL-MoE": (
            Case("groups2", 2, "gpu", (("ep_size", 2),)),
            Case("groups4", 4, "gpu", (("ep_size", 2), ("mm_enable_dp_encoder", True))),
        ),
    }.items()
} | {
    family: (Case("cpu1", 1, "cpu"), Case("gpu2", 2, "gpu")) for family in ("GLM-4V", "Qwen3", "Qwen3.5", "Qwen3.5-MoE")
}
"""Ranks are as many as the heads of keys, fewer and more."""


def made(family: str, folder: Path) -> Path:
    """Of Qwen3-VL four heads of queries and two of keys; of Qwen2.5-VL and GLM-4V two and one."""
    if not family.startswith("Qwen3-VL"):
        return FAMILIES[family][0](folder)
    dense = tiny_model_dir(folder, hidden=128)
    return dense if family == "Qwen3-VL" else as_mixture(dense, folder / "mixture")


def sent(policy: Policy) -> list[Bucket]:
    return list(buckets(gathered(policy), torch.float32, 100_000))


def prepare(family: str, place: Path) -> None:
    """Write what load_buckets.py reads there."""
    folder, cases = made(family, place / "model"), CASES[family]
    policy = load_policy(str(folder), VisionSpec.load(folder))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.vlm.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    export(place / "export", gathered(policy), model_path=str(folder))
    whole = {
        name: values.view(shape).clone()
        for bucket in sent(policy)
        for (name, values), shape in zip(bucket.values(), bucket.shapes, strict=True)
    }
    save_file(whole, place / "sent.safetensors")
    described = [{"name": c.name, "ranks": c.ranks, "like": c.like, "flags": c.flags} for c in cases]
    (place / "cases.json").write_text(json.dumps(described))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The folder of each family, after SGLang's classes of all of them have loaded what lies there: its import alone
    takes half a minute."""
    folders = {family: tmp_path_factory.mktemp(family) for family in sorted(CASES)}
    for family, place in folders.items():
        prepare(family, place)
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(STAND_INS)}
    command = [PYTHON, "-P", "tests/sglang/load_buckets.py", *folders.values()]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folders


@pytest.mark.parametrize("family", sorted(CASES))
def test_each_rank_of_sglangs_class_holds_the_same_of_the_learners_buckets_as_of_its_export(family, loaded):
    for name in [f"{case.name}_{rank}" for case in CASES[family] for rank in range(case.ranks)]:
        rank = json.loads((loaded[family] / f"{name}.json").read_text())
        assert rank["class"] == FAMILIES[family][1].__name__
        assert rank["different"] == [] and rank["count"] > LEAST.get(family, 15), name
