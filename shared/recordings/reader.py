"""Read recordings, including damaged and cut-off files; `shared.recordings` describes the files."""

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

from shared.recordings.episode_format import (
    FORMAT_VERSION,
    AnyRecord,
    ImageRef,
    RecordedEpisode,
    StepHeader,
    StepImages,
    Summary,
    summary_of,
)
from shared.wire.frames import num_items

FOLDER, IMAGES = "recordings", "images"
SUFFIX, INDEX_SUFFIX = ".rec", ".idx"
MAGIC = b"PRONKREC"
MAX_RECORD_BYTES = 256 * 2**20
MAX_IMAGE_BYTES = 256 * 2**20
MAX_ITEMS = 2**19  # msgpack items of one record, at most
MAX_DAMAGES = 100  # damaged records of one file, after which the rest is not read
_STEM = re.compile(r"step_([0-9]{8,12})|evaluation_([0-9]{8,12})_([a-z0-9_]{1,64})")
_ID = re.compile(r"([0-9]{1,12})(?:-([a-z0-9_]{1,64}))?")
START, FRAME = struct.Struct("<8sI"), struct.Struct("<IQ")
_DECODER: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)


class RecordingError(ValueError):
    """The recording is missing, damaged, of another format, or no recording at all; one line that names the file."""


class RecordingId(NamedTuple):
    """One recording of a run: that of a step, or of an evaluation after it. As text `12` or `12-NAME`."""

    step: int
    evaluation: str = ""

    def __str__(self) -> str:
        return f"{self.step}-{self.evaluation}" if self.evaluation else str(self.step)

    @staticmethod
    def parse(text: str) -> RecordingId:
        """Return the recording that a text names. Raise ValueError for any other text."""
        if not (match := _ID.fullmatch(text)):
            raise ValueError(f"{text[:100]!r} is no step like 12, nor an evaluation after one like 12-step_12")
        return RecordingId(int(match[1]), match[2] or "")

    @staticmethod
    def of(path: Path) -> RecordingId | None:
        """Return the recording that a file is; None for a file of another name."""
        if match := _STEM.fullmatch(path.stem):
            return RecordingId(int(match[1] or match[2]), match[3] or "")
        return None

    def path(self, folder: Path) -> Path:
        """Return the file of this recording in `folder`."""
        stem = f"evaluation_{self.step:08d}_{self.evaluation}" if self.evaluation else f"step_{self.step:08d}"
        return folder / f"{stem}{SUFFIX}"


def recordings(folder: Path) -> list[RecordingId]:
    """Return all recordings in a run's folder `recordings`, by step; a step's own comes before its evaluations."""
    try:
        paths = [Path(entry.name) for entry in os.scandir(folder) if entry.name.endswith(SUFFIX)]
    except FileNotFoundError:
        return []
    return sorted(recording for path in paths if (recording := RecordingId.of(path)))


def steps(folder: Path) -> list[Path]:
    """Return the files of the steps' recordings in a run's folder `recordings`, in their order."""
    return [each.path(folder) for each in recordings(folder) if not each.evaluation]


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recording's header and summaries: from its index, completed from the recording itself if that has more
    episodes."""

    path: Path
    header: StepHeader
    summaries: tuple[Summary, ...]
    damages: tuple[str, ...]  # one line per record that could not be read; none for a file still being written

    def episode(self, summary: Summary) -> RecordedEpisode:
        """Return the episode of a summary. Raise RecordingError as `read_episode` does."""
        return read_episode(self.path, summary)


def read_step(path: Path) -> RecordedStep:
    """Read the .rec file `path` with its index. Raise RecordingError if it is no recording, of another format, or has a
    damaged header."""
    header, start = _header_of(path)
    damages: list[str] = []
    summaries: list[Summary] = []
    size = path.stat().st_size
    with suppress(RecordingError):  # the index only saves time
        summaries = [result.record for result in scan(_index_of(path), []) if isinstance(result.record, Summary)]
    if summaries and _is_gapless(summaries, start, size):
        start = summaries[-1].offset + summaries[-1].length
    else:
        summaries = []
    if start != size:  # the index lacks episodes
        rest = scan(path, damages, start)
        summaries += [summary_of(r.record, r.offset, r.length) for r in rest if isinstance(r.record, RecordedEpisode)]
    return RecordedStep(path, header, tuple(summaries), tuple(damages))


def image_names(path: Path) -> tuple[str, ...]:
    """Return the file names of the images in a .rec file's episodes, from its index; none if it has no index."""
    with suppress(RecordingError):
        for result in scan(_index_of(path), []):
            if isinstance(result.record, StepImages):
                return result.record.names
    return ()


def _index_of(path: Path) -> Path:
    return path.with_suffix(INDEX_SUFFIX)


