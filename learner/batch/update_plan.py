"""The plan of one update: the gradient of some of a step's episodes, in microbatches on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from learner.batch.binning import Bins, assign_microbatches, assign_neighbours, probe_of
from learner.batch.episodes import TrainingEpisode
from learner.distributed import Ranks
from shared.config.learner_section import LearnerConfig
from shared.families.model_sizes import ModelSizes


@dataclass(frozen=True, slots=True, eq=False)
class UpdatePlan:
    """One gradient: its divisors and its microbatches."""

    num_episodes: int
    num_tokens: int  # number of sampled tokens, including those of episodes whose loss is exactly 0
    # The microbatches of each context group, as indices of the step's episodes; all groups have equally many.
    bins: list[Bins]
    microbatches: list[list[TrainingEpisode]]  # microbatches of this rank's context group
    probe: list[TrainingEpisode]  # some episodes of the last microbatch


def plan_update(
    episodes: Sequence[TrainingEpisode],
    indices: Sequence[int],
    config: LearnerConfig,
    ranks: Ranks,
    sizes: ModelSizes | None,
    *,
    keep_all: bool = False,
) -> UpdatePlan:
    """Return the plan of an update on the episodes with these indices.

    `sizes`: None if the model's sizes are unknown. Episodes whose loss is exactly 0 are in no microbatch, unless
    `keep_all` is set.
    """
    useful = [i for i in indices if keep_all or not has_no_loss(episodes[i], config)]
    num_groups = ranks.size // ranks.context.size
    bins: list[Bins] = [[] for _ in range(num_groups)]
    if useful:
        lengths = [episodes[i].num_tokens for i in useful]
        costs = None if sizes is None else forward_costs([episodes[i] for i in useful], sizes)
        assign = assign_microbatches if config.group_size == 1 else assign_neighbours
        of_groups = assign(lengths, num_groups, config.parallel.microbatch_tokens * ranks.context.size, costs)
        bins = [[[useful[i] for i in positions] for positions in of_group] for of_group in of_groups]
    own = bins[ranks.context_group]
    return UpdatePlan(
        num_episodes=len(indices),
        num_tokens=sum(episodes[i].num_sampled for i in indices),
        bins=bins,
        microbatches=[[episodes[i] for i in chosen] for chosen in own],
        probe=[episodes[i] for i in probe_of(own)],
    )


def has_no_loss(episode: TrainingEpisode, config: LearnerConfig) -> bool:
    """Tell whether an episode's loss is exactly 0, so that no update computes it."""
    return episode.advantage == 0.0 and config.objective.skips_zero_advantage


def forward_costs(episodes: Sequence[TrainingEpisode], sizes: ModelSizes) -> list[float]:
    """Return the operations of each episode's forward. Attention grows with the square of the length; an image counts
    only in the first episode that has it."""
    seen: set[str] = set()
    costs = []
    for episode in episodes:
        images = zip(episode.images, episode.grids, strict=True)
        new = {image.content_hash: grid for image, grid in images if image.content_hash not in seen}
        seen |= new.keys()
        patches = [prod(grid) for grid in new.values()]
        costs.append(sizes.forward_flops(episode.documents, patches, episode.num_sampled))
    return costs


def minibatch_indices(count: int, passes: int, minibatches: int, seed: int) -> Iterator[list[int]]:
    """Yield the ascending episode indices of each of a step's updates. Every pass covers each of `count` episodes once.

    Each pass is divided anew into `minibatches` of sizes that differ by at most one; into fewer if there are fewer
    episodes.
    """
    minibatches = min(minibatches, count)
    for number in range(passes):
        if minibatches <= 1:
            yield list(range(count))
            continue
        order = np.random.default_rng((seed, number)).permutation(count)
        yield from (sorted(part.tolist()) for part in np.array_split(order, minibatches))
