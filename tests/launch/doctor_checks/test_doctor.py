"""The doctor's checks: each names what is wrong with a machine, and the cure."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch import catalog
from launch.doctor import examine
from launch.doctor_checks import hardware, locations, software
from launch.doctor_checks.hardware import GIB, Gpu
from launch.engines.kinds.sglang_engine import judge_versions
from launch.engines.network import free_port
from launch.findings import Finding, as_json, exit_code, refused, table
from shared.config.recipe import load_recipe
from shared.engine.nccl_versions import Environment
from tests.support.environments import made_up_environment
from tests.support.machine import LocalServer, QuietHandler
from tests.support.runs import RECIPE
from tests.support.tiny import running_engine

CUDA = {"learner.device": "cuda", "engine.device": "cuda", "model.dtype": "bfloat16"}
H100 = Gpu("NVIDIA H100", 80 * 10**9, 79 * 10**9)


def recipe_with(name=RECIPE, **fields):
    return load_recipe(name, [part for key, value in fields.items() for part in (f"--{key}", str(value))])


def doctor(*arguments, **more):
    command = [sys.executable, "launch/doctor.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, **more)


def quick(*arguments, **more):
    """The exit code, and the findings by name, of the doctor as a process."""
    done = doctor("--quick", "--json", *arguments, **more)
    assert "Traceback" not in done.stderr, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    return done.returncode, {each["name"]: each for each in said["checks"]}


def is_bad(finding, *words, state="failed"):
    assert finding.state == state, finding
    assert all(word in finding.found for word in words), finding
    assert finding.cure, finding
    return True


# ---------------------------------------------------------------------- as a process


@pytest.mark.slow
def test_a_sound_machine_is_told_so_in_a_table_and_in_json(tmp_path):
    ports = ("--learner.bind", f"tcp://127.0.0.1:{free_port()}", "--engine.port", free_port())
    done = doctor("--quick", "--json", "--run.dir", tmp_path / "runs", *ports)
    assert done.returncode == 0, done.stderr
    *shown, last = done.stdout.splitlines()
    said = json.loads(last)
    assert said["failed"] is False
    assert all(any(line.startswith(each["name"]) for line in shown) for each in said["checks"])
    assert {"python", "torch", "memory", "open files", "run folder"} <= {
        each["name"] for each in said["checks"] if each["state"] == "ok"
    }
    assert not (tmp_path / "runs").exists()  # it leaves nothing behind


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "nowhere.toml"], "recipe 'nowhere.toml' does not exist"),
        (["--learner.lrr", "1"], "did you mean --learner.optimizer.lr?"),
    ],
)
def test_a_mistake_in_the_recipe_is_one_line(arguments, words):
    done = doctor("--quick", *arguments)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert words in done.stderr


@pytest.mark.slow
def test_too_few_file_descriptors_are_a_failure(tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 250))

    code, found = quick("--run.dir", tmp_path, preexec_fn=limit)
    assert code == 1
    assert is_bad(Finding(**found["open files"]), "200 may be open")
    assert "ulimit -n" in found["open files"]["cure"] and "hard limit (250)" in found["open files"]["cure"]


@pytest.mark.parametrize("recipe", sorted(Path("launch/recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_is_examined(tmp_path, recipe):
    found = examine(recipe_with(str(recipe), **{"run.dir": tmp_path}), quick=True)
    failed = {each.name for each in found if each.state == "failed"}
    assert failed <= {
        "task",
        "engine software",
        "engine ports",
        "learner port",
    }  # data that is not made; what others use
    assert all(each.cure for each in found if each.state in ("failed", "warning"))


# ---------------------------------------------------------------------- places


def test_an_occupied_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert is_bad(locations.check_engine_ports(recipe_with(**{"engine.port": port})), str(port))
        assert is_bad(
            locations.check_learner_port(recipe_with(**{"learner.bind": f"tcp://127.0.0.1:{port}"})), str(port)
        )


def test_a_port_that_the_kernel_gives_to_anybody_is_a_warning(tmp_path):
    port = free_port()
    (tmp_path / "range").write_text(f"{port} {port + 10}\n")
    found = locations.check_engine_ports(recipe_with(**{"engine.port": port}), tmp_path / "range")
    assert is_bad(found, state="warning")


def test_a_run_folder_that_cannot_be_written_is_a_failure(tmp_path):
    (tmp_path / "file").touch()
    found = locations.check_run_folder(recipe_with(**{"run.dir": tmp_path / "file" / "runs"}), None)
    assert is_bad(found, "cannot be written")


def test_a_disk_without_room_for_checkpoints_is_a_failure(tmp_path, monkeypatch):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    sizes = catalog.sizes_in(Path("launch/models/colour_tiny"))
    keep = 2 * int(free / (locations.BYTES_PER_PARAMETER * sizes.parameters)) + 1  # others write and delete meanwhile
    found = locations.check_run_folder(recipe_with(**{"run.dir": tmp_path, "learner.checkpoint.keep": keep}), sizes)
    assert is_bad(found, f"for {keep + 1} checkpoints")


@pytest.mark.parametrize(
    ("path", "words"), [("./nowhere", "is no folder"), ("envs", "config.json"), ("launch/models", "config.json")]
)
def test_a_model_that_is_none_is_named(path, words):
    recipe = recipe_with(**{"model.path": path})
    assert is_bad(locations.check_model(recipe, catalog.model_folder(path)), words)


def test_a_model_without_weights_is_named(tmp_path):
    for file in Path("launch/models/colour_tiny").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    found = locations.check_model(recipe_with(**{"model.path": tmp_path}), catalog.model_folder(str(tmp_path)))
    assert is_bad(found, "no .safetensors")


def test_a_model_of_the_hub_is_not_downloaded():
    recipe = recipe_with(**{"model.path": "Qwen/Qwen3-VL-2B-Instruct"})
    assert locations.check_model(recipe, None).state == "not checked"


def test_data_and_environments_that_are_missing_are_named():
    assert is_bad(locations.check_task(recipe_with(**{"data.source": "data/none.parquet"})), "data/none.parquet")
    assert is_bad(locations.check_task(recipe_with(**{"env.module": "envs.nothing"})), "envs.nothing")


def test_engines_that_run_elsewhere_are_asked_and_silent_ones_named(folder):
    silent = f"http://127.0.0.1:{free_port()}"
    with running_engine(folder) as (url, _):
        (found,) = locations.check_urls(recipe_with(**{"engine.urls": json.dumps([url])}))
        assert found.state == "ok"
        (found,) = locations.check_urls(recipe_with(**{"engine.urls": json.dumps([url, silent])}))
    assert is_bad(found, silent) and url not in found.found


def test_a_server_that_is_ill_is_named():
    class Ill(QuietHandler):
        def do_GET(self):
            self.reply(b"no", 500)

    server = LocalServer(Ill)
    try:
        (found,) = locations.check_urls(recipe_with(**{"engine.urls": json.dumps([server.url])}))
    finally:
        server.close()
    assert is_bad(found, server.url, "500")


# ---------------------------------------------------------------------- software


def test_the_kernels_of_delta_nets_are_missed_where_a_model_with_some_is_trained_on_a_gpu(monkeypatch):
    versions = {}
    monkeypatch.setattr(software.importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(software.importlib.metadata, "PackageNotFoundError", KeyError)
    qwen35 = recipe_with("launch/recipes/colour_tiny_qwen35.toml", **CUDA)
    found = software.check_delta_nets(qwen35)
    assert (
        found.state == "warning" and "flash-linear-attention is missing" in found.found and "pronk[fla]" in found.cure
    )
    versions["flash-linear-attention"] = "0.6.0"
    assert software.check_delta_nets(qwen35).state == "ok"
    for recipe in (recipe_with(**CUDA), recipe_with("launch/recipes/colour_tiny_qwen35.toml")):
        assert software.check_delta_nets(recipe).state == "not checked"


def test_a_package_outside_of_its_range_is_named(tmp_path):
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\ndependencies = ["torch>=99", "numpy", "no-such-package>=1"]\n')
    found = software.check_packages(project)
    assert is_bad(found, "torch", "is not >=99", "no-such-package is missing")
    assert "numpy" not in found.found


def test_torch_for_the_cpu_beside_a_driver_for_gpus_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(software, "cuda_of_torch", lambda: "")
    (tmp_path / "version").touch()
    assert is_bad(software.check_torch(tmp_path / "version"), "NVIDIA's driver")
    assert software.check_torch(tmp_path / "none").state == "ok"


def test_a_missing_sglang_environment_names_its_cure(tmp_path):
    found = software.check_engine(recipe_with(**{"engine.kind": "sglang", "engine.sglang_env": tmp_path}))
    assert is_bad(found, str(tmp_path)) and "make sglang-env" in found.cure


def test_the_sglang_environment_is_read_without_running_it(tmp_path):
    made_up_environment(tmp_path, torch="2.13.0+cpu", sglang="0.5.23", transformers="5.19.0")
    fields = {"engine.kind": "sglang", "engine.sglang_env": tmp_path}
    assert software.check_engine(recipe_with(**fields)).state == "ok"


def test_sglang_of_another_version_or_torch_is_a_warning():
    assert is_bad(judge_versions(Environment("2.14.1", sglang="0.4.1"), "cuda"), "0.4.1", state="warning")
    assert is_bad(judge_versions(Environment("2.13.0", sglang="0.5.23"), "cuda"), "2.14.1", state="warning")
    assert judge_versions(Environment("2.14.1+cu130", sglang="0.5.23"), "cuda").state == "ok"


def test_unequal_versions_of_nccl_are_a_failure(tmp_path):
    made_up_environment(tmp_path, torch="2.14.1", sglang="0.5.23")
    recipe = recipe_with(**CUDA, **{"engine.kind": "sglang", "engine.sglang_env": tmp_path})
    assert is_bad(software.check_nccl(recipe, Environment("2.13.0", "2.29.7")), "2.30.7", "2.29.7")
    assert software.check_nccl(recipe, Environment("2.14.1", "2.30.7")).state == "ok"
    assert software.check_nccl(recipe, Environment("unknown")).state == "not checked"


def test_what_the_user_tells_nccl_is_shown_where_it_differs():
    assert is_bad(software.check_variables(recipe_with(**CUDA), {"NCCL_CUMEM_ENABLE": "1"}), "=1", state="warning")
    assert software.check_variables(recipe_with(**CUDA), {"NCCL_CUMEM_ENABLE": "0"}).state == "ok"


# ---------------------------------------------------------------------- hardware


def test_gpus_that_do_not_suffice_are_named(tmp_path):
    def found(count, **fields):
        return hardware.check_gpus(recipe_with(**CUDA, **fields), [H100] * count, tmp_path / "none")[0]

    assert is_bad(found(1, **{"engine.count": 2}), "need 2, but there are 1")
    assert is_bad(found(2, **{"engine.count": 2}), "the engines take all")
    little = [Gpu("a small one", 10**7, 10**7)] * 2
    assert is_bad(hardware.check_gpus(recipe_with(**CUDA), little, tmp_path / "none")[0], "does not fit")


def test_a_machine_without_a_gpu_says_what_it_cannot_check(tmp_path):
    (found,) = hardware.check_gpus(recipe_with(**CUDA), [], tmp_path / "none")
    assert found.state == "not checked" and "learner.device and engine.device" in found.found
    (tmp_path / "version").touch()
    assert is_bad(hardware.check_gpus(recipe_with(**CUDA), [], tmp_path / "version")[0], "torch can use no GPU")


def test_gpu_memory_that_others_use_is_a_warning(tmp_path):
    busy = Gpu("NVIDIA H100", 80 * 10**9, 10 * 10**9)
    found = hardware.check_gpus(recipe_with(**CUDA), [H100, busy], tmp_path / "none")
    assert is_bad(found[0], "GPU 1", state="warning")


def test_memory_that_does_not_suffice_is_named():
    sizes = catalog.sizes_in(Path("launch/models/colour_tiny"))
    assert is_bad(hardware.check_memory(recipe_with(), sizes, 1000), "0.0 GB available")
    assert hardware.check_memory(recipe_with(), sizes, 10 * GIB).state == "ok"
    assert hardware.check_memory(recipe_with(), sizes, None).state == "not checked"


def test_little_shared_memory_is_a_warning_on_gpus_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "SHM_WANTED", 2**60)
    assert is_bad(hardware.check_shm(recipe_with(**CUDA), tmp_path), "GiB free", state="warning")
    assert hardware.check_shm(recipe_with(), tmp_path).state == "ok"


# ---------------------------------------------------------------------- the report


def test_only_a_failure_makes_the_exit_code_and_cures_stand_below():
    findings = [Finding("a", "ok", "well"), Finding("b", "warning", "odd", "do this"), Finding("c", "not checked", "-")]
    assert exit_code(findings) == 0
    assert exit_code([*findings, Finding("d", "failed", "bad", "mend it", 1.25)]) == 1
    lines = table(findings).splitlines()
    assert lines[1].split()[:3] == ["b", "warning", "odd"] and lines[2].strip() == "-> do this"
    assert lines[-1] == "1 ok, 1 warning, 1 not checked"
    assert "\n" not in as_json(findings, 1.0)


def test_a_refusal_is_parted_into_what_was_found_and_the_cure():
    found = refused("x", ValueError("a is 1; set it to 2; or 3"), "any")
    assert (found.found, found.cure) == ("a is 1", "set it to 2; or 3")
    assert refused("x", ValueError("a is 1"), "any").cure == "any"


# ---------------------------------------------------------------------- GPUs' software


@pytest.mark.parametrize(
    ("suffix", "version", "cuda", "bad"),
    [
        (" for x86_64", "580.65.06", "13.0", False),
        ("", "550.54.14", "13.0", True),
        ("", "550.54.14", "12.8", False),
        ("", "470.1", "12.1", True),
        ("", "550.54.14", "", False),
    ],
)
def test_a_driver_too_old_for_torchs_cuda_is_named_with_what_it_needs(tmp_path, suffix, version, cuda, bad):
    driver = tmp_path / "version"
    driver.write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module{suffix}  {version}  Tue Jul\nGCC version: 12\n")
    found = software.check_driver(driver, cuda)
    assert (found.state == "failed") is bad and version in found.found
    if bad:
        assert f"CUDA {cuda}" in found.found and "or newer" in found.found and found.cure


def test_without_a_driver_there_is_nothing_to_compare(tmp_path):
    assert software.check_driver(tmp_path / "none", "13.0").state == "not checked"


def test_sglang_on_gpus_needs_compilers(tmp_path):
    recipe = recipe_with(**{"engine.kind": "sglang", "engine.device": "cuda", "engine.sglang_env": tmp_path / "env"})
    found = software.check_compilers(recipe, {"PATH": ""}, tmp_path / "none")
    assert is_bad(found, "no nvcc and no g++")
    for name in ("nvcc", "g++"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).touch(mode=0o755)
    assert software.check_compilers(recipe, {"PATH": str(tmp_path / "bin")}, tmp_path / "none").state == "ok"
    assert software.check_compilers(recipe_with(), {"PATH": ""}, tmp_path / "none").state == "not checked"
