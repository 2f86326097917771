"""PNG files, judged without being decoded: their header, their chunks and the chunks' checksums."""

from __future__ import annotations

import struct
import zlib

_HEADER = struct.Struct(">8sI4sIIBBBBB")
_CHUNK = struct.Struct(">I4s")
_CRC = struct.Struct(">I")
_BEGIN = (b"\x89PNG\r\n\x1a\n", 13, b"IHDR")  # signature, length and kind of the first chunk
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}  # bits, by colour type


def png_size(data: bytes | memoryview) -> tuple[int, int] | None:
    """(width, height) in pixels, from the file's header; None for what has no header of a PNG. ValueError for one that
    the format does not have."""
    if len(data) < _HEADER.size:
        return None
    *begin, width, height, bits, colour, method, filters, interlaced = _HEADER.unpack_from(data)
    if (*begin,) != _BEGIN:
        return None
    if not (width and height) or bits not in _DEPTHS.get(colour, ()) or method or filters or interlaced > 1:
        raise ValueError(f"a PNG of {width}x{height} pixels, colour type {colour} and {bits} bits: there is none such")
    return width, height


def check_chunks(data: bytes | memoryview, *, pixels: bool) -> None:
    """ValueError unless the PNG is whole: its chunks follow one another to the last, and match their checksums.

    Those of the chunks that hold the `pixels` cost the more the larger the file is. Whoever makes the file's content
    hash looks at them; after that the hash tells what was damaged on its way.
    """
    view, place, size, kinds = memoryview(data), len(_BEGIN[0]), len(data), set[bytes]()
    while place + 12 <= size and b"IEND" not in kinds:
        length, kind = _CHUNK.unpack_from(view, place)
        end = place + 8 + length
        if end + 4 > size:
            break
        if (pixels or kind != b"IDAT") and zlib.crc32(view[place + 4 : end]) != _CRC.unpack_from(view, end)[0]:
            raise ValueError(f"a PNG's chunk at byte {place} does not match its checksum")
        kinds.add(kind)
        place = end + 4
    if not kinds.issuperset((b"IDAT", b"IEND")):
        raise ValueError(f"a PNG of {size} bytes breaks off")
