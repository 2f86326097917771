"""Paths in a recipe: in the working folder, then beside the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.config.recipe import load_recipe
from shared.config.recipe_paths import beside, command_beside, path_beside

RECIPE = """
[model]
path = "launch/models/colour_tiny"
max_context = 128
[env]
module = "left.py"
reward = "score.py:success"
turn_tokens = 4
[env.args]
module = "left.py"
[data]
source = "rows/*.jsonl"
eval_source = "rows/b.jsonl"
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is worked in, with a recipe and what it names in a folder of its own."""
    recipes = tmp_path / "recipes"
    (recipes / "rows").mkdir(parents=True)
    for name in ("left.py", "score.py", "rows/a.jsonl", "rows/b.jsonl"):
        (recipes / name).touch()
    (recipes / "mine.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_lies_beside_the_recipe_is_found(repository):
    recipe = load_recipe("recipes/mine.toml")
    assert recipe.env.module == "recipes/left.py"
    assert recipe.env.reward == "recipes/score.py:success"
    assert (recipe.data.source, recipe.data.eval_source) == ("recipes/rows/*.jsonl", "recipes/rows/b.jsonl")
    assert recipe.env.args == {"module": "left.py"}  # the user's own
    assert Path(recipe.model.path, "config.json").is_file()


def test_the_words_of_a_command_are_found_beside_the_recipe_too(repository):
    folder = repository / "recipes"
    assert command_beside("node score.py 'two words' --fast", folder) == f"node {folder}/score.py 'two words' --fast"
    assert command_beside("left.py rows", folder) == f"{folder}/left.py rows"  # a folder is no script
    for text in ("node  x.js", "'open", ""):
        assert command_beside(text, folder) == text


def test_the_working_folder_goes_before_and_the_command_line_means_it(repository):
    (repository / "left.py").touch()
    recipe = load_recipe("recipes/mine.toml", ["--env.reward", "score.py:success"])
    assert (recipe.env.module, recipe.env.reward) == ("left.py", "score.py:success")


def test_a_recipe_of_the_working_folder_is_as_it_is_written(repository, monkeypatch):
    monkeypatch.chdir(repository / "recipes")
    recipe = load_recipe("mine.toml")
    assert (recipe.env.module, recipe.data.source) == ("left.py", "rows/*.jsonl")


@pytest.mark.parametrize(
    "text", ["", "envs.colour", "/left.py", "~/left.py", "Score the answer.\nBe strict.", "x" * 5000]
)
def test_what_is_no_path_of_a_file_there_stays(repository, text):
    assert path_beside(text, repository / "recipes") == text


def test_tasks_and_held_out_sets_are_looked_into(repository):
    values = {
        "tasks": [{"name": "left.py", "env": {"module": "left.py"}}],
        "eval": {"sets": [{"source": "rows/a.jsonl"}]},
    }
    found = beside(values, Path("recipes"))
    assert found["tasks"] == [{"name": "left.py", "env": {"module": "recipes/left.py"}}]
    assert found["eval"] == {"sets": [{"source": "recipes/rows/a.jsonl"}]}
