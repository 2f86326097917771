"""The scene with small numbers and a tool that enlarges: what is seen with it, without it, and in the text twin."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from envs import scene_zoom
from envs.boards.marked_scene import make_marked_scene
from envs.boards.scene_board import SceneSpec
from envs.boards.scene_words import zoom_reading
from envs.check import check_env
from envs.env_calls import messages_of
from shared.types import Sample

SMALL = {"pixels_per_cell": 128, "zoom_pixels": 128 * 128, "jitter": 0.0}
POINT = SceneSpec(kinds=("point",))


def env_of(seed: int, **args: Any) -> scene_zoom.SceneZoomEnv:
    return scene_zoom.build_env(Sample(str(seed), metadata={"seed": seed}), args)


def zoomed(env: scene_zoom.SceneZoomEnv, box: list[int]) -> dict[str, Any]:
    """The message that answers a call."""
    (message,) = messages_of(env, env.step(scene_zoom.call(box))[0])
    return message


@pytest.mark.parametrize("args", [{}, {"render_mode": "text"}, SMALL])
def test_it_keeps_the_contract(args: dict[str, Any]) -> None:
    for seed in range(3):
        check = check_env("envs.scene_zoom", {**args, "max_turns": 4}, seed)
        assert (check.problems, check.notes) == ([], [])


@pytest.mark.parametrize("args", [{}, {"render_mode": "text"}, SMALL])
def test_the_best_player_looks_once_and_is_right(args: dict[str, Any]) -> None:
    for seed in range(20):
        env = env_of(seed, **args)
        env.reset()
        _, done, info = env.step(env.best_response())
        assert not done and info["reward"] == 0.0 and info["metrics"]["tool_executed"] == 1.0
        _, done, info = env.step(env.best_response())
        assert done and info["reward"] == info["metrics"]["success"] == info["metrics"]["format"] == 1.0


def test_a_wrong_number_is_not_right_and_a_number_without_the_form_neither() -> None:
    env = env_of(1)
    env.reset()
    wrong = env.marked.answer % 4 + 1
    assert (
        env.step(f"<answer>{wrong}</answer>")[2]["metrics"] | {"format": 1.0, "success": 0.0}
        == env.step(f"<answer>{wrong}</answer>")[2]["metrics"]
    )
    assert env.step(f"It is {env.marked.answer}")[2]["metrics"]["success"] == 0.0


def test_the_number_can_be_read_enlarged_and_hardly_in_the_reduced_picture() -> None:
    """Reduced as the small model sees it, pictures that differ in one number differ in a few pixels by a little;
    enlarged, clearly."""
    seen, near = [], []
    for seed in range(12):
        marked = make_marked_scene(seed, POINT)
        others = [type(marked)(marked.scene, (mark, *marked.marks[1:])) for mark in (1, 4)]
        pictures = [other.render(128).convert("RGB") for other in others]
        x, y = marked.scene.corner(marked.scene.things[0], 128)
        for kept, views in (
            (seen, [picture.resize((128, 128), Image.Resampling.BICUBIC) for picture in pictures]),
            (near, [picture.crop((x, y, x + 128, y + 128)) for picture in pictures]),
        ):
            a, b = (np.asarray(view).astype(int) for view in views)
            kept.append(int((abs(a - b).max(axis=2) > 60).sum()))
    assert max(seen) <= 6 < 20 <= min(near)


def test_the_text_twins_tool_tells_what_stands_in_the_box_and_its_number() -> None:
    env = env_of(3, render_mode="text")
    said = env.reset()[0]["obs_str"].splitlines()
    assert said[-1] == env_of(3).reset()[0]["obs_str"] and len(said) == 1 + len(env.marked.scene.things)
    box = [*env.marked.box(env.marked.asked, 256)]
    assert zoomed(env, box) == {"role": "tool", "content": zoomed(env, box)["content"]}
    name = said[-1].split(" the ")[1].removesuffix(" bear?")
    assert f"The {name} bears {env.marked.answer}." in zoomed(env, box)["content"]
    assert len(zoomed(env, [0, 0, 1000, 1000])["content"].splitlines()) == len(env.marked.scene.things)
    assert zoomed(env, [0, 0, 1, 1])["content"] == "There is nothing."
    assert "four numbers" in zoomed(env, [0, 0, 1])["content"]


def test_the_enlarged_part_has_the_asked_size() -> None:
    env = env_of(2, **SMALL)
    (picture,) = env.reset()[0]["multi_modal_data"]["image"]
    assert picture.size == (512, 512)
    observation = env.step(env.best_response())[0]
    (part,) = observation["multi_modal_data"]["image"]
    assert part.size == (128, 128)


def test_numbers_are_drawn_evenly_and_the_seed_decides_them() -> None:
    marks = Counter(mark for seed in range(100) for mark in make_marked_scene(seed, POINT).marks)
    assert set(marks) == {1, 2, 3, 4} and min(marks.values()) > 80
    assert make_marked_scene(5, POINT) == make_marked_scene(5, POINT)


def test_what_was_read_is_measured_in_the_first_turn_with_diagnostics() -> None:
    env = env_of(4, **SMALL, diagnostics=True)
    env.reset()
    thought = f"<think> {zoom_reading(env.marked, 128)}</think>"
    assert env.step(thought + env.best_response())[2]["metrics"]["read_accuracy"] is True
    assert env.step(env.best_response())[2]["metrics"]["read_accuracy"] is True
    env.reset()
    assert env.step(env.best_response())[2]["metrics"]["read_accuracy"] is False


def test_random_answers_look_or_guess() -> None:
    rng = Random(0)
    answers = [scene_zoom.random_response(rng) for _ in range(100)]
    assert 20 < sum("tool_call" in answer for answer in answers) < 80


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ({"render_mode": "video"}, "render_mode"),
        ({"pixels_per_cell": 16}, "pixels_per_cell"),
        ({"zoom_pixels": 10}, "zoom_pixels"),
        ({"grid_size": [2, 2]}, "no room for 6 things"),
        ({"num_colours": 1, "num_shapes": 1}, "num_shapes = 1"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(args: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word) as caught:
        scene_zoom.build_env(None, args)
    assert "\n" not in str(caught.value)
