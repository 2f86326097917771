"""Pronk as a stranger has it: its wheel in an environment outside the clone, and a repository of the stranger's own.

The environment takes the libraries from the one that runs the tests; of Pronk it has the wheel alone.
"""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from launch.engines.network import free_port

LEFT = """
import random

from PIL import Image

from pronk import Env

COLOURS = {"red": (220, 40, 40), "green": (50, 190, 70), "blue": (50, 80, 220), "yellow": (235, 200, 40)}
SYSTEM_PROMPT = "Name the colour on the left: red, green, blue or yellow. Answer with one word."


class Left(Env):
    def __init__(self, seed):
        self.left, self.right = random.Random(seed).sample(list(COLOURS), 2)

    def reset(self):
        image = Image.new("RGB", (32, 32), COLOURS[self.right])
        image.paste(COLOURS[self.left], (0, 0, 16, 32))
        return {"obs_str": "Which colour?", "multi_modal_data": {"image": [image]}}, {}

    def step(self, response_text):
        return {"obs_str": ""}, True, {"metrics": {"success": self.left in response_text.lower().split()[:1]}}


def build_env(sample=None, args=None, **_):
    return Left(sample.metadata["seed"] if sample else 0)
"""
REWARD = """
from pronk import Played


async def reward(played: Played) -> float:
    return 2.0 * played.infos[0]["metrics"]["success"]
"""
RECIPE = """
[run]
name = "left"
[model]
path = "launch/models/colour_tiny"
max_context = 128
[env]
module = "envs/left.py"
reward = "reward.py:reward"
max_turns = 1
max_tokens = 4
turn_tokens = 4
[learner]
group_size = 4
groups_per_step = 8
total_steps = 2
[learner.objective]
name = "grpo"
[eval]
samples = 8
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    made = subprocess.run(
        [*pip, "wheel", ".", "--no-deps", "--quiet", "--wheel-dir", str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment that has the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    (packages,) = folder.glob("lib/python*/site-packages")
    here = next(path for path in map(Path, site.getsitepackages()) if (path / "torch").is_dir())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "bin" / "python")]
    installed = subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--quiet", str(wheel)], capture_output=True, text=True, timeout=240
    )
    assert installed.returncode == 0, installed.stderr[-2000:]
    (packages / "libraries.pth").write_text(f"{here}\n")
    return folder / "bin"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A stranger's repository: packages called envs and shared, and a recipe with its reward beside it."""
    for name in ("envs", "shared", "recipes"):
        (tmp_path / name).mkdir()
    for name in ("envs", "shared"):
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('taken for Pronk')\n")
    (tmp_path / "envs" / "left.py").write_text(LEFT)
    (tmp_path / "recipes" / "reward.py").write_text(REWARD)
    (tmp_path / "recipes" / "left.toml").write_text(RECIPE)
    return tmp_path


def ports() -> list[str]:
    address = f"tcp://127.0.0.1:{free_port()}"
    return [
        *("--learner.bind", address, "--actor.learner", address, "--engine.port", str(free_port())),
        *("--learner.total_steps", "2", "--eval.samples", "8"),
    ]


def call(command: list[str | Path], folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(command, cwd=folder, env={**env, **environ}, capture_output=True, text=True, timeout=280)


def test_of_pronk_only_its_own_name_lies_in_site_packages(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"pronk"}
    for kept in (
        "py.typed", "pyproject.toml", "kernels/cpu/layer.c", "launch/recipes/sokoban_tiny.toml",
        "launch/models/sokoban_tiny/model.safetensors", "launch/dashboard_pages/index.html",
        "learner/metrics/catalogue.toml", "launch/sglang_env/requirements-cpu.txt",
    ):  # fmt: skip
        assert f"pronk/{kept}" in names
    assert not [name for name in names if "/tests/" in name or "__pycache__" in name or "launch/package" in name]


def test_a_shipped_task_is_trained_by_its_name(programs, tmp_path):
    ended = call([programs / "pronk", "local", "colour_tiny", "--run.dir", "here", *ports()], tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert json.loads(ended.stdout)["optimizer_steps"] == 2
    version = call([programs / "pronk", "--version"], tmp_path).stdout.split()[1]
    assert json.loads((tmp_path / "here/colour_tiny/software.json").read_text())["pronk"] == version
    assert "pronk dashboard here/colour_tiny" in ended.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"here"}


def test_a_repository_with_packages_of_pronks_names_is_trained_from_python(programs, repository):
    code = (
        "import sys, pronk\n"
        "settings = dict(zip([w[2:] for w in sys.argv[1::2]], sys.argv[2::2]))\n"
        "run = pronk.train('recipes/left.toml', settings, show=False)\n"
        "rows = run.metrics()\n"
        "print(run.folder, run.result['optimizer_steps'], [r['step'] for r in rows if 'rollout/reward' in r])\n"
        "print(run.metrics('arrow').num_rows == len(rows), {e['reward'] for e in run.episodes()} <= {0.0, 2.0})\n"
    )
    ended = call([programs / "python", "-c", code, *ports()], repository)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.splitlines() == ["runs/left 2 [1, 2]", "True True"]


def test_without_a_compiler_a_run_says_in_one_line_that_torch_computes(programs, repository):
    ended = call(
        [programs / "pronk", "local", "recipes/left.toml", "--learner.total_steps", "1", *ports()[:6]],
        repository,
        PATH="/nonexistent",
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    said = [line for line in ended.stderr.splitlines() if "no C compiler" in line]
    assert len(said) <= 2, ended.stderr  # of the engine, of the learner
    assert "Traceback" not in ended.stderr


def test_an_editable_installation_is_the_clone(tmp_path):
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "bin" / "python")]
    words = ["install", "--no-deps", "--quiet", "--editable", "."]
    made = subprocess.run([*pip, *words], capture_output=True, text=True, timeout=240)
    assert made.returncode == 0, made.stderr[-2000:]
    assert call([folder / "bin/pronk", "--root"], tmp_path).stdout == f"{Path.cwd()}\n"
    where = call([folder / "bin/python", "-c", "import pronk; print(pronk.__file__)"], tmp_path).stdout
    assert where == f"{Path.cwd()}/launch/package/pronk/__init__.py\n"


def test_of_a_cluster_the_command_says_that_its_hosts_need_a_clone(programs, tmp_path):
    refused = call([programs / "pronk", "cluster", "render", "--on", "slurm", "--config", "colour_tiny"], tmp_path)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "clone Pronk there" in refused.stderr
