"""Several tasks in a recipe: what each inherits, and one line for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.recipe_fields import recipe_toml, set_fields
from shared.agreement import difference, settings_of
from shared.config.recipe import ConfigError, Recipe, field_table, load_recipe
from shared.config.tasks import held_out_sets, tasks_of
from tests.support.mixtures import HEAD, THREE, mixture_toml, values_of

A, B = {"name": "a", "module": "envs.colour"}, {"name": "b", "module": "envs.colour"}


def test_a_recipe_without_tasks_has_one_that_is_itself() -> None:
    recipe = load_recipe("colour_tiny")
    (task,) = tasks_of(recipe)
    assert (task.name, task.weight) == ("", 1.0) and task.recipe is recipe
    (held_out,) = held_out_sets(recipe)
    assert (held_out.name, held_out.count, held_out.source) == ("", 64, "")


def test_a_task_takes_what_it_does_not_set_from_the_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(mixture_toml(tmp_path))
    plain, few, late = (task.recipe for task in tasks_of(recipe))
    assert [task.name for task in tasks_of(recipe)] == ["plain", "few", "late"]
    assert (plain.env.max_tokens, late.env.max_tokens, late.env.turn_tokens) == (4, 3, 3)
    assert [each.learner.group_size for each in (plain, few, late)] == [2, 3, 2]
    assert [each.data.num_samples for each in (plain, few)] == [1_000_000_000, 3]
    assert (recipe.most_turn_tokens, recipe.most_tokens, recipe.most_turns) == (4, 4, 1)


def test_a_reward_that_is_an_address_is_a_server() -> None:
    tasks = [A | {"reward": "http://127.0.0.1:9/grade"}, B | {"reward": "r.py:score"}, {**A, "name": "c"}]
    recipes = [task.recipe for task in tasks_of(Recipe.model_validate(values_of(tasks)))]
    assert [each.reward.url for each in recipes] == ["http://127.0.0.1:9/grade", "", ""]
    assert [each.env.reward for each in recipes] == ["", "r.py:score", ""]


def test_only_a_reward_function_is_isolated() -> None:
    tasks = [A | {"reward": "r.py:score"}, B]
    recipe = Recipe.model_validate(values_of(tasks, reward={"isolation": "process"}))
    assert [task.recipe.reward.isolation for task in tasks_of(recipe)] == ["process", "thread"]


def test_the_fields_of_tasks_sets_and_pools_stand_in_the_reference() -> None:
    text = field_table()
    for head, field in (("[[tasks]]", "`weight`"), ("[[eval.sets]]", "`env_config`"), ("[[pools]]", "`bounds`")):
        assert field in text.partition(f"## {head}")[2].partition("\n## ")[0]


def test_a_recipe_of_tasks_can_be_saved_and_read_again(tmp_path: Path) -> None:
    recipe = load_recipe(mixture_toml(tmp_path, more='sets = [{ name = "x", task = "few" }]\n'))
    (tmp_path / "saved.toml").write_text(recipe_toml(recipe))
    assert load_recipe(str(tmp_path / "saved.toml")) == recipe
    assert set_fields(recipe, {"learner.total_steps": 9}).tasks == recipe.tasks


def test_held_out_sets_are_those_named_or_one_for_each_task(tmp_path: Path) -> None:
    of_tasks = held_out_sets(load_recipe(mixture_toml(tmp_path)))
    assert [(each.name, each.task.name, each.count) for each in of_tasks] == [
        ("plain", "plain", 4),
        ("few", "few", 4),
        ("late", "late", 4),
    ]
    named = 'sets = [{ name = "x", task = "few", samples = 7 }, { name = "y", task = "late" }]\n'
    sets = held_out_sets(load_recipe(mixture_toml(tmp_path, more=named)))
    assert [(each.name, each.task.name, each.count) for each in sets] == [("x", "few", 7), ("y", "late", 4)]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"few"', '"plain"', "tasks: 'plain' is the name of two; give each its own"),
        ("weight = 2", "weight = 0", "task 'plain' has weight = 0: give it one above 0, or leave the task out"),
        ("weight = 2", "wieght = 2", "[[tasks]] number 1: unknown key 'wieght'; did you mean 'weight'?"),
        ('name = "few"\n', "", "[[tasks]] number 2 has no name; give it one"),
        ('"few"', '"few/er"', "[[tasks]] number 2: name is its name in metrics and samples: letters, digits"),
        ("max_tokens = 3", "max_tokens = 2", "task 'late': env.turn_tokens = 3 exceeds env.max_tokens = 2"),
        ("group_size = 3", "group_size = 1", "task 'few': learner.group_size = 1: grpo compares episodes"),
        ("num_samples = 3", "num_samples = 3000000000", "task 'few': data.first_seed = 0 with data.num_samples"),
        ("[env]\n", '[env]\nmodule = "envs.colour"\n', "env.module = 'envs.colour' together with [[tasks]]"),
        ("[env]\n", '[env]\nreward = "a.b"\n', "env.reward = 'a.b' together with [[tasks]]"),
        ("[env]\n", "[data]\nfirst_seed = 5\n[env]\n", "data.first_seed = 5 together with [[tasks]]"),
        ("samples = 4\n", 'samples = 4\nsets = [{ name = "x", task = "fwe" }]\n', "the tasks are plain, few, late"),
        ("samples = 4\n", 'samples = 4\nsets = [{ name = "x" }]\n', "eval.sets: 'x' names no task; set task to one of"),
        ("samples = 4\n", 'sets = [{ name = "x", task = "few" }]\n', "eval.sets: 'x' has no samples"),
        ("samples = 4\n", 'samples = 4\nsets = [{ name = "x", taks = "a" }]\n', "[[eval.sets]] number 1: unknown key"),
    ],
)
def test_a_mistake_in_tasks_is_one_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in HEAD + THREE
    path = mixture_toml(tmp_path, (HEAD + THREE).replace(old, new, 1), head="")
    with pytest.raises(ConfigError) as said:
        load_recipe(path)
    assert words in str(said.value) and "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("pools", "words"),
    [
        (
            ["[0.5, 0.5]", "[0.5, 1]"],
            "pool 'p0' has bounds = [0.5, 0.5], between which there is no reward: it is empty",
        ),
        (["[0.5, 0.1]"], "it is empty; write the smaller one first"),
        (["[0, 0.6]", "[0.5, 1]"], "pools 'p0' and 'p1' overlap: one ends at 0.6, the other begins at 0.5"),
        (["[0.6, 1]", "[0, 0.5]"], "pools 'p1' and 'p0' leave a gap: one ends at 0.5, the other begins at 0.6"),
        (["[0, 1]\nweight = 0"], "pool 'p0' has weight = 0: give it one above 0, since a sample that is never"),
        (["[0, 1]\nweight = 1.5"], "pool 'p0' has weight = 1.5"),
        (['[0, 1]\n[[pools]]\nname = "p0"\nbounds = [1, 2]'], "pools: 'p0' is the name of two"),
        (["[0]"], "[[pools]] number 1: bounds has too few values"),
    ],
)
def test_a_mistake_in_pools_is_one_line(tmp_path: Path, pools: list[str], words: str) -> None:
    text = "".join(f'[[pools]]\nname = "p{i}"\nbounds = {bounds}\n' for i, bounds in enumerate(pools))
    with pytest.raises(ConfigError) as said:
        load_recipe(mixture_toml(tmp_path, THREE + text))
    assert words in str(said.value) and "\n" not in str(said.value)


def test_pools_are_refused_where_no_sample_comes_again(tmp_path: Path) -> None:
    pool = '[[pools]]\nname = "all"\nbounds = [0, 1]\n'
    load_recipe(mixture_toml(tmp_path, THREE + pool))  # one task has few samples
    with pytest.raises(ConfigError, match=r"no run plays a seed again.*; set data\.num_samples to 65536 at most"):
        load_recipe(mixture_toml(tmp_path, THREE.replace("{ num_samples = 3 }", "{ }") + pool))


def test_a_task_on_the_command_line_is_told_how(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tasks is a list: give --tasks as JSON"):
        load_recipe(mixture_toml(tmp_path), ["--tasks.0.weight", "2"])


def test_every_task_must_agree_between_actor_and_learner() -> None:
    ours, theirs = (
        settings_of(Recipe.model_validate(values_of([A, B | {"args": {"size": size}, "max_turns": turns}])))
        for size, turns in ((3, 1), (4, 2))
    )
    assert difference(ours, "actor", ours) == ""
    said = difference(ours, "actor", theirs)
    assert "tasks.b.env.max_turns: the learner has 1, actor actor has 2" in said
    assert "tasks.b.env.args.size: the learner has 3, actor actor has 4" in said
    renamed = settings_of(Recipe.model_validate(values_of([A, {**B, "name": "c", "args": {"size": 3}}])))
    assert "tasks.b.env.args.size: the learner has 3, actor actor has nothing" in difference(ours, "actor", renamed)
