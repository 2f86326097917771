"""The disk space of a run's recordings, and the removal of old ones when it exceeds its limit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from shared.recordings.reader import IMAGES, INDEX_SUFFIX, RecordingId, image_names, recordings

NOWHERE = RecordingId(-1)
BLOCK = 4096  # a file takes a multiple of this
# Once the limit is exceeded, space is freed down to this share of it, so that not every step has to search.
KEPT_SHARE = 0.9


class Disk:
    """The recordings and images in `folder`, which is created, within `max_bytes`.

    The oldest recordings are removed first, with the images that no later recording shows. Raise OSError if the disk
    refuses.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        for part in (folder, folder / IMAGES):  # not the run's folder, if that was moved away
            part.mkdir(exist_ok=True)
        self._recordings: dict[RecordingId, int] = {}  # bytes of each recording
        self._images: dict[str, RecordingId] = {}  # file name -> the last recording that shows the image
        self._sizes: dict[str, int] = {}  # file name -> bytes of the image
        for entry in os.scandir(folder / IMAGES):
            self._images[entry.name], self._sizes[entry.name] = NOWHERE, _blocks(entry.stat().st_size)
        for recording in recordings(folder):
            path = recording.path(folder)
            self._recordings[recording] = _size(path) + _size(path.with_suffix(INDEX_SUFFIX))
            self._show(image_names(path), recording)
        self.num_bytes = sum(self._recordings.values()) + sum(self._sizes.values())

    def add(self, recording: RecordingId, num_bytes: int) -> None:
        """Count a recording that has been written."""
        self.num_bytes += _blocks(num_bytes) - self._recordings.get(recording, 0)
        self._recordings[recording] = _blocks(num_bytes)

    def add_images(self, images: Mapping[str, bytes | memoryview], recording: RecordingId) -> int:
        """Write the images that are not on the disk yet; return the bytes written. A file gets its name when it is
        complete."""
        written = 0
        for name, data in images.items():
            if name not in self._sizes or not (self._folder / IMAGES / name).exists():
                partial = self._folder / IMAGES / f".{name}.partial"
                partial.write_bytes(data)
                os.replace(partial, self._folder / IMAGES / name)
                self.num_bytes += _blocks(len(data)) - self._sizes.get(name, 0)
                self._sizes[name] = _blocks(len(data))
                written += len(data)
        self._show(images, recording)
        return written

    def make_room(self, recording: RecordingId) -> None:
        """Remove the oldest recordings if the limit is exceeded. `recording` is written next and stays."""
        if self.num_bytes <= self._max_bytes:
            return
        for old in sorted(self._recordings):
            if self.num_bytes <= KEPT_SHARE * self._max_bytes:
                return
            if old != recording:
                self._remove(old)

    def _remove(self, recording: RecordingId) -> None:
        path = recording.path(self._folder)
        for file in (path.with_suffix(INDEX_SUFFIX), path):
            file.unlink(missing_ok=True)
        self.num_bytes -= self._recordings.pop(recording)
        first = min(self._recordings, default=None)
        unused = [n for n, last in self._images.items() if last <= recording and (first is None or last < first)]
        for name in unused:
            (self._folder / IMAGES / name).unlink(missing_ok=True)
            del self._images[name]
            self.num_bytes -= self._sizes.pop(name)

    def _show(self, names: Mapping[str, object] | tuple[str, ...], recording: RecordingId) -> None:
        for name in names:
            if name in self._sizes:
                self._images[name] = max(recording, self._images.get(name, NOWHERE))


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return _blocks(path.stat().st_size)
    return 0


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
