"""Count or point at things in a drawn scene: one question, one answer, shown as an image or as text.

A sample's metadata holds {"seed": n, "split": "train" | "heldout" (optional)}, from which its scene is drawn.
"""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from typing import Any, Literal

from pydantic import Field

from envs.answer_tags import answer_in, thinks
from envs.base import Env, Info, Observation, metadata_of, seed_of, setting
from envs.board_env import SIZE_TEXT, GridSize, sizes_of
from envs.boards.scene_board import COLOURS, QUESTION_KINDS, SHAPES, QuestionKind, Scene, SceneSpec, make_scene
from envs.boards.scene_words import reading
from envs.env_settings import EnvSettings, read_settings

_FORM = (
    "Answer a number like this: <answer>2</answer>. Point with x, y in pixels from the upper left corner, like this: "
    "<answer>40, 120</answer>"
)
SYSTEM_PROMPT = f"Look at the picture and answer the question. {_FORM}"
TEXT_PROMPT = f"Read which things there are and where, and answer the question. {_FORM}"
_NUMBER, _POINT = re.compile(r"\s*(\d{1,6})\s*"), re.compile(r"\s*\(?\s*(\d{1,6})\s*,\s*(\d{1,6})\s*\)?\s*")


class DrawnSceneSettings(EnvSettings):
    """Settings of every scene that is drawn."""

    render_mode: Literal["vision", "text"] = Field("vision", description="how a scene is shown: vision or text")
    pixels_per_cell: int = Field(64, ge=8, le=256, description="side of a cell in the picture")
    grid_size: GridSize = Field((4, 4), description=SIZE_TEXT)
    num_things: int | list[int] = Field([4, 5, 6], description="in a scene; or a list, of which each scene draws one")
    num_colours: int = Field(4, ge=1, le=len(COLOURS), description=f"of {', '.join(COLOURS)}, the first")
    num_shapes: int = Field(3, ge=1, le=len(SHAPES), description=f"of {', '.join(SHAPES)}, the first")
    jitter: float = Field(0.15, ge=0, le=0.5, description="how far a thing is moved in its cell, in shares of the cell")
    split: Literal["", "train", "heldout"] = Field(
        "", description="which part the scenes come from; a sample's own split overrides it"
    )
    diagnostics: bool = Field(False, description="also measures what the model wrote about the scene")

    def spec(self, split: str = "") -> SceneSpec:
        """Return what a scene is drawn by; its question is of a point. Raise ValueError for a single kind of thing."""
        numbers = (self.num_things,) if isinstance(self.num_things, int) else tuple(self.num_things)
        names = tuple(c * len(SHAPES) + s for c in range(self.num_colours) for s in range(self.num_shapes))
        if len(names) < 2:
            raise ValueError("num_colours = 1 with num_shapes = 1 gives one kind of thing: use more of either")
        return SceneSpec(sizes_of(self.grid_size), numbers, ("point",), names, jitter=self.jitter, split=split)


class SceneSettings(DrawnSceneSettings):
    questions: tuple[QuestionKind, ...] = Field(QUESTION_KINDS, min_length=1, description="count, point")
    max_count: int = Field(4, ge=1, description="of the things that are counted; from 0 on each number is as frequent")

    def spec(self, split: str = "") -> SceneSpec:
        return replace(super().spec(split), kinds=self.questions, max_count=self.max_count)


SETTINGS = SceneSettings


def system_prompt(args: Any = None) -> str:
    """Return the system prompt for the render mode in `args`."""
    return TEXT_PROMPT if setting(args, "render_mode", "vision") == "text" else SYSTEM_PROMPT


def build_env(sample: Any = None, args: Any = None, **_: Any) -> SceneEnv:
    """Return the environment of a sample, or of seed 0 without a sample. Raise ValueError for settings that allow no
    scene, and for a sample without a seed."""
    settings = read_settings(SceneSettings, sample, args)
    split = metadata_of(sample).get("split", settings.split)
    return SceneEnv(make_scene(seed_of(sample), settings.spec(split)), settings)


def random_response(rng: Random) -> str:
    """Return an answer like that of a policy that knows only the format."""
    if rng.random() < 0.5:
        return f"<answer>{rng.randint(0, 4)}</answer>"
    return f"<answer>{rng.randrange(256)}, {rng.randrange(256)}</answer>"


class SceneEnv(Env):
    """One question, reward 1.0 for the right answer and 0.0 otherwise."""

    def __init__(self, scene: Scene, settings: SceneSettings) -> None:
        self.scene, self.settings = scene, settings

    def best_response(self) -> str:
        """Return the right answer."""
        return f"<answer>{self.scene.answer(self.settings.pixels_per_cell)}</answer>"

    def reset(self) -> tuple[Observation, Info]:
        scene, pixels = self.scene, self.settings.pixels_per_cell
        metrics = {"success": 0.0, f"success_{scene.kind}": 0.0, "format": 0.0}
        if self.settings.render_mode == "text":
            return {"obs_str": f"{scene.text(pixels)}\n{scene.question}"}, {"metrics": metrics}
        images = {"image": [scene.render(pixels)]}
        return {"obs_str": scene.question, "multi_modal_data": images}, {"metrics": metrics}

    def step(self, response_text: str) -> tuple[Observation, bool, Info]:
        scene, pixels = self.scene, self.settings.pixels_per_cell
        said = answer_in(response_text) or ""
        if scene.kind == "count":
            written = _NUMBER.fullmatch(said)
            right = written is not None and int(written[1]) == len(scene.matches)
        else:
            written = _POINT.fullmatch(said)
            right = written is not None and scene.is_at(int(written[1]), int(written[2]), pixels)
        metrics = {"success": right, f"success_{scene.kind}": right, "format": written is not None}
        if self.settings.diagnostics:
            metrics["read_accuracy"] = thinks(response_text, reading(scene, pixels))
        return {"obs_str": "Right." if right else "Wrong."}, True, {"reward": float(right), "metrics": metrics}
