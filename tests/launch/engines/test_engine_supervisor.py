"""Engines of a recipe: their commands, their GPUs, and what keeps them alive."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from launch.engines.engine_supervisor import EngineServer, last_lines
from launch.engines.gpus import check_apart, engine_gpus, gpu_names, lock_gpus
from launch.engines.host_engines import engine_specs
from launch.engines.kinds.engine_kind import EnginePlacement, EngineSpec
from launch.engines.kinds.sglang_engine import cuda_home, sglang_flags, stages_weights
from launch.engines.network import free_port
from launch.processes.children import start_family, stop_all
from learner.setup import publish_settings
from shared.config.recipe import ConfigError, load_recipe
from shared.config.sections import EngineConfig
from shared.engine.engine_api import EngineError
from shared.engine.engine_messages import UNTRAINED
from tests.support.machine import is_there, until

RECIPE = "launch/recipes/sokoban_tiny.toml"


@pytest.fixture(autouse=True)
def signals():
    """Those of this process as they were: it ignores them from a `stop_all` on, and so would all that it starts."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def sglang_env(tmp_path):
    """A folder that looks like SGLang's environment for the CPU."""
    for name in ("bin/python", "lib/python3.11/site-packages/sglang/launch_server.py"):
        (tmp_path / "env" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "env" / name).touch()
    return tmp_path / "env"


def specs(*overrides):
    return engine_specs(load_recipe(RECIPE, [str(part) for part in overrides]))


def sglang_specs(folder, *overrides):
    return specs("--engine.kind", "sglang", "--engine.sglang_env", folder, *overrides)


def options(spec):
    """The flags of a command with their first value; True for a bare flag."""
    parts = [*spec.command, "--"]
    flags = [i for i, part in enumerate(parts[:-1]) if part.startswith("--")]
    return {parts[i]: True if parts[i + 1].startswith("--") else parts[i + 1] for i in flags}


def test_each_embedded_engine_has_its_port_the_recipes_limits_and_no_weights_of_a_run():
    first, second = specs("--engine.count", 2, "--engine.port", 40000, "--engine.request_timeout_s", 1800)
    assert (first.url, second.url) == ("http://127.0.0.1:40000", "http://127.0.0.1:40001")
    assert options(second)["--port"] == "40001" and options(second)["--weight-version"] == UNTRAINED
    assert first.log is None and first.gpus == ()
    assert float(options(first)["--request-timeout-s"]) > 1800 and options(first)["--update-timeout-s"] == "120.0"


