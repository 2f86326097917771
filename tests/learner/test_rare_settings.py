"""Settings of a recipe that few runs use do what they say."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from launch.task_samples import training_samples
from learner.setup import refusal, slow_dtype
from learner.training.optim import lr_factor
from shared.config.objective_section import ObjectiveConfig
from shared.config.recipe import load_recipe
from shared.types import Group
from tests.support.episodes import learner_config, random_groups
from tests.support.runs import RECIPE, local, metrics, places


def test_the_cosine_schedule_warms_up_and_falls_to_nothing() -> None:
    config = learner_config(schedule="cosine", warmup_steps=2, total_steps=10)
    assert [lr_factor(step, config) for step in (0, 1, 2, 6)] == pytest.approx([0.5, 1.0, 1.0, 0.5])
    assert lr_factor(10, config) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_ends_at_the_final_share_of_the_rates(schedule: str) -> None:
    config = learner_config(schedule=schedule, warmup_steps=2, total_steps=10, final_share=0.2)
    assert [lr_factor(step, config) for step in (0, 1, 2, 6, 10, 99)] == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2, 0.2])
    constant = learner_config(schedule="constant", total_steps=10, final_share=0.2)
    assert lr_factor(10, constant) == 1.0


def test_rates_stand_until_the_last_share_of_the_steps() -> None:
    config = learner_config(schedule="linear", warmup_steps=2, total_steps=10, final_share=0.2, decay_share=0.5)
    assert [lr_factor(step, config) for step in (0, 2, 6, 8, 10, 99)] == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2, 0.2])


def test_training_seeds_begin_again_after_num_samples() -> None:
    source = training_samples(load_recipe(RECIPE, ["--data.first_seed", "7", "--data.num_samples", "3"]))
    assert [source.sample(position).metadata["seed"] for position in range(5)] == [7, 8, 9, 7, 8]


def test_dynamic_sampling_replaces_groups_of_equal_rewards(spec) -> None:
    def group(*rewards: float) -> Group:
        played = random_groups(spec, 1, group_size=len(rewards))[0].trajectories
        return Group("g", "a", tuple(replace(t, reward=r) for t, r in zip(played, rewards, strict=True)))

    refuse = refusal(ObjectiveConfig(name="grpo", dynamic_sampling=True))
    assert refuse is not None
    assert (refuse(group(1.0, 1.0)), refuse(group(1.0, 0.0))) == ("uninformative", "")
    assert refusal(ObjectiveConfig(name="grpo")) is None


def run(tmp_path: Path, fields: dict) -> subprocess.CompletedProcess[str]:
    command = local(places(tmp_path, **fields, **{"eval.samples": 0}))
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.parametrize(
    ("fields", "versions"),
    [
        ({"learner.publish.every": 2, "learner.total_steps": 5}, [0, 1, 1, 2, 3]),  # the last step always publishes
        ({"learner.max_minutes": 1e-6}, [1]),
    ],
)
def test_a_run_publishes_and_ends_when_the_recipe_says(tmp_path: Path, fields: dict, versions: list[int]) -> None:
    done = run(tmp_path, fields)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [row["policy_version"] for row in metrics(tmp_path) if "rollout/reward" in row] == versions


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_a_canary_beyond_its_tolerance_stops_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, {"learner.publish.canary_tolerance": 1e-12})
    assert done.returncode and "(learner.publish.canary_tolerance)" in done.stderr, done.stderr[-3000:]


@pytest.mark.parametrize(("dtype", "device"), [("float32", "cpu"), ("bfloat16", "cuda"), ("float32", "cuda")])
def test_float32_on_a_gpu_is_not_taken_silently(dtype: str, device: str) -> None:
    said = slow_dtype(dtype, torch.device(device))
    assert (said is not None) == ((dtype, device) == ("float32", "cuda"))
    assert said is None or ("set model.dtype = bfloat16" in said and "\n" not in said)
