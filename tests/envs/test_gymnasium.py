"""Environments of gymnasium, played through envs.gymnasium: frames, words, endings; one line for what does not fit."""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import numpy as np
import pytest

from envs import check, show
from envs.env_calls import responder
from envs.gymnasium import build_env, in_text, plain_text, system_prompt
from envs.loader import load_module
from shared.types import Sample

SPARKS = "tests/data/user_code/sparks.py:Sparks-v0"
FIRM = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}}
WAY = "down, down, right, right, down, right"  # over the map 4x4


def made(seed: int = 0, **args: Any) -> Any:
    return build_env(Sample("s", metadata={"seed": seed}), {"id": SPARKS, **args})


def said(args: dict[str, Any], capsys) -> list[str]:
    """Return what the check says about these settings, a line for each problem."""
    code = check.main(["envs.gymnasium", "--env.args", json.dumps(args)])
    lines = capsys.readouterr().out.splitlines()
    assert code == (0 if lines[-1].startswith("ok") else 1)
    return [line.removeprefix("problem: ") for line in lines if line.startswith("problem: ")]


@pytest.mark.parametrize(
    "args",
    [
        FIRM,
        {"id": "FrozenLake-v1", "render": "text", "actions_per_turn": 3},
        {"id": "FrozenLake-v1", "render": "observation"},
        {"id": "CartPole-v1", "image_size": [60, 40]},
        {"id": "Blackjack-v1"},
        {"id": "Taxi-v4", "render": "text"},
        {"id": "MountainCarContinuous-v0", "render": "observation"},
        {"id": SPARKS, "actions": ["back", "on"]},
        {"id": SPARKS, "kwargs": {"form": "vector"}},
        {"id": SPARKS, "kwargs": {"form": "box"}},
        {"id": SPARKS, "kwargs": {"form": "text"}},
        {"id": SPARKS, "kwargs": {"form": "bits"}},
        {"id": SPARKS, "kwargs": {"form": "dict"}, "actions": {"grip": {"hand": 1, "at": [0, 0.5]}}},
    ],
    ids=lambda args: f"{args['id'][-14:]} {args.get('render', '')} {args.get('kwargs', {}).get('form', '')}",
)
def test_the_check_passes(args, capsys):
    assert said(args, capsys) == []


def test_a_frozen_lake_is_solved_in_words_over_one_turn_or_several(capsys):
    for answers in ([f"<answer>{WAY}</answer>"], WAY.split(", ")):
        env = build_env(Sample("s", metadata={"seed": 1}), {**FIRM, "actions_per_turn": 6})
        observation, info = env.reset()
        (image,) = observation["multi_modal_data"]["image"]
        assert image.size == (256, 256) and info["metrics"]["success"] is False
        steps = [env.step(answer) for answer in answers]
        assert [done for _, done, _ in steps] == [False] * (len(answers) - 1) + [True]
        assert steps[-1][2]["reward"] == 1.0 and steps[-1][2]["metrics"]["success"]
        assert steps[-1][2]["metrics"]["steps"] == 6
        env.close()


def test_the_text_of_a_lake_shows_where_one_stands():
    env = build_env(None, {**FIRM, "render": "text", "text": "{step} steps. {actions}"})
    assert env.reset()[0]["obs_str"].startswith("[S]FFF\nFHFH\nFFFH\nHFFG\n")
    assert env.step("right")[0]["obs_str"] == (
        "  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG\n1 steps. one of: left, down, right, up"
    )
    assert plain_text("\x1b[35mR\x1b[0m|\x1b[34;1mB\x1b[0m\x1b[K", "x") == "R(magenta)|B(blue)"


def test_the_seed_of_the_sample_is_the_environments():
    starts = [made(seed).reset()[0]["multi_modal_data"]["image"][0].tobytes() for seed in (*range(9), *range(9))]
    assert starts[:9] == starts[9:] and len(set(starts)) > 1
    env = made(5, actions=["back", "on"])
    assert [env.reset()[0]["multi_modal_data"]["image"][0].tobytes() for _ in range(2)] == [starts[5]] * 2


def test_an_answer_that_names_no_action_moves_nothing_is_told_and_is_counted():
    env = made(actions=["back", "on"], actions_per_turn=2, invalid_reward=-0.1)
    env.reset()
    for answer, why in (("", "holds no action"), ("jump", "'jump' is no action"), ("on, jump", "'jump' is no action")):
        observation, done, info = env.step(answer)
        assert why in observation["obs_str"] and "Answer with one of: back, on." in observation["obs_str"]
        assert (done, info["reward"], info["metrics"]["turn_metrics"]) == (False, -0.1, {"action_is_valid": False})
    assert env.env.unwrapped.heard == [] and env.num_steps == 0


