"""The one conversion of images to 8-bit RGB, so that a person, the policy's engine and the learner see the same pixels.

Where an image enters (a dataset's loader, an environment's observation) `plain_file` or `as_png` makes it plain: a
still image of 8-bit RGB, without transparency and without an orientation. From there on every decoder makes the same
pixels of it.
"""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
from PIL import Image as PILImage
from PIL.ExifTags import Base

from shared.util.png_files import check_chunks, is_plain_png, is_unambiguous_png, png_size
from shared.vision import IMAGE_FORMATS, MAX_IMAGE_PIXELS

PLAIN_FORMATS = ("PNG", "JPEG", "MPO", "WEBP")  # a phone's JPEG may be an MPO: its first image is the photo
WHITE = 255
MAX_16_BIT = 65535
_TRANSPOSE = PILImage.Transpose
_ORIENTATIONS = {
    2: _TRANSPOSE.FLIP_LEFT_RIGHT,
    3: _TRANSPOSE.ROTATE_180,
    4: _TRANSPOSE.FLIP_TOP_BOTTOM,
    5: _TRANSPOSE.TRANSPOSE,
    6: _TRANSPOSE.ROTATE_270,
    7: _TRANSPOSE.TRANSVERSE,
    8: _TRANSPOSE.ROTATE_90,
}
_OTHER_FILES = (  # how files begin that people take for images, or that have other decoders
    (rb"GIF8", "a GIF"),
    (rb"BM", "a BMP"),
    (rb"II\*\x00|MM\x00\*|II\+\x00|MM\x00\+", "a TIFF"),
    (rb"....ftyp(avif|avis)", "an AVIF"),
    (rb"....ftyp(heic|heix|hevc|mif1|msf1)", "a HEIC photo"),
    (rb"%PDF", "a PDF"),
    (rb"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)?<svg", "an SVG"),
    (rb"\s*<(!doctype html|html)", "an HTML page"),
    (rb"version https://git-lfs", "a Git LFS pointer"),
    (rb"\x00\x00\x01\x00", "an ICO"),
    (rb"\xff\x0a|\x00\x00\x00\x0cJXL ", "a JPEG XL"),
    (rb"\x00\x00\x00\x0cjP  |\xff\x4f\xff\x51", "a JPEG 2000"),
)


def to_rgb(image: PILImage.Image) -> PILImage.Image:
    """Return the image in mode RGB, as a viewer shows it: the first frame, transparency on white (as the models' own
    processors do), values of 16 and 32 bits by their range, and, for an image that was opened from a file, the
    orientation of its EXIF data applied. Raise ValueError for numbers that are no brightness."""
    rgb = _without_transparency(image)
    orientation = _orientation(image)  # after the pixels: a PNG may hold it at its end
    return rgb if orientation not in _ORIENTATIONS else rgb.transpose(_ORIENTATIONS[orientation])


def as_png(image: PILImage.Image) -> bytes:
    """Return the plain PNG file of an image that an environment has drawn."""
    return _png(to_rgb(image))


def plain_file(data: bytes | memoryview) -> bytes | memoryview:
    """Return an image file that every decoder shows alike: `data` itself if it is plain already, else a PNG. The image
    is decoded once as a check. Raise ValueError, in one line, for data that is no PNG, JPEG or WebP."""
    return _plain(data, PLAIN_FORMATS)[0]


def plain_png(data: bytes | memoryview) -> tuple[bytes | memoryview, tuple[int, int]]:
    """Return an image file as a plain PNG, and the image's size (width, height): servers decode other formats on a GPU,
    to pixels that differ from the learner's. A plain PNG is returned as it is, checked but not decoded. Raise
    ValueError, in one line, for data that is no PNG, JPEG or WebP."""
    return _plain(data, ("PNG",), decode=False)


def check_plain(data: bytes | memoryview) -> None:
    """Raise ValueError, in one line, for an image file of which decoders make different pixels; its pixels are not
    decoded. Grey and palette images may pass."""
    if png_size(data) is not None:
        plain = is_unambiguous_png(data)
    else:
        with open_image(data) as file:
            plain = file.mode in ("RGB", "L") and _is_still(file) and _orientation(file) in (0, 1)
    if not plain:
        raise ValueError(
            "decoders differ in its transparency, orientation, 16 bits, colours or frames; send what "
            "shared.rgb_images.plain_file makes of it"
        )


def size_as_shown(data: bytes | memoryview) -> tuple[int, int]:
    """Return the (width, height) of what `plain_file` makes of an image file; a plain one is not decoded. Raise
    ValueError as `open_image` does."""
    with open_image(data) as file:
        width, height = file.size
        return (height, width) if not _is_plain(file, data) and _orientation(file) >= 5 else (width, height)


def open_image(data: bytes | memoryview) -> PILImage.Image:
    """Return an opened file whose header is read; its pixels are not. Raise ValueError, in one line, for data that is
    no PNG, JPEG or WebP, and for more pixels than are decoded."""
    try:
        file = PILImage.open(io.BytesIO(data), formats=IMAGE_FORMATS)
    except PILImage.UnidentifiedImageError:
        raise ValueError(f"{_kind_of(bytes(data[:512]))}; PNG, JPEG and WebP are read") from None
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, struct.error and others
        raise ValueError(_in_words(error)) from error
    width, height = file.size
    if width * height > MAX_IMAGE_PIXELS:
        raise ValueError(f"an image of {width}x{height} pixels is above the {MAX_IMAGE_PIXELS} that are decoded")
    return file


