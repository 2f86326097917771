"""The decoder of received images into patches of the vision tower. Each distinct image is decoded once, on the ranks
that train on it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from PIL import Image as PILImage

from shared.log import get_logger
from shared.rgb_images import check_plain, open_image, to_rgb
from shared.types import Image
from shared.util.lru_cache import LruCache
from shared.util.png_files import check_chunks, png_size
from shared.util.refusals import Refusals
from shared.vision import MAX_IMAGE_PIXELS, Grid, VisionSpec, patchify


@dataclass(frozen=True, slots=True, eq=False)
class ImagePatches:
    patches: np.ndarray  # uint8 [patches, 3, patch, patch] in merge-block order
    grid: Grid
    readable: bool = True


class AbsentImage(Image):
    """An image whose bytes are on another rank. Planning needs only its size, (width, height)."""

    __slots__ = ("size",)
    size: tuple[int, int]

    def __init__(self, content_hash: str, size: tuple[int, int]) -> None:
        super().__init__(b"", content_hash)
        self.size = size


class ImageDecoder:
    """A cache of decoded images by content hash, of at most `max_bytes`; the least recently used are dropped first.

    Thread-safe: the intake reads sizes, and a thread packs during the step. `files` has the bytes of images that are
    absent from the current groups. `refusals` counts and stores files that turn out, in a step, not to be images.
    """

    def __init__(self, spec: VisionSpec, max_bytes: int = 1 << 28) -> None:
        self.spec = spec
        self.files: dict[str, bytes | memoryview] = {}
        self.refusals = Refusals("an image", get_logger("learner"))
        self._blank = set[str]()  # content hashes
        self._lock = threading.Lock()
        self._images: LruCache[str, ImagePatches] = LruCache(max_bytes, lambda _, image: image.patches.nbytes)

    def grid(self, image: Image) -> Grid:
        """Return (1, rows, columns) in patches, from the file's header only. Raise ValueError if it is not an image."""
        return self.spec.grid(*size_of(image))

    def check(self, image: Image) -> None:
        """Raise ValueError if the file is not an image, or one of which decoders make different pixels. A PNG is not
        decoded for this: `get_or_blank` detects a complete PNG that cannot be decoded."""
        is_png = _size_of(image)[1]
        try:
            if is_png:
                check_chunks(image.data, pixels=False)
            check_plain(image.data)
        except ValueError as error:
            raise _refused(image, error) from None
        if not is_png:
            self.get(image)

    def get(self, image: Image) -> ImagePatches:
        """Return the image, resized as the engine resizes it and cut into patches. Raise ValueError if it is not an
        image."""
        with self._lock:
            cached = self._images.find(image.content_hash)
        if cached is None:  # decoded without the lock, so that other images need not wait
            decoded = self._decode(self._present(image))
            with self._lock:
                cached = self._images.get(image.content_hash, lambda: decoded)
        return cached

    def get_or_blank(self, image: Image) -> ImagePatches:
        """Return the same as `get`, but patches of zeros for a file that cannot be decoded.

        Such a file is counted and stored once between two calls of `take_num_blank`. The step was planned with it, also
        on other ranks, and continues; episodes with this image have weight 0.
        """
        try:
            return self.get(image)
        except ValueError as error:
            grid, side = self.grid(image), self.spec.patch_size
            with self._lock:
                if image.content_hash not in self._blank:
                    self.refusals.add("a step", "unreadable", str(error), (self._present(image).data,))
                self._blank.add(image.content_hash)
            return ImagePatches(np.zeros((grid[1] * grid[2], 3, side, side), np.uint8), grid, readable=False)

    def take_num_blank(self) -> int:
        """Return the number of images that `get_or_blank` left blank since the last call."""
        with self._lock:
            count = len(self._blank)
            self._blank.clear()
            return count

    def _present(self, image: Image) -> Image:
        if not isinstance(image, AbsentImage):
            return image
        return Image(self.files[image.content_hash], image.content_hash)

    def _decode(self, image: Image) -> ImagePatches:
        spec = self.spec
        with _open(image) as file:
            height, width = spec.resized(*file.size)
            rgb = _convert(file, image)
        if rgb.size != (width, height):
            rgb = rgb.resize((width, height), PILImage.Resampling.BICUBIC)
        patches = patchify(np.asarray(rgb), spec)
        return ImagePatches(patches, (1, height // spec.patch_size, width // spec.patch_size))


def size_of(image: Image) -> tuple[int, int]:
    """Return (width, height) in pixels, from the file's header. Raise ValueError if it is not an image, or too large to
    be decoded."""
    return image.size if isinstance(image, AbsentImage) else _size_of(image)[0]


def _size_of(image: Image) -> tuple[tuple[int, int], bool]:
    """Return the size, and whether the file is a PNG."""
    try:
        size = png_size(image.data)
    except ValueError as error:
        raise _refused(image, error) from None
    if size is None:
        with _open(image) as file:
            return file.size, False
    _check_pixels(image, *size)
    return size, True


def rgb_of(image: Image) -> np.ndarray:
    """Return uint8 [height, width, 3], in the image's original size. Raise ValueError if it is not an image."""
    with _open(image) as file:
        return np.asarray(_convert(file, image))


def _convert(file: PILImage.Image, image: Image) -> PILImage.Image:
    try:
        return to_rgb(file)
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, struct.error and others
        raise ValueError(f"image {image.content_hash[:12]} cannot be decoded: {error}") from error


def _open(image: Image) -> PILImage.Image:
    try:
        return open_image(image.data)
    except ValueError as error:
        raise _refused(image, error) from error


def _refused(image: Image, error: Exception) -> ValueError:
    return ValueError(f"image {image.content_hash[:12]} ({len(image.data)} bytes) is refused: {error}")


def _check_pixels(image: Image, width: int, height: int) -> None:
    if width * height > MAX_IMAGE_PIXELS:
        raise ValueError(f"image {image.content_hash[:12]} of {width}x{height} pixels is above {MAX_IMAGE_PIXELS}")
