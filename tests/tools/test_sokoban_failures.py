"""Why a recorded episode failed, told by playing it again."""

from __future__ import annotations

import json

import numpy as np
import pytest

from envs.boards.board_words import moves_with_states, reading
from envs.boards.solver import optimal_first_moves, solve
from envs.sokoban import build_env
from shared.recordings.episode_format import Array, RecordedEpisode, RecordedTurn
from shared.types import Sample
from tests.bench.sokoban.failures import why

ARGS = {"grid_size": [6, 6], "max_actions_per_step": 3}
OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}


def recorded(seed: int, answers: list[str]) -> RecordedEpisode:
    none = Array.of(np.zeros(0, np.int32))
    return RecordedEpisode(
        ticket_id="0-a",
        index=0,
        metadata=json.dumps({"seed": seed}),
        token_ids=none,
        loss_mask=none,
        behaviour_logprobs=none,
        policy_versions=none,
        turns=tuple(RecordedTurn(start=0, end=0, reward=0.0, answer=answer) for answer in answers),
    )


def said(env, moves: list[str], *, sees: bool = True, foresees: bool = True) -> str:
    told = moves_with_states(env.position, moves)
    thought = reading(env.position)
    return f"<think>{thought if sees else 'none'}</think><answer>{told if foresees else ', '.join(moves)}</answer>"


def a_losing_push():
    """A seed, the answers that lead next to a push after which nothing helps, the environment then, and that push."""
    for seed in range(200):
        env = build_env(Sample("", metadata={"seed": seed}), ARGS)
        answers = []
        for move in optimal_first_moves(env.position):
            for push in OPPOSITE:
                if solve(env.position.moved(push)) is None:
                    return seed, answers, env, push
            answers.append(said(env, [move]))
            env.step(answers[-1])
    raise AssertionError("no board can be lost")


@pytest.mark.parametrize(
    ("sees", "foresees", "reason"),
    [(False, True, "lost: misread"), (True, False, "lost: misforeseen"), (True, True, "lost: chosen")],
)
def test_a_lost_game_is_lost_in_the_turn_of_the_push_and_by_what_was_wrong_of_it(sees, foresees, reason) -> None:
    seed, answers, env, push = a_losing_push()
    assert why(recorded(seed, [*answers, said(env, [push], sees=sees, foresees=foresees)]), ARGS)[1] == reason


def test_a_solved_game_has_no_reason_and_a_length() -> None:
    env = build_env(Sample("", metadata={"seed": 3}), ARGS)
    moves = optimal_first_moves(env.position)
    answers = [f"<answer>{move}</answer>" for move in moves]
    length = "1_3" if len(moves) <= 3 else "4_6" if len(moves) <= 6 else "7_9" if len(moves) <= 9 else "10_up"
    assert why(recorded(3, answers), ARGS) == (length, "")


def test_a_game_that_comes_back_to_a_position_circles_and_one_that_does_not_is_slow() -> None:
    env = build_env(Sample("", metadata={"seed": 3}), ARGS)
    first = optimal_first_moves(env.position)[0]
    stays = next(move for move in OPPOSITE if env.position.moved(move) is env.position or move == OPPOSITE[first])
    assert why(recorded(3, [f"<answer>{first}</answer>"]), ARGS)[1] == "slow"
    back = [f"<answer>{move}</answer>" for move in (stays, OPPOSITE[stays])]
    assert why(recorded(3, back), ARGS)[1] == "circling"
