"""Reads recordings, whatever has become of their files; `shared.recordings` tells the layout."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import xxhash

from shared.frames import num_items
from shared.recordings.records import (
    FORMAT_VERSION,
    AnyRecord,
    Episode,
    ImageRef,
    StepHeader,
    StepImages,
    Summary,
    summary_of,
)

FOLDER, IMAGES = "recordings", "images"
SUFFIX, INDEX_SUFFIX = ".rec", ".idx"
MAGIC = b"PRONKREC"
MAX_RECORD_BYTES = 256 * 2**20
MAX_IMAGE_BYTES = 256 * 2**20
MAX_ITEMS = 2**19  # of one record's msgpack
MAX_DAMAGES = 100  # of one file, before its rest is given up
_STEM = re.compile(r"step_([0-9]{8,12})|evaluation_([0-9]{8,12})_([a-z0-9_]{1,64})")
_PLACE = re.compile(r"([0-9]{1,12})(?:-([a-z0-9_]{1,64}))?")
START, FRAME = struct.Struct("<8sI"), struct.Struct("<IQ")
_DECODER: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)


class RecordingError(ValueError):
    """What is asked for is no recording, one of another format, or damaged; one line that names the file."""


class Place(NamedTuple):
    """Which recording of a run: that of a step, or of an evaluation after it. As text `12` or `12-NAME`."""

    step: int
    evaluation: str = ""

    def __str__(self) -> str:
        return f"{self.step}-{self.evaluation}" if self.evaluation else str(self.step)

    @staticmethod
    def parse(text: str) -> Place:
        """ValueError for a text that is no place."""
        if not (found := _PLACE.fullmatch(text)):
            raise ValueError(f"{text[:100]!r} is no step like 12, nor an evaluation after one like 12-step_12")
        return Place(int(found[1]), found[2] or "")

    @staticmethod
    def of(path: Path) -> Place | None:
        """Of a recording's file; None for a file of another name."""
        if found := _STEM.fullmatch(path.stem):
            return Place(int(found[1] or found[2]), found[3] or "")
        return None

    def path(self, folder: Path) -> Path:
        stem = f"evaluation_{self.step:08d}_{self.evaluation}" if self.evaluation else f"step_{self.step:08d}"
        return folder / f"{stem}{SUFFIX}"


def step_path(folder: Path, step: int) -> Path:
    return Place(step).path(folder)


def recordings(folder: Path) -> list[Place]:
    """All of a run's folder `recordings`: by step, those of evaluations behind the step's own."""
    try:
        paths = [Path(entry.name) for entry in os.scandir(folder) if entry.name.endswith(SUFFIX)]
    except FileNotFoundError:
        return []
    return sorted(place for path in paths if (place := Place.of(path)))


def steps(folder: Path) -> list[Path]:
    """The recordings of a run's folder `recordings` that are of steps, in their order."""
    return [place.path(folder) for place in recordings(folder) if not place.evaluation]


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """What the index of a recording says, completed from the recording itself where that has more."""

    path: Path
    header: StepHeader
    summaries: tuple[Summary, ...]
    damages: tuple[str, ...]  # what could not be read, a line each; a file that is just being written has none

    def episode(self, summary: Summary) -> Episode:
        return read_episode(self.path, summary)


def read_step(path: Path) -> RecordedStep:
    """`path`: of a .rec file. RecordingError: it is none, or of another format, or its header is damaged."""
    header, start = _header_of(path)
    damages, summaries, size = list[str](), list[Summary](), path.stat().st_size
    with suppress(RecordingError):  # an index is only quicker
        summaries = [found.record for found in scan(_index_of(path), []) if isinstance(found.record, Summary)]
    if summaries and _fit(summaries, start, size):
        start = summaries[-1].offset + summaries[-1].length
    else:
        summaries = []
    if start != size:  # the index is behind
        rest = scan(path, damages, start)
        summaries += [summary_of(r.record, r.offset, r.length) for r in rest if isinstance(r.record, Episode)]
    return RecordedStep(path, header, tuple(summaries), tuple(damages))


def image_names(path: Path) -> tuple[str, ...]:
    """The files of the images that a .rec file's episodes show; without its index they are not known."""
    with suppress(RecordingError):
        for found in scan(_index_of(path), []):
            if isinstance(found.record, StepImages):
                return found.record.names
    return ()


def _index_of(path: Path) -> Path:
    return path.with_suffix(INDEX_SUFFIX)


def _fit(summaries: list[Summary], start: int, size: int) -> bool:
    """Whether they lie in the file one after another from `start` on, so that the index has lost none between them."""
    ends = [start, *(summary.offset + summary.length for summary in summaries)]
    return ends[-1] <= size and all(s.offset == end + FRAME.size for end, s in zip(ends, summaries, strict=False))


def read_episode(path: Path, summary: Summary) -> Episode:
    """RecordingError if it is damaged, or no longer there."""
    with _opened(path) as file:
        found = _next(file, path, summary.offset - FRAME.size)
    if isinstance(found, Found) and isinstance(found.record, Episode) and found.length == summary.length:
        return found.record
    raise RecordingError(f"{path}: {summary.id} is not at {summary.offset}: {getattr(found, 'what', 'another record')}")


