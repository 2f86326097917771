"""Image files as nobody should send them: cut off, of a wrong kind, lying about their size, or simply huge."""

from __future__ import annotations

import io
import random
import struct
import zlib
from functools import cache

from PIL import Image, PngImagePlugin

SIZE = (32, 32)


@cache
def drawn(kind: str, width: int = SIZE[0], height: int = SIZE[1], mode: str = "RGB") -> bytes:
    """A sound image file of that kind (PNG, JPEG, WEBP, GIF, BMP, TIFF)."""
    out = io.BytesIO()
    Image.new(mode, (width, height)).save(out, kind)
    return out.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    """A PNG whose header names this size, with `chunks` instead of what belongs there."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


def cut_off(rng: random.Random) -> bytes:
    whole = drawn(rng.choice(("PNG", "JPEG", "WEBP")))
    return whole[: rng.randrange(len(whole))]


def damaged(rng: random.Random) -> bytes:
    data = bytearray(drawn(rng.choice(("PNG", "JPEG", "WEBP"))))
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def of_another_kind(rng: random.Random) -> bytes:
    return rng.choice(
        (
            drawn("GIF"),
            drawn("BMP"),
            drawn("TIFF"),
            b"<svg xmlns='http://www.w3.org/2000/svg'/>",
            b"%PDF-1.7",
            b"\0" * 99,
        )
    )


def lying(rng: random.Random) -> bytes:
    """The header names a size that the file does not have."""
    sizes = (0, 1, 2**31 - 1, 2**32 - 1, 65500, 8192)
    return png(rng.choice(sizes), rng.choice(sizes), chunk(b"IDAT", zlib.compress(b"\0" * 100)))


def with_odd_chunks(rng: random.Random) -> bytes:
    odd = (
        b"\0\0\0\xffIDAT",
        struct.pack(">I", 2**31) + b"IDAT" + b"x",
        chunk(b"\xff\xfe\xfd\xfc", b"x"),
        chunk(b"zTXt", b"a\0\0" + zlib.compress(b"\0" * 2**24)),
        chunk(b"iCCP", b"a\0\0" + zlib.compress(b"\0" * 2**22)),
        chunk(b"eXIf", b"MM\0*" + b"\xff" * 300),
        chunk(b"acTL", b"\xff" * 8),
    )
    return png(32, 32, *rng.choices(odd, k=rng.randint(1, 3)))


@cache
def bomb() -> bytes:
    """A few hundred kilobytes that unpack to 2**26 pixels, the most that is ever decoded."""
    rows = zlib.compressobj(9)
    data = b"".join(rows.compress(b"\0" * (1 + 3 * 8192)) for _ in range(8192)) + rows.flush()
    return png(8192, 8192, chunk(b"IDAT", data))


def stretched(rng: random.Random) -> bytes:
    """Sound, but of a shape that no task has."""
    width, height = rng.choice(((1, 1), (1, 4000), (6000, 1), (3, 3), (2000, 2000)))
    return drawn(rng.choice(("PNG", "JPEG")), width, height, rng.choice(("RGB", "L")))


def with_text(rng: random.Random) -> bytes:
    """Sound, with megabytes of text beside the pixels."""
    note, out = PngImagePlugin.PngInfo(), io.BytesIO()
    note.add_text("comment", "x" * rng.choice((10, 2**20, 2**21)), zip=True)
    Image.new("RGB", SIZE).save(out, "PNG", pnginfo=note)
    return out.getvalue()


def hostile(rng: random.Random) -> bytes:
    """One of all these; a bomb once in a while."""
    if rng.random() < 0.02:
        return bomb()
    kinds = (cut_off, damaged, of_another_kind, lying, with_odd_chunks, stretched, with_text)
    return b"" if rng.random() < 0.05 else rng.choice(kinds)(rng)
