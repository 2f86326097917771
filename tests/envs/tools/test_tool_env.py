"""An environment with tools, as an actor plays it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PILImage

from envs.base import Info
from envs.check import check_env
from envs.env_calls import messages_of, reset_env, step_env
from envs.play import main as play
from envs.tools.tool import ToolContext, ToolFault
from envs.tools.tool_env import MAX_CALLS, ToolEnv
from envs.tools.zoom import zoom
from shared.types import Image, Sample
from tests.support.tiny import draw_image, png


def note(text: str, episode: ToolContext) -> str:
    """Write a note."""
    episode.state.setdefault("notes", []).append(text)
    return " ".join(episode.state["notes"])


def fail(how: str) -> str:
    """Fail."""
    raise ToolFault("gone") if how == "fault" else RuntimeError("boom")


class Finding(ToolEnv):
    def grade(self, answer: str) -> float | Info:
        right = float("red" in answer)
        return {"reward": right, "metrics": {"success": right}}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def env_of(*images: PILImage.Image) -> Finding:
    env = Finding(Sample("x", images=tuple(Image.of(png(image)) for image in images)), [zoom, note, fail])
    assert reset_env(env)[0] == {}
    return env


def test_an_answer_with_calls_is_answered_by_a_message_of_a_tool_for_each() -> None:
    env = env_of(draw_image(64, 64))
    text = call("note", text="a") + call("zoom", box=[0, 0, 500, 500]) + call("note", text="b")
    observation, done, info = step_env(env, text)
    messages = messages_of(env, observation)
    assert not done and info["reward"] == 0.0
    assert [message["role"] for message in messages] == ["tool"] * 3
    assert [message["content"] for message in messages[::2]] == ["a", "a b"]
    (part,) = messages[1]["content"]
    assert part["type"] == "image" and part["image"].size == (512, 512)
    assert info["metrics"] == {
        "tool_calls": 3.0, "tool_executed": 3.0, "tool_unknown_tool": 0.0, "tool_malformed_call": 0.0,
        "tool_bad_arguments": 0.0, "tool_failed": 0.0,
    }  # fmt: skip


def test_an_image_of_a_result_can_be_zoomed_into_again() -> None:
    env = env_of(draw_image(64, 64))
    step_env(env, call("zoom", box=[0, 0, 500, 500]))
    observation, _, info = step_env(env, call("zoom", box=[0, 0, 500, 500], image=2))
    assert info["metrics"]["tool_executed"] == 2.0
    assert messages_of(env, observation)[0]["content"][0]["image"].size == (512, 512)


def test_an_answer_without_a_call_is_graded_and_ends_the_episode() -> None:
    env = env_of()
    step_env(env, call("note", text="a"))
    observation, done, info = step_env(env, "It is red.")
    assert (observation, done, info["reward"]) == ({}, True, 1.0)
    assert info["metrics"]["success"] == 1.0 and info["metrics"]["tool_calls"] == 1.0


def test_errors_are_told_and_counted_and_the_episode_goes_on() -> None:
    env = env_of()
    text = call("search") + "<tool_call>{broken</tool_call>" + call("note") + call("fail", how="error")
    observation, done, info = step_env(env, text)
    texts = [message["content"] for message in messages_of(env, observation)]
    assert not done and all(text.startswith("Error: ") for text in texts) and len(texts) == 4
    counted = {name: value for name, value in info["metrics"].items() if name != "tool_executed"}
    assert counted == {
        "tool_calls": 4.0, "tool_unknown_tool": 1.0, "tool_malformed_call": 1.0, "tool_bad_arguments": 1.0,
        "tool_failed": 1.0,
    }  # fmt: skip


def test_a_fault_of_a_tool_ends_the_episode() -> None:
    with pytest.raises(ToolFault):
        step_env(env_of(), call("fail", how="fault"))


def test_calls_beyond_the_limit_are_not_run_and_the_model_is_told() -> None:
    env = env_of()
    observation, _, info = step_env(env, "".join(call("note", text=str(number)) for number in range(50)))
    texts = [message["content"] for message in messages_of(env, observation)]
    assert info["metrics"]["tool_calls"] == MAX_CALLS and len(texts) == MAX_CALLS + 1
    assert texts[-1] == f"Error: only the first {MAX_CALLS} calls of a turn are run"


def test_a_new_episode_begins_without_the_state_of_the_last() -> None:
    env = env_of(draw_image(64, 64))
    step_env(env, call("note", text="a") + call("zoom", box=[0, 0, 500, 500]))
    _, info = reset_env(env)
    observation, _, _ = step_env(env, call("note", text="b"))
    assert messages_of(env, observation)[0]["content"] == "b"
    assert len(env.context.images) == 1 and set(info["metrics"].values()) == {0.0}


SOURCE = '''
"""Which colour is hidden in the corner?"""
from random import Random
from PIL import Image
from envs.tools.tool_env import ToolEnv
from envs.tools.zoom import zoom

TOOLS = [zoom]
SYSTEM_PROMPT = "Find the colour."

class Corner(ToolEnv):
    def first(self):
        rng = Random(self.sample.metadata["seed"])
        self.colour = rng.choice(["red", "blue"])
        picture = Image.new("RGB", (64, 64), "white")
        picture.paste(self.colour, (60, 60, 62, 62))
        return {"obs_str": "Which colour?", "multi_modal_data": {"image": [picture]}}

    def grade(self, answer):
        return float(self.colour in answer)

def random_response(rng):
    return '<tool_call>{"name": "zoom", "arguments": {"box": [900, 900, 1000, 1000]}}</tool_call>'

def build_env(sample=None, args=None, **_):
    return Corner(sample, TOOLS)
'''


def test_an_environment_with_tools_keeps_the_contract(tmp_path: Path) -> None:
    (tmp_path / "corner.py").write_text(SOURCE)
    check = check_env(str(tmp_path / "corner.py"))
    assert (check.problems, check.notes) == ([], [])


def test_an_environment_with_tools_is_played_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corner.py").write_text(SOURCE)
    answers = iter(['<tool_call>{"name": "zoom", "arguments": {"box": [900, 900, 1000, 1000]}}</tool_call>', "red"])
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    assert play([str(tmp_path / "corner.py"), "--pictures", str(tmp_path / "pictures")]) == 0
    shown = capsys.readouterr().out
    assert "--- tools" in shown and '"name": "zoom"' in shown and "--- tool\n[image 224x224]" in shown
    assert (tmp_path / "pictures" / "turn1_0.png").is_file()


def test_a_tool_without_a_docstring_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd.py").write_text(SOURCE.replace("TOOLS = [zoom]", "TOOLS = [lambda x: x]"))
    assert play([str(tmp_path / "odd.py")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "has no docstring" in error