def episodes(path: Path, damages: list[str] | None = None) -> Iterator[Episode]:
    """All episodes of a .rec file that can be read, in their order; `damages` is given a line for each of the rest."""
    for found in scan(path, [] if damages is None else damages):
        if isinstance(found.record, Episode):
            yield found.record


def read_image(folder: Path, image: ImageRef) -> bytes:
    """The file of an image in a run's folder `recordings`; its bytes are what the run was given, so that they are to
    be decoded as anything from outside. RecordingError: it is not there, or not what its name says."""
    path = folder / IMAGES / image.file_name
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_IMAGE_BYTES:
                raise RecordingError(f"{path} has more than {MAX_IMAGE_BYTES} bytes")
            data = file.read(MAX_IMAGE_BYTES)
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}") from error
    if xxhash.xxh3_128_hexdigest(data) != image.hash:
        raise RecordingError(f"{path} is damaged: its content is not that of its name")
    return data


@dataclass(frozen=True, slots=True)
class Found:
    """A record with the place of its msgpack in the file."""

    record: AnyRecord
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Damage:
    """Why there is no record, and where the next one may begin; -1: nowhere."""

    what: str
    next: int


def scan(path: Path, damages: list[str], start: int = 0) -> Iterator[Found]:
    """The records of a file from byte `start`, where one begins; `damages` is given a line for each that is damaged.
    RecordingError: it is no file of records of this format."""
    count = 0
    with _opened(path) as file:
        size, place = os.fstat(file.fileno()).st_size, max(start, START.size)
        while place != size:
            found = _next(file, path, place)
            if isinstance(found, Found):
                place = found.offset + found.length
                yield found
                continue
            count += 1
            damages.append(f"{path}, byte {place}: {found.what}")
            if found.next < 0 or count == MAX_DAMAGES:
                return
            place = found.next


def _opened(path: Path) -> BinaryIO:
    """A file of records of this format. RecordingError."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}") from error
    start = file.read(START.size)
    if len(start) < START.size or start[: len(MAGIC)] != MAGIC:
        file.close()
        raise RecordingError(f"{path} is no recording: it does not begin as one")
    _, version = START.unpack(start)
    if version != FORMAT_VERSION:
        file.close()
        raise RecordingError(
            f"{path} has format {version} of recordings, this Pronk reads {FORMAT_VERSION}; read it with the one that "
            "wrote it"
        )
    return file


def _next(file: BinaryIO, path: Path, place: int) -> Found | Damage:
    size = os.fstat(file.fileno()).st_size
    if place < START.size or place + FRAME.size > size:
        return Damage("the file is cut off", -1)
    file.seek(place)
    length, checksum = FRAME.unpack(file.read(FRAME.size))
    end = place + FRAME.size + length
    if end > size:
        return Damage("the file is cut off", -1)
    if length > MAX_RECORD_BYTES:
        return Damage(f"a record of {length} bytes, the limit is {MAX_RECORD_BYTES}", end)
    payload = file.read(length)
    if xxhash.xxh3_64_intdigest(payload) != checksum:
        return Damage("a record is damaged: its checksum does not match", end)
    try:
        return Found(decode(payload), place + FRAME.size, length)
    except RecordingError as error:
        return Damage(str(error), end)


def decode(payload: bytes) -> AnyRecord:
    """The record, with arrays that are views of `payload`. RecordingError if it breaks its type or bounds."""
    if len(payload) > MAX_ITEMS and num_items(payload, MAX_ITEMS) > MAX_ITEMS:
        raise RecordingError(f"a record of more than {MAX_ITEMS} items")
    try:
        record = _DECODER.decode(payload)
        if isinstance(record, Episode):
            _check(record)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
        raise RecordingError(f"a record is not what it should be: {' '.join(str(error).split())[:300]}") from None
    return record


def _check(episode: Episode) -> None:
    """ValueError unless the lengths of an episode's parts agree."""
    mask = episode.loss_mask.numpy()
    for name in ("token_ids", "loss_mask", "behaviour_logprobs", "policy_versions"):
        if getattr(episode, name).numpy().shape != (len(mask.reshape(-1)),):
            raise ValueError(f"{name} is not of [T]")
    num_sampled = int((mask == 1).sum())
    for name, column in episode.columns.items():
        if column.numpy().shape != (num_sampled,):
            raise ValueError(f"the column {name} is not of the {num_sampled} sampled tokens")
    if episode.pieces and len(episode.pieces) != len(mask):
        raise ValueError(f"{len(episode.pieces)} pieces of text for {len(mask)} tokens")
    for turn in episode.turns:
        if not turn.start <= turn.end <= len(mask) or not turn.first_image <= turn.last_image <= len(episode.images):
            raise ValueError(f"a turn [{turn.start}, {turn.end}) of {len(mask)} tokens and its images do not fit")


def _header_of(path: Path) -> tuple[StepHeader, int]:
    """With the place where it ends."""
    with _opened(path) as file:
        found = _next(file, path, START.size)
    if isinstance(found, Found) and isinstance(found.record, StepHeader):
        return found.record, found.offset + found.length
    raise RecordingError(f"{path} has no header: {getattr(found, 'what', 'it begins with another record')}")
