"""Images of requests: data URIs to patches, with a cache, since every turn of an episode sends its images again."""

from __future__ import annotations

import base64
import hashlib
import io
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from PIL import Image as PILImage

from shared.vision import IMAGE_FORMATS, MAX_IMAGE_PIXELS, Grid, VisionSpec, patchify


@dataclass(frozen=True, slots=True, eq=False)
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
    of more than `max_tokens` visual tokens is refused before it is decoded."""

    def __init__(self, spec: VisionSpec, max_tokens: int = 2**31, max_bytes: int = 256 * 2**20) -> None:
        self._spec, self._max_tokens, self._max_bytes = spec, max_tokens, max_bytes
        self._images: OrderedDict[str, ImagePatches] = OrderedDict()
        self._bytes = 0

    def get(self, uri: str) -> ImagePatches:
        """The image of a `data:...;base64,` URI (or bare base64). ValueError if it is not one."""
        image = self._images.get(uri)
        if image is not None:
            self._images.move_to_end(uri)
            return image
        image = self._images[uri] = self._decode(uri)
        self._bytes += image.patches.nbytes + len(uri)
        while self._bytes > self._max_bytes and len(self._images) > 1:
            old_uri, old = self._images.popitem(last=False)
            self._bytes -= old.patches.nbytes + len(old_uri)
        return image

    def _decode(self, uri: str) -> ImagePatches:
        spec = self._spec
        try:
            data = base64.b64decode(uri.partition(",")[2] if uri.startswith("data:") else uri, validate=True)
            with PILImage.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
                if image.width * image.height > MAX_IMAGE_PIXELS:
                    raise ValueError(f"an image of {image.width}x{image.height} pixels is above {MAX_IMAGE_PIXELS}")
                num_tokens = spec.num_tokens(spec.grid(*image.size))
                if num_tokens > self._max_tokens:
                    raise ValueError(f"an image of {num_tokens} tokens; the context is {self._max_tokens}")
                rgb = load_rgb(image, spec)
        except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, struct.error and others
            raise ValueError(f"image_data holds no image that can be read: {error}") from error
        patches = patchify(rgb, spec)
        grid = (1, rgb.shape[0] // spec.patch_size, rgb.shape[1] // spec.patch_size)
        key = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 2
        return ImagePatches(key, grid, spec.num_tokens(grid), patches)
