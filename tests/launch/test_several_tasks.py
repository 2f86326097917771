"""The samples of several tasks: each tells its task and its held-out set, and a task's mistake names the task."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.task_samples import check_data, check_env, chosen_samples, held_out_samples, training_samples
from learner.checkpoints.contents import contents_of
from learner.checkpoints.restoring import check_recipe
from learner.tickets.ticket_book import BookSettings, TicketBook
from shared.config.recipe import Recipe, load_recipe
from tests.support.mixtures import THREE, mixture_toml


def loaded(folder: Path, old: str = "", new: str = "", more: str = "") -> Recipe:
    return load_recipe(mixture_toml(folder, THREE.replace(old, new, 1) if old else THREE, more))


def test_samples_tell_their_task_and_their_held_out_set(tmp_path):
    recipe = loaded(tmp_path)
    source = training_samples(recipe)
    samples = [source.sample(position) for position in range(400)]
    assert [[s.task for s in samples].count(name) for name in ("plain", "few", "late")] == [200, 100, 100]
    assert {s.metadata["seed"] for s in samples if s.task == "few"} == {0, 1, 2}
    assert min(s.metadata["seed"] for s in samples if s.task == "late") == 1000
    assert not any(s.held_out for s in samples)
    assert [(s.task, s.held_out) for s in held_out_samples(recipe)] == [
        (name, name) for name in ("plain", "few", "late") for _ in range(4)
    ]


def test_several_held_out_sets_of_one_task(tmp_path):
    sets = 'sets = [{ name = "x", task = "few", samples = 2 }, { name = "y", task = "few" }]\n'
    samples = held_out_samples(loaded(tmp_path, more=sets))
    assert [(s.task, s.held_out) for s in samples] == [("few", "x")] * 2 + [("few", "y")] * 4
    assert len(chosen_samples(loaded(tmp_path, more=sets), "", None)) == 6


def test_groups_are_as_large_as_their_task_says(tmp_path):
    recipe = loaded(tmp_path)
    book = TicketBook(training_samples(recipe), BookSettings.of(recipe), nonce="n")
    sizes = {ticket.sample.task: ticket.group_size for _ in range(8) if (ticket := book.issue("a"))}
    assert sizes == {"plain": 2, "few": 3, "late": 2}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"envs.colour"\ndata = { num', '"envs.nothing"\ndata = { num', "task 'few': no module 'envs.nothing'"),
        ("group_size = 3", 'reward = "envs.colour.nothing"', "task 'few': env.reward = 'envs.colour.nothing'"),
        ("group_size = 3", "args = { nothing = 1 }", "task 'few': env.args"),
    ],
)
def test_a_mistake_of_a_task_names_the_task(tmp_path, old, new, words):
    recipe = loaded(tmp_path, old, new)
    with pytest.raises(ValueError) as said:
        check_env(recipe)
        check_data(recipe)
    assert words in str(said.value)


def test_a_dataset_that_is_not_there_names_the_task(tmp_path):
    recipe = loaded(tmp_path, "{ num_samples = 3 }", '{ source = "no.jsonl", eval_source = "no.jsonl" }')
    with pytest.raises(ValueError, match=r"task 'few': .*no\.jsonl"):
        check_data(recipe)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "late"', 'name = "early"', "tasks by name"),
        ("weight = 2", "weight = 3", "tasks.plain.weight"),
        ("num_samples = 3", "num_samples = 4", "tasks.few.data.num_samples"),
    ],
)
def test_a_run_goes_on_only_with_the_same_tasks(tmp_path, old, new, words):
    before = loaded(tmp_path).model_dump(mode="json")
    check_recipe(Path("step_1"), loaded(tmp_path), before)
    check_recipe(Path("step_1"), loaded(tmp_path, "max_tokens = 3", "max_tokens = 4"), before)
    with pytest.raises(ValueError, match="is of another recipe") as said:
        check_recipe(Path("step_1"), loaded(tmp_path, old, new), before)
    assert words in str(said.value)


def test_a_run_of_one_task_does_not_go_on_with_several(tmp_path):
    recipe = loaded(tmp_path)
    before = load_recipe("colour_tiny").model_dump(mode="json")
    with pytest.raises(ValueError, match="tasks by name"):
        check_recipe(Path("step_1"), recipe, before)


def test_the_code_of_every_task_is_kept_in_the_checkpoint(tmp_path):
    recipe = loaded(tmp_path)
    contents = contents_of(recipe, training_samples(recipe), held_out_samples(recipe))
    assert {f"task {name}: env.module" for name in ("plain", "few", "late")} <= contents.keys()
