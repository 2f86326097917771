"""Images of requests: data URIs to patches, with a cache, since every turn of an episode sends its images again."""

from __future__ import annotations

import base64
import hashlib
import io
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
from PIL import Image as PILImage

from actor.engine.http import HttpError
from shared.guards.kept import Kept
from shared.vision import IMAGE_FORMATS, MAX_IMAGE_PIXELS, Grid, VisionSpec, patchify

MAX_HELD_BYTES = 2**31  # of the images that open requests and the cache hold


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ImagePatches:
    """One image, ready for the vision tower. `key` is a 62-bit content hash; patches uint8 [P, 3, patch, patch]."""

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
    """Decoded images by data URI, the least recently used forgotten beyond `max_bytes`. Holds pixels, no features. One
    of more than `max_tokens` visual tokens is refused before it is decoded, and so is one for which there is no room
    beside those that requests hold. For one thread: one image is decoded at a time."""

    def __init__(self, spec: VisionSpec, max_tokens: int = 2**31, max_bytes: int = 256 * 2**20) -> None:
        self._spec, self._max_tokens = spec, max_tokens
        self._images: Kept[str, ImagePatches] = Kept(max_bytes, lambda uri, image: len(uri) + image.patches.nbytes)
        self._held: WeakValueDictionary[int, ImagePatches] = WeakValueDictionary()  # by key, by whomever they are held
        self._held_bytes = 0  # at most: those of images that are gone are taken off when there seems to be no room

    def get(self, uri: str) -> ImagePatches:
        """The image of a `data:...;base64,` URI (or bare base64). ValueError if it is not one, HttpError (503) if there
        is no room for it."""
        return self._images.get(uri, lambda: self._read(uri))

    def _read(self, uri: str) -> ImagePatches:
        try:
            if not uri.isascii():  # its characters would take up to four bytes each
                raise ValueError("it is not ASCII")
            data = base64.b64decode(uri.partition(",")[2] if uri.startswith("data:") else uri, validate=True)
            key = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 2
            if (image := self._held.get(key)) is None:
                image = self._held[key] = self._decode(data, key)
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
