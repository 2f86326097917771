"""What a lesson is: its settings, a task with its texts and demonstrations, and what is demonstrated."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from launch.tiny_models.tower_lessons import Pictures

CELL_PIXELS = 32


class DemonstratedAnswer(NamedTuple):
    """A demonstrated answer; `guesses` are the positions (start, end) of the words in it that were chosen at random."""

    text: str
    guesses: tuple[tuple[int, int], ...] = ()


Demonstration = Iterator[tuple[Sequence[dict[str, Any]], DemonstratedAnswer]]
"""Pairs of the messages of an observation and the answer to it."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """The settings of demonstrations."""

    expertise: float = 0.4  # share of good answers; for Sokoban, of good moves within reach
    reach: int = 3  # Sokoban: solutions of at most this many moves are within reach
    jump: float = 0.0  # Sokoban: share of turns that show a fresh board
    scatter: float = 0.0  # Sokoban: share of turns that begin with player and boxes on cells drawn at random
    near: float = 0.0  # Sokoban: share of boards that begin within reach
    turns: int = 8  # Sokoban, triangles: maximum of one episode
    wall_chances: tuple[float, ...] = (0.05,)  # Sokoban: each board draws one
    boxes: tuple[int, ...] = (1,)  # Sokoban: each board draws one of these numbers
    split: str = "train"  # Sokoban: split of the boards


@dataclass(frozen=True, slots=True)
class Task:
    """One task's texts for the tokenizer, the size of its model, and its demonstrations; the system message of a seed
    is `prompts[seed % len(prompts)]`."""

    prompts: tuple[str, ...]
    phrases: tuple[str, ...]
    model: dict[str, Any]
    demonstrate: Callable[[int, random.Random, Lesson], Demonstration]
    """One episode of a seed."""
    pictures: tuple[Pictures, ...] = ()
    """What the vision tower can be taught alone, in cells of CELL_PIXELS."""
    tools: tuple[dict[str, Any], ...] = ()
    """The schemas of the tools that the model may call."""
    max_pixels: int | None = None
    """Larger images are reduced."""
