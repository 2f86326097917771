"""Demonstrations for teaching the small models before any training by reward: episodes turn by turn, good and bad ones
mixed.

Sokoban: the player writes down what it sees, then moves and the state that each move leads to. Moves are good only if
the solution is within reach, and random otherwise, so that the model learns to see, to foresee a move and to play the
end of the game, and no more. Many images show another board than the one that the earlier moves lead to, so that the
model must look. Colour: answers are random, so that the model learns only the format. Geometry: tool calls and boxed
answers, only a part of which has the right form. Triangles: the player writes down the numbers in a drawing with their
sums and differences, then guesses. Games and scenes:
launch.tiny_models.game_demonstrations and zoom_demonstrations.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

from envs import colour, geo3k, geo3k_multi_turn, sokoban
from envs.boards.board import MOVES, WALL, Board
from envs.boards.board_images import TILES
from envs.boards.board_words import TURNS, moves_with_states, reading, words
from envs.boards.solver import optimal_first_moves
from envs.geometry.triangle_words import reading as numbers_reading
from launch.tiny_models import game_demonstrations as games
from launch.tiny_models import zoom_demonstrations as zoom
from launch.tiny_models.lesson import CELL_PIXELS, DemonstratedAnswer, Demonstration, Lesson, Task
from launch.tiny_models.tower_lessons import Pictures
from shared.families import marks
from shared.families.marks import THOUGHT
from shared.types import Sample

SOKOBAN_PROMPT = "Solve Sokoban."
COLOUR_PROMPT = "Name the colour."
TRIANGLE_ARGS = {"picture_pixels": 64}
WRITTEN = 0.25  # share of guesses of a triangle's answer that repeat a number written down
READ_KINDS = ("angle_sum", "exterior", "isosceles", "right_angle")
# Step, in degrees, of the numbers from 0 to 180, with one token each: few enough to learn, but too many pairs to learn
# by heart.
READ_STEP = 3
READ_ARGS = {"picture_pixels": 128, "text_grid": 16, "kinds": READ_KINDS, "angle_step": READ_STEP, "max_turns": 3}
TOOL_PROMPT = "Call calc_score, then give the answer."
ANSWER_PROMPT = "Give the answer."
CALL = (
    marks.CALL.opening,
    '{"name": ',
    '"calc_score"',
    ', "arguments": ',
    '{"answer": ',
    '"',
    '"',
    "}}",
    marks.CALL.closing,
)


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
        yield [env.format_observation(observation)], answer
        observation, done, _ = env.step(answer.text)
        if done and not lesson.jump:
            return


def _sokoban(seed: int, rng: random.Random, lesson: Lesson) -> sokoban.SokobanEnv:
    longest = {"max_solution": lesson.reach} if rng.random() < lesson.near else {}
    sample = Sample(str(seed), metadata={"seed": seed, "split": lesson.split})
    args = {"pixels_per_cell": CELL_PIXELS, "wall_chance": rng.choice(lesson.wall_chances), "num_boxes": lesson.boxes}
    return sokoban.build_env(sample, args | longest)


def scattered(board: Board, rng: random.Random) -> Board:
    """Return the board with player and boxes at random cells, not solved, and often not solvable."""
    free = [cell for cell, code in enumerate(board.cells) if code != WALL]
    while True:
        player, *boxes = rng.sample(free, 1 + len(board.boxes))
        moved = replace(board, player=player, boxes=tuple(sorted(boxes)))
        if not moved.solved:
            return moved


def play_colour(seed: int, rng: random.Random, lesson: Lesson) -> Demonstration:
    env = colour.build_env(seeded(seed))
    yield [env.format_observation(env.reset()[0])], DemonstratedAnswer(rng.choice(list(colour.COLOURS)))


def play_told_colour(seed: int, rng: random.Random, lesson: Lesson) -> Demonstration:
    env = colour.build_env(seeded(seed), {"render_mode": "text"})
    yield [env.format_observation(env.reset()[0])], DemonstratedAnswer(rng.choice(list(colour.COLOURS)))


def play_geometry(seed: int, rng: random.Random, lesson: Lesson) -> Demonstration:
    calls = with_tool = seed % 2 == 0
    module: Any = geo3k_multi_turn if with_tool else geo3k
    env = module.build_env(seeded(seed), {**TRIANGLE_ARGS, "max_turns": 3})
    observation, done = env.reset()[0], False
    while not done:
        number = env.label if rng.random() < 0.5 else str(5 * rng.randint(1, 30))
        answer = tool_call(number, rng, lesson.expertise) if calls else boxed(number, rng, lesson.expertise)
        yield [env.format_observation(observation)], DemonstratedAnswer(answer)
        observation, done, info = env.step(answer)
        calls = with_tool and not info.get("tool_executed") and rng.random() < 0.5


def play_triangles(seed: int, rng: random.Random, lesson: Lesson) -> Demonstration:
    """Demonstrate a triangle problem: write down the numbers and their sums, also for numbers of held-out problems,
    then guess. The right answer is never shown. The tool's label is set to a random guess, so that the model learns to
    trust the tool."""
    env = geo3k_multi_turn.build_env(Sample(str(seed), metadata={"seed": seed}), READ_ARGS)
    assert env.problem is not None
    read = numbers_reading(env.problem.numbers)
    env.label = guess(read, rng)
    observation, done = env.reset()[0], False
    while not done and len(env.written) < lesson.turns:
        if observation.get("tool_score"):
            answer = DemonstratedAnswer(boxed(env.label, rng, 1.0))
        else:
            number = env.label if rng.random() < 0.4 else guess(read, rng)
            last = len(env.written) == env.max_turns - 1
            thought = THOUGHT.around(read)
            text = thought + (boxed(number, rng, 1.0) if last else tool_call(number, rng, 1.0))
            start = text.index(number, len(thought))
            answer = DemonstratedAnswer(text, ((start, start + len(number)),))
        yield [env.format_observation(observation)], answer
        observation, done, _ = env.step(answer.text)


def guess(read: str, rng: random.Random) -> str:
    """Return a random number of those written down, or any possible answer of a problem of angles."""
    if rng.random() < WRITTEN:
        return rng.choice(re.findall(r"\d+", read))
    return str(rng.randrange(21, 151, READ_STEP))


def sokoban_answer(board: Board, rng: random.Random, lesson: Lesson) -> DemonstratedAnswer:
    """Return an answer with the board, then up to three moves and the states that they lead to. If the solution is
    within reach, a move is the next one of a shortest solution with probability `expertise`; otherwise it is random."""
    moves: list[str] = []
    guessed: list[bool] = []
    position = board
    while len(moves) < 3 and not position.solved:
        best = optimal_first_moves(position) if lesson.expertise else []
        guessed.append(not (0 < len(best) <= lesson.reach and rng.random() < lesson.expertise))
        moves.append(rng.choice(MOVES) if guessed[-1] else best[0])
        position = position.moved(moves[-1])
    start = f"{THOUGHT.around(f' {reading(board)}')}<answer>"
    text = f" {moves_with_states(board, moves)}"
    places = [found.span() for found in re.finditer(rf" ({'|'.join(TURNS)})\b", text)]
    guesses = [(len(start) + a, len(start) + b) for (a, b), guess in zip(places, guessed, strict=True) if guess]
    return DemonstratedAnswer(f"{start}{text}</answer>", tuple(guesses))


def tool_call(number: str, rng: random.Random, expertise: float) -> str:
    """Return a call of the right form with probability `expertise`; otherwise a call with one wrong part, or no
    call."""
    parts = list(CALL)
    parts.insert(6, number)
    if rng.random() < expertise:
        return "".join(parts)
    wrong = rng.randrange(5)
    if wrong == 0:
        return boxed(number, rng, 0.5)
    place, instead = ((2, "calc_score"), (2, '"score"'), (4, "{"), (8, "}"))[wrong - 1]
    parts[place] = instead
    if wrong == 3:  # leave out the answer
        del parts[5:8]
    return "".join(parts)


def boxed(number: str, rng: random.Random, expertise: float) -> str:
    """Return a boxed answer with probability `expertise`; otherwise one without a valid box."""
    if rng.random() < expertise:
        return f"Answer: \\boxed{{{number}}}"
    return rng.choice((f"Answer: {number}", f"Answer: {{{number}}}", f"Answer: \\boxed{{{number}"))


def sokoban_phrases() -> tuple[str, ...]:
    """Return the words that are written often, repeated so that the tokenizer learns them first, and the environment's
    texts."""
    observation = "[Observation]\n(Refer to the image for the grid layout.)\nValid last actions: "
    request = "\nProvide your next move(s) using Up, Down, Left, Right."
    titles = [move.title() for move in MOVES]
    spoken = ("<answer>", "</answer>", ", ", *MOVES, *titles, *(f" {word}" for word in (*MOVES, *titles, *words())))
    return (*spoken * 20, observation, request, "None", SOKOBAN_PROMPT)


def geometry_phrases(numbers: range) -> tuple[str, ...]:
    """Return the environments' texts, cut at numbers and answers, and the parts of the model's answers."""
    form = geo3k_multi_turn.FORM.removeprefix(marks.CALL.opening).removesuffix(marks.CALL.closing)
    text = (
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
    return (*text, *written, *map(str, numbers), TOOL_PROMPT, ANSWER_PROMPT)


TASKS = {
    "sokoban": Task((SOKOBAN_PROMPT,), sokoban_phrases(), {"vocab_size": 704}, play_sokoban, (Pictures(TILES, 6, 6),)),
    "games": Task(
        tuple(games.PROMPTS.values()), games.phrases(), {"layers": 3, "vocab_size": 1024}, games.play, games.PICTURES
    ),
    "colour": Task(
        (COLOUR_PROMPT,),
        (*colour.COLOURS, "Which colour?", COLOUR_PROMPT),
        {"hidden": 64, "layers": 2, "vision_hidden": 32, "vision_depth": 1, "vocab_size": 384},
        play_colour,
    ),
    "colour_qwen35": Task(
        (COLOUR_PROMPT,),
        (*colour.COLOURS, "Which colour?", COLOUR_PROMPT),
        {"hidden": 64, "layers": 4, "vision_hidden": 32, "vision_depth": 1, "vocab_size": 384, "family": "qwen3_5"},
        play_colour,
    ),
    "colour_glm": Task(
        (COLOUR_PROMPT,),
        (*colour.COLOURS, "Which colour?", COLOUR_PROMPT),
        {"hidden": 64, "layers": 2, "vision_hidden": 32, "vision_depth": 1, "vocab_size": 384, "family": "glm4v"},
        play_colour,
    ),
    "colour_text": Task(
        (COLOUR_PROMPT,),
        (*colour.COLOURS, "Which colour?", COLOUR_PROMPT, *map(colour.told, colour.COLOURS)),
        {"hidden": 64, "layers": 2, "vocab_size": 384, "family": "qwen3"},
        play_told_colour,
    ),
    "geo3k": Task(
        (TOOL_PROMPT, ANSWER_PROMPT),
        geometry_phrases(range(5, 151, 5)),
        {"hidden": 64, "layers": 3, "vision_hidden": 32, "vision_depth": 2, "vocab_size": 704},
        play_geometry,
    ),
    "scene_zoom": Task(
        (zoom.PROMPT,),
        zoom.phrases(),
        {"layers": 3, "vocab_size": 704},
        zoom.play,
        zoom.PICTURES,
        zoom.TOOLS,
        zoom.MAX_PIXELS,
    ),
    "triangles": Task(
        (TOOL_PROMPT,),
        geometry_phrases(range(0, 181, READ_STEP)),
        {"hidden": 128, "layers": 3, "vision_hidden": 64, "vision_depth": 3, "vocab_size": 704},
        play_triangles,
    ),
}
