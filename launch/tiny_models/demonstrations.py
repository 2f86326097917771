"""What the small models are taught before any training by reward: episodes shown turn by turn, good and bad ones mixed.

Sokoban: a player that writes down what it sees, then moves and what each move leads to. Its moves are good ones only
where the solution is within reach, and random ones elsewhere, so the model learns to see, to foresee a move and to play
the end of the game, and no more. Many images show another board than the moves before would have led to, so that only
looking helps. Colour: answers drawn at random, so the model learns the format alone. Geometry: tool calls and boxed
answers of which only a part has the right form. Triangles: a player that writes down the numbers of a drawing and what
they add up to, and guesses.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from envs import colour, geo3k, geo3k_multi_turn, sokoban
from envs.boards.board import MOVES, WALL, Board
from envs.boards.reading import TURNS, moves_with_states, reading, words
from envs.boards.solver import optimal_first_moves
from envs.geometry.reading import reading as numbers_reading
from shared.types import Sample

CELL_PIXELS = 32
SOKOBAN_PROMPT = "Solve Sokoban."
COLOUR_PROMPT = "Name the colour."
TRIANGLE_ARGS = {"picture_pixels": 64}
WRITTEN = 0.25  # share of guesses at a triangle's answer that repeat what was written down
READ_KINDS = ("angle_sum", "exterior", "isosceles", "right_angle")
READ_STEP = 3  # degrees: of numbers 0 to 180, a token for each; few enough to learn, too many pairs to learn by heart
READ_ARGS = {"picture_pixels": 128, "text_grid": 16, "kinds": READ_KINDS, "angle_step": READ_STEP, "max_turns": 3}
TOOL_PROMPT = "Call calc_score, then give the answer."
ANSWER_PROMPT = "Give the answer."
CALL = ("<tool_call>", '{"name": ', '"calc_score"', ', "arguments": ', '{"answer": ', '"', '"', "}}", "</tool_call>")


class Answer(NamedTuple):
    """A demonstrated answer, and where in it (start and end) the words stand that chance chose."""

    text: str
    guesses: tuple[tuple[int, int], ...] = ()


Demonstration = Iterator[tuple[dict[str, Any], Answer]]
"""Pairs of an observation message and the answer to it."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """What demonstrations are like."""

    expertise: float = 0.4  # share of good answers; Sokoban: of good moves within reach
    reach: int = 3  # Sokoban: a solution of at most so many moves is within reach
    jump: float = 0.0  # Sokoban: share of turns that show a fresh board
    scatter: float = 0.0  # Sokoban: share of turns that begin with player and boxes on cells drawn at random
    near: float = 0.0  # Sokoban: share of boards that begin within reach
    turns: int = 8  # Sokoban, triangles: of one episode, at most
    wall_chances: tuple[float, ...] = (0.05,)  # Sokoban: each board draws one
    boxes: tuple[int, ...] = (1,)  # Sokoban: each board draws one of these numbers
    split: str = "train"  # Sokoban: of the boards


@dataclass(frozen=True, slots=True)
class Task:
    """One task's texts for the tokenizer, the size of its model, and its demonstrations; a seed has
    `prompts[seed % len(prompts)]` as its system message."""

    prompts: tuple[str, ...]
    phrases: tuple[str, ...]
    model: dict[str, int]
    demonstrate: Callable[[int, random.Random, Lesson], Demonstration]
    """One episode of a seed."""
    cell_pixels: int = 0  # Sokoban: of the images


def seeded(seed: int) -> Sample:
    return Sample(str(seed), metadata={"seed": seed, "split": "train"})


def play_sokoban(seed: int, rng: random.Random, lesson: Lesson) -> Demonstration:
    env = _sokoban(seed, rng, lesson)
    observation, done = env.reset()[0], False
    for turn in range(lesson.turns):
        if done or (turn and rng.random() < lesson.jump):
            env = _sokoban(rng.randrange(1 << 30), rng, lesson)
            observation = env.reset()[0] | {"obs_str": observation["obs_str"]}
        if lesson.scatter and rng.random() < lesson.scatter:
            env = sokoban.SokobanEnv(scattered(env.position, rng), env.settings)
            observation = env.reset()[0] | {"obs_str": observation["obs_str"]}
        answer = sokoban_answer(env.position, rng, lesson)
        yield env.format_observation(observation), answer
        observation, done, _ = env.step(answer.text)
        if done and not lesson.jump:
            return


def _sokoban(seed: int, rng: random.Random, lesson: Lesson) -> sokoban.SokobanEnv:
    longest = {"max_solution": lesson.reach} if rng.random() < lesson.near else {}
    sample = Sample(str(seed), metadata={"seed": seed, "split": lesson.split})
    args = {"pixels_per_cell": CELL_PIXELS, "wall_chance": rng.choice(lesson.wall_chances), "num_boxes": lesson.boxes}
    return sokoban.build_env(sample, args | longest)


def scattered(board: Board, rng: random.Random) -> Board:
    """The board with player and boxes anywhere, in a position that is not solved; often one that cannot be."""
    free = [cell for cell, code in enumerate(board.cells) if code != WALL]
    while True:
        player, *boxes = rng.sample(free, 1 + len(board.boxes))
        moved = replace(board, player=player, boxes=tuple(sorted(boxes)))
        if not moved.solved:
            return moved


def play_colour(seed: int, rng: random.Random, lesson: Lesson) -> Demonstration:
    env = colour.build_env(seeded(seed))
    yield env.format_observation(env.reset()[0]), Answer(rng.choice(list(colour.COLOURS)))


def play_geometry(seed: int, rng: random.Random, lesson: Lesson) -> Demonstration:
    calls = with_tool = seed % 2 == 0
    module: Any = geo3k_multi_turn if with_tool else geo3k
    env = module.build_env(seeded(seed), {**TRIANGLE_ARGS, "max_turns": 3})
    observation, done = env.reset()[0], False
    while not done:
        number = env.label if rng.random() < 0.5 else str(5 * rng.randint(1, 30))
        answer = tool_call(number, rng, lesson.expertise) if calls else boxed(number, rng, lesson.expertise)
        yield env.format_observation(observation), Answer(answer)
        observation, done, info = env.step(answer)
        calls = with_tool and not info.get("tool_executed") and rng.random() < 0.5


def play_triangles(seed: int, rng: random.Random, lesson: Lesson) -> Demonstration:
    """Reads and reckons, numbers of held-out problems too, then guesses: what answers the question is never told. The
    tool is made to call right what chance chose, so that what it says is believed."""
    env = geo3k_multi_turn.build_env(Sample(str(seed), metadata={"seed": seed}), READ_ARGS)
    assert env.problem is not None
    read = numbers_reading(env.problem.numbers)
    env.label = guess(read, rng)
    observation, done = env.reset()[0], False
    while not done and len(env.written) < lesson.turns:
        if observation.get("tool_score"):
            answer = Answer(boxed(env.label, rng, 1.0))
        else:
            number = env.label if rng.random() < 0.4 else guess(read, rng)
            last = len(env.written) == env.max_turns - 1
            thought = f"<think>{read}</think>"
            said = thought + (boxed(number, rng, 1.0) if last else tool_call(number, rng, 1.0))
            start = said.index(number, len(thought))
            answer = Answer(said, ((start, start + len(number)),))
        yield env.format_observation(observation), answer
        observation, done, _ = env.step(answer.text)


def guess(read: str, rng: random.Random) -> str:
    """Something that was written down, whichever it is, or any answer that a problem of angles has."""
    if rng.random() < WRITTEN:
        return rng.choice(re.findall(r"\d+", read))
    return str(rng.randrange(21, 151, READ_STEP))


def sokoban_answer(board: Board, rng: random.Random, lesson: Lesson) -> Answer:
    """Writes down the board, then up to three moves and what they lead to: where the solution is within reach, the
    next move of a shortest one with probability `expertise`; random ones elsewhere."""
    moves: list[str] = []
    guessed: list[bool] = []
    position = board
    while len(moves) < 3 and not position.solved:
        best = optimal_first_moves(position) if lesson.expertise else []
        guessed.append(not (0 < len(best) <= lesson.reach and rng.random() < lesson.expertise))
        moves.append(rng.choice(MOVES) if guessed[-1] else best[0])
        position = position.moved(moves[-1])
    start = f"<think> {reading(board)}</think><answer>"
    said = f" {moves_with_states(board, moves)}"
    places = [found.span() for found in re.finditer(rf" ({'|'.join(TURNS)})\b", said)]
    guesses = [(len(start) + a, len(start) + b) for (a, b), guess in zip(places, guessed, strict=True) if guess]
    return Answer(f"{start}{said}</answer>", tuple(guesses))


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
    """What is written often, so that it is cut into words before anything else, and what the environment says."""
    observation = "[Observation]\n(Refer to the image for the grid layout.)\nValid last actions: "
    request = "\nProvide your next move(s) using Up, Down, Left, Right."
    titles = [move.title() for move in MOVES]
    spoken = ("<answer>", "</answer>", ", ", *MOVES, *titles, *(f" {word}" for word in (*MOVES, *titles, *words())))
    return (*spoken * 20, observation, request, "None", SOKOBAN_PROMPT)


def geometry_phrases(numbers: range) -> tuple[str, ...]:
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
    return (*said, *written, *map(str, numbers), TOOL_PROMPT, ANSWER_PROMPT)


TASKS = {
    "sokoban": Task((SOKOBAN_PROMPT,), sokoban_phrases(), {"vocab_size": 704}, play_sokoban, cell_pixels=CELL_PIXELS),
    "colour": Task(
        (COLOUR_PROMPT,),
        (*colour.COLOURS, "Which colour?", COLOUR_PROMPT),
        {"hidden": 64, "layers": 2, "vision_hidden": 32, "vision_depth": 1, "vocab_size": 384},
        play_colour,
    ),
    "geo3k": Task(
        (TOOL_PROMPT, ANSWER_PROMPT),
        geometry_phrases(range(5, 151, 5)),
        {"hidden": 64, "layers": 3, "vision_hidden": 32, "vision_depth": 2, "vocab_size": 704},
        play_geometry,
    ),
    "triangles": Task(
        (TOOL_PROMPT,),
        geometry_phrases(range(0, 181, READ_STEP)),
        {"hidden": 128, "layers": 3, "vision_hidden": 64, "vision_depth": 3, "vocab_size": 704},
        play_triangles,
    ),
}
