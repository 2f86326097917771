"""Image files that are cut off or invalid, which Pillow refuses with errors of different kinds."""

from __future__ import annotations

import io

from PIL import Image as PILImage


def encoded(kind: str) -> bytes:
    buffer = io.BytesIO()
    PILImage.new("RGB", (64, 64), "red").save(buffer, kind)
    return buffer.getvalue()


def cut(data: bytes, chunk: bytes) -> bytes:
    """Return a PNG cut off three bytes after the kind of its chunk `chunk`."""
    return data[: data.index(chunk) + len(chunk) + 3]


DAMAGED = {
    "a PNG that ends in its first chunk": cut(encoded("PNG"), b"IHDR"),
    "a PNG whose second chunk is none": encoded("PNG")[:33] + b"\0\0\0\1\x01\x02\x03\x04" + bytes(12),
    "a PNG whose pixels break off": encoded("PNG")[:-30],
    "a JPEG of six bytes": encoded("JPEG")[:6],
    "a JPEG that ends in its header": encoded("JPEG")[:40],
    "half a WebP": encoded("WEBP")[: len(encoded("WEBP")) // 2],
    "a WebP that ends in its header": encoded("WEBP")[:20],
    "no image": b"no image",
    "nothing": b"",
}
