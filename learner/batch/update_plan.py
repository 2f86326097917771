"""The plan of one update: the gradient of some of a step's episodes, in microbatches on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from learner.batch.binning import assign_microbatches, assign_neighbours, probe_of
from learner.batch.episodes import TrainingEpisode, pieces_of
from learner.distributed import Ranks
from shared.config.learner_section import LearnerConfig
from shared.families.model_sizes import ModelSizes

Microbatches = list[list[TrainingEpisode]]  # episodes, or pieces of those that are longer than a microbatch


@dataclass(frozen=True, slots=True, eq=False)
class UpdatePlan:
    """One gradient: its divisors and its microbatches."""

    num_episodes: int
    num_tokens: int  # number of sampled tokens, including those of episodes whose loss is exactly 0
    of_groups: list[Microbatches]  # of each context group; all groups have equally many microbatches
    microbatches: Microbatches  # of this rank's context group
    probe: list[TrainingEpisode]  # some episodes of the last microbatch
    # Forwards of the pieces of divided episodes before the update, if the loss of a token depends on tokens of its
    # episode in other pieces; None if no episode is divided, or no token depends on others.
    pieces: UpdatePlan | None = None


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
    budget = config.parallel.microbatch_tokens * ranks.context.size
    useful = [episodes[i] for i in indices if keep_all or not has_no_loss(episodes[i], config)]
    computed = [piece for episode in useful for piece in pieces_of(episode, budget)]
    of_groups = _of_groups(computed, config, ranks, sizes)
    divided = [piece for piece in computed if piece.whole is not None]
    plan = UpdatePlan(
        num_episodes=len(indices),
        num_tokens=sum(episodes[i].num_sampled for i in indices),
        of_groups=of_groups,
        microbatches=of_groups[ranks.context_group],
        probe=probe_of(of_groups[ranks.context_group]),
    )
    if not divided or not config.objective.couples_tokens:
        return plan
    first = _of_groups(divided, config, ranks, sizes)
    return replace(plan, pieces=UpdatePlan(0, 0, first, first[ranks.context_group], []))


def _of_groups(
    computed: Sequence[TrainingEpisode], config: LearnerConfig, ranks: Ranks, sizes: ModelSizes | None
) -> list[Microbatches]:
    """Return the microbatches of each context group for episodes and pieces."""
    num_groups = ranks.size // ranks.context.size
    if not computed:
        return [[] for _ in range(num_groups)]
    lengths = [episode.num_tokens for episode in computed]
    costs = None if sizes is None else forward_costs(computed, sizes)
    assign = assign_microbatches if config.group_size == 1 else assign_neighbours
    of_groups = assign(lengths, num_groups, config.parallel.microbatch_tokens * ranks.context.size, costs)
    return [[[computed[i] for i in positions] for positions in of_group] for of_group in of_groups]


def has_no_loss(episode: TrainingEpisode, config: LearnerConfig) -> bool:
    """Tell whether an episode's loss is exactly 0, so that no update computes it."""
    return episode.advantage_size == 0.0 and config.objective.skips_zero_advantage


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
        lengths = [document.num_tokens for document in episode.documents]
        costs.append(sizes.forward_flops(lengths, patches, episode.num_sampled))
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
