"""Environments in the shapes that people bring: what is right is played, what is not is named with its cure, by the
check as by an actor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from envs import show
from envs.check import check_env, main
from envs.env_calls import is_number, messages_of, play_a_turn
from envs.loader import load_env

HEAD = """
import numpy as np
from PIL import Image
def build_env(sample=None, args=None, **_): return E()
SYSTEM_PROMPT = "Play."
class E:
    def reset(self): return {"obs_str": "say hi"}, {}
"""
NUMPY = (
    HEAD
    + """
    def step(self, text):
        right = np.float32("hi" in text)
        metrics = {"success": right, "distance": np.int64(3), "share": np.array(0.5)}
        return {"obs_str": "bye"}, np.bool_(True), {"reward": right, "metrics": metrics}
"""
)
BARE_IMAGE = """
from PIL import Image
def build_env(sample=None, args=None, **_): return E()
class E:
    def reset(self): return {"obs_str": "say hi", "multi_modal_data": {"image": [Image.new("RGB", (8, 8))]}}, {}
    def step(self, text): return {"obs_str": "bye"}, True, {"reward": 1.0}
    def format_observation(self, observation):
        images = [{"type": "image"} for _ in observation.get("multi_modal_data", {}).get("image", [])]
        return {"role": "user", "content": [*images, {"type": "text", "text": observation["obs_str"]}]}
"""
NO_CLOSE_NO_FORMAT = (
    HEAD
    + """
    def step(self, text): return {"obs_str": "bye"}, True, {"reward": 1.0}
