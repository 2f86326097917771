"""Images of Sokoban boards."""

from __future__ import annotations

import io

from PIL import Image, ImageDraw

from envs.boards.board import SYMBOLS
from envs.boards.tile_sets import Codes, TileSet, disc

_FLOOR, _WALL, _RED, _BOX, _BOX_EDGE, _GREEN, _DARK, _MORTAR = range(8)
_COLOURS = ((8, 8, 8), (176, 80, 50), (220, 40, 40), (233, 184, 47), (150, 100, 20), (60, 200, 80), (20, 90, 35),
            (120, 52, 32))  # fmt: skip


def render(codes: bytes, height: int, width: int, pixels_per_cell: int) -> Image.Image:
    """Return the board as a palette image of height*p x width*p pixels; `codes` are the cells' codes
    (`Board.codes`)."""
    return TILES.render(Codes(height, width, codes), pixels_per_cell)


def png(image: Image.Image) -> bytes:
    """Return the image as a PNG file; `compress_level` 1 keeps it fast, and drawn boards are small anyway."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _draw(draw: ImageDraw.ImageDraw, code: int, p: int) -> None:
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
        disc(draw, p, _GREEN, _DARK, edge)


TILES = TileSet(_COLOURS, SYMBOLS, _draw)
