"""Read a small number on a thing in a drawn scene, with a tool that enlarges a part; shown as an image or as text.

A sample's metadata holds {"seed": n, "split": "train" | "heldout" (optional)}, from which its scene is drawn. The whole
picture is to be reduced before the model sees it (`model.max_pixels`); the tool enlarges the picture as it is.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any

from pydantic import Field

from envs.answer_tags import thinks
from envs.base import Info, Observation, metadata_of, seed_of, setting
from envs.boards.marked_scene import MARKS, MarkedScene, make_marked_scene
from envs.boards.scene_board import NAMES
from envs.boards.scene_words import zoom_reading
from envs.env_settings import read_settings
from envs.scene import DrawnSceneSettings
from envs.tools.tool import Tool, ToolContext, tool_of
from envs.tools.tool_env import ToolEnv
from envs.tools.zoom import zoom_tool
from shared.families.marks import CALL
from shared.types import Sample

_FORM = "zoom shows a part of it enlarged. Answer like this: <answer>2</answer>"
SYSTEM_PROMPT = f"Look at the picture and answer the question; {_FORM}"
TEXT_PROMPT = f"Read which things there are and where, and answer the question; {_FORM}"
_ANSWER = re.compile(r"<answer>\s*(\d{1,6})\s*</answer>", re.IGNORECASE)


class SceneZoomSettings(DrawnSceneSettings):
    pixels_per_cell: int = Field(256, ge=32, le=256, description="side of a cell in the picture")
    zoom_pixels: int = Field(
        256 * 256, ge=1024, le=4_194_304, description="pixels of an enlarged part, at most, however large it is"
    )


SETTINGS = SceneZoomSettings


def system_prompt(args: Any = None) -> str:
    """Return the system prompt for the render mode in `args`."""
    return TEXT_PROMPT if setting(args, "render_mode", "vision") == "text" else SYSTEM_PROMPT


def tools(args: Any = None) -> list[Tool]:
    """Return the tool of the render mode in `args`."""
    if setting(args, "render_mode", "vision") == "text":
        return [text_zoom]
    return [zoom_tool(pixels=int(setting(args, "zoom_pixels", SETTINGS.model_fields["zoom_pixels"].default)))]


def build_env(sample: Any = None, args: Any = None, **_: Any) -> SceneZoomEnv:
    """Return the environment of a sample, or of seed 0 without a sample. Raise ValueError for settings that allow no
    scene, and for a sample without a seed."""
    settings = read_settings(SceneZoomSettings, sample, args)
    split = metadata_of(sample).get("split", settings.split)
    return SceneZoomEnv(sample, make_marked_scene(seed_of(sample), settings.spec(split)), settings)


def random_response(rng: Random) -> str:
    """Return an answer like that of a policy that knows only the format."""
    if rng.random() < 0.5:
        return f"<answer>{rng.choice(MARKS)}</answer>"
    left, top = (250 * rng.randrange(4) for _ in range(2))
    return call([left, top, left + 250, top + 250])


def call(box: list[int]) -> str:
    """Return a call of the tool."""
    return CALL.around(f'{{"name": "zoom", "arguments": {{"box": {box}}}}}')


class SceneZoomEnv(ToolEnv):
    """One question, reward 1.0 for the right answer and 0.0 otherwise."""

    def __init__(self, sample: Sample | None, marked: MarkedScene, settings: SceneZoomSettings) -> None:
        super().__init__(sample, tools(settings))
        self.marked, self.settings = marked, settings

    def best_response(self) -> str:
        """Return the right answer; before a part has been looked at, the call that shows the thing."""
        if self.counts["executed"]:
            return f"<answer>{self.marked.answer}</answer>"
        return call([*self.marked.box(self.marked.asked, self.settings.pixels_per_cell)])

    def reset(self) -> tuple[Observation, Info]:
        started = super().reset()
        self.context.state["scene"] = self.marked, self.settings.pixels_per_cell
        return started

    def first(self) -> Observation:
        marked, pixels = self.marked, self.settings.pixels_per_cell
        if self.settings.render_mode == "text":
            return {"obs_str": f"{marked.text(pixels)}\n{marked.question}"}
        return {"obs_str": marked.question, "multi_modal_data": {"image": [marked.render(pixels)]}}

    def step(self, response_text: str) -> tuple[Observation, bool, Info]:
        is_first = not self.counts
        observation, done, info = super().step(response_text)
        if self.settings.diagnostics and is_first:
            self.has_read = thinks(response_text, zoom_reading(self.marked, self.settings.pixels_per_cell))
        if self.settings.diagnostics:
            info["metrics"]["read_accuracy"] = self.has_read
        return observation, done, info

    def grade(self, answer: str) -> Info:
        found = _ANSWER.search(answer)
        right = found is not None and int(found[1]) == self.marked.answer
        return {"reward": float(right), "metrics": {"success": right, "format": found is not None}}

    def metrics(self) -> dict[str, float]:
        return {"success": 0.0, "format": 0.0} | super().metrics()


def _text_zoom(context: ToolContext, box: list[float], image: int = 1) -> str:
    """Look at a part of the scene, enlarged.

    Args:
        box: left, top, right, bottom of the part, in thousandths of the scene's width and height, from 0 to 1000
        image: which scene: there is one
    """
    if len(box) != 4:
        raise ValueError("box needs four numbers: left, top, right, bottom")
    marked, pixels = context.state["scene"]
    seen = []
    for thing, mark in zip(marked.scene.things, marked.marks, strict=True):
        left, top, right, bottom = marked.box(thing, pixels)
        if box[0] <= (left + right) / 2 <= box[2] and box[1] <= (top + bottom) / 2 <= box[3]:
            seen.append(f"The {NAMES[thing.name]} bears {mark}.")
    return "\n".join(seen) or "There is nothing."


text_zoom = tool_of(_text_zoom, "zoom")
