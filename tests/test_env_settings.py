"""A setting that the environment does not know is refused, with the nearest that it does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envs import geo3k, geo3k_multi_turn
from envs.check import check_env as check_contract
from envs.play import main as play
from launch.task_samples import check_env
from shared.config import Recipe, load_recipe
from shared.types import Sample

RECIPES = sorted(Path("launch/recipes").glob("*.toml"))
ANY = "def build_env(sample=None, args=None, **_):\n    return type('Env', (), {'close': lambda self: None})()\n"


def recipe(module: str, args: dict | None = None, variants: list[dict] | None = None, *more: str) -> Recipe:
    fields = ["--env.module", module, "--data.variants", json.dumps(variants or [])]
    return load_recipe("launch/recipes/colour_tiny.toml", [*fields, "--env.args", json.dumps(args or {}), *more])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_sets_what_its_environment_knows(path: Path) -> None:
    check_env(load_recipe(str(path)))


@pytest.mark.parametrize(
    ("module", "args", "variants", "expected"),
    [
        (
            "envs.sokoban",
            {"grid_sze": [6, 6]},
            [],
            "env.args: envs.sokoban has no setting 'grid_sze'; did you mean 'grid",
        ),
        ("envs.sokoban", {"zz": 1}, [], "it has diagnostics, grid_size, "),
        ("envs.sokoban", {}, [{}, {"min_solutions": 6}], "data.variants = {'min_solutions': 6}: envs.sokoban has no"),
        ("envs.sokoban", {}, [{"min_solution": 9, "max_solution": 4}], "min_solution = 9 is above max_solution = 4"),
        ("envs.sokoban", {}, [{"min_solution": 500}], "no board found"),
        ("envs.geo3k", {"tolerence": 0.1}, [], "did you mean 'tolerance'?"),
        ("envs.geo3k_multi_turn", {"picture_pixel": 64}, [], "did you mean 'picture_pixels'?"),
        ("envs.geo3k_multi_turn", {"max_turns": 2}, [], "env.args has max_turns = 2: set env.max_turns"),
        ("envs.geo3k", {}, [{"kinds": ["circle"]}], "kinds is ['circle']"),
        ("envs.colour", {"size": 3}, [], "envs.colour has no setting 'size'; it has none"),
    ],
)
def test_an_unknown_or_impossible_setting_is_named(module, args, variants, expected) -> None:
    with pytest.raises(ValueError) as caught:
        check_env(recipe(module, args, variants))
    assert expected in str(caught.value)


def test_a_module_that_names_no_settings_and_a_rollout_function_take_any(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(ANY + "def play(context):\n    pass\n")
    module = str(tmp_path / "env.py")
    check_env(recipe(module, {"anything": 1}))
    check_env(recipe("envs.colour", {"anything": 1}, None, "--rollout.path", f"{module}:play"))


def test_checking_and_playing_by_hand_refuse_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    (problem,) = check_contract("envs.sokoban", {"grid_sze": 6}).problems
    assert problem == "--set: envs.sokoban has no setting 'grid_sze'; did you mean 'grid_size'?"
    assert play(["envs.sokoban", "--set", "grid_sze=6"]) == 2
    assert "did you mean 'grid_size'?" in capsys.readouterr().err


@pytest.mark.parametrize("module", [geo3k, geo3k_multi_turn])
def test_drawn_problems_take_the_settings_of_their_variant(module) -> None:
    """Over those of env.args."""
    metadata = {"seed": 1, "env_config": {"kinds": ["right_angle"], "reward_model": "geo3k"}}
    env = module.build_env(Sample("s", metadata=metadata), {"kinds": ["isosceles"], "tolerance": 0.05})
    assert env.problem.text == "One angle is a right angle. Find x, in degrees."
    assert (env.settings.reward_model, env.settings.tolerance) == ("geo3k", 0.05)
