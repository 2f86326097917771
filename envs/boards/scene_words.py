"""Describes a scene in words, as the small models write it in <think>.

    16, 16 red circle 48, 16 blue square * 48, 16 80, 48 red circle

Each thing's point and name; those that the question is about get a star and their point once more.
"""

from __future__ import annotations

from envs.boards.marked_scene import MarkedScene
from envs.boards.scene_board import NAMES, Scene


def reading(scene: Scene, pixels: int) -> str:
    """Return the text of <think>."""
    things = ((scene.point(thing, pixels), thing.name) for thing in scene.things)
    return " ".join(_starred(point, name, is_asked=name == scene.asked) for point, name in things)


def scene_words(side: int, pixels: int) -> tuple[str, ...]:
    """Return all words of scenes of a size whose things stand in the middle of their cells, for building a
    tokenizer."""
    middles = [place * pixels + pixels // 2 for place in range(side)]
    return (*(f"{x}, {y}" for y in middles for x in middles), *NAMES, "*")


def zoom_reading(marked: MarkedScene, pixels: int) -> str:
    """Return the text of <think> for a scene that is to be zoomed into: each thing's box and name; the one that
    the question is about gets a star and its box once more."""
    things, asked = marked.scene.things, marked.asked
    return " ".join(
        _starred(str(list(marked.box(thing, pixels))), thing.name, is_asked=thing is asked) for thing in things
    )


def _starred(place: str, name: int, *, is_asked: bool) -> str:
    return f"{place} {NAMES[name]}{f' * {place}' * is_asked}"
