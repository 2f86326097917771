"""Turns carry the key of the state that they were played in."""

from __future__ import annotations

from envs.states import state_key
from tests.support.rollout_rig import Counting, completion, play, renderer, threads

__all__ = ["renderer", "threads"]  # fixtures


class Stateful(Counting):
    def reset(self):
        return self.look("begin"), {"state": (0, frozenset())}

    def step(self, text):
        observation, done, info = super().step(text)
        return observation, done, info | {"state": (len(self.heard), frozenset(self.heard))}


class Odd(Counting):
    def step(self, text):
        observation, done, info = super().step(text)
        return observation, done, info | {"state": object()}


ANSWERS = [("up", 1), ("up", 1), ("end", 6)]


def test_turns_carry_the_key_of_the_state_before_them(renderer, threads):
    trajectory, _ = play(renderer, threads, [completion(*answer) for answer in ANSWERS], Stateful)
    states = [(0, frozenset()), (1, frozenset({"up"})), (2, frozenset({"up"}))]
    assert [turn.state for turn in trajectory.turns] == [state_key(state) for state in states]


def test_without_states_turns_have_none(renderer, threads):
    trajectory, _ = play(renderer, threads, [completion(*answer) for answer in ANSWERS])
    assert [turn.state for turn in trajectory.turns] == ["", "", ""]


def test_a_state_without_a_value_is_a_failure_of_the_environment(renderer, threads):
    trajectory, _ = play(renderer, threads, [completion(*answer) for answer in ANSWERS], Odd)
    assert trajectory.ending == "env_error" and "info['state'] is or holds" in trajectory.error
