"""What the small models are taught before any training by reward: episodes shown turn by turn, good and bad ones mixed.

Sokoban: a player that follows a shortest solution in some turns and moves at random in the others, so the model learns
to see and to answer, and only part of what it imitates is good play. Colour: answers drawn at random, so the model
learns the format alone. Geometry: tool calls and boxed answers of which only a part has the right form.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from envs import colour, geo3k, geo3k_multi_turn, sokoban
from envs.boards.board import MOVES
from envs.boards.solver import optimal_first_moves
from shared.types import Sample

SOKOBAN_ARGS = {"pixels_per_cell": 32, "split": "train"}
SOKOBAN_PROMPT = "Solve Sokoban."
COLOUR_PROMPT = "Name the colour."
TRIANGLE_ARGS = {"picture_pixels": 64}
TOOL_PROMPT = "Call calc_score, then give the answer."
ANSWER_PROMPT = "Give the answer."
CALL = ("<tool_call>", '{"name": ', '"calc_score"', ', "arguments": ', '{"answer": ', '"', '"', "}}", "</tool_call>")

Demonstration = Iterator[tuple[dict[str, Any], str]]
"""Pairs of an observation message and the answer to it."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task's texts for the tokenizer, the size of its model, and its demonstrations; a seed has
    `prompts[seed % len(prompts)]` as its system message."""

    prompts: tuple[str, ...]
    phrases: tuple[str, ...]
    model: dict[str, int]
    demonstrate: Callable[[int, random.Random, float], Demonstration]
    """One episode of a seed; the last argument is the share of good answers."""


def seeded(seed: int) -> Sample:
    return Sample(str(seed), metadata={"seed": seed, "split": "train"})


def play_sokoban(seed: int, rng: random.Random, expertise: float) -> Demonstration:
    env = sokoban.build_env(seeded(seed), SOKOBAN_ARGS)
    observation = env.reset()[0]
    for _ in range(8):
        answer = sokoban_answer(env, rng, expertise)
        yield env.format_observation(observation), answer
        observation, done, _ = env.step(answer)
        if done:
            return


def play_colour(seed: int, rng: random.Random, expertise: float) -> Demonstration:
    env = colour.build_env(seeded(seed))
    yield env.format_observation(env.reset()[0]), rng.choice(list(colour.COLOURS))


def play_geometry(seed: int, rng: random.Random, expertise: float) -> Demonstration:
    calls = with_tool = seed % 2 == 0
    module: Any = geo3k_multi_turn if with_tool else geo3k
    env = module.build_env(seeded(seed), {**TRIANGLE_ARGS, "max_turns": 3})
    observation, done = env.reset()[0], False
    while not done:
        number = env.label if rng.random() < 0.5 else str(5 * rng.randint(1, 30))
        answer = tool_call(number, rng, expertise) if calls else boxed(number, rng, expertise)
        yield env.format_observation(observation), answer
        observation, done, info = env.step(answer)
        calls = with_tool and not info.get("tool_executed") and rng.random() < 0.5


def sokoban_answer(env: sokoban.SokobanEnv, rng: random.Random, expertise: float) -> str:
    """Writes where player, box and target are, then up to three moves: good ones with probability `expertise`."""
    board = env.position
    places = [f"{cell // board.width}{cell % board.width}" for cell in (board.player, *board.boxes, *board.targets)]
    moves = optimal_first_moves(board)[:3] if rng.random() < expertise else []
    if not moves:
        moves = [rng.choice(list(MOVES)) for _ in range(rng.randint(1, 3))]
    return f"<think>{' '.join(places)}</think><answer>{', '.join(moves)}</answer>"


def tool_call(number: str, rng: random.Random, expertise: float) -> str:
    """A call of the right form with probability `expertise`; otherwise one part is wrong, or there is no call."""
    parts = list(CALL)
    parts.insert(6, number)
    if rng.random() < expertise:
        return "".join(parts)
    wrong = rng.randrange(5)
    if wrong == 0:
        return boxed(number, rng, 0.5)
    place, instead = ((2, "calc_score"), (2, '"score"'), (4, "{"), (8, "}"))[wrong - 1]
    parts[place] = instead
    if wrong == 3:  # nothing to score
        del parts[5:8]
    return "".join(parts)


def boxed(number: str, rng: random.Random, expertise: float) -> str:
    """An answer in its box with probability `expertise`; otherwise without one."""
    if rng.random() < expertise:
        return f"Answer: \\boxed{{{number}}}"
    return rng.choice((f"Answer: {number}", f"Answer: {{{number}}}", f"Answer: \\boxed{{{number}"))


def sokoban_phrases() -> tuple[str, ...]:
    cells = [f"{row}{column}" for row in range(6) for column in range(6)]
    observation = "[Observation]\n(Refer to the image for the grid layout.)\nValid last actions: "
    request = "\nProvide your next move(s) using Up, Down, Left, Right."
    moves = (*MOVES, *(move.title() for move in MOVES))
    words = ("<answer>", "</answer>", ", ", *moves, *cells, *(" " + cell for cell in cells))
    return (*words, observation, request, "None", SOKOBAN_PROMPT)


def geometry_phrases() -> tuple[str, ...]:
    """What the environments say, cut where numbers and answers stand, and the parts of the model's answers."""
    form = geo3k_multi_turn.FORM.removeprefix("<tool_call>").removesuffix("</tool_call>")
    said = (
        "Find x, in degrees.",
        "Find x.",
        "The two marked sides are equal. ",
        "x is the exterior angle at the unmarked corner. ",
        "One angle is a right angle. ",
        "The triangle has a right angle. ",
        "calc_score: 0.0. The answer '",
        "calc_score: 1.0. The answer '",
        "' is wrong. Reason in a different way and do not repeat it.",
        "' is correct. Stop reasoning and give the final answer in ",
        "\\boxed{}.",
        " You have only one chance left to answer: make no more tool calls and give the final answer in the form ",
        "Answer: \\boxed{$Answer}",
        "The tool '",
        "' is not supported. The right form of a call is ",
        "The answer is missing, so nothing was scored. The right form of a call is ",
        form,
    )
    written = ("Answer: ", "\\boxed{", "}", "calc_score", '"score"', *CALL[1:-1])
    return (*said, *written, *(str(5 * n) for n in range(1, 31)), TOOL_PROMPT, ANSWER_PROMPT)


TASKS = {
    "sokoban": Task((SOKOBAN_PROMPT,), sokoban_phrases(), {}, play_sokoban),
    "colour": Task(
        (COLOUR_PROMPT,),
        (*colour.COLOURS, "Which colour?", COLOUR_PROMPT),
        {"hidden": 64, "layers": 2, "vision_hidden": 32, "vision_depth": 1, "vocab_size": 384},
        play_colour,
    ),
    "geo3k": Task(
        (TOOL_PROMPT, ANSWER_PROMPT),
        geometry_phrases(),
        {"hidden": 64, "layers": 3, "vision_hidden": 32, "vision_depth": 2, "vocab_size": 704},
        play_geometry,
    ),
}