@pytest.mark.parametrize(
    ("answer", "pattern", "heard"),
    [
        ("ON.", "", [4]),
        ("<think>back or on?</think> on, back, on", "", [4, 3]),
        ("back <answer> on\nback </answer> on", "", [4, 3]),
        ("I go back and then I go on", r"go (\w+)", [3, 4]),
        ("on!", "on|back", [4]),
    ],
)
def test_words_are_found_in_an_answer(answer, pattern, heard):
    env = made(actions=["back", "on"], actions_per_turn=2, pattern=pattern)
    env.reset()
    assert env.step(answer)[2]["metrics"]["turn_metrics"] == {"action_is_valid": True}
    assert env.env.unwrapped.heard == heard


@pytest.mark.parametrize(
    ("form", "actions", "answer", "heard"),
    [
        ("", None, "4", 4),
        ("", {"step on": 4}, "Step on", 4),
        ("vector", None, "1 2", [1, 2]),
        ("vector", [["in", "out"], ["a", "b", "c"]], "<answer>out, c</answer>", [1, 2]),
        ("bits", None, "0, 1", [0, 1]),
        ("box", None, "-.3; 2e0", [-0.3, 2]),
        ("box", {"jump": [0.1, 9]}, "jump", [0.1, 9]),
        ("text", None, "<answer>abc</answer>", "abc"),
        ("dict", {"grip": {"hand": 1, "at": [0, 0.5]}}, "grip", {"hand": 1, "at": [0, 0.5]}),
    ],
)
def test_each_space_has_words(form, actions, answer, heard):
    env = made(kwargs={"form": form}, actions=actions)
    env.reset()
    assert env.step(answer)[2]["metrics"]["turn_metrics"] == {"action_is_valid": True}
    (action,) = env.env.unwrapped.heard
    assert action in env.env.action_space
    if isinstance(action, dict):
        assert action["hand"] == heard["hand"] and action["at"].tolist() == heard["at"]
    else:
        assert action == heard if isinstance(heard, str) else np.allclose(action, heard)


@pytest.mark.parametrize(
    ("form", "answer", "why"),
    [
        ("vector", "1 2 1", "Your answer holds 3 words, where an action has 2"),
        ("vector", "1 3", "'3' is no action"),
        ("box", "0 nine", "'nine' is no number"),
        ("box", "0 9.5", "9.5 is not from 0 to 9"),
        ("text", "abd", "'abd' is no action"),
    ],
)
def test_an_action_outside_of_its_space_is_told(form, answer, why):
    env = made(kwargs={"form": form})
    env.reset()
    assert why in env.step(answer)[0]["obs_str"]


def test_success_is_what_the_environment_says_else_its_return_else_a_reward_at_the_end():
    def success(**args: Any) -> bool:
        env = made(actions=["back", "on"], actions_per_turn=6, **args)
        env.reset()
        return env.step("on on on on on on")[2]["metrics"]["success"]

    assert success() and not success(kwargs={"form": "says no"})
    assert success(kwargs={"form": "says no"}, solved_return=1.0) and not success(solved_return=1.5)


def test_an_episode_that_is_cut_off_by_its_steps_is_over_and_counted():
    env = made(actions=["back", "on"], max_steps=2, actions_per_turn=4)
    env.reset()
    _, done, info = env.step("back back back")
    assert done and info["metrics"] | {"turn_metrics": 0} == {
        **{"success": False, "steps": 2, "truncated": True, "turn_metrics": 0}
    }


