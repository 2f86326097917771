"""The tool that shows a part of a picture enlarged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from envs.tools.tool import BAD_ARGUMENTS, ToolBox, ToolContext
from envs.tools.tool_call import ToolCall
from envs.tools.zoom import zoom, zoom_tool


def quarters(width: int = 200, height: int = 100) -> Image.Image:
    """A picture with another colour in each quarter."""
    picture = Image.new("RGB", (width, height))
    for index, colour in enumerate(((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0))):
        x, y = index % 2 * width // 2, index // 2 * height // 2
        picture.paste(colour, (x, y, x + width // 2, y + height // 2))
    return picture


def colours(picture: Image.Image) -> set[tuple[int, ...]]:
    return {tuple(pixel) for row in np.asarray(picture).tolist() for pixel in row}


def run(tool: Any, *pictures: Image.Image, **arguments: Any) -> Any:
    return ToolBox([tool]).run(ToolCall("zoom", arguments), ToolContext(None, list(pictures)))


def test_a_part_is_shown_enlarged_to_the_pixels_that_are_allowed() -> None:
    (part,) = run(zoom_tool(pixels=64 * 64), quarters(), box=[500, 0, 750, 500]).images
    assert part.size == (64, 64)
    assert colours(part) == {(0, 255, 0)}
    (whole,) = run(zoom, quarters(4000, 4000), box=[0, 0, 1000, 1000]).images
    assert whole.size == (512, 512)


def test_a_tiny_part_is_enlarged_within_limits() -> None:
    (part,) = run(zoom, quarters(), box=[0, 0, 10, 20]).images
    assert part.size == (64, 64)


def test_a_box_counts_thousandths_or_pixels_as_the_schema_says() -> None:
    by_pixels = zoom_tool("pixels")
    assert "in thousandths" in zoom.parameters["properties"]["box"]["description"]
    assert "in pixels" in by_pixels.parameters["properties"]["box"]["description"]
    (part,) = run(by_pixels, quarters(), box=[0, 50, 100, 100]).images
    assert colours(part) == {(0, 0, 255)}


def test_a_box_over_the_edge_is_cut_and_an_earlier_image_can_be_named() -> None:
    (part,) = run(zoom, Image.new("L", (9, 9)), quarters(), box=[750, 500, 2000, 5000], image=2).images
    assert colours(part) == {(255, 255, 0)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"box": [500, 0, 400, 500]}, "right is to be above left"),
        ({"box": [1000, 0, 1200, 500]}, "right is to be above left"),
        ({"box": [0, 0, 1000, 9]}, "too narrow"),
        ({"box": [0, 0, 1]}, "left, top, right, bottom of the part, in thousandths"),
        ({"box": [0, 0, 500, "nan"]}, "finite"),
        ({"box": [0, 0, 500, 500], "image": 2}, "'image' is 2, and 1 have been shown"),
        ({}, "'box' is missing"),
    ],
)
def test_a_box_without_an_area_and_a_missing_image_are_told(arguments: dict[str, Any], words: str) -> None:
    result = run(zoom, quarters(), **arguments)
    assert result.error == BAD_ARGUMENTS
    assert words in result.text
