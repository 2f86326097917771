"""Describes a scene in words, as the small models write it in <think>.

    16, 16 red circle 48, 16 blue square * 80, 48 red circle

Each thing's point and name; a star follows those that the question is about.
"""

from __future__ import annotations

from envs.boards.marked_scene import MarkedScene
from envs.boards.scene_board import NAMES, Scene


def reading(scene: Scene, pixels: int) -> str:
    """Return the text of <think>."""
    return " ".join(
        f"{scene.point(thing, pixels)} {NAMES[thing.name]}{' *' * (thing.name == scene.asked)}"
        for thing in scene.things
    )


def scene_words(side: int, pixels: int) -> tuple[str, ...]:
    """Return all words of scenes of a size whose things stand in the middle of their cells, for building a
    tokenizer."""
    middles = [place * pixels + pixels // 2 for place in range(side)]
    return (*(f"{x}, {y}" for y in middles for x in middles), *NAMES, "*")


def zoom_reading(marked: MarkedScene, pixels: int) -> str:
    """Return the text of <think> for a scene that is to be zoomed into: each thing's box and name, with a star after
    the one that the question is about."""
    things, asked = marked.scene.things, marked.asked
    return " ".join(
        f"{list(marked.box(thing, pixels))} {NAMES[thing.name]}{' *' * (thing is asked)}" for thing in things
    )
