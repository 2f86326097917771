"""A tool that shows a part of a picture enlarged."""

# Without `from __future__ import annotations`: the hints of the tool hold the words of its units.
from math import ceil, floor
from typing import Annotated, Literal

from PIL import Image
from pydantic import Field, FiniteFloat

from envs.tools.tool import BadArguments, Tool, ToolContext, ToolResult, tool_of

Units = Literal["thousandths", "pixels"]
MAX_ASPECT = 50  # of the part's sides; models refuse narrower pictures
MAX_ENLARGEMENT = 32.0
WORDS = {
    "thousandths": "in thousandths of the image's width and height, from 0 to 1000",
    "pixels": "in pixels of the image",
}


def zoom_tool(units: Units = "thousandths", pixels: int = 512 * 512, name: str = "zoom") -> Tool:
    """Return the tool. `units`: what the numbers of a box count, thousandths of the picture's sides (as Qwen3-VL writes
    boxes) or its pixels. `pixels`: the size of the picture that the model is shown, at most, whatever part it asks
    for."""

    def zoom(
        context: ToolContext,
        box: Annotated[
            list[FiniteFloat],
            Field(min_length=4, max_length=4, description=f"left, top, right, bottom of the part, {WORDS[units]}"),
        ],
        image: Annotated[int, Field(ge=1, description="which image: 1 is the first one shown")] = 1,
    ) -> ToolResult:
        """Look at a part of an image, enlarged."""
        if image > len(context.images):
            raise BadArguments(f"'image' is {image}, and {len(context.images)} have been shown")
        picture = context.images[image - 1]
        return ToolResult(images=(part_of(picture, box, units, pixels),))

    return tool_of(zoom, name)


def part_of(picture: Image.Image, box: list[FiniteFloat], units: Units, pixels: int) -> Image.Image:
    """Return the part of a picture in `box`, scaled to `pixels` pixels at most. A box that reaches over the edge is
    cut. Raise BadArguments for one without an area inside of the picture."""
    width, height = picture.size
    scale_x, scale_y = (width / 1000, height / 1000) if units == "thousandths" else (1.0, 1.0)
    left, right = (min(max(side * scale_x, 0.0), width) for side in (box[0], box[2]))
    top, bottom = (min(max(side * scale_y, 0.0), height) for side in (box[1], box[3]))
    if right <= left or bottom <= top:
        raise BadArguments(f"'box' is {box}: right is to be above left and bottom above top, {WORDS[units]}")
    part = picture.crop((floor(left), floor(top), ceil(right), ceil(bottom)))  # whole pixels
    wide, high = part.size
    if max(wide, high) > MAX_ASPECT * min(wide, high):
        raise BadArguments(f"'box' is {box}, which is too narrow: give it more width or height")
    scale = min((pixels / (wide * high)) ** 0.5, MAX_ENLARGEMENT)
    size = int(wide * scale + 1e-6), int(high * scale + 1e-6)
    method = Image.Resampling.BICUBIC if scale > 1 else Image.Resampling.LANCZOS
    return part.convert("RGB").resize((max(1, size[0]), max(1, size[1])), method)


zoom = zoom_tool()
"""The tool with boxes in thousandths and a picture of at most 512 x 512 pixels."""
