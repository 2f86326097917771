"""Recipes: strict, layered, and one clear line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.config import ConfigError, load_recipe

RECIPES = sorted(Path("launch/recipes").glob("*.toml"))
MINIMAL = '[model]\npath = "m"\n[env]\nmodule = "envs.colour"\n'


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_in_the_repository_loads(path: Path) -> None:
    recipe = load_recipe(str(path))
    assert Path(recipe.model.path, "config.json").exists() or "/" in recipe.model.path


def test_the_command_line_beats_the_environment_which_beats_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, MINIMAL + "[learner]\ntotal_steps = 7\ngroup_size = 2\noptimizer.lr = 1e-3\n")
    monkeypatch.setenv("PRONK_LEARNER__OPTIMIZER__LR", "2e-3")
    monkeypatch.setenv("PRONK_LEARNER__TOTAL_STEPS", "8")
    recipe = load_recipe(path, ["--learner.optimizer.lr", "3e-3"])
    assert (recipe.learner.optimizer.lr, recipe.learner.total_steps, recipe.learner.group_size) == (3e-3, 8, 2)


def test_env_args_of_file_and_command_line_are_merged(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "[env.args]\na = 1\nb = 2\n")
    assert load_recipe(path, ["--env.args", '{"b": 3}']).env.args == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (MINIMAL + "[learner]\nlearning_rat = 1\n", [], "unknown key 'learner.learning_rat'"),
        (MINIMAL + "[learner]\ngroups_per_stp = 1\n", [], "did you mean 'learner.groups_per_step'?"),
        (MINIMAL + "[lerner]\nlr = 1\n", [], "did you mean 'learner'?"),
        (MINIMAL, ["--learner.lrr", "1"], "unknown option --learner.lrr; did you mean --learner.optimizer.lr?"),
        (MINIMAL, ["--zzzzzz", "1"], "unknown option --zzzzzz; options are --section.key VALUE"),
        (MINIMAL + '[learner.optimizer]\nlr = "fast"\n', [], "learner.optimizer.lr = 'fast'"),
        (MINIMAL, ["--learner.group_size", "0"], "learner.group_size = '0'"),
        ('[env]\nmodule = "envs.colour"\n', [], "'model' is required"),
        ("[model\n", [], "is not valid TOML"),
        (MINIMAL, ["--sampling.top_p", "0.9"], "sampling.top_p = 0.9"),
        (MINIMAL, ["--learner.objective.name", "grpo"], "learner.group_size = 1"),
        (MINIMAL, ["--learner.objective.dynamic_sampling", "true"], "set learner.objective.name"),
        (MINIMAL, ["--sampling.temperature", "0"], "sampling.temperature = 0"),
        (MINIMAL, ["--env.turn_tokens", "9000"], "exceeds env.max_tokens = 1536"),
        (MINIMAL, ["--engine.router", "http://r"], "engine.router = 'http://r'"),
        (MINIMAL, ["--learner.actor_timeout_s", "3"], "learner.actor_timeout_s = 3.0: below two heartbeats"),
        (MINIMAL, ["--data.num_samples", "3000000000", "--eval.samples", "1"], "training seeds [0, 3000000000)"),
        (MINIMAL, ["--env.turn_tokens", "9000", "--env.max_tokens", "9000"], "no room in model.max_context"),
        (MINIMAL, ["--data.source", "x.jsonl", "--data.variants", '[{"a": 1}]'], "data.variants is for seeds"),
        (MINIMAL, ["--eval.samples", "5", "--data.eval_first_seed", "3"], "held-out seeds overlap the training seeds"),
        (
            MINIMAL,
            ["--eval.every_steps", "6", "--learner.publish.every", "4"],
            "a multiple of learner.publish.every = 4",
        ),
        (MINIMAL, ["--env.reward", "a.b", "--reward.url", "http://c"], "leave one of them out"),
        (MINIMAL, ["--env.max_failure_share", "1.5"], "env.max_failure_share = '1.5'"),
        (MINIMAL, ["--actor.groups", "100000"], "actor.processes x actor.groups = 100000"),
        (MINIMAL, ["--actor.groups", "0", "--engine.count", "0"], "nobody would play or generate"),
        (MINIMAL, ["--data.variants", "[{a=1}]"], "--data.variants = '[{a=1}]' is not JSON: "),
        (MINIMAL, ["--data.variants=[{a=1}]"], "write it like '[{\"name\": 1}]'"),
        (MINIMAL, ["--data.variants", "3"], "command line: data.variants.0 = 3"),
        (MINIMAL, ["--env.args", "size=[7,7]"], "--env.args = 'size=[7,7]' is not JSON: "),
        (
            MINIMAL,
            ["--env.args.size", "[7, 7]"],
            "--env.args.size; write --env.args '{\"size\": VALUE}'",
        ),
        (MINIMAL, ["--learner.optimizer.freeze", "[vision"], "write it like '[\"vision\"]'"),
        (MINIMAL, ["--learner.optimizer.betas", "0.9"], "learner.optimizer.betas = [0.9]: too few values"),
        (MINIMAL, ["--run.name", ""], "run.name = ''"),  # its folder would be that of all runs
        (MINIMAL, ["--run.name", ".."], "run.name = '..': its folder is DIR/NAME: no / and no leading dot"),
        (MINIMAL, ["--data"], "--data without a value: data is a section; set a field of it, such as data.source"),
        (MINIMAL, ["--data", "--run.name", "a"], "--data without a value: data is a section"),
        (MINIMAL, ["--run.name", "a/b"], "run.name = 'a/b'"),
        (MINIMAL, ["--learner", "{"], "--learner = '{': learner is a section; set a field of it, such as learner.bind"),
    ],
)
def test_a_mistake_is_one_line_that_names_value_and_cure(
    tmp_path: Path, text: str, overrides: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path, text), overrides)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("PRONK_ENGINE__URLS", "http://a", "PRONK_ENGINE__URLS = 'http://a' is not JSON: "),
        ("PRONK_LEARNER__OPTIMIZER__BETAS", "(0.9, 0.95)", "write it like '[1, 2]'"),
        ("PRONK_LEARNER__TOTAL_STEPS", "x", "PRONK_LEARNER__TOTAL_STEPS: learner.total_steps = 'x'"),
        ("PRONK_LERNER__TOTAL_STEPS", "4", "unknown section 'lerner'; did you mean PRONK_LEARNER__TOTAL_STEPS?"),
        ("PRONK_ZZ__QQ", "4", "PRONK_ZZ__QQ: unknown section 'zz'; sections are run, model, env, "),
        ("PRONK_LEARNER__TOTAL_STEP", "4", "PRONK_LEARNER__TOTAL_STEP: unknown key 'learner.total_step'; did you mean"),
    ],
)
def test_a_mistake_in_the_environment_names_its_variable(tmp_path, monkeypatch, name, value, expected) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path, MINIMAL), ["--learner.group_size", "2"])
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("objective", "objective.name"),
        ("optimizer", "optimizer.name"),
        ("lr", "optimizer.lr"),
        ("gamma", "objective.gamma"),
        ("proof_every", "publish.verify_every"),
        ("keep_checkpoints", "checkpoint.keep"),
        ("microbatch_tokens", "parallel.microbatch_tokens"),
    ],
)
@pytest.mark.parametrize("how", ["recipe", "command line", "environment"])
def test_an_old_name_is_refused_with_the_new_one(tmp_path, monkeypatch, how, old, new) -> None:
    if how == "environment":
        monkeypatch.setenv(f"PRONK_LEARNER__{old.upper()}", "grpo")
    path = write(tmp_path, MINIMAL + (f'[learner]\n{old} = "grpo"\n' if how == "recipe" else ""))
    with pytest.raises(ConfigError, match=f"learner.{old} is now called learner.{new}$"):
        load_recipe(path, [f"--learner.{old}", "grpo"] if how == "command line" else [])


def test_a_missing_recipe_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'nowhere\.toml' does not exist"):
        load_recipe("nowhere.toml")
