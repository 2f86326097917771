"""Scenes with a question: what is drawn, told, asked and counted as right."""

from __future__ import annotations

import re
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest

from envs import scene
from envs.boards.scene_board import NAMES, SceneSpec, make_scene, split_of_scene
from envs.boards.scene_words import reading
from envs.check import check_env
from envs.loader import check_settings
from shared.types import Sample


def env_of(seed: int, **args: Any) -> scene.SceneEnv:
    return scene.build_env(Sample(str(seed), metadata={"seed": seed}), args)


def answered(env: scene.SceneEnv, text: str) -> tuple[float, float]:
    """Reward and format."""
    env.reset()
    _, done, info = env.step(text)
    assert done and info["metrics"]["success"] == info["reward"] == info["metrics"][f"success_{env.scene.kind}"]
    return info["reward"], float(info["metrics"]["format"])


@pytest.mark.parametrize(
    "args", [{}, {"render_mode": "text"}, {"jitter": 0.5, "grid_size": [1, 8]}, {"questions": ["count"]}]
)
def test_a_scene_keeps_the_contract(args: dict[str, Any]) -> None:
    for seed in range(3):
        check = check_env("envs.scene", {**args, "max_turns": 1}, seed)
        assert (check.problems, check.notes) == ([], [])


def test_the_best_response_is_right_and_another_number_wrong() -> None:
    for seed in range(60):
        env = env_of(seed)
        assert answered(env, env.best_response()) == (1.0, 1.0)
        number = len(env.scene.matches)
        wrong = number + 1 if env.scene.kind == "count" else "0, 0"
        if env.scene.kind == "count" or not env.scene.is_at(0, 0, 64):
            assert answered(env, f"<answer>{wrong}</answer>") == (0.0, 1.0)
        assert answered(env, f"I see {number}") == (0.0, 0.0)


def test_a_point_counts_within_the_thing_that_is_asked_for_and_nowhere_else() -> None:
    for seed in range(20):
        env = env_of(seed, questions=["point"], pixels_per_cell=16)
        (thing,) = env.scene.matches
        left, top = env.scene.corner(thing, 16)
        for x in range(0, 64, 3):
            for y in range(0, 64, 3):
                inside = left <= x < left + 16 and top <= y < top + 16
                assert answered(env, f"<answer>({x}, {y})</answer>") == (float(inside), 1.0)


def test_image_and_text_show_the_same_things() -> None:
    for seed in range(20):
        seen, told = env_of(seed, pixels_per_cell=32), env_of(seed, pixels_per_cell=32, render_mode="text")
        shown, said = seen.reset()[0], told.reset()[0]
        assert said["obs_str"].splitlines()[-1] == shown["obs_str"]
        pixels = np.asarray(shown["multi_modal_data"]["image"][0].convert("RGB")).astype(int)
        lines = re.findall(r"(\w+) (\w+) at (\d+), (\d+)", said["obs_str"])
        assert len(lines) == len(seen.scene.things)
        for colour, _, x, y in lines:
            red, green, blue = pixels[int(y), int(x)]
            assert {"red": red > 200 > 100 > green, "blue": blue > 200, "yellow": red > 200 < green + 1 and blue < 100,
                    "green": green > 150 > red}[colour]  # fmt: skip
        empty = [divmod(cell, 4) for cell in range(16) if cell not in {thing.cell for thing in seen.scene.things}]
        plain = env_of(seed, pixels_per_cell=32, jitter=0.0).reset()[0]["multi_modal_data"]["image"][0].convert("RGB")
        assert all(plain.getpixel((32 * column + 16, 32 * row + 16)) == (240, 238, 230) for row, column in empty)


def test_counts_are_drawn_evenly_and_the_thing_to_point_at_is_the_only_one() -> None:
    counts = Counter()
    for seed in range(600):
        drawn = make_scene(seed, SceneSpec())
        if drawn.kind == "count":
            counts[len(drawn.matches)] += 1
        else:
            assert len(drawn.matches) == 1
    assert set(counts) == {0, 1, 2, 3, 4} and min(counts.values()) > 30


def test_splits_share_no_scene_and_all_stands_inside_the_picture() -> None:
    for split in ("train", "heldout"):
        drawn = [make_scene(seed, SceneSpec(jitter=0.5, split=split)) for seed in range(60)]
        assert {split_of_scene(each) for each in drawn} == {split}
        corners = [each.corner(thing, 32) for each in drawn for thing in each.things]
        assert all(0 <= x <= 96 and 0 <= y <= 96 for x, y in corners)


def test_what_was_read_is_measured_with_diagnostics() -> None:
    env = env_of(4, diagnostics=True, jitter=0.0)
    right = f"<think> {reading(env.scene, 64)}</think>{env.best_response()}"
    assert env.step(right)[2]["metrics"]["read_accuracy"] is True
    assert env.step(env.best_response())[2]["metrics"]["read_accuracy"] is False
    assert "read_accuracy" not in env_of(4).step(right)[2]["metrics"]
    assert reading(env.scene, 64).count("*") == len(env.scene.matches)
    assert any(name in reading(env.scene, 64) for name in NAMES)


def test_random_answers_have_the_form_and_are_right_now_and_then() -> None:
    rng = Random(0)
    results = [answered(env_of(seed), scene.random_response(rng)) for seed in range(300)]
    assert 0.02 < sum(reward for reward, _ in results) / 300 < 0.3
    assert 0.3 < sum(form for _, form in results) / 300 < 0.7


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ({"render_mode": "video"}, "render_mode"),
        ({"pixels_per_cell": 1}, "pixels_per_cell"),
        ({"grid_size": [2, 2]}, "no room for 6 things"),
        ({"num_things": 0}, "num_things"),
        ({"num_things": []}, "num_things"),
        ({"questions": []}, "questions"),
        ({"questions": ["where"]}, "questions"),
        ({"num_colours": 1, "num_shapes": 1}, "num_shapes = 1"),
        ({"jitter": 2}, "jitter"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(args: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word) as caught:
        scene.build_env(None, args)
    assert "\n" not in str(caught.value)


def test_a_setting_that_there_is_not_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="jiter"):
        check_settings(scene, {"jiter": 0.1}, "--env.args")
