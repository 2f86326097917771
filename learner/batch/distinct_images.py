"""The distinct images of a microbatch.

Shape suffixes: P = patches, M = visual tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from learner.batch.image_decoder import ImageDecoder
from learner.batch.zigzag import deal
from learner.distributed import Context
from shared.types import Image
from shared.vision import Grid


@dataclass(frozen=True, slots=True, eq=False)
class LoadedImages:
    """The distinct images of some episodes, dealt to the ranks of a context group. Only this rank's images are
    decoded."""

    patches: Tensor  # uint8 [P,3,side,side], of this rank's images, one after another
    grids: tuple[Grid, ...]  # grids of this rank's images, or of a blank image if it has none
    lengths: tuple[int, ...]  # patches of each of this rank's images
    visual_tokens: list[int]  # number for each rank's images
    rows_M: np.ndarray  # int64, row of each visual token among those of all images, rank by rank
    readable: np.ndarray  # float32, for each episode: 0 if one of its images cannot be decoded on this rank


def load_images(
    of_episodes: Sequence[tuple[Image, ...]], decoder: ImageDecoder, context: Context, *, pin: bool
) -> LoadedImages:
    """Load this rank's images of some episodes. `pin`: into pinned memory, from which a GPU copies without the host."""
    of_ranks, sizes = deal_images(of_episodes, decoder, context.size)
    order = [image.content_hash for image in chain(*of_ranks)]
    first_row = dict(zip(order, accumulate((sizes[key] for key in order), initial=0), strict=False))
    rows = [first_row[image.content_hash] + np.arange(sizes[image.content_hash]) for image in chain(*of_episodes)]
    decoded = {image.content_hash: decoder.get_or_blank(image) for image in of_ranks[context.rank]}
    unreadable = {key for key, image in decoded.items() if not image.readable}
    readable = [all(image.content_hash not in unreadable for image in images) for images in of_episodes]
    lengths = tuple(len(image.patches) for image in decoded.values())
    side, merge_size = decoder.spec.patch_size, decoder.spec.merge_size
    blank: Grid = (1, merge_size, merge_size)  # an image of one visual token, for a tower without images
    patches = torch.empty(sum(lengths), 3, side, side, dtype=torch.uint8, pin_memory=pin)
    if lengths:
        np.concatenate([image.patches for image in decoded.values()], out=patches.numpy())
    return LoadedImages(
        patches=patches,
        grids=tuple(image.grid for image in decoded.values()) or (blank,),
        lengths=lengths,
        visual_tokens=[sum(sizes[image.content_hash] for image in images) for images in of_ranks],
        rows_M=np.concatenate([np.zeros(0, dtype=np.int64), *rows]),
        readable=np.array(readable, dtype=np.float32),
    )


def deal_images(
    of_episodes: Sequence[tuple[Image, ...]], decoder: ImageDecoder, num_ranks: int
) -> tuple[list[list[Image]], dict[str, int]]:
    """Return the distinct images of each rank, and content hash -> number of visual tokens, by which they are dealt."""
    distinct = {image.content_hash: image for image in chain(*of_episodes)}
    sizes = {key: decoder.spec.num_tokens(decoder.grid(image)) for key, image in distinct.items()}
    owners = deal(list(sizes.values()), num_ranks)
    images = [
        [image for image, owner in zip(distinct.values(), owners, strict=True) if owner == rank]
        for rank in range(num_ranks)
    ]
    return images, sizes
