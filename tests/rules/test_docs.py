"""The documentation tells the truth: its example runs, its links, fields, files and metrics exist."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from envs.check import main as check_env
from shared.config.recipe import free_fields, known_fields, load_recipe
from tests.support.runs import RECIPE, local, metrics, places

README = Path("README.md")
PAGES = [README, *sorted(Path("docs").rglob("*.md"))]
SECTIONS = "run|model|env|reward|rollout|data|sampling|actor|engine|learner|eval|record|transport"
GENERATED = {
    "reference": "recipe environments metrics alarms commands python wire-format engine-api files",
}
CATALOGUE = tomllib.loads(Path("learner/metrics/catalogue.toml").read_text(encoding="utf-8"))
DESCRIBED = [re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(name)) for section in CATALOGUE.values() for name in section]


def example_of(page: str, folder: Path) -> Path:
    """Write the first Python example of a page into a file."""
    block = re.search(r"```python\n(.*?)```", Path(page).read_text(), re.DOTALL)
    assert block
    path = folder / "example.py"
    path.write_text(block.group(1))
    return path


@pytest.fixture
def example(tmp_path: Path) -> Path:
    return example_of("docs/tutorials/own-environment.md", tmp_path)


def test_the_example_of_tools_keeps_the_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_env([str(example_of("docs/how-to/tools.md", tmp_path))]) == 0
    assert "note" not in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_somewhere(page: Path) -> None:
    made = {Path("docs", folder, f"{name}.md") for folder, names in GENERATED.items() for name in names.split()}
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    paths = [Path(page.parent, t).resolve().relative_to(Path.cwd()) for t in targets if "://" not in t]
    assert [str(path) for path in paths if not path.exists() and path not in made] == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_field_and_module_that_a_page_names_exists(page: Path) -> None:
    text = re.sub(r"\]\([^)]*\)", "]", page.read_text())  # without the targets of links
    words = re.findall(rf"(?<![\w/.-])(?:--)?((?:{SECTIONS})(?:\.[a-z_]+)+)(?![\w/(.])", text)
    assert [word for word in words if word not in known_fields() and not exists(word)] == []


def exists(word: str) -> bool:
    """Whether a dotted word is a section of a recipe or within a field of free form, or a module of ours or a name in
    one."""
    if any(word.startswith(f"{field}.") for field in free_fields()) or any(
        key.startswith(word + ".") for key in known_fields()
    ):
        return True
    parts = word.split(".")
    for length in range(len(parts), 1, -1):
        try:
            if importlib.util.find_spec(".".join(parts[:length])) is not None:
                return True
        except ModuleNotFoundError:
            continue
    return False


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    roots = "shared|envs|actor|learner|kernels|launch|tests|docs"
    named = re.findall(rf"`((?:{roots})/[\w./-]+?\.(?:py|md|toml|txt))`", page.read_text())
    assert [name for name in named if not Path(name).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "docs/tutorials/own-environment.md"])
def test_the_example_environment_keeps_the_contract(page: str, tmp_path: Path) -> None:
    assert check_env([str(example_of(page, tmp_path))]) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_the_example_environment_is_trained_on_and_every_metric_of_the_run_is_described(
    example: Path, tmp_path: Path
) -> None:
    fields = {"env.module": example, "learner.total_steps": 2, "eval.samples": 8}
    run = subprocess.run(local(places(tmp_path, **fields)), capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout)["optimizer_steps"] == 2
    rows = metrics(tmp_path)
    assert [row["rollout/turns"] for row in rows if "rollout/turns" in row] == [1.0, 1.0]
    names = {name for row in rows for name in row} - {"step", "time"}
    assert [name for name in sorted(names) if not any(re.fullmatch(p, name) for p in DESCRIBED)] == []


def gpu_commands() -> list[str]:
    page = Path("docs/how-to/first-run.md").read_text()
    found = re.search(r"## The first hour on GPUs.*?```\n(.*?)```", page, re.DOTALL)
    assert found
    return found[1].splitlines()


@cache
def help_of(program: tuple[str, ...]) -> str:
    told = subprocess.run([sys.executable, *program, "--help"], capture_output=True, text=True, timeout=250)
    assert told.returncode == 0, told.stderr[-2000:]
    return told.stdout


@pytest.mark.slow
@pytest.mark.parametrize("line", gpu_commands())
def test_commands_for_gpus_can_be_given(line: str) -> None:
    """As far as a machine without a GPU can tell: each file, module, option and value exists."""
    program, *words = shlex.split(line, comments=True)
    if program == "make":
        assert not set(words) - set(re.findall(r"^([\w-]+):", Path("Makefile").read_text(), re.M))
        return
    if program == "torchrun":
        words = words[words.index("-m") :]
    what = words[: 2 if words[0] == "-m" else 1]
    arguments = words[len(what) :]
    fields = [i for i, word in enumerate(arguments) if word.startswith("--") and "." in word]
    options = {word for i, word in enumerate(arguments) if word.startswith("--") and i not in fields}
    config = arguments[arguments.index("--config") + 1] if "--config" in arguments else RECIPE
    load_recipe(config, [part for i in fields for part in arguments[i : i + 2]])
    told = help_of(tuple(what))
    assert [option for option in options if option not in told] == []
