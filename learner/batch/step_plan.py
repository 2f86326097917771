"""The plan of a step: its episodes, its updates, and the images that each rank decodes.

It is made once, before any computation, only from the groups and the recipe, so it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from msgspec import structs

from learner.batch.binning import probe_of
from learner.batch.distinct_images import deal_images
from learner.batch.episodes import TrainingEpisode, make_episodes, shortest_first, with_hints
from learner.batch.image_decoder import ImageDecoder
from learner.batch.other_images import with_other_images
from learner.batch.update_plan import UpdatePlan, has_no_loss, minibatch_indices, plan_update
from learner.distributed import Ranks
from shared.config.learner_section import LearnerConfig
from shared.families.model_sizes import ModelSizes
from shared.types import Group, Image

OBSERVED_EVERY = 16  # of the episodes that no update computes, one in so many is observed


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """A step's episodes and its computations: forwards beforehand, then one update after the other."""

    episodes: list[TrainingEpisode]
    updates: list[UpdatePlan]
    beforehand: UpdatePlan | None = None  # forwards of all episodes, if logprobs are computed before the first update
    taught: UpdatePlan | None = None  # forwards of all episodes by the teacher
    # Forwards of some of the episodes that no update computes. Without them the metrics would be those of groups whose
    # rewards vary alone, and a policy that has collapsed would show none at all.
    observed: UpdatePlan | None = None
    # Forwards of some episodes under their own images and under others.
    looked_at: UpdatePlan | None = None

    @property
    def parts(self) -> list[UpdatePlan]:
        """The plan's parts in the order in which they are computed."""
        of_updates = [part for update in self.updates for part in (update.pieces, update)]
        steps = (self.beforehand, self.taught, self.observed, self.looked_at, *of_updates)
        return [part for part in steps if part is not None]

    def images_of(self, rank: int, context_size: int, decoder: ImageDecoder) -> dict[str, Image]:
        """Return the images that a rank decodes in this step, by content hash.

        Ranks that share a microbatch deal its images among themselves; the images of a probe are dealt differently from
        those of its whole microbatch.
        """
        context_group, position = divmod(rank, context_size)
        batches = [chosen for part in self.parts for chosen in part.of_groups[context_group]]
        if context_size > 1:  # without sharing, the probe's images are among those of its microbatch
            batches += [probe_of(update.of_groups[context_group]) for update in self.updates]
        images: dict[str, Image] = {}
        for chosen in batches:
            dealt, _ = deal_images([e.images for e in shortest_first(chosen)], decoder, context_size)
            images |= {image.content_hash: image for image in dealt[position]}
        return images


def told(group: Group) -> Group:
    """Return a group as a teacher reads it."""
    if not any(trajectory.hints for trajectory in group.trajectories):
        return group
    return structs.replace(group, trajectories=tuple(map(with_hints, group.trajectories)))


def plan_step(
    groups: Sequence[Group],
    decoder: ImageDecoder,
    config: LearnerConfig,
    ranks: Ranks,
    sizes: ModelSizes | None,
    *,
    seed: int,
    noise: float = 0.0,
    beforehand: bool = False,
    taught: bool = False,
    looked_at: Collection[int] = (),
) -> StepPlan:
    """Return the plan of a step on `groups`.

    `sizes`: None if the model's sizes are unknown. `seed`: of the permutations that divide passes into updates.
    `noise`: the deviation of a group's rewards that is regarded as noise. `beforehand`: some logprobs are computed
    before the first update. `taught`: a teacher reads the episodes. `looked_at`: indices of the episodes from which
    those are taken that are computed under other images too. Raise ValueError if a group's layout is wrong.
    """
    objective = config.objective
    episodes = make_episodes(groups, decoder, objective, noise=noise)
    chosen = list(minibatch_indices(len(episodes), objective.passes, objective.minibatches, seed))
    if beforehand and episodes:
        chosen.insert(0, list(range(len(episodes))))
    parts = [plan_update(episodes, indices, config, ranks, sizes) for indices in chosen]
    first = parts.pop(0) if beforehand and episodes else None
    left_out = [i for i, episode in enumerate(episodes) if has_no_loss(episode, config)][::OBSERVED_EVERY]
    observed = plan_update(episodes, left_out, config, ranks, sizes, keep_all=True) if left_out else None
    of_teacher = None
    if taught and episodes:
        read, hinted = episodes, [told(group) for group in groups]
        if any(one is not other for one, other in zip(groups, hinted, strict=True)):
            read = make_episodes(hinted, decoder, objective, noise=noise)
        of_teacher = plan_update(read, range(len(read)), config, ranks, sizes)
    pairs = with_other_images(episodes, looked_at)
    looking = plan_update(pairs, range(len(pairs)), config, ranks, sizes, keep_all=True) if pairs else None
    return StepPlan(episodes, parts, first, of_teacher, observed, looking)
