"""A setting that the environment does not know, or of another type, is refused with the cure before a run starts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from envs import geo3k, geo3k_multi_turn
from envs.check import check_env as check_contract
from envs.env_settings import read_settings
from envs.play import main as play
from envs.sokoban import SokobanSettings
from launch.local import show_random_policy
from launch.task_samples import check_env, chosen_samples
from shared.config.recipe import Recipe, load_recipe
from shared.types import Sample

RECIPES = sorted(Path("launch/recipes").glob("*.toml"))
ANY = """
def build_env(sample=None, args=None, **_):
    return type("Env", (), {"reset": lambda self: ({}, {}), "step": lambda self, text: (None, True, {})})()
"""


def recipe(module: str, args: dict | None = None, variants: list[dict] | None = None, *more: str) -> Recipe:
    fields = ["--env.module", module, "--data.variants", json.dumps(variants or [])]
    return load_recipe("launch/recipes/colour_tiny.toml", [*fields, "--env.args", json.dumps(args or {}), *more])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_sets_what_its_environment_knows(path: Path) -> None:
    check_env(load_recipe(str(path)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "args", "variants", "expected"),
    [
        (
            "envs.sokoban",
            {"grid_sze": [6, 6]},
            [],
            "env.args: envs.sokoban has no setting 'grid_sze'; did you mean 'grid",
        ),
        ("envs.sokoban", {"zz": 1}, [], "it has boards, diagnostics, "),
        ("envs.sokoban", {}, [{}, {"min_solutions": 6}], "data.variants = {'min_solutions': 6}: envs.sokoban has no"),
        ("envs.sokoban", {}, [{"min_solution": 9, "max_solution": 4}], "min_solution = 9 is above max_solution = 4"),
        ("envs.sokoban", {}, [{"min_solution": 500}], "no board found"),
        ("envs.geo3k", {"tolerence": 0.1}, [], "did you mean 'tolerance'?"),
        ("envs.geo3k_multi_turn", {"picture_pixel": 64}, [], "did you mean 'picture_pixels'?"),
        ("envs.geo3k_multi_turn", {"max_turns": 2}, [], "env.args has max_turns = 2: set env.max_turns"),
        ("envs.geo3k", {}, [{"kinds": ["circle"]}], "kinds = ['circle']: write it like ["),
        ("envs.colour", {"size": 3}, [], "envs.colour has no setting 'size'; it has render_mode"),
        ("envs.sokoban", {"wall_chance": "high"}, [], "env.args: wall_chance = 'high': input should be a valid number"),
        ("envs.sokoban", {"max_steps": 1.5}, [], "max_steps = 1.5: input should be a valid integer"),
        ("envs.sokoban", {"grid_size": [6, 6, 6]}, [], "grid_size = [6, 6, 6]: write it like [6, 6]"),
        ("envs.sokoban", {"grid_size": {"a": 1}}, [], "write it like [6, 6]"),
        ("envs.sokoban", {"num_boxes": []}, [], "grid_size and num_boxes must not be empty"),
        (
            "envs.sokoban",
            {},
            [{"num_boxes": 1.5}],
            "{'num_boxes': 1.5}: num_boxes = 1.5: write it like 1",
        ),
        ("envs.geo3k", {"kinds": "isosceles"}, [], "kinds = 'isosceles': write it like ["),
        ("envs.geo3k", {"angle_step": 0}, [], "angle_step = 0: input should be greater than or equal to 1"),
        (
            "envs.geo3k_multi_turn",
            {"format_reward": "much"},
            [],
            "format_reward = 'much': input should be a valid number",
        ),
        ("envs.geo3k_multi_turn", {"grade_limit_s": 0}, [], "grade_limit_s = 0: input should be greater than 0"),
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
    check_env(recipe("envs.no_env", {"anything": 1}, None, "--rollout.agent", f"{module}:play"))


def test_a_value_of_a_type_that_says_the_same_is_taken() -> None:
    """As a command line or a dataset has it."""
    said = {"wall_chance": "0.1", "diagnostics": "false", "max_steps": np.int64(7), "num_boxes": [1, 2], "split": None}
    settings = read_settings(SokobanSettings, None, said | {"grid_size": 7, "unknown": 1})
    expected = SokobanSettings(wall_chance=0.1, max_steps=7, num_boxes=[1, 2], grid_size=7)
    assert settings == expected and settings.diagnostics is False
    assert settings.spec("train").sizes == ((7, 7),)
    sizes = read_settings(SokobanSettings, None, {"grid_size": [[6, 6], [7, 8]]}).spec().sizes
    assert sizes == ((6, 6), (7, 8))


def test_an_own_environment_may_name_its_settings(tmp_path: Path) -> None:
    settings = "from pydantic import BaseModel\n\n\nclass SETTINGS(BaseModel):\n    name: str\n    size: int = 3\n\n\n"
    (tmp_path / "env.py").write_text(settings + ANY)
    module = str(tmp_path / "env.py")
    check_env(recipe(module, {"name": "a", "size": 4}))
    for args, expected in (
        ({"size": 4}, "env.args: name is required"),
        ({"name": "a", "size": "big"}, "env.args: size = 'big': input should be a valid integer"),
        ({"sise": 4}, "has no setting 'sise'; did you mean 'size'?"),
    ):
        with pytest.raises(ValueError) as caught:
            check_env(recipe(module, args))
        assert expected in str(caught.value)
    (tmp_path / "names.py").write_text("SETTINGS = {'size'}\n" + ANY)
    with pytest.raises(ValueError, match="make it a pydantic model, or leave it out"):
        check_env(recipe(str(tmp_path / "names.py")))


NEEDS_TURNS = """
from pydantic import BaseModel

