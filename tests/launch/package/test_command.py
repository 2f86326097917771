"""The command `pronk` and the package `pronk`, from the clone, as an editable installation has them."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path("launch/package").resolve()
HIDDEN = "in Pronk's processes 'envs' is Pronk's own package"


def pronk(*words: str, folder: Path | None = None, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (PACKAGE, *path)))}
    command = [sys.executable, "-P", "-m", "pronk", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def python(code: str, folder: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def commands() -> dict[str, str]:
    """The commands' programs by their names."""
    code = "from pronk.command import COMMANDS\nfor n, c in COMMANDS.items(): print(n, c.program)"
    return dict(line.split() for line in python(code, Path()).splitlines())


@pytest.fixture
def own_packages(tmp_path: Path) -> Path:
    """A user's repository with packages that have the names of Pronk's."""
    for name in ("envs", "shared"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("MINE = True\n")
    return tmp_path


def test_help_is_one_table_of_all_commands(commands):
    shown = pronk("--help").stdout
    assert [name for name in commands if f"\n  {name} " not in shown] == []
    assert max(map(len, shown.splitlines())) <= 110
    assert pronk().stdout == shown


def test_each_command_is_a_program_of_the_clone_and_each_program_has_a_command(commands):
    assert [name for name, program in commands.items() if not Path(program).is_file()] == []
    scripts = {str(path) for path in Path("launch").glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert scripts - set(commands.values()) == set()


@pytest.mark.slow
def test_the_help_of_a_command_is_its_programs_and_says_how_it_was_called(tmp_path):
    for name in ("local", "check", "plan", "export", "keys"):
        shown = pronk(name, "--help", folder=tmp_path)
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.startswith(f"usage: pronk {name} ")


def test_the_version_is_the_projects(tmp_path):
    wanted = tomllib.loads(Path("pyproject.toml").read_text())["project"]["version"]
    assert pronk("--version", folder=tmp_path).stdout == f"pronk {wanted}\n"
    assert python("import pronk; print(pronk.__version__)", tmp_path) == wanted
    assert pronk("--root", folder=tmp_path).stdout.strip() == str(Path.cwd())


def test_an_unknown_command_names_the_nearest():
    refused = pronk("lokal")
    assert (refused.returncode, refused.stderr) == (
        2,
        "error: pronk lokal: there is no such command; did you mean local?\n",
    )
    assert "there are train, run, local" in pronk("zzzz").stderr


def test_another_installed_version_is_named(tmp_path):
    facts = tmp_path / "other" / "pronk-9.9.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: pronk\nVersion: 9.9\n")
    refused = pronk("doctor", path=(tmp_path / "other",))
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert f"9.9 in {tmp_path / 'other'}: pip uninstall pronk" in refused.stderr


def test_a_recipe_may_stand_first(tmp_path):
    code = "from pronk.command import COMMANDS, arguments\n"
    code += "print(arguments(COMMANDS['local'], ['mine.toml', '--ranks', '2']))\n"
    code += "print(arguments(COMMANDS['train'], ['--run.name', 'x']))\n"
    code += "print(arguments(COMMANDS['train'], ['mine.toml']))\n"
    code += "print(arguments(COMMANDS['check'], ['left.py']))"
    assert python(code, tmp_path).splitlines() == [
        "['--config', 'mine.toml', '--ranks', '2']",
        "['--config', 'sokoban_tiny', '--run.name', 'x']",
        "['--config', 'mine.toml']",
        "['left.py']",
    ]


def test_a_recipe_that_does_not_exist_is_one_line_with_the_names_that_there_are(tmp_path):
    refused = pronk("local", "nothing_like_it", folder=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "colour_tiny" in refused.stderr


def test_a_program_keeps_its_own_packages_beside_pronk(own_packages):
    code = (
        "import pronk, envs, shared\nfrom pronk import Env, load_recipe\nimport pronk.envs.colour\n"
        "print(envs.MINE, shared.MINE, Env.__module__, load_recipe('colour_tiny').run.name)\n"
        "print(issubclass(pronk.envs.colour.ColourEnv, Env), envs.__path__)"
    )
    first, second = python(code, own_packages).splitlines()
    assert first == "True True pronk.envs.base colour_tiny"
    assert second == f"True ['{own_packages}/envs']"


def test_in_pronks_processes_both_names_are_one_module(own_packages):
    env = own_packages / "mine.py"
    env.write_text(
        "import envs.base, pronk\nfrom pronk.envs.base import Env, Played\nfrom pronk import Env as same\n"
        "assert Env is envs.base.Env is same and Played.__module__ == 'envs.base'\n"
        "class Mine(Env):\n"
        "    def reset(self): return {'obs_str': 'Say yes.'}, {}\n"
        "    def step(self, text): return {'obs_str': ''}, True, {'reward': float(text == 'yes')}\n"
        "def build_env(sample=None, args=None, **_): return Mine()\n"
    )
    checked = pronk("check", "mine.py", folder=own_packages)
    assert checked.stdout.endswith("ok: mine.py keeps the contract\n"), checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", f"no module 'envs.mine': {HIDDEN}; give yours as a file: envs/mine.py"),
        (
            "from envs.colours import RED\n",
            f"imports 'envs.colours', which is not there: {HIDDEN}; give yours another name",
        ),
    ],
)
def test_a_module_that_pronks_package_hides_is_named(own_packages, text, words):
    (own_packages / "envs" / "mine.py").write_text(text)
    refused = pronk("check", "envs/mine.py" if text else "envs.mine", folder=own_packages)
    assert words in refused.stdout + refused.stderr
    assert "Traceback" not in refused.stderr
