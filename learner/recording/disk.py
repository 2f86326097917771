"""The disk that a run's recordings take, and what goes when it is too much."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from shared.recordings.reading import IMAGES, INDEX_SUFFIX, image_names, step_path, steps

BLOCK = 4096  # what a file takes at least
KEPT_SHARE = 0.9  # of the bound, once it was passed: not every step has to look for what may go


class Disk:
    """The steps and images in `folder` of `max_bytes`, which is made. The oldest steps go first, with the images that
    no later one shows. OSError when the disk refuses."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        (folder / IMAGES).mkdir(parents=True, exist_ok=True)
        self._steps: dict[int, int] = {}  # bytes of each
        self._images: dict[str, int] = {}  # the last step that shows each, by file name
        self._sizes: dict[str, int] = {}  # of images
        for entry in os.scandir(folder / IMAGES):
            self._images[entry.name], self._sizes[entry.name] = -1, _blocks(entry.stat().st_size)
        for path in steps(folder):
            number = path.stem.removeprefix("step_")
            if number.isdecimal():
                self._steps[int(number)] = _size(path) + _size(path.with_suffix(INDEX_SUFFIX))
                self._show(image_names(path), int(number))
        self.num_bytes = sum(self._steps.values()) + sum(self._sizes.values())

    def add_step(self, step: int, num_bytes: int) -> None:
        """`step` is written."""
        self.num_bytes += _blocks(num_bytes) - self._steps.get(step, 0)
        self._steps[step] = _blocks(num_bytes)

    def add_images(self, images: Mapping[str, bytes | memoryview], step: int) -> int:
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
        self._show(images, step)
        return written

    def make_room(self, step: int) -> None:
        """Removes what is oldest, if there is too much; `step` is to be written next."""
        if self.num_bytes <= self._max_bytes:
            return
        for old in sorted(self._steps):
            if self.num_bytes <= KEPT_SHARE * self._max_bytes:
                return
            if old != step:
                self._remove(old)

    def _remove(self, step: int) -> None:
        path = step_path(self._folder, step)
        for file in (path.with_suffix(INDEX_SUFFIX), path):
            file.unlink(missing_ok=True)
        self.num_bytes -= self._steps.pop(step)
        first = min(self._steps, default=None)
        for name in [name for name, last in self._images.items() if last <= step and (first is None or last < first)]:
            (self._folder / IMAGES / name).unlink(missing_ok=True)
            del self._images[name]
            self.num_bytes -= self._sizes.pop(name)

    def _show(self, names: Mapping[str, object] | tuple[str, ...], step: int) -> None:
        for name in names:
            if name in self._sizes:
                self._images[name] = max(step, self._images.get(name, -1))


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return _blocks(path.stat().st_size)
    return 0


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