def test_sglang_is_started_for_the_recipes_model_on_a_cpu(sglang_env):
    (spec,) = sglang_specs(sglang_env, "--engine.port", 40000)
    flags = options(spec)
    assert spec.command[:4] == (str(sglang_env / "bin/python"), "-P", "-m", "sglang.launch_server")
    assert Path(flags["--model-path"]).is_absolute()
    assert all(flags[f"--{name}"] is True for name in ("disable-overlap-schedule", "sleep-on-idle"))
    assert flags["--attention-backend"] == "torch_native"
    assert json.loads(flags["--mm-process-config"])["image"]["size"]["shortest_edge"] == 1024
    assert spec.env["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    assert flags["--mm-preprocess-cache-size-mb"] == "256" and flags["--trust-mm-content-hashes"] is True
    assert spec.env["PATH"] == f"{sglang_env / 'bin'}:{os.environ['PATH']}"
    assert spec.env["PYTHONPATH"].endswith("stand_ins")
    assert spec.log is not None and "40000" in spec.log.name


def test_sglang_receives_weights_beside_generation_where_the_recipe_wants_it(sglang_env):
    for value, staged in (("auto", "1"), ("off", "0"), ("on", "1")):
        (spec,) = sglang_specs(sglang_env, "--engine.stage_weights", value)  # on a CPU
        assert [Path(path).name for path in spec.env["PYTHONPATH"].split(":")] == ["plugin", "stand_ins"]
        assert (spec.env["PRONK_STAGE_WEIGHTS"], spec.env["PRONK_DRAIN_PAUSES"]) == (staged, "1")
        assert spec.env["PRONK_GROUP_TIMEOUT_S"] == "120.0"


@pytest.mark.parametrize("timeout_s", [1, 120, 3000])
def test_a_server_that_is_paused_is_not_ended_by_its_own_watchdog(sglang_env, timeout_s):
    override = ("--learner.publish.timeout_s", timeout_s)
    (spec,) = sglang_specs(sglang_env, *override)
    recipe = load_recipe(RECIPE, [str(part) for part in override])
    assert float(options(spec)["--watchdog-timeout"]) > publish_settings(recipe).longest_s


def test_on_a_gpu_images_are_resized_as_the_learner_does_and_logits_are_not_rounded():
    fields = ("--engine.device", "cuda", "--learner.device", "cuda")
    for dtype, wide in (("bfloat16", True), ("float32", None)):
        recipe = load_recipe(RECIPE, [*fields, "--model.dtype", dtype])
        flags = sglang_flags(recipe, EnginePlacement(0, 30000, gpus=(0,)))
        assert flags["image-processor-backend"] == "pil" and flags.get("enable-fp32-lm-head") is wide


@pytest.mark.parametrize(("fields", "limit_s"), [({}, 300), ({"device": "cuda"}, 1800), ({"start_timeout_s": 7}, 7)])
def test_a_first_start_on_a_gpu_which_compiles_has_more_time(fields, limit_s):
    assert EngineConfig(**fields).start_limit_s == limit_s


def test_kernels_are_compiled_by_the_nvcc_on_the_path_or_by_that_of_the_engines_environment(sglang_env, tmp_path):
    of_pip = sglang_env / "lib/python3.11/site-packages/nvidia/cu13/bin/nvcc"
    assert cuda_home(sglang_env, {"PATH": ""}, Path("/nowhere")) == ""
    of_pip.parent.mkdir(parents=True)
    of_pip.touch(mode=0o755)
    assert cuda_home(sglang_env, {"PATH": ""}, Path("/nowhere")) == str(of_pip.parents[1])
    without = {"PATH": "", "CUDA_HOME": "/a/folder/without/nvcc"}
    assert cuda_home(sglang_env, without, Path("/nowhere")) == str(of_pip.parents[1])
    own = tmp_path / "cuda" / "bin" / "nvcc"
    own.parent.mkdir(parents=True)
    own.touch(mode=0o755)
    assert cuda_home(sglang_env, {"PATH": str(own.parent)}, Path("/nowhere")) == str(own.parents[1])
    assert cuda_home(sglang_env, {"PATH": "", "CUDA_HOME": str(own.parents[1])}, Path("/nowhere")) == str(
        own.parents[1]
    )
    assert cuda_home(sglang_env, {"PATH": ""}, own.parents[1]) == str(own.parents[1])


@pytest.mark.parametrize(("publish", "staged"), [("merged", False), ("adapter", True)])
def test_sglang_on_a_gpu_receives_adapters_alone_beside_generation(publish, staged):
    fields = {
        "engine.device": "cuda",
        "learner.device": "cuda",
        "learner.lora.rank": 8,
        "learner.lora.publish": publish,
    }
    options = [part for key, value in fields.items() for part in (f"--{key}", str(value))]
    assert stages_weights(load_recipe("launch/recipes/colour_tiny.toml", options)) is staged


def test_each_rank_of_sglang_on_a_cpu_has_cores(sglang_env, monkeypatch):
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    for cores, shares in (({0, 1, 2, 3}, "0,2|1,3"), ({5}, "5|5")):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        (spec,) = sglang_specs(sglang_env, "--engine.tensor_parallel", 2)
        assert spec.env["SGLANG_CPU_OMP_THREADS_BIND"] == shares
    (spec,) = sglang_specs(sglang_env)
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in spec.env
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0-1|2-3")
    (spec,) = sglang_specs(sglang_env, "--engine.tensor_parallel", 2)
    assert spec.env.get("SGLANG_CPU_OMP_THREADS_BIND", "0-1|2-3") == "0-1|2-3"


def test_engines_sample_with_seeds_of_their_own(sglang_env):
    both = sglang_specs(sglang_env, "--engine.count", 2, "--run.seed", 5)
    assert [options(spec)["--random-seed"] for spec in both] == ["5", "6"]


def test_any_flag_is_passed_on_and_wins(sglang_env):
    flags = {
        "max_running_requests": 7,
        "--enable-metrics": True,
        "disable-overlap-schedule": False,
        "lora-paths": [1, 2],
        "mm-attention-backend": "sdpa",
    }
    own = ("--engine.mem_fraction", 0.5)
    (spec,) = sglang_specs(sglang_env, "--engine.flags", json.dumps(flags), *own)
    found = options(spec)
    assert found["--max-running-requests"] == "7" and found["--enable-metrics"] is True
    assert "--disable-overlap-schedule" not in found
    assert spec.command[spec.command.index("--lora-paths") + 1 :][:2] == ("1", "2")
    assert found["--mm-attention-backend"] == "sdpa" and found["--mem-fraction-static"] == "0.5"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"pp-size": 2}, r"pp-size = 2, but weights cannot be sent .* raise engine.tensor_parallel"),
        ({"--data_parallel_size": 4}, "data-parallel-size = 4, but weights cannot be sent"),
        ({"quantization": "fp8"}, "quantization = 'fp8', but SGLang would load new weights .* leave it out"),
    ],
)
def test_an_engine_that_would_take_no_new_weights_is_refused_before_it_starts(sglang_env, flags, words):
    with pytest.raises(ConfigError, match=words) as error:
        sglang_specs(sglang_env, "--engine.flags", json.dumps(flags))
    assert "\n" not in str(error.value)
    assert sglang_specs(sglang_env, "--engine.flags", json.dumps(dict.fromkeys(flags, 1 if "size" in words else "")))


