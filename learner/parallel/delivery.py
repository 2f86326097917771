"""Groups from rank 0 to every rank, and their images to the ranks that train on them, each image once a step.

Every rank plans with the tokens of all episodes. Images are the bulk of a step: of them it gets the sizes, and the
files of those that it decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist

from learner.distributed import Ranks, broadcast_frames
from learner.images import AbsentImage, ImageDecoder, size_of
from shared.codec import decode, frames_of, split_images
from shared.frames import HASH_DIGITS, Frame
from shared.types import Group, Image

PIECE_BYTES = 2**26  # that travel at once, or one image
NO_SIZE = (0, 0)  # of what is no image, in an episode that is not trained on


def broadcast_groups(groups: Sequence[Group] | None, ranks: Ranks) -> Sequence[Group]:
    """Rank 0's groups on every rank; the others pass None, and have `AbsentImage`s in the place of images."""
    if ranks.size == 1:
        assert groups is not None
        return groups
    if groups is not None:
        split = [split_images(frames_of(group)) for group in groups]
        counts = np.array([(len(frames), len(images)) for frames, images in split], dtype=np.int64).tobytes()
        shown = [image for _, images in split for image in images]
        sizes = np.array([_size_or_none(image) for image in shown], dtype=np.uint32).tobytes()
        names = "".join(image.content_hash for image in shown).encode()
        broadcast_frames([counts, sizes, names, *(frame for frames, _ in split for frame in frames)], ranks)
        return groups
    return list(_received(*broadcast_frames(None, ranks)))


def _received(counts: Frame, sizes: Frame, names: Frame, *frames: Frame) -> Iterator[Group]:
    text, rest = str(names, "ascii"), iter(frames)
    keys = (text[at : at + HASH_DIGITS] for at in range(0, len(text), HASH_DIGITS))
    widths, heights = np.frombuffer(sizes, np.uint32).reshape(-1, 2).T.tolist()
    images = map(AbsentImage, keys, zip(widths, heights, strict=True))
    for num_frames, num_images in np.frombuffer(counts, np.int64).reshape(-1, 2).tolist():
        group = decode(list(islice(rest, num_frames)), images=list(islice(images, num_images)))
        assert isinstance(group, Group)
        yield group


def _size_or_none(image: Image) -> tuple[int, int]:
    try:
        return size_of(image)
    except ValueError:
        return NO_SIZE


class Delivery:
    """The images of one step after the other. The same calls on every rank."""

    def __init__(self, ranks: Ranks, decoder: ImageDecoder) -> None:
        self._ranks, self._decoder = ranks, decoder
        self._sent: list[set[str]] = [set() for _ in range(ranks.size)]  # to each rank, in this step
        self.num_bytes = 0  # of files that this rank has sent, or got

    def forget(self) -> None:
        """The step is over."""
        self._decoder.files.clear()
        for keys in self._sent:
            keys.clear()

    def bring(self, wanted: Callable[[int], Mapping[str, Image]]) -> None:
        """What each rank wants, by content hash, goes to it, but for what it has got in this step; a collective.

        `wanted` is asked on rank 0 for every rank, on the others for their own; RuntimeError for a damaged image."""
        if self._ranks.is_main:
            for rank in range(1, self._ranks.size):
                self._send(self._new(wanted, rank), rank)
        else:
            self._receive(self._new(wanted, self._ranks.rank))

    def _new(self, wanted: Callable[[int], Mapping[str, Image]], rank: int) -> dict[str, Image]:
        new = {key: image for key, image in wanted(rank).items() if key not in self._sent[rank]}
        self._sent[rank].update(new)
        return new

    def _send(self, images: Mapping[str, Image], rank: int) -> None:
        if not images:
            return
        files = [memoryview(image.data) for image in images.values()]
        sizes = [len(data) for data in files]
        dist.send(torch.tensor(sizes), rank, group=self._ranks.on_cpu)
        self.num_bytes += sum(sizes)
        for start, end in _pieces(sizes):
            piece = bytearray().join(files[start:end])
            if piece:
                dist.send(torch.frombuffer(piece, dtype=torch.uint8), rank, group=self._ranks.on_cpu)

    def _receive(self, images: Mapping[str, Image]) -> None:
        if not images:
            return
        told, keys = torch.zeros(len(images), dtype=torch.int64), list(images)
        dist.recv(told, 0, group=self._ranks.on_cpu)
        sizes: list[int] = told.tolist()
        self.num_bytes += sum(sizes)
        for start, end in _pieces(sizes):
            piece, place = bytearray(sum(sizes[start:end])), 0
            if piece:
                dist.recv(torch.frombuffer(piece, dtype=torch.uint8), 0, group=self._ranks.on_cpu)
            view = memoryview(piece).toreadonly()
            for key, size in zip(keys[start:end], sizes[start:end], strict=True):
                image = Image.of(view[place : place + size])
                if image.content_hash != key:
                    raise RuntimeError(f"image {key[:12]} was damaged on its way from rank 0")
                self._decoder.files[key] = image.data
                place += size


def _pieces(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, end) of stretches that together have `PIECE_BYTES` at most, or are one image."""
    start = total = 0
    for at, size in enumerate(sizes):
        if at > start and total + size > PIECE_BYTES:
            yield start, at
            start, total = at, 0
        total += size
    yield start, len(sizes)
