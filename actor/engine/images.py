"""Images of requests, as files or by name, to patches, with a cache: every turn of an episode shows them again."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
from PIL import Image as PILImage

from actor.engine.http import HttpError
from shared.guards.kept import Kept
from shared.types import IMAGE_NAME, image_name
from shared.vision import IMAGE_FORMATS, MAX_IMAGE_PIXELS, Grid, VisionSpec, patchify

MAX_HELD_BYTES = 2**31  # of the images that open requests and the cache hold


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ImagePatches:
    """One image, ready for the vision tower. `key` is 62 bits of its SHA-256; patches uint8 [P, 3, patch, patch]."""

    key: int
    grid: Grid
    num_tokens: int
    patches: np.ndarray


def load_rgb(image: PILImage.Image, spec: VisionSpec) -> np.ndarray:
    """uint8 [H, W, 3] in the size that the model wants; resized only where that differs."""
    if image.mode != "RGB":
        image = image.convert("RGB")
    height, width = spec.resized(*image.size)
    if image.size != (width, height):
        image = image.resize((width, height), PILImage.Resampling.BICUBIC)
    return np.asarray(image)


class ImageCache:
    """Decoded images by name, the least recently used forgotten beyond `max_bytes`. Holds pixels, no features. One
    of more than `max_tokens` visual tokens is refused before it is decoded, and so is one for which there is no room
    beside those that requests hold. For one thread: one image is decoded at a time.

    A name is the SHA-256 of the file, computed here of the bytes that came: nobody can put one image in the place of
    another."""

    def __init__(self, spec: VisionSpec, max_tokens: int = 2**31, max_bytes: int = 256 * 2**20) -> None:
        self._spec, self._max_tokens = spec, max_tokens
        self._images: Kept[str, ImagePatches] = Kept(max_bytes, lambda name, image: len(name) + image.patches.nbytes)
        self._held: WeakValueDictionary[str, ImagePatches] = WeakValueDictionary()  # by whomever they are held
        self._held_bytes = 0  # at most: those of images that are gone are taken off when there seems to be no room

    def add(self, data: bytes) -> str:
        """The name of an image's file, which may be used in its place from now on. ValueError if it is none, HttpError
        (503) if there is no room for it."""
        return self._take(data)[0]

    def get(self, items: Sequence[str]) -> tuple[list[ImagePatches], list[str]]:
        """The images of a request, each given as its name, as a `data:...;base64,` URI or as bare base64; and the
        names of those that are not here. Raises what `add` raises."""
        names = {item for item in items if item.startswith(IMAGE_NAME)}
        named = {name: image for name in names if (image := self._find(name)) is not None}
        missing = [item for item in items if item not in named]
        if unknown := [item for item in missing if item in names]:
            return [], unknown
        for uri in missing:
            named[uri] = self._take(_data_of(uri))[1]
        return [named[item] for item in items], []

    def _take(self, data: bytes) -> tuple[str, ImagePatches]:
        name = image_name(data)
        return name, self._images.get(name, lambda: self._held.get(name) or self._read(name, data))

    def _find(self, name: str) -> ImagePatches | None:
        return self._images.find(name) or self._held.get(name)

    def _read(self, name: str, data: bytes) -> ImagePatches:
        try:
            image = self._held[name] = self._decode(data, int(name.removeprefix(IMAGE_NAME)[:16], 16) >> 2)
            return image
        except HttpError:
            raise
        except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, struct.error and others
            raise ValueError(f"image_data holds no image that can be read: {error}") from error

    def _decode(self, data: bytes, key: int) -> ImagePatches:
        spec = self._spec
        with PILImage.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            if image.width * image.height > MAX_IMAGE_PIXELS:
                raise ValueError(f"an image of {image.width}x{image.height} pixels is above {MAX_IMAGE_PIXELS}")
            num_tokens = spec.num_tokens(grid := spec.grid(*image.size))
            if num_tokens > self._max_tokens:
                raise ValueError(f"an image of {num_tokens} tokens; the context is {self._max_tokens}")
            self._take_room(3 * spec.patch_size**2 * grid[1] * grid[2])
            return ImagePatches(key, grid, num_tokens, patchify(load_rgb(image, spec), spec))

    def _take_room(self, num_bytes: int) -> None:
        if self._held_bytes + num_bytes > MAX_HELD_BYTES:
            self._held_bytes = sum(held.patches.nbytes for held in self._held.values())
            if self._held_bytes + num_bytes > MAX_HELD_BYTES:
                raise HttpError(503, f"requests hold images of {MAX_HELD_BYTES} bytes already")
        self._held_bytes += num_bytes


def _data_of(uri: str) -> bytes:
    try:
        if not uri.isascii():  # its characters would take up to four bytes each
            raise ValueError("it is not ASCII")
        return base64.b64decode(uri.partition(",")[2] if uri.startswith("data:") else uri, validate=True)
    except ValueError as error:
        raise ValueError(f"image_data holds no image that can be read: {error}") from error
