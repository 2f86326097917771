"""Images of the wire as patches of the vision tower, each distinct image decoded once, where it is trained on."""

from __future__ import annotations

import io
import threading
from dataclasses import dataclass

import numpy as np
from PIL import Image as PILImage

from shared.guards.kept import Kept
from shared.guards.png_files import check_chunks, png_size
from shared.guards.refusals import Refusals
from shared.log import get_logger
from shared.types import Image
from shared.vision import IMAGE_FORMATS, MAX_IMAGE_PIXELS, Grid, VisionSpec, patchify


@dataclass(frozen=True, slots=True, eq=False)
class ImagePatches:
    patches: np.ndarray  # uint8 [patches, 3, patch, patch] in merge-block order
    grid: Grid
    readable: bool = True


class AbsentImage(Image):
    """An image whose bytes another rank has; what is planned with it needs its size alone, (width, height)."""

    __slots__ = ("size",)
    size: tuple[int, int]

    def __init__(self, content_hash: str, size: tuple[int, int]) -> None:
        super().__init__(b"", content_hash)
        self.size = size


class ImageDecoder:
    """Decoded images by content hash; the least recently used are forgotten beyond `max_bytes`. Thread-safe: the
    intake reads sizes, and a thread packs beside the step.

    `files` has the bytes of images that are absent from the groups at hand. `refusals` counts and keeps those that
    turn out to be none when a step needs them.
    """

    def __init__(self, spec: VisionSpec, max_bytes: int = 1 << 28) -> None:
        self.spec = spec
        self.files: dict[str, bytes | memoryview] = {}
        self.refusals = Refusals("an image", get_logger("learner"))
        self._blank = set[str]()  # content hashes
        self._lock = threading.Lock()
        self._images: Kept[str, ImagePatches] = Kept(max_bytes, lambda _, image: image.patches.nbytes)

    def grid(self, image: Image) -> Grid:
        """(1, rows, columns) in patches, read from the file's header alone. ValueError if it is no image."""
        return self.spec.grid(*size_of(image))

    def check(self, image: Image) -> None:
        """ValueError for what is no image. A PNG is not decoded for it: one that is whole and yet cannot be decoded is
        found out by `get_or_blank`."""
        if not _size_of(image)[1]:
            self.get(image)
            return
        try:
            check_chunks(image.data, pixels=False)
        except ValueError as error:
            raise _refused(image, error) from None

    def get(self, image: Image) -> ImagePatches:
        """The image, resized as the engine resizes it and cut into patches. ValueError if it is no image."""
        with self._lock:
            kept = self._images.find(image.content_hash)
        if kept is None:  # nobody waits for another's image meanwhile
            decoded = self._decode(self._present(image))
            with self._lock:
                kept = self._images.get(image.content_hash, lambda: decoded)
        return kept

    def get_or_blank(self, image: Image) -> ImagePatches:
        """As `get`. In place of what cannot be decoded there are patches of zeros, and the file is counted and kept
        once between two calls of `take_num_blank`: the step was planned with it, on other ranks too, and goes on;
        episodes that show it have no weight in it."""
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
        """How many images `get_or_blank` left blank since the last call."""
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
    """(width, height) in pixels, from the file's header. ValueError if it is no image, or beyond what is decoded."""
    return image.size if isinstance(image, AbsentImage) else _size_of(image)[0]


def _size_of(image: Image) -> tuple[tuple[int, int], bool]:
    """Also whether it is a PNG."""
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
        raise _refused(image, error) from error
    _check_pixels(image, file.width, file.height)
    return file


def _refused(image: Image, error: Exception) -> ValueError:
    return ValueError(f"image {image.content_hash[:12]} ({len(image.data)} bytes) is refused: {error}")


def _check_pixels(image: Image, width: int, height: int) -> None:
    if width * height > MAX_IMAGE_PIXELS:
        raise ValueError(f"image {image.content_hash[:12]} of {width}x{height} pixels is above {MAX_IMAGE_PIXELS}")