def _is_gapless(summaries: list[Summary], start: int, size: int) -> bool:
    """Tell whether the summaries' records follow one another without gaps from `start` on, so that the index misses
    none in between."""
    ends = [start, *(summary.offset + summary.length for summary in summaries)]
    return ends[-1] <= size and all(s.offset == end + FRAME.size for end, s in zip(ends, summaries, strict=False))


def read_episode(path: Path, summary: Summary) -> RecordedEpisode:
    """Read one episode. Raise RecordingError if it is damaged, or no longer there."""
    with _open(path) as file:
        result = _next(file, path, summary.offset - FRAME.size)
    if (
        isinstance(result, LocatedRecord)
        and isinstance(result.record, RecordedEpisode)
        and result.length == summary.length
    ):
        return result.record
    raise RecordingError(
        f"{path}: {summary.id} is not at {summary.offset}: {getattr(result, 'what', 'another record')}"
    )


def episodes(path: Path, damages: list[str] | None = None) -> Iterator[RecordedEpisode]:
    """Yield all episodes of a .rec file that can be read, in their order; append a line to `damages` for each that
    cannot."""
    for result in scan(path, [] if damages is None else damages):
        if isinstance(result.record, RecordedEpisode):
            yield result.record


def read_image(folder: Path, image: ImageRef) -> bytes:
    """Return the bytes of an image in a run's folder `recordings`; they are untrusted data from outside, so decode them
    with care. Raise RecordingError if the file is missing, or if its content does not match the hash in its
    name."""
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
class LocatedRecord:
    """A record, and the position of its msgpack in the file."""

    record: AnyRecord
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged position: what is wrong there, and the offset where the next record may begin; -1 = nowhere."""

    what: str
    next: int


def scan(path: Path, damages: list[str], start: int = 0) -> Iterator[LocatedRecord]:
    """Yield the records of a file from byte `start` on, where a record must begin; append a line to `damages` for each
    damaged one. Raise RecordingError for a file that is not one of records in this format."""
    count = 0
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        offset = max(start, START.size)
        while offset != size:
            result = _next(file, path, offset)
            if isinstance(result, LocatedRecord):
                offset = result.offset + result.length
                yield result
                continue
            count += 1
            damages.append(f"{path}, byte {offset}: {result.what}")
            if result.next < 0 or count == MAX_DAMAGES:
                return
            offset = result.next


def _open(path: Path) -> BinaryIO:
    """Open a file of records of this format. Raise RecordingError for any other."""
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


def _next(file: BinaryIO, path: Path, offset: int) -> LocatedRecord | Damage:
    size = os.fstat(file.fileno()).st_size
    if offset < START.size or offset + FRAME.size > size:
        return Damage("the file is cut off", -1)
    file.seek(offset)
    length, checksum = FRAME.unpack(file.read(FRAME.size))
    end = offset + FRAME.size + length
    if end > size:
        return Damage("the file is cut off", -1)
    if length > MAX_RECORD_BYTES:
        return Damage(f"a record of {length} bytes, the limit is {MAX_RECORD_BYTES}", end)
    payload = file.read(length)
    if xxhash.xxh3_64_intdigest(payload) != checksum:
        return Damage("a record is damaged: its checksum does not match", end)
    try:
        return LocatedRecord(decode(payload), offset + FRAME.size, length)
    except RecordingError as error:
        return Damage(str(error), end)


def decode(payload: bytes) -> AnyRecord:
    """Decode a record, whose arrays are views of `payload`. Raise RecordingError if it breaks its type or
    bounds."""
    if len(payload) > MAX_ITEMS and num_items(payload, MAX_ITEMS) > MAX_ITEMS:
        raise RecordingError(f"a record of more than {MAX_ITEMS} items")
    try:
        record = _DECODER.decode(payload)
        if isinstance(record, RecordedEpisode):
            _check(record)
    except (msgspec.MsgspecError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        raise RecordingError(f"a record is not what it should be: {' '.join(str(error).split())[:300]}") from None
    return record


def _check(episode: RecordedEpisode) -> None:
    """Raise ValueError unless the lengths of an episode's parts agree."""
    mask = episode.loss_mask.numpy()
    for name in ("token_ids", "loss_mask", "behaviour_logprobs", "policy_versions"):
        if getattr(episode, name).numpy().shape != (len(mask.reshape(-1)),):
            raise ValueError(f"{name} is not of [T]")
        is_float = getattr(episode, name).numpy().dtype.kind == "f"
        if is_float != (name == "behaviour_logprobs"):
            raise ValueError(f"{name} is of {'floats' if is_float else 'integers'}")
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
    """Return the header, and the byte where it ends."""
    with _open(path) as file:
        result = _next(file, path, START.size)
    if isinstance(result, LocatedRecord) and isinstance(result.record, StepHeader):
        return result.record, result.offset + result.length
    raise RecordingError(f"{path} has no header: {getattr(result, 'what', 'it begins with another record')}")
