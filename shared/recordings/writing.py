"""How the recording of a step is written; `shared.recordings` tells the layout. A full disk raises OSError."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import xxhash

from shared.recordings.reading import FRAME, INDEX_SUFFIX, MAGIC, START, Place, decode
from shared.recordings.records import FORMAT_VERSION, AnyRecord, Episode, StepHeader, StepImages, summary_of


class RecordWriter:
    """Appends records to `path`, a new file; what was there under the name stays with those who read it. OSError when
    the disk refuses."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._file = path.open("xb", buffering=0)
        self.num_bytes = 0
        self._write(START.pack(MAGIC, FORMAT_VERSION))

    def add(self, record: AnyRecord) -> tuple[int, int]:
        """(offset, length) of its msgpack. RecordingError if no reader would take it: nothing is written then."""
        payload = msgspec.msgpack.encode(record)
        decode(payload)
        place = self.num_bytes + FRAME.size
        self._write(FRAME.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload)
        return place, len(payload)

    def _write(self, data: bytes) -> None:
        while data:
            count = self._file.write(data)
            self.num_bytes += count
            data = data[count:]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class StepWriter:
    """Writes the recording of one step, or of one evaluation, with its index into `folder`, which exists."""

    def __init__(self, folder: Path, header: StepHeader, images: StepImages) -> None:
        self.path = Place(header.step, header.evaluation).path(folder)
        self._index = RecordWriter(self.path.with_suffix(INDEX_SUFFIX))
        try:
            self._records = RecordWriter(self.path)
            self._records.add(header)
            for record in (header, images):
                self._index.add(record)
        except BaseException:
            self._index.close()
            raise

    def add(self, episode: Episode) -> None:
        self._index.add(summary_of(episode, *self._records.add(episode)))

    @property
    def num_bytes(self) -> int:
        return self._records.num_bytes + self._index.num_bytes

    def close(self) -> None:
        self._records.close()
        self._index.close()
