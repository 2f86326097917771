"""Images of Sokoban boards: tiles are drawn once per size, a board is put together from them by indexing."""

from __future__ import annotations

import io
from functools import cache

import numpy as np
from PIL import Image, ImageDraw

_FLOOR, _WALL, _RED, _BOX, _BOX_EDGE, _GREEN, _DARK, _MORTAR = range(8)
_COLOURS = ((8, 8, 8), (176, 80, 50), (220, 40, 40), (233, 184, 47), (150, 100, 20), (60, 200, 80), (20, 90, 35),
            (120, 52, 32))  # fmt: skip
_PALETTE = bytes(channel for colour in _COLOURS for channel in colour)


def render(codes: bytes, height: int, width: int, pixels_per_cell: int) -> Image.Image:
    """The board as a palette image of height*p x width*p pixels; `codes` are the seen codes of the cells."""
    p = pixels_per_cell
    grid = np.frombuffer(codes, dtype=np.uint8).reshape(height, width)
    pixels = _tiles(p)[grid].transpose(0, 2, 1, 3).reshape(height * p, width * p)
    image = Image.fromarray(pixels)
    image.putpalette(_PALETTE)
    return image


def png(image: Image.Image) -> bytes:
    """The image as a PNG file; `compress_level` 1 keeps it fast, and drawn boards are small anyway."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


@cache
def _tiles(p: int) -> np.ndarray:
    """uint8 [7, p, p]: one tile of palette indices per code."""
    if not 8 <= p <= 256:
        raise ValueError(f"pixels_per_cell is {p}: use 8 to 256")
    return np.stack([_tile(code, p) for code in range(7)])


def _tile(code: int, p: int) -> np.ndarray:
    tile = Image.new("L", (p, p), _FLOOR)
    draw = ImageDraw.Draw(tile)
    line = max(1, p // 16)
    last = p - 1
    if code == 0:
        draw.rectangle((0, 0, last, last), fill=_WALL)
        draw.rectangle((0, p // 2, last, p // 2 + line - 1), fill=_MORTAR)
        draw.rectangle((p // 2, 0, p // 2 + line - 1, p // 2), fill=_MORTAR)
        draw.rectangle((p // 4, p // 2, p // 4 + line - 1, last), fill=_MORTAR)
    if code in (2, 3, 6):
        draw.rectangle((0, 0, last, last), outline=_RED, width=2 * line)
        draw.polygon(
            [(p // 2 + x * (p // 4), p // 2 + y * (p // 4)) for x, y in ((0, -1), (1, 0), (0, 1), (-1, 0))], _RED
        )
    if code in (3, 4):
        edge = p // 8 if code == 4 else p // 5
        draw.rectangle((edge, edge, last - edge, last - edge), fill=_BOX, outline=_BOX_EDGE, width=line)
        draw.line((edge, edge, last - edge, last - edge), fill=_BOX_EDGE, width=line)
        draw.line((edge, last - edge, last - edge, edge), fill=_BOX_EDGE, width=line)
    if code in (5, 6):
        edge = p // 8 if code == 5 else p // 5
        draw.ellipse((edge, edge, last - edge, last - edge), fill=_GREEN, outline=_DARK, width=line)
    return np.asarray(tile, dtype=np.uint8)