def test_random_answers_are_valid_and_the_prompt_names_the_actions():
    for args in (FIRM, {"id": SPARKS, "kwargs": {"form": "box"}}, {"id": SPARKS, "kwargs": {"form": "vector"}}):
        args = {**args, "actions_per_turn": 2}
        env = build_env(None, args)
        respond = responder(load_module("envs.gymnasium"), env)
        env.reset()
        assert respond is not None
        for seed in range(5):
            _, done, info = env.step(respond(Random(seed)))
            assert info["metrics"]["turn_metrics"] == {"action_is_valid": True}
            if done:
                env.reset()
    assert "left, down, right, up" in system_prompt(FIRM)
    assert "2 numbers, from -0.3 to 0.3, from 0 to 9" in system_prompt({"id": SPARKS, "kwargs": {"form": "box"}})
    assert "Each turn shows an image" in system_prompt(FIRM)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({}, "id is required"),
        ({"id": "FrozenLak-v1"}, "id = 'FrozenLak-v1': gymnasium says: Environment `FrozenLak` doesn't exist. Did you"),
        ({"id": "no_module:Lake-v0"}, "id = 'no_module:Lake-v0': gymnasium says: No module named 'no_module'"),
        (
            {"id": "no_file.py:Lake-v0"},
            "no file 'no_file.py': give the path of a .py file that holds gymnasium.register",
        ),
        ({**FIRM, "kwargs": {"slippery": 1}}, "cannot be made, with kwargs = {'slippery': 1}: "),
        ({**FIRM, "kwargs": {"render_mode": "ansi"}}, "kwargs: leave render_mode out, and set render"),
        ({**FIRM, "pattern": "("}, "pattern = '(': value error, no regular expression"),
        ({**FIRM, "text": "{where}"}, "text = '{where}': no field 'where'; it has observation, step, actions"),
        (
            {**FIRM, "actions": ["a", "b"]},
            "actions is 2 words, but the environment has 4 such actions: write a list of",
        ),
        ({**FIRM, "actions": ["a", "b", "c", "A"]}, "the words must be texts, no two of them alike"),
        ({**FIRM, "actions": {"up": 7}}, "actions: 'up' = 7 is no action of Discrete(4)"),
        ({**FIRM, "idd": 1}, "--env.args: envs.gymnasium has no setting 'idd'; did you mean 'id'?"),
        ({"id": "CartPole-v1", "render": "text"}, "render = 'text': CartPole-v1 has no render mode 'ansi', only human"),
        (
            {"id": SPARKS, "kwargs": {"form": "dict"}},
            "cannot be named by words or numbers: give each action a word, actions = {word = value}, or wrap the",
        ),
        (
            {"id": SPARKS, "kwargs": {"form": "vector"}, "actions": [["a"], []]},
            "actions[0] is 1 words, but the environment has 2",
        ),
        ({"id": SPARKS, "kwargs": {"form": "float"}}, "is an array (8, 48, 3) of float64, not an array (height, width"),
        (
            {"id": SPARKS, "kwargs": {"form": "list"}},
            "a frame of tests/data/user_code/sparks.py:Sparks-v0 is list, not",
        ),
        (
            {"id": SPARKS, "kwargs": {"form": "none"}},
            "is NoneType, not an array (height, width, 3) of uint8: set render",
        ),
        ({"id": SPARKS, "kwargs": {"form": "gym"}}, "(observation, reward, terminated, truncated, info)"),
    ],
)
def test_what_does_not_fit_is_one_line_with_its_cure(args, line, capsys):
    problems = said(args, capsys)
    assert len(problems) == 1 and line in problems[0], problems
    assert "envs/gymnasium.py" not in problems[0]


def test_the_first_frame_of_a_process_is_drawn_alone(monkeypatch):
    """pygame imports its parts at the first frame, and half of one is there for another thread."""
    monkeypatch.setattr("envs.gymnasium._drawn", set())
    lakes, begun, drawing, at_once = [made(**FIRM) for _ in range(4)], threading.Barrier(4), list[int](), list[int]()

    def draw() -> Any:
        drawing.append(1)
        at_once.append(len(drawing))
        time.sleep(0.02)
        drawing.pop()
        return np.zeros((8, 8, 3), np.uint8)

    def reset(lake: Any) -> None:
        monkeypatch.setattr(lake.env, "render", draw)
        begun.wait(10)
        lake.reset()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(reset, lakes))
    assert at_once == [1] * 4


def test_without_gymnasium_the_line_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    (line,) = said({"id": "Nothing-v0"}, capsys)
    assert "envs.gymnasium needs gymnasium, which is not installed: pip install 'gymnasium[toy-text]'" in line


def test_observations_are_told_in_words():
    assert in_text({"place": (1, 2.50001), "word": "up"}) == "place: 1, 2.5\nword: up"
    assert in_text(np.arange(4).reshape(2, 2)) == "0 1\n2 3"
    with pytest.raises(TypeError, match=r"an array \(84, 84\) of uint8, which text cannot tell"):
        in_text(np.zeros((84, 84), np.uint8))


def test_an_episode_is_shown(tmp_path):
    out = tmp_path / "episode.png"
    assert show.main(["envs.gymnasium", "--env.args", json.dumps(FIRM), "--out", str(out)]) == 0
    assert out.stat().st_size > 1000