def test_a_missing_environment_is_named_with_its_cure(tmp_path):
    with pytest.raises(ConfigError, match="make sglang-env"):
        sglang_specs(tmp_path)


def test_an_environment_for_the_other_device_is_refused(sglang_env):
    (sglang_env / "lib/python3.11/site-packages/sgl_kernel").mkdir()
    with pytest.raises(ConfigError, match=r"set engine\.device = 'cuda'"):
        sglang_specs(sglang_env)


def config(**fields):
    return EngineConfig(kind="sglang", device="cuda", **fields)


def test_engines_take_the_last_gpus_and_share_none():
    assert engine_gpus(config(count=2), 4) == [(2,), (3,)]
    assert engine_gpus(config(count=2, tensor_parallel=2), 8) == [(4, 5), (6, 7)]
    assert engine_gpus(config(count=2, gpus=(5, 1)), 8) == [(5,), (1,)]
    assert engine_gpus(EngineConfig(count=2), 0) == [(), ()]


@pytest.mark.parametrize(
    ("fields", "visible", "words"),
    [
        ({"count": 2, "gpus": (1, 1)}, 4, "gives a GPU to two engines"),
        ({"count": 2, "gpus": (1,)}, 4, "need 2, but there are 1"),
        ({"count": 3, "tensor_parallel": 2}, 4, "need 6, but there are 4"),
        ({"gpus": (4,)}, 4, "shows the GPUs 0 to 3"),
    ],
)
def test_gpus_that_do_not_suffice_are_named(fields, visible, words):
    with pytest.raises(ConfigError, match=words):
        engine_gpus(config(**fields), visible)


def test_gpus_for_engines_on_a_cpu_are_a_mistake():
    with pytest.raises(ConfigError, match="set it to cuda"):
        engine_gpus(EngineConfig(gpus=(1,)), 4)


def test_a_gpu_of_the_learners_is_refused():
    check_apart([(2,), (3,)], 2)
    with pytest.raises(ConfigError, match="GPU 1 would be an engine's and a learner rank's"):
        check_apart([(1,), (2,)], 2)


def test_gpus_are_counted_among_the_visible_ones():
    assert gpu_names((0, 2), {"CUDA_VISIBLE_DEVICES": "3,5,GPU-7a"}) == ("3", "GPU-7a")
    assert gpu_names((0, 2), {}) == ("0", "2")


def test_a_gpu_is_given_to_one_owner_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    held = lock_gpus(["0"], "engine on port 1")
    with pytest.raises(ConfigError, match=r"taken by engine on port 1 \(process \d+\)"):
        lock_gpus(["0"], "learner rank 0")
    held[0].close()
    assert lock_gpus(["0"], "learner rank 0")


