"""Keys of states: equal states have equal keys, in every process; what has no value is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pytest

from envs.env_calls import play_a_turn, reset_env, step_env
from envs.sokoban import build_env
from envs.states import state_key


class Side(Enum):
    LEFT = 1


@dataclass(frozen=True)
class Place:
    row: int
    things: frozenset[str] = frozenset()


STATE = ("room", 3, 2.5, b"\x00", frozenset({"key", "door", "lamp"}), None, True)


def test_a_state_has_the_same_key_in_another_process_whose_hashes_differ() -> None:
    code = f"from envs.states import state_key; print(state_key({STATE!r}))"
    for seed in ("1", "2"):
        env = {"PYTHONHASHSEED": seed}
        told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        assert told.stdout.strip() == state_key(STATE), told.stderr


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 2), [1, 2]),
        (np.int64(7), 7),
        (1.0, 1),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Place(1, frozenset({"a", "b"})), Place(1, frozenset({"b", "a"}))),
        (np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3))),
        (Side.LEFT, Side.LEFT),
    ],
)
def test_equal_states_have_equal_keys(one: object, other: object) -> None:
    assert state_key(one) == state_key(other) != ""


def test_different_states_have_different_keys() -> None:
    states = [
        "1",
        1,
        b"1",
        (1,),
        ((1,),),
        ("ab", "c"),
        ("a", "bc"),
        ("abc",),
        (),
        frozenset(),
        {},
        (1, 23),
        (12, 3),
        1.5,
        -1,
        float("nan"),
        float("inf"),
        Side.LEFT,
        Place(1),
        Place(2),
        np.zeros(3),
        np.zeros((1, 3)),
        np.zeros(3, dtype=np.int8),
    ]
    assert len({state_key(state) for state in states}) == len(states)
    assert state_key(None) == state_key("") == ""
    assert state_key(state_key(1)) == state_key(1)


@pytest.mark.parametrize("state", [object(), (1, [object()]), lambda: 1, np.array([object()])])
def test_a_state_without_a_value_is_refused_in_one_line(state: object) -> None:
    with pytest.raises(TypeError, match=r"info\['state'\] is or holds .*it may be text, numbers") as error:
        state_key(state)
    assert "\n" not in str(error.value)


def test_sokoban_is_in_the_same_state_again_after_moves_there_and_back() -> None:
    env = build_env(args={"grid_size": 6})
    keys = [reset_env(env)[1]["state"]]
    for move in ("Up", "Down", "Left", "Right") * 8:
        _, done, info = step_env(env, f"<answer>{move}</answer>")
        keys.append(info["state"])
        if done:
            break
    assert "" not in keys and 1 < len(set(keys)) < len(keys)


def test_an_environment_without_states_is_refused_where_the_objective_compares_them() -> None:
    class Stateless:
        def reset(self):
            return {"obs_str": "?"}, {}

        def step(self, text):
            return {"obs_str": "?"}, True, {"reward": 1.0}

    play_a_turn(Stateless)
    with pytest.raises(ValueError, match=r"reset of Stateless has no 'state'.*turn_advantage = 'state'"):
        play_a_turn(Stateless, has_states=True)
