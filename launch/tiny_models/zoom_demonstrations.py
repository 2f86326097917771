"""Demonstrations of the scene with a tool that enlarges: the player writes down the things and marks the one that is
asked for, then looks at any of them, and answers with the number that it sees; or it guesses at once. Where to look is
drawn by lot, so that the model learns to read and to call, and not where to look."""

from __future__ import annotations

import random

from envs import scene_zoom
from envs.boards import scene_board as scenes
from envs.boards.marked_scene import MARKS
from envs.boards.scene_words import zoom_reading
from envs.env_calls import messages_of
from launch.tiny_models.lesson import CELL_PIXELS, DemonstratedAnswer, Demonstration, Lesson
from launch.tiny_models.tower_lessons import Pictures
from shared.families.marks import CALL, THOUGHT
from shared.types import Sample

PROMPT = "Look closer, then answer."
SIDE, PIXELS = 4, 128  # cells of a scene's side, pixels of a cell's
MAX_PIXELS = (SIDE * CELL_PIXELS) ** 2  # of what the model sees: a scene, or one enlarged cell
ARGS = {
    "grid_size": [SIDE, SIDE], "num_things": [3, 4, 5, 6], "pixels_per_cell": PIXELS, "zoom_pixels": MAX_PIXELS,
    "jitter": 0.0,
}  # fmt: skip
PICTURES = (Pictures(scenes.TILES, SIDE, SIDE),)
TOOLS = tuple(tool.schema for tool in scene_zoom.tools(ARGS))
LOOKS = 0.7  # share of episodes that look before they answer


def play(seed: int, rng: random.Random, lesson: Lesson) -> Demonstration:
    """Demonstrate an episode."""
    sample = Sample(str(seed), metadata={"seed": rng.randrange(1 << 30), "split": lesson.split})
    env = scene_zoom.build_env(sample, ARGS)
    marked, pixels = env.marked, env.settings.pixels_per_cell
    started = THOUGHT.around(f" {zoom_reading(marked, pixels)}")
    thing, mark = rng.choice(list(zip(marked.scene.things, marked.marks, strict=True)))
    first = messages_of(env, env.reset()[0])
    if rng.random() > LOOKS:
        guess = f" {rng.choice(MARKS)}"
        start = len(started) + len("<answer>")
        yield first, DemonstratedAnswer(f"{started}<answer>{guess}</answer>", ((start, start + len(guess)),))
        return
    box = f" {list(marked.box(thing, pixels))}"
    text = started + scene_zoom.call(list(marked.box(thing, pixels)))
    start = text.index(box, len(started))
    yield first, DemonstratedAnswer(text, ((start, start + len(box)),))
    yield messages_of(env, env.step(text)[0]), DemonstratedAnswer(f"<answer> {mark}</answer>")


def phrases() -> tuple[str, ...]:
    """Return the words that are written often, repeated so that the tokenizer learns them first, and the environment's
    texts."""
    step = 1000 // SIDE
    corners = [(step * column, step * row) for row in range(SIDE) for column in range(SIDE)]
    boxes = [f" {[left, top, left + step, top + step]}" for left, top in corners]
    opening, closing = scene_zoom.call([]).removeprefix(CALL.opening).removesuffix(CALL.closing).split(" []")
    words = ("<answer>", "</answer>", *(f" {mark}" for mark in MARKS), " *", *boxes, closing)
    asked = [f" {name}" for name in scenes.NAMES]
    return (*words * 20, *asked * 20, *(opening, "Which number does the", " bear?", "system\nTools: zoom") * 10, PROMPT)
