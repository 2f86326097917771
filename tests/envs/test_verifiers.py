"""Environments in the style of verifiers' are played turn by turn, and what cannot be played so is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from envs import check
from envs.env_calls import close_env, make_env, messages_of, reset_env, reward_of, step_env
from envs.verifiers import build_env, episode_reward, system_prompt
from shared.types import Sample

FILE = "tests/data/user_code/verifiers_style.py"


def begun(seed: int = 3, split: str = "", **args: Any) -> Any:
    metadata = {"seed": seed} | ({"split": split} if split else {})
    return make_env(build_env, sample=Sample("s", metadata=metadata), args={"env": FILE, "args": args})


def question(env: Any) -> str:
    observation, _ = reset_env(env)
    (message,) = messages_of(env, observation)
    close_env(env)
    return message["content"]


@pytest.mark.parametrize("kind", ["guess", "single"])
def test_the_check_passes(kind, capsys):
    """Numbers are what this one's answers must be, and the check's are none: its own step raises then."""
    args = {"env": FILE, "args": {"kind": kind}}
    code = check.main(["envs.verifiers", "--env.args", json.dumps(args)])
    printed = capsys.readouterr().out
    if kind == "guess":
        assert code == 1 and "problem: step raised ValueError: invalid literal for int()" in printed
        assert "verifiers_style.py:" in printed
    else:
        assert code == 0, printed


def test_an_episode_of_several_turns_has_the_rubrics_reward_at_its_end():
    env = begun(3)
    assert system_prompt({"env": FILE}) == "Guess the number from 0 to 9."
    observation, _ = reset_env(env)
    (first,) = messages_of(env, observation)
    number = int(first["content"].split()[1].strip(".")) % 10
    observation, done, info = step_env(env, str((number + 1) % 10))
    (message,) = messages_of(env, observation)
    assert not done and info == {} and message["role"] == "user"
    assert [part["type"] for part in message["content"]] == ["image", "text"]
    observation, done, info = step_env(env, str(number))
    assert done and info["metrics"] | {"num_turns": 0} == {"right": 1.0, "few": 1 / 3, "num_turns": 0}
    assert info["reward"] == pytest.approx(1 + 0.1 / 3) and reward_of(episode_reward, env) == info["reward"]
    close_env(env)


def test_an_episode_that_is_cut_off_is_scored_too():
    env = begun()
    reset_env(env)
    step_env(env, "1")
    assert reward_of(episode_reward, env) == pytest.approx(0.1 / 2)
    close_env(env)


def test_an_episode_ends_after_the_turns_that_it_may_have_and_begins_again_the_same():
    env = begun(seed=0)
    first = [reset_env(env)[0]["messages"] for _ in range(2)]
    assert first[0] == first[1]
    wrong = "0" if "Row 1." in question(begun(seed=0)) else "5"
    assert [step_env(env, wrong)[1] for _ in range(3)] == [False, False, True]
    close_env(env)


def test_a_single_turn_is_scored():
    env = begun(kind="single")
    number = int(str(reset_env(env)[0]["messages"][0]).partition("Row ")[2].partition(".")[0]) % 10
    _, done, info = step_env(env, str(number))
    assert done and info["metrics"]["right"] == 1.0
    close_env(env)


def test_nothing_is_trained_on_what_is_held_out():
    train = {question(begun(seed)) for seed in range(40)}
    held_out = {question(begun(seed, "heldout")) for seed in range(40)}
    assert (len(train), len(held_out)) == (36, 4) and not train & held_out
    assert {question(begun(seed, "heldout", held_out=3)) for seed in range(9)} == {
        *(f"Row {number}. Guess." for number in range(3))
    }
    assert len({question(begun(seed, held_out=3)) for seed in range(40)}) == 40


def test_a_reward_function_that_raises_is_no_reward_of_zero():
    env = begun(bad="reward", kind="single")
    reset_env(env)
    with pytest.raises(KeyError):
        step_env(env, "1")


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({}, "env is required"),
        (
            {"env": "no-package"},
            "no module 'no_package': give a dotted path such as envs.sokoban, or a .py file, that holds load_en",
        ),
        ({"env": "envs/colour.py"}, "env = 'envs/colour.py' has no function load_environment"),
        ({"env": FILE, "args": {"hard": 1}}, "got an unexpected keyword argument 'hard'"),
        ({"env": FILE, "args": {"bad": "load"}}, "raised OSError: no data"),
        ({"env": FILE, "args": {"bad": "kind"}}, "it is no MultiTurnEnv or SingleTurnEnv: it has no env_response"),
        (
            {"env": FILE, "args": {"bad": "group"}},
            "its rubric compares the episodes of a group, which is not supported",
        ),
        ({"env": FILE, "args": {"bad": "tools"}}, "it has tools for the model, which are not supported"),
    ],
)
def test_what_cannot_be_played_is_one_line(args, line, capsys):
    assert check.main(["envs.verifiers", "--env.args", json.dumps(args)]) == 1
    problems = [text for text in capsys.readouterr().out.splitlines() if text.startswith("problem")]
    assert len(problems) == 1 and line in problems[0], problems
