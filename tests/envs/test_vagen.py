"""Environments in the style of VAGEN's are played unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from envs import check
from envs.env_calls import close_env, make_env, messages_of, reset_env, step_env
from envs.vagen import build_env, system_prompt
from shared.types import Sample

DOT = "tests/data/user_code/vagen_style.py:Dot"


def played(answers: tuple[str, ...], seed: int = 0, **config: Any) -> list[Any]:
    """Return what each turn of an episode gave."""
    env = make_env(build_env, sample=Sample("s", metadata={"seed": seed}), args={"env": DOT, "config": config})
    observation, _ = reset_env(env)
    turns = [(messages_of(env, observation), False, {})]
    for answer in answers:
        observation, done, info = step_env(env, answer)
        turns.append((messages_of(env, observation), done, info))
    close_env(env)
    return turns


@pytest.mark.parametrize("form", ["", "gym", "former", "text"])
def test_the_check_passes(form, capsys):
    args = {"env": DOT, "config": {"form": form}}
    assert check.main(["envs.vagen", "--env.args", json.dumps(args)]) == 0, capsys.readouterr().out
    assert "has text before an image" in capsys.readouterr().out or form == "text"


def test_an_episode_has_images_where_the_text_has_their_place_and_its_rewards_and_metrics():
    turns = played(("left", "left", "left", "right", "right", "right"))
    (message,) = turns[0][0]
    assert [part["type"] for part in message["content"]] == ["text", "image", "text"]
    assert message["content"][0]["text"] == "You see " and message["content"][2]["text"] == ". What next?"
    assert [done for _, done, _ in turns] == [False] * 6 + [True]
    assert [info.get("reward") for _, _, info in turns] == [None, 0, 0, 0, 0, 0, 1]
    assert turns[-1][2]["metrics"] == {
        **{"turn_metrics": {"action_is_valid": True}, "traj_metrics": {"success": True}, "success": True}
    }


def test_the_seed_is_the_samples():
    first = {seed: played((), seed)[0][0][0]["content"][1]["image"].tobytes() for seed in (0, 1, 2, 3, 0)}
    assert len(set(first.values())) > 1
    assert first[0] == played((), 0)[0][0][0]["content"][1]["image"].tobytes()


def test_the_system_prompt_is_the_classs():
    assert system_prompt({"env": DOT, "config": {"hint": "Hurry. "}}) == (
        "Move the dot to the right edge. Hurry. Answer left or right."
    )


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({}, "env is required"),
        ({"env": "tests/data/user_code/vagen_style.py:Dott"}, "has no function Dott; it has "),
        ({"env": "no_package.Dot"}, "no module 'no_package'"),
        (
            {"env": "tests/data/user_code/vagen_style.py:Half"},
            "has no method step: VAGEN's have reset, step, system_pr",
        ),
        ({"env": DOT, "config": {"form": "no prompt"}}, "is None, not a text"),
        ({"env": DOT, "config": {"form": "no place"}}, "has 1 images and 0 places '<image>' in its text"),
        ({"env": DOT, "config": {"form": "audio"}}, "not {'<image>': [image]}"),
        ({"env": DOT, "config": {"form": "ours"}}, "not (observation, reward, done, info)"),
    ],
)
def test_what_does_not_fit_is_one_line(args, line, capsys):
    assert check.main(["envs.vagen", "--env.args", json.dumps(args)]) == 1
    problems = [text for text in capsys.readouterr().out.splitlines() if text.startswith("problem")]
    assert len(problems) == 1 and line in problems[0], problems
