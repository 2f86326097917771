"""Images of the wire as patches of the vision tower, each distinct image decoded once."""

from __future__ import annotations

import io
import threading
from dataclasses import dataclass

import numpy as np
from PIL import Image as PILImage

from shared.guards.kept import Kept
from shared.types import Image
from shared.vision import IMAGE_FORMATS, MAX_IMAGE_PIXELS, Grid, VisionSpec, patchify

MAX_GRIDS = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class ImagePatches:
    patches: np.ndarray  # uint8 [patches, 3, patch, patch] in merge-block order
    grid: Grid


class ImageDecoder:
    """Decoded images by content hash; the least recently used are forgotten beyond `max_bytes`. Thread-safe: the
    intake decodes what arrives ahead of the step that trains on it, and a thread packs beside the step."""

    def __init__(self, spec: VisionSpec, max_bytes: int = 1 << 28) -> None:
        self.spec = spec
        self._lock = threading.Lock()
        self._images: Kept[str, ImagePatches] = Kept(max_bytes, lambda _, image: image.patches.nbytes)
        self._grids: dict[str, Grid] = {}

    def grid(self, image: Image) -> Grid:
        """(1, rows, columns) in patches, read from the file's header alone. ValueError if it is no image."""
        with self._lock:
            known = self._grids.get(image.content_hash)
        if known is None:
            with _open(image) as file:
                known = self.spec.grid(*file.size)
            with self._lock:
                if len(self._grids) >= MAX_GRIDS:
                    self._grids.clear()
                self._grids[image.content_hash] = known
        return known

    def get(self, image: Image) -> ImagePatches:
        """The image, resized as the engine resizes it and cut into patches. ValueError if it is no image."""
        with self._lock:
            kept = self._images.find(image.content_hash)
        if kept is None:  # nobody waits for another's image meanwhile
            decoded = self._decode(image)
            with self._lock:
                kept = self._images.get(image.content_hash, lambda: decoded)
        return kept

    def _decode(self, image: Image) -> ImagePatches:
        spec = self.spec
        with _open(image) as file:
            height, width = spec.resized(*file.size)
            rgb = _convert(file, image)
        if rgb.size != (width, height):
            rgb = rgb.resize((width, height), PILImage.Resampling.BICUBIC)
        patches = patchify(np.asarray(rgb), spec)
        return ImagePatches(patches, (1, height // spec.patch_size, width // spec.patch_size))


def rgb_of(image: Image) -> np.ndarray:
    """uint8 [height, width, 3], in the image's own size. ValueError if it is no image."""
    with _open(image) as file:
        return np.asarray(_convert(file, image))


def _convert(file: PILImage.Image, image: Image) -> PILImage.Image:
    try:
        return file.convert("RGB")
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, struct.error and others
        raise ValueError(f"image {image.content_hash[:12]} cannot be decoded: {error}") from error


def _open(image: Image) -> PILImage.Image:
    try:
        file = PILImage.open(io.BytesIO(image.data), formats=IMAGE_FORMATS)
    except Exception as error:  # as in `_convert`
        raise ValueError(f"image {image.content_hash[:12]} ({len(image.data)} bytes) is refused: {error}") from error
    if file.width * file.height > MAX_IMAGE_PIXELS:
        raise ValueError(
            f"image {image.content_hash[:12]} of {file.width}x{file.height} pixels is above {MAX_IMAGE_PIXELS}"
        )
    return file