"""
)
WRONG = {
    "gymnasium": (
        HEAD + "    def step(self, text): return {'obs_str': 'bye'}, 1.0, True, False, {}\n",
        "step of E returned 5 values, not (observation, done, info); these look like Gymnasium's (observation, reward, "
        "terminated, truncated, info): put the reward into info['reward'], and terminated or truncated into done",
    ),
    "gym": (
        HEAD + "    def step(self, text): return {'obs_str': 'bye'}, 1.0, True, {}\n",
        "step of E returned 4 values, not (observation, done, info); these look like Gym's (observation, reward, done, "
        "info): put the reward into info['reward']",
    ),
    "async": (
        HEAD + "    async def step(self, text): return {'obs_str': 'bye'}, True, None\n",
        "step of E returned an info of type NoneType, not dict",
    ),
    "text": (
        HEAD.replace('{"obs_str": "say hi"}, {}', '"say hi", {}')
        + "    def step(self, text): return {'obs_str': 'bye'}, True, {}\n",
        "reset of E returned an observation of type str, not a dict with a text at 'obs_str'",
    ),
    "no info": (
        HEAD + "    def step(self, text): return {'obs_str': 'bye'}, True, None\n",
        "step of E returned an info of type NoneType, not dict",
    ),
    "tensor done": (
        HEAD + "    def step(self, text): return {'obs_str': 'bye'}, np.array([True]), {}\n",
        "step of E returned done = array([ True]), which is ndarray, not bool",
    ),
    "more images": (
        BARE_IMAGE.replace('[{"type": "image"} for', '[{"type": "image"} for _ in range(2) for'),
        "the message that format_observation of E returned: a message shows more images than the sample has",
    ),
    "odd part": (
        BARE_IMAGE.replace('{"type": "text", "text": observation["obs_str"]}', '{"type": "audio"}'),
        "message content of type 'audio': use text or image",
    ),
    "text reward": (
        HEAD + "    def step(self, text): return {'obs_str': 'bye'}, True, {'reward': 'high'}\n",
        "info['reward']",
    ),
}


def written(tmp_path: Path, source: str) -> str:
    path = tmp_path / "brought.py"
    path.write_text(source)
    return str(path)


@pytest.mark.parametrize("source", [NUMPY, BARE_IMAGE, NO_CLOSE_NO_FORMAT], ids=["numpy", "bare image", "bare"])
def test_what_keeps_the_contract_in_another_shape_is_played(tmp_path: Path, source: str) -> None:
    path = written(tmp_path, source)
    assert check_env(path).problems == []
    play_a_turn(load_env(path))


@pytest.mark.parametrize("last", ["None", "{}"])
def test_an_episode_that_ends_without_an_observation_is_played_checked_and_shown(tmp_path: Path, last: str) -> None:
    path = written(tmp_path, HEAD + f"    def step(self, text): return {last}, True, {{'reward': 1.0}}\n")
    assert check_env(path).problems == []
    play_a_turn(load_env(path))
    assert show.main([path, "--out", str(tmp_path / "episode.png")]) == 0


@pytest.mark.parametrize(("source", "words"), WRONG.values(), ids=WRONG)
def test_what_breaks_it_is_named_with_its_cure_by_the_check_as_by_an_actor(tmp_path, source: str, words: str) -> None:
    path = written(tmp_path, source)
    assert any(words in problem for problem in check_env(path).problems), check_env(path).problems
    with pytest.raises((TypeError, ValueError)) as caught:
        play_a_turn(load_env(path))
    assert words in str(caught.value)


def test_bare_image_parts_take_the_images_of_the_observation_in_order() -> None:
    class Two:
        def format_observation(self, observation: dict[str, Any]) -> dict[str, Any]:
            return {"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "?"}]}

    images = [Image.new("RGB", (8, size)) for size in (3, 5)]
    (message,) = messages_of(Two(), {"obs_str": "?", "multi_modal_data": {"image": images}})
    assert [part.get("image") for part in message["content"]] == [*images, None]
    with pytest.raises(ValueError, match="more images"):
        messages_of(Two(), {"obs_str": "?", "multi_modal_data": {"image": images[:1]}})


def test_the_check_goes_on_after_a_problem_and_notes_that_no_step_gave_a_reward(tmp_path: Path) -> None:
    source = NO_CLOSE_NO_FORMAT.replace('"reward": 1.0', '"score": 1.0, "metrics": {"a": "x"}')
    found = check_env(written(tmp_path, source))
    assert any("the metric 'a'" in problem for problem in found.problems)
    assert any("no step gave info['reward']" in note and "info has score" in note for note in found.notes)


def test_the_check_shows_the_frames_of_what_an_environment_raised(tmp_path: Path, capsys) -> None:
    source = HEAD + "    def step(self, text): return helper()\ndef helper(): return 1 / 0\n"
    assert main([written(tmp_path, source)]) == 1
    printed = capsys.readouterr().out
    assert "problem: step raised ZeroDivisionError: division by zero (brought.py:9 in helper, called at" in printed
    assert 'brought.py", line 8, in step' in printed and printed.count("Traceback of the user's code") == 1


def test_numbers_of_numpy_are_numbers_and_texts_are_none() -> None:
    assert all(map(is_number, (1, 0.5, True, np.float32(1), np.int8(1), np.bool_(True), np.array(0.5))))
    assert not any(map(is_number, ("0.5", None, float("nan"), np.float32("inf"), np.array([0.5]), [1])))


def test_check_and_play_take_settings_as_a_run_does(capsys) -> None:
    assert main(["envs.sokoban", "--env.args", '{"grid_size": [6, 6], "render_mode": "text"}']) == 0
    assert main(["envs.sokoban", "--env.args.grid_size", "[6, 6]", "--env.args.render_mode=text"]) == 0
    assert main(["envs.sokoban", "--env.args", '{"grid_sze": 6}']) == 1
    assert "did you mean 'grid_size'" in capsys.readouterr().out
    assert main(["envs.sokoban", "--env.args", "[6]"]) == 2
    assert "write it like" in capsys.readouterr().err


@pytest.mark.parametrize(
    "start",
    [
        '{"obs_str": "what?", "images": [Image.new("RGB", (8, 8))]}',
        '{"obs_str": "what?", "image": Image.new("RGB", (8, 8))}',
        '{"obs_str": "what?", "pixels": np.zeros((8, 8, 3), np.uint8)}',
        '{"observation": "what?"}',
        '{"text": "what?", "images": []}',
    ],
)
def test_what_the_model_would_never_be_shown_is_refused_by_its_name(tmp_path, start):
    path = tmp_path / "env.py"
    path.write_text(NUMPY.replace('{"obs_str": "say hi"}', start))
    name = start.split('"')[5 if "obs_str" in start else 1]
    (problem,) = check_env(str(path)).problems
    assert f"{name!r}" in problem and "multi_modal_data" in problem and "format_observation" in problem
    with pytest.raises(ValueError, match="never shown"):
        play_a_turn(lambda: load_env(str(path))())


@pytest.mark.parametrize(
    "start", ['{"obs_str": "what?", "state": [1, 2], "grid": np.zeros((8, 8))}', "{}", '{"multi_modal_data": {}}']
)
def test_an_observation_may_hold_what_is_not_for_the_model(tmp_path, start):
    path = tmp_path / "env.py"
    path.write_text(NUMPY.replace('{"obs_str": "say hi"}', start))
    play_a_turn(lambda: load_env(str(path))())
