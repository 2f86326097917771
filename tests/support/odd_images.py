"""Image files of every odd kind that people bring, each with the pixels that a viewer shows."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

WIDTH, HEIGHT = 48, 32
EXIF_ORIENTATION = 0x0112


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def raw_png(
    values: np.ndarray, bits: int, colour: int, key: tuple[int, ...] | None = None, extra: bytes = b""
) -> bytes:
    """Return a PNG of [H, W, channels] values, written without Pillow."""
    height, width, _ = values.shape
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    kind = ">u2" if bits == 16 else "u1"
    rows = b"".join(b"\0" + row.astype(kind).tobytes() for row in values)
    transparent = b"" if key is None else chunk(b"tRNS", struct.pack(f">{len(key)}H", *key))
    body = chunk(b"IHDR", header) + transparent + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def interlaced_png(rgb: np.ndarray) -> bytes:
    """Return an Adam7-interlaced PNG of uint8 [H, W, 3]."""
    height, width, _ = rgb.shape
    passes = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
    rows = b"".join(b"\0" + row.tobytes() for y, x, down, right in passes for row in rgb[y::down, x::right])
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def saved(image: Image.Image, kind: str, **settings: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **settings)
    return buffer.getvalue()


def photo() -> Image.Image:
    """Return an RGB image without any symmetry."""
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, 15, 7), fill="red")
    draw.rectangle((32, 16, 47, 31), fill="blue")
    return image


def diagram() -> Image.Image:
    """Return black and half-transparent grey on a transparent ground, as drawing programs export it."""
    image = Image.new("RGBA", (WIDTH, HEIGHT), (0, 0, 0, 0))
    draw = ImageDraw.Draw(image)
    draw.line((4, 28, 44, 28), fill=(0, 0, 0, 255), width=3)
    draw.rectangle((8, 8, 20, 20), fill=(40, 40, 40, 128))
    return image


def on_white(rgba: np.ndarray) -> np.ndarray:
    alpha = rgba[..., 3:].astype(float) / 255
    return np.rint(rgba[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)


def grey_of(values: np.ndarray) -> np.ndarray:
    return np.repeat(values.astype(np.uint8).reshape(HEIGHT, WIDTH, 1), 3, axis=2)


def transparent() -> dict[str, tuple[bytes, np.ndarray]]:
    drawn, plain = diagram(), np.asarray(photo())
    grey = drawn.convert("LA")
    palette = drawn.convert("RGBA").quantize(8)
    keyed = Image.new("P", (WIDTH, HEIGHT), 1)
    keyed.putpalette(bytes((0, 0, 0, 10, 20, 30)))
    ImageDraw.Draw(keyed).line((0, 5, 40, 5), fill=0, width=2)
    strokes = np.asarray(keyed) == 0
    opaque = saved(Image.fromarray(np.dstack([plain, np.full((HEIGHT, WIDTH), 255, np.uint8)])), "PNG")
    return {
        "RGBA": (saved(drawn, "PNG"), on_white(np.asarray(drawn))),
        "LA": (saved(grey, "PNG"), on_white(np.asarray(grey.convert("RGBA")))),
        "PA": (saved(palette, "PNG"), on_white(np.asarray(palette.convert("RGBA")))),
        "palette with a transparent index": (
            saved(keyed, "PNG", transparency=1),
            np.where(strokes[..., None], 0, 255).repeat(3, axis=2).astype(np.uint8),
        ),
        "WebP": (saved(drawn, "WEBP", lossless=True, exact=True), on_white(np.asarray(drawn))),
        "opaque RGBA": (opaque, plain),
        "L with a key": (
            raw_png(np.asarray(photo().convert("L"))[..., None], 8, 0, (76,)),
            grey_of(np.where(np.asarray(photo().convert("L")) == 76, 255, np.asarray(photo().convert("L")))),
        ),
        "RGB with a key": (
            raw_png(plain, 8, 2, (255, 0, 0)),
            np.where((plain == (255, 0, 0)).all(-1, keepdims=True), 255, plain).astype(np.uint8),
        ),
    }


def deep() -> dict[str, tuple[bytes, np.ndarray]]:
    """Return images of 16 bits."""
    ramp = np.linspace(0, 65535, WIDTH * HEIGHT).astype(np.int64).reshape(HEIGHT, WIDTH, 1)
    colours = np.dstack([ramp, ramp[::-1], np.full_like(ramp, 0x1234)])
    near = np.full((HEIGHT, WIDTH, 3), 0x1203)
    near[::2] = 0x1204  # the same high bytes
    alpha = np.dstack([np.full_like(ramp, 0), np.full_like(ramp, 0)])
    alpha[4:8, :, 1] = 65535
    return {
        "grey of 16 bits": (raw_png(ramp, 16, 0), grey_of(np.rint(ramp / 257))),
        "grey of 16 bits with a key": (
            raw_png(np.where(ramp < 30000, 700, ramp), 16, 0, (700,)),
            grey_of(np.where(ramp < 30000, 255, np.rint(ramp / 257))),
        ),
        "RGB of 16 bits": (raw_png(colours, 16, 2), (colours >> 8).astype(np.uint8)),
        "RGB of 16 bits with a key": (
            raw_png(near, 16, 2, (0x1203,) * 3),
            np.where(near == 0x1203, 255, 0x12).astype(np.uint8),
        ),
        "grey of 16 bits with alpha": (raw_png(alpha, 16, 4), grey_of(np.where(alpha[..., 1] > 0, 0, 255))),
    }


def rotated() -> dict[str, tuple[bytes, np.ndarray]]:
    """Return a photo in every orientation, that is, stored so that a viewer shows the same as of `photo`."""
    upright, images = np.asarray(photo()), {}
    stored = {
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: upright.transpose(1, 0, 2)[::-1],
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: upright.transpose(1, 0, 2)[:, ::-1],
    }
    for orientation, pixels in stored.items():
        exif = Image.Exif()
        exif[EXIF_ORIENTATION] = orientation
        image = Image.fromarray(np.ascontiguousarray(pixels))
        images[f"PNG of orientation {orientation}"] = (saved(image, "PNG", exif=exif), upright)
        images[f"WebP of orientation {orientation}"] = (saved(image, "WEBP", exif=exif, lossless=True), upright)
        jpeg = saved(image, "JPEG", exif=exif, quality=100, subsampling=0)
        images[f"JPEG of orientation {orientation}"] = (jpeg, upright)
    return images


def others() -> dict[str, tuple[bytes, np.ndarray]]:
    grey = photo().convert("L")
    plain, black = np.asarray(photo()), Image.new("RGB", (WIDTH, HEIGHT), "black")
    bits = photo().convert("1")
    settings: dict[str, Any] = {"save_all": True, "append_images": [black, black], "duration": 100}
    return {
        "one bit": (saved(bits, "PNG"), np.asarray(bits.convert("RGB"))),
        "grey": (saved(grey, "PNG"), np.asarray(grey.convert("RGB"))),
        "palette": (saved(photo().quantize(8), "PNG"), plain),
        "interlaced": (interlaced_png(plain), plain),
        "animated PNG": (saved(photo(), "PNG", **settings), plain),
        "animated WebP": (saved(photo(), "WEBP", lossless=True, **settings), plain),
        "CMYK JPEG": (saved(photo().convert("CMYK"), "JPEG", quality=100, subsampling=0), plain),
        "grey JPEG": (
            saved(photo().convert("L"), "JPEG", quality=100),
            np.asarray(photo().convert("L").convert("RGB")),
        ),
        "PNG with text": (saved(photo(), "PNG", pnginfo=None, icc_profile=b"no profile"), plain),
    }


ODD_IMAGES = {**transparent(), **deep(), **rotated(), **others()}
"""A file by its kind, and uint8 [H, W, 3] that everybody is to see."""

PLAIN_IMAGES = {
    "PNG": saved(photo(), "PNG"),
    "JPEG": saved(photo(), "JPEG", quality=95),
    "WebP": saved(photo(), "WEBP", lossless=True),
}


def tolerance(kind: str) -> int:
    """Return by how much one value may differ for the file's own loss."""
    return 12 if "JPEG" in kind else 1
