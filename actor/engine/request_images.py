"""Turns the images of requests, given as files or by name, into patches; cached, because each turn of an episode sends
them again."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
from PIL import Image as PILImage

from actor.engine.http import HttpError
from shared.rgb_images import open_image, size_as_shown, to_rgb
from shared.types import IMAGE_NAME, image_name
from shared.util.lru_cache import LruCache
from shared.vision import Grid, VisionSpec, patchify

MAX_HELD_BYTES = 2**31  # limit of the images held by open requests and the cache


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RequestImage:
    """One image, ready for the vision tower. `key` is 62 bits of its SHA-256; patches uint8 [P, 3, patch, patch]."""

    key: int
    grid: Grid
    num_tokens: int
    patches: np.ndarray


def load_rgb(image: PILImage.Image, spec: VisionSpec) -> np.ndarray:
    """Return uint8 [H, W, 3] in the size that the model needs; resized only if that differs."""
    image = to_rgb(image)
    height, width = spec.resized(*image.size)
    if image.size != (width, height):
        image = image.resize((width, height), PILImage.Resampling.BICUBIC)
    return np.asarray(image)


class ImageCache:
    """A cache of decoded images by name; beyond `max_bytes` the least recently used are dropped. It holds pixels, no
    features. Refused before decoding: an image of more than `max_tokens` visual tokens, and one for which there is no
    room beside the images that requests hold. For use by one thread, so that one image is decoded at a time. The name
    is the SHA-256 of the file, computed here from the received bytes, so that no client can replace one image by
    another."""

    def __init__(self, spec: VisionSpec, max_tokens: int = 2**31, max_bytes: int = 256 * 2**20) -> None:
        self._spec, self._max_tokens = spec, max_tokens
        self._images: LruCache[str, RequestImage] = LruCache(
            max_bytes, lambda name, image: len(name) + image.patches.nbytes
        )
        # All images still in use, by the cache or by a request.
        self._held: WeakValueDictionary[str, RequestImage] = WeakValueDictionary()
        self._held_bytes = 0  # an upper bound; freed images are subtracted only when room seems short

    def add(self, data: bytes) -> str:
        """Store an image's file; return its name, which requests may use from now on. Raise ValueError if the file is
        no image, HttpError (503) if there is no room for it."""
        return self._take(data)[0]

    def get(self, items: Sequence[str]) -> tuple[list[RequestImage], list[str]]:
        """Return the images of a request, each given as its name, as a `data:...;base64,` URI or as bare base64; and
        the names that are unknown here (the images are left out then). Raise as `add` does."""
        names = {item for item in items if item.startswith(IMAGE_NAME)}
        named = {name: image for name in names if (image := self._find(name)) is not None}
        missing = [item for item in items if item not in named]
        if unknown := [item for item in missing if item in names]:
            return [], unknown
        for uri in missing:
            named[uri] = self._take(_data_of(uri))[1]
        return [named[item] for item in items], []

    def _take(self, data: bytes) -> tuple[str, RequestImage]:
        name = image_name(data)
        return name, self._images.get(name, lambda: self._held.get(name) or self._read(name, data))

    def _find(self, name: str) -> RequestImage | None:
        return self._images.find(name) or self._held.get(name)

    def _read(self, name: str, data: bytes) -> RequestImage:
        try:
            image = self._held[name] = self._decode(data, int(name.removeprefix(IMAGE_NAME)[:16], 16) >> 2)
            return image
        except HttpError:
            raise
        except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, struct.error and others
            raise ValueError(f"image_data holds no image that can be read: {error}") from error

    def _decode(self, data: bytes, key: int) -> RequestImage:
        spec = self._spec
        with open_image(data) as image:
            num_tokens = spec.num_tokens(grid := spec.grid(*size_as_shown(data)))
            if num_tokens > self._max_tokens:
                raise ValueError(f"an image of {num_tokens} tokens; the context is {self._max_tokens}")
            self._take_room(3 * spec.patch_size**2 * grid[1] * grid[2])
            return RequestImage(key, grid, num_tokens, patchify(load_rgb(image, spec), spec))

    def _take_room(self, num_bytes: int) -> None:
        if self._held_bytes + num_bytes > MAX_HELD_BYTES:
            self._held_bytes = sum(held.patches.nbytes for held in self._held.values())
            if self._held_bytes + num_bytes > MAX_HELD_BYTES:
                raise HttpError(503, f"requests hold images of {MAX_HELD_BYTES} bytes already")
        self._held_bytes += num_bytes


def _data_of(uri: str) -> bytes:
    try:
        if not uri.isascii():  # other characters would take up to four bytes each
            raise ValueError("it is not ASCII")
        return base64.b64decode(uri.partition(",")[2] if uri.startswith("data:") else uri, validate=True)
    except ValueError as error:
        raise ValueError(f"image_data holds no image that can be read: {error}") from error
