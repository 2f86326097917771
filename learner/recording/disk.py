"""The disk that a run's recordings take, and what goes when it is too much."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from shared.recordings.reading import IMAGES, INDEX_SUFFIX, Place, image_names, recordings

NOWHERE = Place(-1)
BLOCK = 4096  # what a file takes at least
KEPT_SHARE = 0.9  # of the bound, once it was passed: not every step has to look for what may go


class Disk:
    """The recordings and images in `folder` of `max_bytes`, which is made. The oldest recordings go first, with the
    images that no later one shows. OSError when the disk refuses."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        (folder / IMAGES).mkdir(parents=True, exist_ok=True)
        self._recordings: dict[Place, int] = {}  # bytes of each
        self._images: dict[str, Place] = {}  # the last recording that shows each, by file name
        self._sizes: dict[str, int] = {}  # of images
        for entry in os.scandir(folder / IMAGES):
            self._images[entry.name], self._sizes[entry.name] = NOWHERE, _blocks(entry.stat().st_size)
        for place in recordings(folder):
            path = place.path(folder)
            self._recordings[place] = _size(path) + _size(path.with_suffix(INDEX_SUFFIX))
            self._show(image_names(path), place)
        self.num_bytes = sum(self._recordings.values()) + sum(self._sizes.values())

    def add(self, place: Place, num_bytes: int) -> None:
        """The recording is written."""
        self.num_bytes += _blocks(num_bytes) - self._recordings.get(place, 0)
        self._recordings[place] = _blocks(num_bytes)

    def add_images(self, images: Mapping[str, bytes | memoryview], place: Place) -> int:
        """Writes those that are not there yet; the bytes written. A file appears when it is complete."""
        written = 0
        for name, data in images.items():
            if name not in self._sizes:
                partial = self._folder / IMAGES / f".{name}.partial"
                partial.write_bytes(data)
                os.replace(partial, self._folder / IMAGES / name)
                self._sizes[name] = _blocks(len(data))
                self.num_bytes += self._sizes[name]
                written += len(data)
        self._show(images, place)
        return written

    def make_room(self, place: Place) -> None:
        """Removes what is oldest, if there is too much; `place` is to be written next."""
        if self.num_bytes <= self._max_bytes:
            return
        for old in sorted(self._recordings):
            if self.num_bytes <= KEPT_SHARE * self._max_bytes:
                return
            if old != place:
                self._remove(old)

    def _remove(self, place: Place) -> None:
        path = place.path(self._folder)
        for file in (path.with_suffix(INDEX_SUFFIX), path):
            file.unlink(missing_ok=True)
        self.num_bytes -= self._recordings.pop(place)
        first = min(self._recordings, default=None)
        for name in [name for name, last in self._images.items() if last <= place and (first is None or last < first)]:
            (self._folder / IMAGES / name).unlink(missing_ok=True)
            del self._images[name]
            self.num_bytes -= self._sizes.pop(name)

    def _show(self, names: Mapping[str, object] | tuple[str, ...], place: Place) -> None:
        for name in names:
            if name in self._sizes:
                self._images[name] = max(place, self._images.get(name, NOWHERE))


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return _blocks(path.stat().st_size)
    return 0


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