def _plain(
    data: bytes | memoryview, formats: tuple[str, ...], *, decode: bool = True
) -> tuple[bytes | memoryview, tuple[int, int]]:
    with open_image(data) as file:
        try:
            if file.format == "PNG":
                check_chunks(data, pixels=True)
            if file.format in formats and _is_plain(file, data):
                if decode:
                    file.load()
                return data, file.size
            rgb = to_rgb(file)
        except Exception as error:  # as in `open_image`
            raise ValueError(_in_words(error)) from error
    return _png(rgb), rgb.size


def _is_plain(file: PILImage.Image, data: bytes | memoryview) -> bool:
    if file.format == "PNG":
        return is_plain_png(data)
    return file.mode == "RGB" and _is_still(file) and _orientation(file) in (0, 1)


def _is_still(file: PILImage.Image) -> bool:
    return file.format == "MPO" or not getattr(file, "is_animated", False)


def _png(rgb: PILImage.Image) -> bytes:
    buffer = io.BytesIO()
    # Without the colour profile and the other facts of the file that the image was read from.
    PILImage.Image.save(rgb, buffer, "PNG", compress_level=1, icc_profile=None, exif=b"")
    return buffer.getvalue()


def _orientation(image: PILImage.Image) -> int:
    """Return the EXIF orientation of a file's image, 1 to 8; 0 if there is none. What an environment has made of such
    an image (by `convert`, `resize` or drawing on it) counts as it is."""
    if image.format is None:
        return 0
    try:
        orientation = image.getexif().get(Base.Orientation, 0)
        return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 0
    except Exception:  # noqa: BLE001 - damaged EXIF data, which viewers ignore too
        return 0


def _without_transparency(image: PILImage.Image) -> PILImage.Image:
    if image.mode in ("La", "RGBa"):  # premultiplied
        image = image.convert("LA" if image.mode == "La" else "RGBA")
    if image.mode.startswith(("I", "F")):
        return _of_numbers(image)
    key = image.info.get("transparency")
    if image.format == "PNG" and image.mode == "RGB" and isinstance(key, tuple) and _is_deep(image):
        return _of_deep_key(image, key)
    if "A" in image.getbands() or key is not None:
        image = image.convert("RGBA")
        background = PILImage.new("RGBA", image.size, (WHITE, WHITE, WHITE, WHITE))
        return PILImage.alpha_composite(background, image).convert("RGB")
    image.load()
    return image.convert("RGB")


def _of_numbers(image: PILImage.Image) -> PILImage.Image:
    """Return an image of 16 or 32 bits in RGB, black to white over its range: 65535 for 16 bits; for 32 bits the least
    of 1 (floats alone), 255 and 65535 that holds all values."""
    values = np.asarray(image).astype(np.float64)
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if image.mode.startswith("I;16") or image.format == "PNG":
        largest = MAX_16_BIT
    else:
        ranges = (1, WHITE, MAX_16_BIT) if image.mode == "F" else (WHITE, MAX_16_BIT)
        largest = next((each for each in ranges if low >= 0 and high <= each), 0)  # NaN is in no range
    if not largest or not np.isfinite(values).all():
        raise ValueError(
            f"an image of mode {image.mode} with values from {low:g} to {high:g}: give it as 8-bit L or RGB, or scale "
            "it to 0..1, 0..255 or 0..65535"
        )
    grey = np.rint(values * (WHITE / largest)).astype(np.uint8)
    key = image.info.get("transparency")
    if isinstance(key, int):
        grey[values == key] = WHITE
    return PILImage.fromarray(grey).convert("RGB")


def _of_deep_key(image: Any, key: tuple[int, ...]) -> PILImage.Image:
    """Return an opened PNG of three times 16 bits with its transparent colour as white. Pillow keeps the high bytes,
    which many colours share: the file is decoded twice, for these and for the low ones. `image` stays as it is."""
    position = image.fp.tell()
    image.fp.seek(0)
    data = image.fp.read()
    image.fp.seek(position)
    halves = []
    for raw_mode in ("RGB;16B", "RGB;16L"):
        half: Any = PILImage.open(io.BytesIO(data), formats=("PNG",))
        half.tile = [tile._replace(args=raw_mode) for tile in half.tile]
        halves.append(np.array(half.convert("RGB"), dtype=np.uint16))
    values = halves[0] << 8 | halves[1]
    halves[0][(values == np.asarray(key, np.uint16)).all(-1)] = WHITE
    return PILImage.fromarray(halves[0].astype(np.uint8))


def _is_deep(image: Any) -> bool:
    """Tell whether an opened PNG whose pixels are not read yet has 16 bits a value."""
    return any("16" in str(tile.args) for tile in image.tile)


def _kind_of(head: bytes) -> str:
    for pattern, name in _OTHER_FILES:
        if re.match(pattern, head, re.DOTALL | re.IGNORECASE):
            return name
    if not head:
        return "an empty file"
    return f"no image file, it begins with {head[:12]!r}"


def _in_words(error: Exception) -> str:
    words = " ".join(str(error).split())
    return words if isinstance(error, ValueError) and words else f"{type(error).__name__}: {words}"
