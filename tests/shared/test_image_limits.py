"""Images from outside: only formats that we expect, and no file that unpacks to gigabytes."""

from __future__ import annotations

import base64
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from actor.engine.request_images import ImageCache
from envs.datasets import data_uri, load_dataset
from envs.row_files import write_rows
from learner.batch.image_decoder import ImageDecoder
from shared.families.registry import FAMILIES
from shared.types import Image
from shared.vision import VisionSpec
from tests.support.hostile.images import DAMAGED, encoded

SPEC = VisionSpec(image_token_id=7, family=FAMILIES["qwen3_vl"])


def bomb(side: int) -> bytes:
    """A PNG of a few bytes that claims `side` x `side` pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def engine(data: bytes) -> None:
    ImageCache(SPEC).get(["data:image/png;base64," + base64.b64encode(data).decode()])


def learner(data: bytes) -> None:
    ImageDecoder(SPEC).get(Image.of(data))


def dataset(data: bytes) -> None:
    """ValueError if the row with this image is left out, and why."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"problem": "x?", "answer": "1"}, {"problem": "<image>?", "answer": "1", "images": [data_uri(data)]}]
        write_rows(Path(folder) / "rows.jsonl", rows)
        report = load_dataset(Path(folder) / "rows.jsonl").report
    if report.bad_images:
        raise ValueError(report.summary())


EVERYWHERE = pytest.mark.parametrize("take", [engine, learner, dataset])


@EVERYWHERE
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_expected_formats_are_read(take: Callable[[bytes], None], kind: str) -> None:
    take(encoded(kind))


@EVERYWHERE
@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "PPM", "ICO"])
def test_other_formats_are_refused(take: Callable[[bytes], None], kind: str) -> None:
    with pytest.raises(ValueError, match="PNG, JPEG and WebP are read"):
        take(encoded(kind))


@EVERYWHERE
@pytest.mark.parametrize("damage", sorted(DAMAGED))
def test_a_damaged_image_is_one_error_of_its_reader(take: Callable[[bytes], None], damage: str) -> None:
    with pytest.raises(ValueError, match=r"image"):
        take(DAMAGED[damage])


def test_the_engine_refuses_an_image_beyond_its_context_before_it_is_decoded() -> None:
    images, uri = ImageCache(SPEC, max_tokens=4), "data:image/png;base64," + base64.b64encode(bomb(1000)).decode()
    with pytest.raises(ValueError, match="tokens; the context is 4"):  # else: that the file is cut off
        images.get([uri])


@EVERYWHERE
@pytest.mark.parametrize("side", [10_000, 60_000])
def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(take: Callable[[bytes], None], side: int) -> None:
    with pytest.raises(ValueError, match=r"above|too large|exceeds|bomb"):
        take(bomb(side))
