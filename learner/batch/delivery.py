"""Delivery of groups from rank 0 to every rank, and of their images to the ranks that train on them, each image once
per step.

Every rank plans with the tokens of all episodes. Images are most of a step's bytes: a rank gets the sizes of all
images, but only the files of those that it decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist

from learner.batch.image_decoder import AbsentImage, ImageDecoder, size_of
from learner.distributed import Ranks, broadcast_frames
from shared.types import Group, Image
from shared.wire.codec import decode, frames_of, split_images
from shared.wire.frames import HASH_DIGITS, Frame

PIECE_BYTES = 2**26  # largest message, unless one image is larger
NO_SIZE = (0, 0)  # size of an invalid image, in an episode that is not trained on


def broadcast_groups(groups: Sequence[Group] | None, ranks: Ranks) -> Sequence[Group]:
    """Return rank 0's groups on every rank. The other ranks pass None, and their groups have `AbsentImage`s as
    images."""
    if ranks.size == 1:
        assert groups is not None
        return groups
    if groups is not None:
        split = [split_images(frames_of(group)) for group in groups]
        counts = np.array([(len(frames), len(of_group)) for frames, of_group in split], dtype=np.int64).tobytes()
        images = [image for _, images_of_group in split for image in images_of_group]
        sizes = np.array([_size_or_none(image) for image in images], dtype=np.uint32).tobytes()
        names = "".join(image.content_hash for image in images).encode()
        broadcast_frames([counts, sizes, names, *(frame for frames, _ in split for frame in frames)], ranks)
        return groups
    return list(_received(*broadcast_frames(None, ranks)))


def _received(counts: Frame, sizes: Frame, names: Frame, *frames: Frame) -> Iterator[Group]:
    text, rest = str(names, "ascii"), iter(frames)
    keys = (text[start : start + HASH_DIGITS] for start in range(0, len(text), HASH_DIGITS))
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


@contextmanager
def delivered_images(
    images_of: Callable[[int], Mapping[str, Image]], ranks: Ranks, decoder: ImageDecoder
) -> Iterator[None]:
    """Deliver to each rank, once, the images that it decodes in a step, and forget them when the context ends; a
    collective.

    `images_of`: a rank's images by content hash, in the same order wherever it is called. Rank 0 calls it for every
    rank, the others for themselves. Raise RuntimeError for an image that was damaged in transit.
    """
    try:
        if ranks.is_main:
            for rank in range(1, ranks.size):
                _send(images_of(rank), rank, ranks)
        else:
            decoder.files.update(_receive(images_of(ranks.rank), ranks))
        yield
    finally:
        decoder.files.clear()


def _send(images: Mapping[str, Image], rank: int, ranks: Ranks) -> None:
    if not images:
        return
    files = [memoryview(image.data) for image in images.values()]
    sizes = [len(data) for data in files]
    dist.send(torch.tensor(sizes), rank, group=ranks.on_cpu)
    for start, end in _pieces(sizes):
        piece = bytearray().join(files[start:end])
        if piece:
            dist.send(torch.frombuffer(piece, dtype=torch.uint8), rank, group=ranks.on_cpu)


def _receive(images: Mapping[str, Image], ranks: Ranks) -> Iterator[tuple[str, bytes | memoryview]]:
    if not images:
        return
    keys, received_sizes = list(images), torch.zeros(len(images), dtype=torch.int64)
    dist.recv(received_sizes, 0, group=ranks.on_cpu)
    sizes: list[int] = received_sizes.tolist()
    for start, end in _pieces(sizes):
        piece = bytearray(sum(sizes[start:end]))
        if piece:
            dist.recv(torch.frombuffer(piece, dtype=torch.uint8), 0, group=ranks.on_cpu)
        view, offset = memoryview(piece).toreadonly(), 0
        for key, size in zip(keys[start:end], sizes[start:end], strict=True):
            image = Image.of(view[offset : offset + size])
            if image.content_hash != key:
                raise RuntimeError(f"image {key[:12]} was damaged on its way from rank 0")
            yield key, image.data
            offset += size


def _pieces(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of runs that have at most `PIECE_BYTES` together, or are a single image."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > PIECE_BYTES:
            yield start, index
            start, total = index, 0
        total += size
    yield start, len(sizes)
