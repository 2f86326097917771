"""Episodes with the images of others in place of their own, by which it is measured whether the policy looks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from learner.batch.episodes import TrainingEpisode
from shared.types import Image

MEASURED = 8  # episodes at most


def with_other_images(episodes: Sequence[TrainingEpisode], indices: Collection[int]) -> list[TrainingEpisode]:
    """Return pairs, one after another: an episode of a step as it is, and with images of an episode of another group.

    `indices`: of the episodes that may be taken; `MEASURED` of them are. An image is replaced by one of the same size,
    so that the tokens stay where they are. Episodes that show no image, or for which there is no other one, are left
    out. The second of a pair has the index -2 - i of the first one's i.
    """
    pairs: list[TrainingEpisode] = []
    shown = [e for e in episodes if e.images]
    for episode in shown:
        if episode.index not in indices or len(pairs) == 2 * MEASURED:
            continue
        if (images := next(_others(episode, shown), None)) is not None:
            pairs += [episode, replace(episode, images=images, index=-2 - episode.index, group=-2 - episode.group)]
    return pairs


def _others(episode: TrainingEpisode, shown: Sequence[TrainingEpisode]) -> Iterator[tuple[Image, ...]]:
    """Yield images of other groups' episodes, beginning with the next group, that fit in the places of the episode's
    and are all different from them."""
    own = {image.content_hash for image in episode.images}
    for donor in [e for e in shown if e.group > episode.group] + [e for e in shown if e.group < episode.group]:
        of_grid = {
            grid: [i for i, g in zip(donor.images, donor.grids, strict=True) if g == grid] for grid in donor.grids
        }
        if not set(episode.grids) <= of_grid.keys():
            continue
        images = tuple(of_grid[grid][n % len(of_grid[grid])] for n, grid in enumerate(episode.grids))
        if not own & {image.content_hash for image in images}:
            yield images
