"""Checks of PNG files without decoding them: their header, their chunks and the chunks' checksums."""

from __future__ import annotations

import struct
import zlib

_HEADER = struct.Struct(">8sI4sIIBBBBB")
_CHUNK = struct.Struct(">I4s")
_CRC = struct.Struct(">I")
_BEGIN = (b"\x89PNG\r\n\x1a\n", 13, b"IHDR")  # signature, length and kind of the first chunk
PLAIN_CHUNKS = frozenset({b"IHDR", b"IDAT", b"IEND", b"pHYs", b"sBIT", b"sRGB", b"tIME"})  # change no pixel
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}  # bits, by colour type


def png_size(data: bytes | memoryview) -> tuple[int, int] | None:
    """Return (width, height) in pixels from the file's header; None for what has no header of a PNG. Raise ValueError
    for a header that the format does not allow."""
    if len(data) < _HEADER.size:
        return None
    *begin, width, height, bits, colour, method, filters, interlaced = _HEADER.unpack_from(data)
    if (*begin,) != _BEGIN:
        return None
    if not (width and height) or bits not in _DEPTHS.get(colour, ()) or method or filters or interlaced > 1:
        raise ValueError(f"a PNG of {width}x{height} pixels, colour type {colour} and {bits} bits: there is none such")
    return width, height


def is_plain_png(data: bytes | memoryview) -> bool:
    """Tell whether a complete PNG is a still image of 8-bit RGB and nothing else: no transparency, orientation, colour
    profile or text that a decoder might act on."""
    *_, bits, colour, _, _, _ = _HEADER.unpack_from(data)
    return (bits, colour) == (8, 2) and kinds_of(data) <= PLAIN_CHUNKS


def is_unambiguous_png(data: bytes | memoryview) -> bool:
    """Tell whether every decoder makes the same RGB of a complete PNG: grey, palette or RGB of at most 8 bits, still,
    without transparency and orientation."""
    *_, bits, colour, _, _, _ = _HEADER.unpack_from(data)
    return colour in (0, 2, 3) and bits <= 8 and not kinds_of(data) & {b"tRNS", b"eXIf", b"acTL"}


def kinds_of(data: bytes | memoryview) -> set[bytes]:
    """Return the kinds of chunks of a PNG, as far as they follow one another."""
    offset, kinds = len(_BEGIN[0]), set[bytes]()
    while offset + _CHUNK.size <= len(data) and b"IEND" not in kinds:
        length, kind = _CHUNK.unpack_from(data, offset)
        kinds.add(kind)
        offset += 12 + length
    return kinds


def check_chunks(data: bytes | memoryview, *, pixels: bool) -> None:
    """Raise ValueError unless the PNG is complete: its chunks follow one another to the last, and match their
    checksums. Checksums of the pixel data, which take time in proportion to the file's size, are checked only with
    `pixels`. That is done once, when the file's content hash is made; from then on the hash detects damage.
    """
    view = memoryview(data)
    offset = len(_BEGIN[0])
    size = len(data)
    kinds: set[bytes] = set()
    while offset + 12 <= size and b"IEND" not in kinds:
        length, kind = _CHUNK.unpack_from(view, offset)
        end = offset + 8 + length
        if end + 4 > size:
            break
        if (pixels or kind != b"IDAT") and zlib.crc32(view[offset + 4 : end]) != _CRC.unpack_from(view, end)[0]:
            raise ValueError(f"a PNG's chunk at byte {offset} does not match its checksum")
        kinds.add(kind)
        offset = end + 4
    if not kinds.issuperset((b"IDAT", b"IEND")):
        raise ValueError(f"a PNG of {size} bytes breaks off")
