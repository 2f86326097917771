"""Demonstrations of FrozenLake, the maze, the sliding puzzle and the scene, from which one small model learns to read
all four and to answer in form.

Each turn shows another position, drawn at random, so that the model must look. The player writes down what it sees, and
then makes random moves; of a scene it names a number, or one of the points that it has written down. No good move and
no right answer is ever shown but by chance.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from envs import frozen_lake, maze, scene, sliding_puzzle
from envs.boards import lake, puzzle
from envs.boards import maze_board as mazes
from envs.boards import scene_board as scenes
from envs.boards.board import MOVES
from envs.boards.maze_words import maze_words
from envs.boards.place_words import place_words
from envs.boards.puzzle_words import puzzle_words
from envs.boards.scene_words import reading as scene_reading
from envs.boards.scene_words import scene_words
from launch.tiny_models.lesson import CELL_PIXELS, DemonstratedAnswer, Demonstration, Lesson
from launch.tiny_models.tower_lessons import Pictures

PROMPTS = {"lake": "Cross the lake.", "maze": "Solve the maze.", "puzzle": "Solve the puzzle.", "scene": "Answer."}
"""The system message of each game; the seeds take the games in turn."""
PICTURES = (
    Pictures(lake.TILES, 4, 4),
    Pictures(mazes.TILES, 5, 5),
    Pictures(puzzle.TILES, 3, 3),
    Pictures(scenes.TILES, 4, 4),
)
MOST_MOVES = 3  # of an answer
TURNS = (1, 1, 1, 1, 12)  # of an episode
GUESSED_NUMBERS = range(5)


def play(seed: int, rng: random.Random, lesson: Lesson) -> Demonstration:
    """Demonstrate an episode of the game whose turn it is."""
    game = tuple(PROMPTS)[seed % len(PROMPTS)]
    if game == "scene":
        yield _scene(rng, lesson)
        return
    told = ""
    for _ in range(min(lesson.turns, rng.choice(TURNS))):
        env = _GAMES[game](rng, lesson)
        observation = env.reset()[0]
        observation["obs_str"] = told or observation["obs_str"]
        answer = game_answer(env, rng)
        yield [env.format_observation(observation)], answer
        told = env.step(answer.text)[0]["obs_str"]


def game_answer(env: Any, rng: random.Random) -> DemonstratedAnswer:
    """Return an answer with what is seen, and up to `MOST_MOVES` random moves, fewer where fewer are allowed."""
    most = min(MOST_MOVES, env.settings.max_actions_per_step)
    moves = ", ".join(rng.choice(MOVES) for _ in range(rng.randint(1, most)))
    text = f"<think> {env.reading(env.position)}</think><answer> {moves}"
    return DemonstratedAnswer(f"{text}</answer>", ((len(text) - len(moves) - 1, len(text)),))


def _lake(rng: random.Random, lesson: Lesson) -> Any:
    spec = lake.LakeSpec(hole_chance=rng.choice((0.1, 0.2, 0.3)), split=lesson.split)
    board = lake.make_lake(rng.randrange(1 << 30), spec)
    ice = [cell for cell, code in enumerate(board.cells) if code == lake.ICE]
    settings = frozen_lake.FrozenLakeSettings(pixels_per_cell=CELL_PIXELS)
    return frozen_lake.FrozenLakeEnv(replace(board, player=rng.choice(ice)), settings)


def _maze(rng: random.Random, lesson: Lesson) -> Any:
    board = mazes.make_maze(rng.randrange(1 << 30), mazes.MazeSpec(walls=(1, 2, 3, 4), split=lesson.split))
    has_key = rng.random() < 0.6
    walkable = (mazes.FLOOR, mazes.KEY, mazes.DOOR) if has_key else (mazes.FLOOR,)
    cells = [cell for cell, code in enumerate(board.cells) if code in walkable]
    board = replace(board, player=rng.choice(cells), has_key=has_key)
    return maze.MazeEnv(board, maze.MazeSettings(pixels_per_cell=CELL_PIXELS))


def _puzzle(rng: random.Random, lesson: Lesson) -> Any:
    # Odd numbers too: after an even number of moves the gap is never beside where it was.
    spec = puzzle.PuzzleSpec(scramble=(*range(1, 11), 20, 21, 40, 41), split=lesson.split)
    board = puzzle.make_puzzle(rng.randrange(1 << 30), spec)
    return sliding_puzzle.SlidingPuzzleEnv(
        board, sliding_puzzle.SlidingPuzzleSettings(pixels_per_cell=CELL_PIXELS, max_actions_per_step=1)
    )


_GAMES: dict[str, Callable[[random.Random, Lesson], Any]] = {"lake": _lake, "maze": _maze, "puzzle": _puzzle}


def _scene(rng: random.Random, lesson: Lesson) -> tuple[list[dict[str, Any]], DemonstratedAnswer]:
    settings = scene.SceneSettings(pixels_per_cell=CELL_PIXELS, jitter=0.0, num_things=[3, 4, 5, 6])
    env = scene.SceneEnv(scenes.make_scene(rng.randrange(1 << 30), settings.spec(lesson.split)), settings)
    drawn = env.scene
    if drawn.kind == "count":
        guess = str(rng.choice(GUESSED_NUMBERS))
    else:
        guess = drawn.point(rng.choice(drawn.things), CELL_PIXELS)
    text = f"<think> {scene_reading(drawn, CELL_PIXELS)}</think><answer> {guess}"
    answer = DemonstratedAnswer(f"{text}</answer>", ((len(text) - len(guess) - 1, len(text)),))
    return [env.format_observation(env.reset()[0])], answer


def phrases() -> tuple[str, ...]:
    """Return the words that are written often, repeated so that the tokenizer learns them first, and the environments'
    texts."""
    observation = "[Observation]\n(Refer to the image for the grid layout.)\nValid last actions:"
    request = "\nProvide your next move(s) using Up, Down, Left, Right."
    words = {
        *MOVES,
        *place_words(5, 5),
        *maze_words(),
        *puzzle_words(9),
        *scene_words(4, CELL_PIXELS),
        *map(str, GUESSED_NUMBERS),
    }
    spoken = ("<answer>", "</answer>", *MOVES, *(f" {word}" for word in sorted(words)))
    asked = [f" {name}" for name in scenes.NAMES]
    questions = ("How many", "s are there?", "Point at the", ".")
    return (*spoken * 20, *asked * 20, *(observation, request, " None") * 5, *questions * 5, *PROMPTS.values())
