"""A teacher of another vocabulary or image rule is refused in one line, before anything heavy starts."""

from __future__ import annotations

import json
import shutil

import pytest

from launch.learner import check_cheaply
from launch.teachers import check_teacher
from shared.config.recipe import load_recipe
from tests.support.runs import RECIPE

POLICY = "launch/models/colour_tiny"


def recipe(teacher):
    return load_recipe(RECIPE, ["--learner.objective.teacher", str(teacher)])


@pytest.fixture
def copy(tmp_path):
    """A model like the policy, with changes in its files: {file: change of its JSON}."""

    def make(**changes):
        folder = shutil.copytree(POLICY, tmp_path / "teacher")
        for name, change in changes.items():
            path = folder / f"{name}.json"
            values = json.loads(path.read_text())
            change(values)
            path.write_text(json.dumps(values))
        return folder

    return make


def test_a_model_like_the_policy_may_teach(copy):
    check_teacher(recipe(copy()))
    check_teacher(load_recipe(RECIPE))  # no teacher


def another_word(values):
    words = values["model"]["vocab"]
    first, second, *_ = words
    words[first], words[second] = words[second], words[first]


def fewer_rows(values):
    values["text_config"]["vocab_size"] -= 8


def other_mean(values):
    values["image_mean"] = [0.4, 0.5, 0.5]


def other_positions(values):
    values["vision_config"]["num_position_embeddings"] = 64


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tokenizer": another_word}, "2 of them other ones than those of launch/models/colour_tiny"),
        ({"config": fewer_rows}, "tokens, and the policy may sample 384"),
        ({"preprocessor_config": other_mean}, "its images have mean = (0.4, 0.5, 0.5)"),
        ({"config": other_positions}, "its vision tower has num_position_embeddings = 64"),
    ],
)
def test_a_model_that_reads_something_else_is_refused_in_one_line(copy, changes, expected):
    folder = copy(**changes)
    with pytest.raises(ValueError, match=r"learner\.objective\.teacher = ") as raised:
        check_cheaply(recipe(folder))
    assert expected in str(raised.value) and "\n" not in str(raised.value) and "; name a" in str(raised.value)


@pytest.mark.parametrize(
    ("teacher", "expected"),
    [
        ("nowhere", "it is no folder of a model: it has no config.json"),
        ("launch/models/colour_text_tiny", "it is of the family Qwen3, and launch/models/colour_tiny of Qwen3-VL"),
        ("launch/models/sokoban_tiny", "name a model of the same vocabulary"),
    ],
)
def test_another_model_is_refused_in_one_line(teacher, expected):
    with pytest.raises(ValueError, match=r"learner\.objective\.teacher = ") as raised:
        check_cheaply(recipe(teacher))
    assert expected in str(raised.value)