def test_a_lock_that_somebody_else_has_put_there_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / "pronk-gpu-0.lock").symlink_to(tmp_path / "theirs")
    with pytest.raises(ConfigError, match=r"pronk-gpu-0.lock cannot be opened: .*; remove it"):
        lock_gpus(["0"], "engine on port 1")
    assert (tmp_path / "theirs").read_text() == "precious"
    (tmp_path / "pronk-gpu-1.lock").mkdir()
    with pytest.raises(ConfigError, match="cannot be opened"):
        lock_gpus(["1"], "engine on port 1")


@pytest.fixture
def started(tmp_path):
    """Starts an engine whose command is Python with these arguments; it ends with the test."""
    engines = []

    def start(*arguments, port=1, **settings):
        command = (sys.executable, *arguments)
        spec = EngineSpec("engine on port 1", f"http://127.0.0.1:{port}", command, {}, (), tmp_path / "log")
        engines.append(EngineServer(spec, EngineConfig(**settings)))
        engines[-1].start()
        return engines[-1]

    yield start
    stop_all([engine.child for engine in engines if engine.child])


def until_restarted(engine, first):
    until(lambda: engine.keep_alive() or (engine.child is not None and engine.child.process.pid != first))


def test_an_engine_that_ended_is_started_again_and_named(started, tmp_path, caplog):
    engine = started("-c", "import time; print('here', flush=True); time.sleep(60)")
    until(lambda: "here" in (tmp_path / "log").read_text())
    first = engine.child.process.pid
    os.kill(first, signal.SIGKILL)
    until_restarted(engine, first)
    assert "engine on port 1 was ended by SIGKILL; starting it again in 1 s" in caplog.text
    until(lambda: (tmp_path / "log").read_text().count("here") == 2)


@pytest.mark.slow
def test_an_engine_that_hangs_is_killed_and_started_again(started, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("launch.engines.health_probe.EVERY_S", 0.05)
    monkeypatch.setattr("launch.engines.health_probe.ANSWER_S", 1.0)
    port = free_port()
    monkeypatch.setattr("launch.engines.engine_supervisor.SILENT_S", 2.5)
    engine = started("-m", "http.server", str(port), "--bind", "127.0.0.1", port=port)
    until(lambda: "GET /health" in (tmp_path / "log").read_text())  # it answers: an error is an answer
    first = engine.child.process.pid
    time.sleep(3.0)
    engine.keep_alive()
    assert engine.child.process.pid == first
    os.kill(first, signal.SIGSTOP)
    until_restarted(engine, first)
    assert "engine on port 1 gave no answer for 2.5 s; starting it again" in caplog.text


def test_an_engine_that_never_answers_after_a_restart_is_no_engine(started, monkeypatch):
    monkeypatch.setattr("launch.engines.health_probe.EVERY_S", 0.05)
    engine = started("-c", "import time; time.sleep(60)", max_restarts=0, start_timeout_s=0.3)
    until(lambda: engine.probe.missing)
    with pytest.raises(EngineError, match=r"gave no answer for 0.3 s, after 0 restarts"):
        engine.keep_alive()


def test_an_engine_that_cannot_stay_alive_is_given_up(started, capfd):
    engine = started("-c", "print('no memory'); raise SystemExit(3)", max_restarts=0)
    until(lambda: engine.child.process.poll() is not None)
    with pytest.raises(EngineError, match="ended with exit code 3, after 0 restarts"):
        engine.keep_alive()
    assert "no memory" in capfd.readouterr().err


@pytest.mark.slow
def test_what_an_engine_has_started_ends_with_it(tmp_path):
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    child = start_family("engine", [sys.executable, "-c", code], tmp_path / "log", env={})
    until(lambda: (tmp_path / "log").read_text().endswith("\n"))
    grandchild = int((tmp_path / "log").read_text())
    stop_all([child])
    until(lambda: not is_there(grandchild))


def test_the_end_of_a_log_is_shown(tmp_path):
    (tmp_path / "log").write_text("".join("x" * 2**17 + "\n") + "\n".join(f"line {i}" for i in range(50)))
    assert last_lines(tmp_path / "log", 2).splitlines()[1:] == ["    line 48", "    line 49"]