class SETTINGS(BaseModel):
    max_turns: int

class Env:
    success = True
    def reset(self): return {}, {}
    def step(self, text): return None, True, {}
    def close(self): ...

def system_prompt(args):
    return f"{args['max_turns']} turns"

def build_env(sample, args):
    assert args["max_turns"] == 3
    return Env()

def random_response(rng):
    return ""
"""


def test_an_environment_is_given_max_turns_wherever_it_is_built(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(NEEDS_TURNS)
    made = recipe(str(tmp_path / "env.py"), None, None, "--env.max_turns", "3", "--eval.samples", "1")
    check_env(made)
    show_random_policy(made)
    (sample,) = chosen_samples(made, "", 1)
    assert sample.prompt[0]["content"] == "3 turns"


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        ("env.reward", "a function that takes what"),
        ("rollout.path", "an async function that plays"),
        ("rollout.agent", "a function run(base_url, sample, args)"),
    ],
)
def test_a_function_that_is_not_there_is_named_with_its_field(field: str, kind: str) -> None:
    for path, why in (
        ("foo.py:bar", "no file 'foo.py': give the path of a .py file that holds bar"),
        ("nothing_at_all.bar", "no module 'nothing_at_all': give a dotted path such as envs.sokoban, or a .py file,"),
        ("bar", "write package.module.function or file.py:function"),
    ):
        with pytest.raises(ValueError) as caught:
            check_env(recipe("envs.colour", None, None, f"--{field}", path))
        assert str(caught.value).startswith(f"{field} = {path!r} is to be {kind}") and why in str(caught.value)


def test_a_command_that_is_not_there_is_named_with_its_cure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout\.command = 'no-such-agent -x': there is no program no-such-agent"):
        check_env(recipe("envs.colour", None, None, "--rollout.command", "no-such-agent -x"))


def test_checking_and_playing_by_hand_refuse_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    (problem,) = check_contract("envs.sokoban", {"grid_sze": 6}).problems
    assert problem == "--env.args: envs.sokoban has no setting 'grid_sze'; did you mean 'grid_size'?"
    assert play(["envs.sokoban", "--env.args.grid_sze", "6"]) == 2
    assert "did you mean 'grid_size'?" in capsys.readouterr().err


@pytest.mark.parametrize("module", [geo3k, geo3k_multi_turn])
def test_drawn_problems_take_the_settings_of_their_variant(module) -> None:
    """Over those of env.args."""
    metadata = {"seed": 1, "env_config": {"kinds": ["right_angle"], "reward_model": "geo3k"}}
    env = module.build_env(Sample("s", metadata=metadata), {"kinds": ["isosceles"], "tolerance": 0.05})
    assert env.problem.text == "One angle is a right angle. Find x, in degrees."
    assert (env.settings.reward_model, env.settings.tolerance) == ("geo3k", 0.05)
