"""The command that makes SGLang's environment: what it installs, and what it refuses. `make sglang-env` runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from launch import engine_env
from shared.engine.nccl_versions import SGLANG_TESTED


def test_with_a_gpu_sglang_brings_its_own_packages_and_without_one_they_are_pinned():
    gpu = engine_env.commands("python3", Path("there"), gpu=True)
    assert gpu[0] == ["python3", "-m", "venv", "--clear", "there"]
    assert gpu[-1][-1] == f"sglang=={SGLANG_TESTED}"
    cpu = engine_env.commands("python3", Path("there"), gpu=False)
    assert [command[-1] for command in cpu[2:]] == [
        "torch",
        str(engine_env.FILES / "requirements-cpu.txt"),
        "torchvision",
    ]
    for command in cpu[2:]:
        constraints = Path(command[command.index("--constraint") + 1])
        assert constraints.is_file() and command[0] == "there/bin/python"


def test_a_folder_that_is_no_environment_is_never_cleared(tmp_path, capsys):
    (tmp_path / "thesis.tex").touch()
    assert engine_env.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} is there and no Python environment: choose another folder\n"
    assert (tmp_path / "thesis.tex").exists()


def test_a_python_that_is_not_there_is_one_line(tmp_path, capsys):
    assert engine_env.main([str(tmp_path / "new"), "--python", "python9"]) == 2
    assert capsys.readouterr().err == "error: there is no program 'python9': give another --python\n"


def test_it_needs_nothing_but_python(tmp_path):
    script = Path("launch/engine_env.py").resolve()
    done = subprocess.run([sys.executable, "-I", "-S", script, "--help"], cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
