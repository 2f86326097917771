"""Write the recording of a step; `shared.recordings` describes the files. A full disk raises OSError."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import xxhash

from shared.recordings.episode_format import (
    FORMAT_VERSION,
    AnyRecord,
    RecordedEpisode,
    StepHeader,
    StepImages,
    summary_of,
)
from shared.recordings.reader import FRAME, INDEX_SUFFIX, MAGIC, START, RecordingId, decode


class RecordWriter:
    """Appends records to the new file `path`. A previous file of that name is unlinked, so that those who are reading
    it keep it. The methods raise OSError if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._file = path.open("xb", buffering=0)
        self.num_bytes = 0
        self._write(START.pack(MAGIC, FORMAT_VERSION))

    def add(self, record: AnyRecord) -> tuple[int, int]:
        """Append a record; return (offset, length) of its msgpack. If no reader would accept it, raise RecordingError
        and write nothing."""
        payload = msgspec.msgpack.encode(record)
        decode(payload)
        offset = self.num_bytes + FRAME.size
        self._write(FRAME.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload)
        return offset, len(payload)

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
        self.path = RecordingId(header.step, header.evaluation).path(folder)
        self._index = RecordWriter(self.path.with_suffix(INDEX_SUFFIX))
        try:
            self._records = RecordWriter(self.path)
            self._records.add(header)
            for record in (header, images):
                self._index.add(record)
        except BaseException:
            self._index.close()
            raise

    def add(self, episode: RecordedEpisode) -> None:
        """Append an episode and its summary."""
        self._index.add(summary_of(episode, *self._records.add(episode)))

    @property
    def num_bytes(self) -> int:
        return self._records.num_bytes + self._index.num_bytes

    def close(self) -> None:
        self._records.close()
        self._index.close()
