"""The images of a microbatch, each once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from learner.images import ImageDecoder, ImagePatches
from learner.parallel.layout import deal
from shared.types import Image


@dataclass(frozen=True, slots=True, eq=False)
class Pictures:
    """The distinct images of some episodes, dealt to the ranks of a context group by their patches."""

    images: list[list[Image]]  # of each rank
    visual_tokens: list[int]  # of each rank's images
    rows_M: np.ndarray  # int64, of each visual token among those of all images, rank by rank

    @staticmethod
    def of(of_episodes: Sequence[tuple[Image, ...]], decoder: ImageDecoder, num_ranks: int) -> Pictures:
        of_ranks, sizes = deal_images(of_episodes, decoder, num_ranks)
        order = [image.content_hash for image in chain(*of_ranks)]
        first_row = dict(zip(order, accumulate((sizes[key] for key in order), initial=0), strict=False))
        shown = [image.content_hash for image in chain(*of_episodes)]
        rows = [first_row[key] + np.arange(sizes[key]) for key in shown]
        return Pictures(
            of_ranks,
            [sum(sizes[image.content_hash] for image in of_rank) for of_rank in of_ranks],
            np.concatenate([np.zeros(0, dtype=np.int64), *rows]),
        )


def deal_images(
    of_episodes: Sequence[tuple[Image, ...]], decoder: ImageDecoder, num_ranks: int
) -> tuple[list[list[Image]], dict[str, int]]:
    """The distinct images of each rank, and the visual tokens of each by content hash."""
    distinct = {image.content_hash: image for image in chain(*of_episodes)}
    sizes = {key: math.prod(decoder.grid(image)) // decoder.spec.merge_size**2 for key, image in distinct.items()}
    owners = deal(list(sizes.values()), num_ranks)
    images = [
        [image for image, owner in zip(distinct.values(), owners, strict=True) if owner == rank]
        for rank in range(num_ranks)
    ]
    return images, sizes


def readable(
    of_episodes: Sequence[tuple[Image, ...]], shown: Sequence[Image], found: Sequence[ImagePatches]
) -> np.ndarray:
    """float32, for each episode: 0 where one of its images could not be decoded. `found`: what was made of `shown`."""
    wrong = {image.content_hash for image, patches in zip(shown, found, strict=True) if not patches.readable}
    if not wrong:
        return np.ones(len(of_episodes), dtype=np.float32)
    return np.array([all(i.content_hash not in wrong for i in images) for images in of_episodes], dtype=np.float32)


def together(patches: Sequence[np.ndarray], side: int, *, pin: bool) -> Tensor:
    """Images' patches one after another, uint8 [P,3,side,side], copied once; `pin`: into pinned memory, from which a
    GPU copies by itself."""
    out = torch.empty(sum(map(len, patches)), 3, side, side, dtype=torch.uint8, pin_memory=pin)
    if patches:
        np.concatenate(patches, out=out.numpy())
    return out
