"""The doctor's trial: real parts in miniature, and whatever ends it is told as the stage that it was in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from launch import catalog
from launch.doctor_checks.trial_recipe import STAND_IN, make_trial_recipe
from launch.doctor_checks.trial_runner import STAGES, TrialProgress, end, watch
from launch.engines.kinds import sglang_engine
from launch.engines.network import free_port
from launch.processes.children import start_family
from shared.config.recipe import load_recipe
from tests.support.environments import made_up_environment
from tests.support.runs import RECIPE

MODEL = Path("launch/models/colour_tiny")
CUDA = {"learner.device": "cuda", "engine.device": "cuda", "model.dtype": "bfloat16"}


def recipe_with(name=RECIPE, **fields):
    return load_recipe(name, [part for key, value in fields.items() for part in (f"--{key}", str(value))])


def small(recipe, num_gpus=0, place=Path("runs/x")):
    folder = catalog.model_folder(recipe.model.path)
    return make_trial_recipe(recipe, place, folder, catalog.sizes_in(folder), num_gpus)


def doctor(tmp_path, *arguments):
    ports = ("--learner.bind", f"tcp://127.0.0.1:{free_port()}", "--engine.port", free_port())
    command = [sys.executable, "launch/doctor.py", "--json", "--run.dir", tmp_path / "runs", *ports, *arguments]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=280, env=env)
    assert "Traceback" not in done.stderr, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    return done.returncode, {each["name"]: each for each in said["checks"]}


# ---------------------------------------------------------------------- the whole of it


@pytest.mark.slow
def test_the_trial_goes_through_every_stage_and_leaves_nothing_behind(tmp_path):
    code, found = doctor(tmp_path)
    assert code == 0
    assert [found[f"trial: {stage}"]["state"] for stage in STAGES] == ["ok"] * len(STAGES), found
    assert found["trial: learner"]["found"].startswith("2 ranks on cpu")
    assert "checksums equal" in found["trial: weights again"]["found"]
    assert "8 images" in found["trial: episode"]["found"]
    assert not (tmp_path / "runs").exists() and [*tmp_path.glob("pronk-doctor-*")] == []


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_the_trial_of_a_recipe_with_a_mesh_shares_its_microbatches_and_experts(tmp_path):
    """What cannot be had here is made smaller, or left out."""
    overrides = ("--model.dtype", "float32", "--engine.kind", "embedded")
    _, found = doctor(tmp_path, "--config", "launch/recipes/sokoban_long.toml", *overrides)
    assert {name for name, each in found.items() if each["state"] == "failed"} <= {"task"}, found  # has no data
    assert [found[f"trial: {stage}"]["state"] for stage in STAGES] == ["ok"] * len(STAGES), found
    words = found["trial: learner"]["found"]
    assert words.startswith("2 ranks on cpu") and words.endswith(
        "context 2 and expert 2 compute what each rank does alone"
    )
    assert "a mixture of experts made of launch/models/colour_tiny" in found["trial"]["found"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_the_trial_of_a_recipe_with_adapters_reads_them_back(tmp_path):
    code, found = doctor(tmp_path, "--learner.lora.rank", 8)
    assert code == 0
    assert [found[f"trial: {stage}"]["state"] for stage in STAGES] == ["ok"] * len(STAGES), found


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_a_model_with_a_tensor_missing_fails_the_stage_that_sees_it(tmp_path):
    broken = tmp_path / "model"
    broken.mkdir()
    for file in MODEL.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    del weights[next(name for name in weights if name.endswith("o_proj.weight"))]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    code, found = doctor(tmp_path, "--model.path", broken)
    states = [found[f"trial: {stage}"]["state"] for stage in STAGES]
    assert code == 1
    assert states[2:] == ["not checked"] * len(states[2:])
    (failed,) = [each for each in found.values() if each["state"] == "failed"]
    assert failed["name"] in ("trial: learner", "trial: engine") and "o_proj.weight" in failed["found"]
    assert Path(found["trial: log"]["found"]).exists()


# ---------------------------------------------------------------------- what it runs


def test_a_small_recipe_is_run_as_it_is_but_short():
    made = small(recipe_with("launch/recipes/sokoban_tiny.toml"))
    assert made.changes == ()
    assert made.recipe.model.path == "launch/models/sokoban_tiny"
    assert made.recipe.env.module == "envs.sokoban"
    assert (made.recipe.env.max_turns, made.recipe.learner.total_steps, made.recipe.engine.count) == (2, 1, 1)


@pytest.mark.parametrize("recipe", sorted(Path("launch/recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_has_a_round(tmp_path, recipe):
    whole = recipe_with(str(recipe))
    made = small(whole, place=tmp_path)
    assert made.recipe.learner.objective.name == whole.learner.objective.name
    assert made.recipe.model.dtype == whole.model.dtype
    assert Path(made.recipe.model.path).is_dir()
    assert made.recipe.learner.device == made.recipe.engine.device == "cpu"


def test_a_large_model_is_replaced_and_the_report_says_so(monkeypatch):
    monkeypatch.setattr("launch.doctor_checks.trial_recipe.LARGEST", 1e5)
    made = small(recipe_with(**{"learner.optimizer.name": "muon", "learner.group_size": 64}))
    assert made.recipe.model.path.endswith(STAND_IN)
    assert made.recipe.learner.optimizer.name == "muon"
    assert made.recipe.learner.group_size == 8
    assert "takes long to load" in made.changes[0]


@pytest.mark.parametrize(
    ("num_gpus", "devices", "ranks"),
    [(0, ("cpu", "cpu"), 2), (1, ("cuda", "cpu"), 1), (2, ("cuda", "cuda"), 1), (8, ("cuda", "cuda"), 2)],
)
def test_learner_and_engine_share_out_the_gpus_that_there_are(num_gpus, devices, ranks):
    made = small(recipe_with(**CUDA), num_gpus)
    assert (made.recipe.learner.device, made.recipe.engine.device) == devices
    assert made.ranks == ranks


@pytest.mark.parametrize(
    ("context", "expert", "num_gpus", "shared", "said"),
    [
        (8, 4, 0, (2, 2), ["context = 2 on 2 ranks instead of 8", "expert = 2 on 2 ranks instead of 4"]),
        (2, 2, 8, (2, 2), []),
        (3, 1, 8, (1, 1), ["context = 1 on 2 ranks instead of 3"]),
        (2, 8, 2, (1, 1), ["context = 1 on 1 rank instead of 2", "expert = 1 on 1 rank instead of 8"]),
    ],
)
def test_a_mesh_is_made_as_small_as_the_ranks_and_the_report_says_so(
    tmp_path, monkeypatch, context, expert, num_gpus, shared, said
):
    monkeypatch.setattr("launch.doctor_checks.trial_recipe.LARGEST", 1e5)
    fields = {"learner.parallel.context": context, "learner.parallel.expert": expert, "learner.parallel.check": False}
    made = small(recipe_with(**fields | (CUDA if num_gpus else {})), num_gpus, tmp_path)
    parallel = made.recipe.learner.parallel
    assert (parallel.context, parallel.expert) == shared and parallel.check
    told = [change.removeprefix("learner.parallel.") for change in made.changes if "instead of" in change]
    assert told[1:] == said
    assert (tmp_path / "mixture").exists() == (shared[1] > 1) == ("mixture" in made.recipe.model.path)


@pytest.mark.parametrize("kind", ["sglang", "embedded"])
def test_a_shared_gpu_is_shared_in_the_trial_too_by_the_embedded_engine_where_sglang_is_not_built(monkeypatch, kind):
    if kind == "sglang":
        monkeypatch.setattr(sglang_engine, "sglang_python", lambda recipe: Path("python"))
    made = small(load_recipe("launch/recipes/geo3k_multi_turn_one_gpu.toml"), 1)
    assert (made.recipe.learner.device, made.recipe.engine.device) == ("cuda", "cuda")
    assert (made.recipe.engine.kind, made.recipe.engine.shares_gpu, made.ranks) == (kind, True, 1)


def test_the_kernel_gives_the_engines_port_to_no_other_socket_before_it_listens(tmp_path, monkeypatch):
    (tmp_path / "range").write_text("12000\t60999\n")
    monkeypatch.setattr("launch.engines.network.EPHEMERAL", tmp_path / "range")
    ports = {small(recipe_with()).recipe.engine.port for _ in range(20)}
    assert 10000 <= min(ports) < max(ports) < 12000


def test_what_is_said_of_gpus_is_not_asked_of_the_cpu(tmp_path):
    fields = {
        "learner.parallel.attention": "flash3",
        "engine.flags": '{"attention-backend": "fa3"}',
        "engine.mem_fraction": 0.8,
    }
    made = small(recipe_with(**CUDA, **fields))
    assert made.recipe.learner.parallel.attention == "auto" and made.recipe.engine.flags == {}
    made = small(recipe_with(**CUDA, **fields), 2)
    assert made.recipe.learner.parallel.attention == "flash3" and made.recipe.engine.flags == {
        "attention-backend": "fa3"
    }


def test_sglang_takes_part_where_its_environment_fits(tmp_path):
    made_up_environment(tmp_path, sglang="0.5.23")
    fields = {"engine.kind": "sglang", "engine.sglang_env": tmp_path}
    assert small(recipe_with(**fields)).recipe.engine.kind == "sglang"
    made = small(recipe_with(**fields | {"engine.sglang_env": tmp_path / "none"}))
    assert made.recipe.engine.kind == "embedded" and "no SGLang" in made.changes[0]


def test_a_recipe_with_penalties_and_minibatches_has_a_trial_too():
    fields = {"learner.objective.overlong": "penalise", "learner.objective.overlong_tokens": 4}
    fields |= {"learner.objective.overlong_buffer": 2, "learner.objective.minibatches": 16}
    made = small(recipe_with(**fields))
    assert made.recipe.learner.objective.minibatches <= 8


# ---------------------------------------------------------------------- how it is followed


def followed(tmp_path, code, *, stage_s=30.0):
    """What `watch` says of a process with this code, and what its events said."""
    follow = TrialProgress(tmp_path / "events")
    prelude = (
        f"import json, os, signal, time\ndef tell(**e): print(json.dumps(e), file=open({str(follow.path)!r}, 'a'))\n"
    )
    child = start_family("trial", [sys.executable, "-c", prelude + code], tmp_path / "log", env={})
    try:
        return watch(child, follow, stage_s, 0.0, lambda _: None), follow
    finally:
        end(child)


def test_a_process_that_is_killed_is_told_with_its_stage(tmp_path):
    code = "tell(stage='learner', state='begun')\nos.kill(os.getpid(), signal.SIGSEGV)"
    how, follow = followed(tmp_path, code)
    assert (how, follow.stage) == ("its process was ended by SIGSEGV", "learner")


def test_a_stage_that_hangs_is_told_after_its_time(tmp_path):
    how, follow = followed(tmp_path, "tell(stage='weights', state='begun')\ntime.sleep(60)", stage_s=2.0)
    assert (how, follow.stage) == ("no end within 2 s", "weights")


def test_what_follows_from_the_first_failure_is_not_told_as_one(tmp_path):
    code = (
        "tell(stage='learner', state='ok', found='well', seconds=1.0)\n"
        "tell(stage='engine', state='failed', found='no memory', seconds=1.0)\n"
        "tell(stage='weights', state='failed', found='connection closed (rank 1)', seconds=1.0)\nexit(1)"
    )
    how, follow = followed(tmp_path, code)
    assert how == "its process ended with exit code 1"
    assert {stage: each.state for stage, each in follow.findings.items()} == {"learner": "ok", "engine": "failed"}
    assert follow.findings["engine"].cure
