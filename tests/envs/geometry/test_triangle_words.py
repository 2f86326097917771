"""What a small model writes about a drawn triangle, how it is measured, and what its demonstrations show."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from envs import geo3k, geo3k_multi_turn
from envs.env_settings import read_settings
from envs.geometry.triangle_words import reading
from envs.geometry.triangles import TriangleSettings, make_problem
from envs.tools.tool_call import parse_tool_call
from launch.tiny_models.demonstrations import READ_ARGS, TASKS, Lesson
from shared.config.recipe import load_recipe
from shared.types import Sample

TASK = TASKS["triangles"]


def demonstrated(seed: int) -> list[tuple[str, str]]:
    """Pairs of what the environment says and the answer."""
    shown = TASK.demonstrate(seed, random.Random(seed), Lesson())
    return [(message["content"][-1]["text"], answer.text) for (message,), answer in shown]


@pytest.mark.parametrize(
    ("kind", "count"), [("angle_sum", 2), ("isosceles", 1), ("exterior", 2), ("right_angle", 2), ("pythagoras", 3)]
)
def test_a_drawn_problem_knows_the_numbers_in_its_picture(kind, count):
    problem = make_problem("3", TriangleSettings(kinds=(kind,)))
    assert len(problem.numbers) == count and list(problem.numbers) == sorted(problem.numbers)


@pytest.mark.parametrize("module", [geo3k, geo3k_multi_turn])
def test_reading_is_measured_in_turns_that_say_what_they_read(module):
    sample = Sample("x", metadata={"seed": 4})
    env = module.build_env(sample, {**READ_ARGS, "diagnostics": True})
    said = reading(env.problem.numbers)
    for thought, expected in ((f"<think>{said}</think>", 1.0), ("<think>5,5</think>", 0.0), ("", None)):
        env.reset()
        _, _, info = env.step(f"{thought}Answer: \\boxed{{7}}")
        assert info["metrics"]["turn_metrics"].get("read_accuracy") == expected
    _, _, info = module.build_env(sample, READ_ARGS).step(f"<think>{said}</think>Answer: \\boxed{{7}}")
    assert "read_accuracy" not in info["metrics"]["turn_metrics"]


def test_demonstrations_draw_as_the_recipe_does():
    env = load_recipe("launch/recipes/geo3k_answers_tiny.toml").env
    given = json.loads(json.dumps({key: value for key, value in READ_ARGS.items() if key != "max_turns"}))
    assert env.args.items() >= given.items() and env.max_turns == READ_ARGS["max_turns"]
    assert env.args["system_prompt"] in TASK.prompts


def test_texts_begin_at_multiples_of_the_grid():
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        TriangleSettings(text_grid=0)
    for seed in range(20):
        drawn = [TriangleSettings(kinds=("right_angle",), picture_pixels=128, text_grid=grid) for grid in (1, 16)]
        anywhere, aligned = (np.asarray(make_problem(seed, settings).image) for settings in drawn)
        rows, columns = (np.argwhere(aligned < anywhere) % 16).T  # ink, which is 0, where there was none
        assert rows.max() < 10 and columns.max() < 14  # numbers of two digits are no larger, and begin at 0


@pytest.mark.slow
def test_demonstrations_read_rightly_and_show_the_right_answer_by_chance_alone():
    right = calls = 0
    for seed in range(300):
        problem = make_problem(seed, read_settings(TriangleSettings, None, READ_ARGS))
        for _, text in demonstrated(seed):
            if "<think>" in text:
                assert text.startswith(f"<think>{reading(problem.numbers)}</think>")
            if call := parse_tool_call(text):
                right, calls = right + (call.arguments["answer"] == problem.answer), calls + 1
    assert calls > 300 and right / calls < 0.15


def test_what_the_tool_calls_right_is_the_demonstrated_answer():
    endings = [episode[-1] for episode in map(demonstrated, range(100))]
    believed = [(said, text) for said, text in endings if "is correct" in said]
    assert 20 < len(believed) < 100
    for said, text in believed:
        assert text == f"Answer: \\boxed{{{said.split(chr(39))[1]}}}"
    assert all("\\boxed{" in text for _, text in endings)


def test_guessed_answers_are_marked():
    for _, answer in TASK.demonstrate(1, random.Random(1), Lesson()):
        for start, end in answer.guesses:
            call = parse_tool_call(answer.text)
            assert answer.text[start:end] == (call.arguments["answer"] if call else json.loads(answer.text[start:end]))
