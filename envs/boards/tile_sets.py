"""Draws boards of tiles: each tile of a set is drawn once per size, and a board is composed of them by indexing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
from PIL import Image, ImageDraw

Colour = tuple[int, int, int]


class Grid(Protocol):
    """A board of any game: what is visible in each cell, row by row."""

    @property
    def height(self) -> int: ...

    @property
    def width(self) -> int: ...

    def codes(self) -> bytes:
        """Return the code of what is visible in each cell."""


@dataclass(frozen=True, slots=True)
class Codes:
    """Cells to draw that need not be a valid board."""

    height: int
    width: int
    cells: bytes

    def codes(self) -> bytes:
        return self.cells


@dataclass(frozen=True, eq=False)
class TileSet:
    """How a game's boards look. `draw(pencil, code, p)` draws the tile of a code, p pixels wide, with indices into
    `colours` on a ground of index 0; `symbols` has a letter for each code."""

    colours: tuple[Colour, ...]
    symbols: Sequence[str]
    draw: Callable[[ImageDraw.ImageDraw, int, int], None]

    def render(self, grid: Grid, pixels_per_cell: int) -> Image.Image:
        """Return the board as a palette image of height*p x width*p pixels."""
        p, codes = pixels_per_cell, np.frombuffer(grid.codes(), dtype=np.uint8).reshape(grid.height, grid.width)
        pixels = _tiles(self, p)[codes].transpose(0, 2, 1, 3).reshape(grid.height * p, grid.width * p)
        return self.picture(pixels)

    def picture(self, indices: np.ndarray) -> Image.Image:
        """Return a palette image of indices into `colours`, uint8 [height, width]."""
        image = Image.fromarray(indices)
        image.putpalette(bytes(channel for colour in self.colours for channel in colour))
        return image

    def tile(self, code: int, pixels: int) -> np.ndarray:
        """Return one tile, uint8 [pixels, pixels] of indices into `colours`."""
        return _tiles(self, pixels)[code]

    def text(self, grid: Grid) -> str:
        """Return the board in symbols, cells padded with spaces and joined by tabs."""
        codes = grid.codes()
        rows = [codes[start : start + grid.width] for start in range(0, len(codes), grid.width)]
        return "\n".join("\t".join(f" {self.symbols[code]} " for code in row) for row in rows)


@cache
def _tiles(tiles: TileSet, p: int) -> np.ndarray:
    """Return one tile of palette indices for each code, uint8 [codes, p, p]."""
    if not 8 <= p <= 256:
        raise ValueError(f"pixels_per_cell is {p}: use 8 to 256")
    drawn = []
    for code in range(len(tiles.symbols)):
        tile = Image.new("L", (p, p), 0)
        pencil = ImageDraw.Draw(tile)
        pencil.fontmode = "1"  # smooth letters would have indices in between
        tiles.draw(pencil, code, p)
        drawn.append(np.asarray(tile, dtype=np.uint8))
    return np.stack(drawn)


def framed(draw: ImageDraw.ImageDraw, p: int, fill: int, edge: int, margin: int) -> None:
    """Draw a square with an edge, `margin` pixels inside the tile."""
    last = p - 1 - margin
    draw.rectangle((margin, margin, last, last), fill=fill, outline=edge, width=max(1, p // 16))


def disc(draw: ImageDraw.ImageDraw, p: int, fill: int, edge: int, margin: int) -> None:
    """Draw a disc with an edge, `margin` pixels inside the tile: the player of every game."""
    last = p - 1 - margin
    draw.ellipse((margin, margin, last, last), fill=fill, outline=edge, width=max(1, p // 16))
