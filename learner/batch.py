"""Groups of trajectories -> episodes -> packed microbatches.

Shape suffixes: E = tokens of one episode with placeholders expanded, K = its sampled tokens; T = tokens of a
microbatch, N = its sampled tokens, P = patches of its distinct images, I = its distinct images, M = its visual
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from learner.advantages import equal, group_advantages, group_signal
from learner.distributed import ALONE, Context
from learner.images import ImageDecoder
from learner.packing.documents import Packing, packing_of
from learner.packing.expanded import Expanded, expand_trajectory
from learner.packing.pictures import Pictures, readable, together
from learner.packing.place import STAYS, on
from learner.packing.prefixes import computed_part, find_prefixes
from learner.packing.tower import TowerInputs, blank, tower_inputs
from learner.parallel.share import Share, divide, filled
from shared.settings.objective import ObjectiveConfig
from shared.types import Ending, Group, Image, Trajectory
from shared.vision import VisionSpec


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One trajectory, as the model sees it. Its tokens are expanded when it is packed, by ranks that train on it."""

    expanded: Callable[[], Expanded]  # the same at each call
    num_tokens: int  # E
    images: tuple[Image, ...]
    behaviour_logprobs: np.ndarray  # float32 [K]
    versions: np.ndarray  # int32 [K]
    rewards: np.ndarray  # float32 [K], a turn's reward at its last token
    turn_end: np.ndarray  # bool [K]
    advantage: float  # relative to its group
    group: int = 0  # which of the step's
    signal: float = 1.0  # of its group's rewards: below 1 their spread is taken for noise
    place: int = -1  # among all trajectories of the step's groups, those that are not trained on included
    proximal_logprobs: np.ndarray | None = None  # float32 [K], of the policy as the step began; None = not computed
    reference_logprobs: np.ndarray | None = None  # float32 [K], of the reference policy; None = not computed yet

    @property
    def num_sampled(self) -> int:
        return len(self.behaviour_logprobs)


_OVERLONG = frozenset({Ending.OUT_OF_TOKENS, Ending.CONTEXT_FULL})


def penalty(trajectory: Trajectory, objective: ObjectiveConfig) -> float:
    """What the reward of an episode is less for its length, in the reward's units.

    The whole of `overlong_penalty` where a token limit cut it off. With `overlong_buffer` also, growing from 0 to the
    whole, over the last so many tokens before `overlong_tokens` (DAPO: Yu et al., 2025, equation 13).
    """
    if objective.overlong != "penalise":
        return 0.0
    if trajectory.ending in _OVERLONG:
        return objective.overlong_penalty
    if not objective.overlong_buffer:
        return 0.0
    over = int(trajectory.loss_mask.sum()) - (objective.overlong_tokens - objective.overlong_buffer)
    return objective.overlong_penalty * min(max(over / objective.overlong_buffer, 0.0), 1.0)


def episode_rewards(group: Group, objective: ObjectiveConfig) -> list[float]:
    """Of the trainable trajectories, as advantages see them."""
    return [t.reward - penalty(t, objective) for t in group.trajectories if t.trainable]


def is_uninformative(group: Group, objective: ObjectiveConfig) -> bool:
    """Whether all its episodes earned exactly the same, so that no group-relative objective learns from it."""
    return equal(episode_rewards(group, objective))


def check_layout(trajectory: Trajectory, spec: VisionSpec) -> None:
    """ValueError unless its images have their placeholders, and its sampled tokens follow a prompt."""
    placeholders, sampled = trajectory.token_ids == spec.image_token_id, trajectory.loss_mask == 1
    if placeholders.sum() != len(trajectory.images):
        raise ValueError(f"{placeholders.sum()} image placeholders but {len(trajectory.images)} images")
    if not sampled.any() or sampled[0] or (placeholders & sampled).any():
        raise ValueError("an episode needs a prompt, then sampled tokens, none of which is an image's placeholder")


def make_episode(
    trajectory: Trajectory,
    advantage: float,
    decoder: ImageDecoder,
    objective: ObjectiveConfig,
    *,
    group: int = 0,
    place: int = -1,
) -> Episode:
    """ValueError when the layout is wrong or an image has no size."""
    check_layout(trajectory, decoder.spec)
    grids = tuple(decoder.grid(image) for image in trajectory.images)
    sampled = np.flatnonzero(trajectory.loss_mask)
    rewards = np.zeros(len(sampled), dtype=np.float32)
    turn_end = np.zeros(len(sampled), dtype=bool)
    for turn in trajectory.turns:
        last = int(np.searchsorted(sampled, turn.end)) - 1
        turn_end[last] = True
        if objective.turn_rewards:
            rewards[last] += turn.reward * objective.reward_scale
    if not objective.turn_rewards:
        rewards[-1] = trajectory.reward * objective.reward_scale
    rewards[-1] -= penalty(trajectory, objective) * objective.reward_scale
    turn_end[-1] = True
    return Episode(
        expanded=partial(expand_trajectory, trajectory, grids, decoder.spec),
        num_tokens=len(trajectory.token_ids) + sum(decoder.spec.num_tokens(grid) - 1 for grid in grids),
        images=trajectory.images,
        behaviour_logprobs=trajectory.behaviour_logprobs[sampled],
        versions=trajectory.policy_versions[sampled],
        rewards=rewards,
        turn_end=turn_end,
        advantage=advantage,
        group=group,
        place=place,
    )


def make_episodes(groups: Sequence[Group], decoder: ImageDecoder, objective: ObjectiveConfig) -> list[Episode]:
    """Episodes of all trainable trajectories; advantages are relative to the trainable ones of each group."""
    episodes, start = [], 0
    for index, group in enumerate(groups):
        places = [start + i for i, t in enumerate(group.trajectories) if t.trainable]
        trajectories = [group.trajectories[place - start] for place in places]
        start += len(group.trajectories)
        rewards, floor = episode_rewards(group, objective), objective.advantage_floor
        how = {"divide_by_std": objective.divide_by_std, "leave_one_out": objective.leave_one_out}
        advantages = group_advantages(rewards, **how, floor=floor)
        signal = group_signal(rewards, floor) if objective.group_relative else 1.0
        for trajectory, advantage, place in zip(trajectories, advantages, places, strict=True):
            if not (objective.overlong == "mask" and trajectory.ending in _OVERLONG):
                episode = make_episode(trajectory, float(advantage), decoder, objective, group=index, place=place)
                episodes.append(episode if signal == 1.0 else replace(episode, signal=signal))
    return episodes


def cut(count: int, passes: int, minibatches: int, seed: int) -> Iterator[list[int]]:
    """Which of a step's `count` episodes each of its updates is on, in their order: in every pass each one once, cut
    anew into `minibatches` of equal size, up to one; into fewer where there are not as many episodes."""
    minibatches = min(minibatches, count)
    for number in range(passes):
        if minibatches <= 1:
            yield list(range(count))
            continue
        order = np.random.default_rng((seed, number)).permutation(count)
        yield from (sorted(part.tolist()) for part in np.array_split(order, minibatches))


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """Packed documents, one after another, as tensors of one device, but for the ids that kernels check on the host.
    Whatever follows from lengths and grids is known here, so that no forward waits for a device to say it. `empty`
    marks a stand-in without any episode.

    With a `share`, T, P, I and M are this rank's part of them: `predictors` are those of its tokens, [max(n,1)], and
    `visual_rows` are rows of what the ranks exchange. `lengths` and what is [N] stay the microbatch's. Where the
    packing has `prefixes`, T and M are of the tokens that are computed; `lengths` are those of whole documents.
    """

    input_ids: Tensor  # int64 [1,T]
    position_ids: Tensor  # int64 [4,1,T]
    lengths: tuple[int, ...]  # of the documents
    packing: Packing  # of the documents
    patches: Tensor  # uint8 [P,3,patch,patch], of distinct images
    tower: TowerInputs  # of these images; of a blank one if there is none
    image_lengths: tuple[int, ...]  # patches of each distinct image
    visual_positions: Tensor  # int64 [M], places of visual tokens among the T
    visual_rows: Tensor  # int64 [M], the row of the tower's output that belongs there
    predictors: Tensor  # int64 [N], places whose hidden state predicts a sampled token
    target_ids: Tensor = field(metadata=STAYS)  # int64 [N]
    asked_ids: Tensor = field(metadata=STAYS)  # int64 [N], of a share [max(n,1)]: of the predictors
    behaviour_logprobs: Tensor  # float32 [N]
    versions: Tensor  # int32 [N]
    rewards: Tensor  # float32 [N]
    turn_end: Tensor  # bool [N]
    episode_end: Tensor  # bool [N]
    advantages: Tensor  # float32 [N], relative to the group
    episode_tokens: Tensor  # float32 [N], sampled tokens of the token's episode
    readable: Tensor  # float32 [N], 0 where the episode shows an image that this rank cannot decode, else 1
    sampled: tuple[int, ...]  # tokens of each episode
    empty: bool
    places: tuple[int, ...] = ()  # of its episodes, in their order here
    proximal_logprobs: Tensor | None = None  # float32 [N], where the episodes have them
    reference_logprobs: Tensor | None = None  # float32 [N], where the episodes have them
    share: Share | None = None  # of the rank among those that share the microbatch; None = it is alone

    @property
    def num_tokens(self) -> int:
        return 0 if self.empty else self.target_ids.shape[0]


def pack(
    episodes: Sequence[Episode], decoder: ImageDecoder, device: torch.device, context: Context = ALONE, **options: bool
) -> Microbatch:
    """Packs episodes (shortest first, so that equal lengths are neighbours) into one microbatch, or into this rank's
    share of it. No other rank's images are decoded. `options`: of `pack_on_host`."""
    return on(pack_on_host(episodes, decoder, context, **options), device)


def shortest_first(episodes: Sequence[Episode]) -> list[Episode]:
    """As a microbatch has them."""
    return sorted(episodes, key=lambda e: e.num_tokens)


def pack_on_host(
    episodes: Sequence[Episode],
    decoder: ImageDecoder,
    context: Context = ALONE,
    *,
    share_prefixes: bool = True,
    pin: bool = False,
) -> Microbatch:
    """As `pack`, without touching a device: a thread may do it meanwhile. `share_prefixes`: tokens that a group's
    episodes begin with alike are computed once, but for a microbatch that ranks share. `pin`: patches, into pinned
    memory."""
    episodes = shortest_first(episodes)
    expanded = [e.expanded() for e in episodes]
    pictures = Pictures.of([e.images for e in episodes], decoder, context.size)
    images = [decoder.get_or_blank(image) for image in pictures.images[context.rank]]
    known = readable([e.images for e in episodes], pictures.images[context.rank], images)
    arrays = _stream(episodes, expanded, decoder.spec.image_token_id)
    arrays |= {"visual_rows": pictures.rows_M, "readable": np.repeat(known, [e.num_sampled for e in episodes])}
    lengths, asked = tuple(e.num_tokens for e in episodes), arrays["predictors"]
    share, own, prefixes = None, None, None
    if context.size > 1:
        arrays, lengths = filled(arrays, lengths, context.size)
        arrays, share = divide(arrays, lengths, pictures.visual_tokens, context)
        own = share.places.numpy()
        asked = own[arrays["predictors"]]
    elif share_prefixes:
        prefixes = find_prefixes(arrays, lengths, [e.group for e in episodes])
        if prefixes is not None:
            arrays, own = arrays | computed_part(arrays, prefixes), prefixes.places.numpy()
    return Microbatch(
        patches=together([image.patches for image in images], decoder.spec.patch_size, pin=pin),
        lengths=lengths,
        packing=packing_of(lengths, causal=True, share=share, own=own, asked=asked, prefixes=prefixes),
        tower=tower_inputs(tuple(image.grid for image in images) or blank(decoder.spec), decoder.spec),
        image_lengths=tuple(len(image.patches) for image in images),
        sampled=tuple(e.num_sampled for e in episodes),
        empty=False,
        places=tuple(e.place for e in episodes),
        share=share,
        **{name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()},
    )


def _stream(episodes: Sequence[Episode], expanded: Sequence[Expanded], image_token_id: int) -> dict[str, np.ndarray]:
    """A microbatch's arrays, but for what its images are; of whole episodes, one after another."""
    counts = np.array([e.num_sampled for e in episodes])
    starts = np.cumsum([0, *(e.num_tokens for e in episodes)])
    targets = np.concatenate([e.targets + start for e, start in zip(expanded, starts, strict=False)])
    input_ids = np.concatenate([e.input_ids for e in expanded])
    episode_end = np.zeros(len(targets), dtype=bool)
    episode_end[counts.cumsum() - 1] = True
    arrays = {
        "input_ids": input_ids[None],
        "position_ids": np.concatenate([e.position_ids for e in expanded], axis=1)[:, None],
        "visual_positions": np.flatnonzero(input_ids == image_token_id),
        "predictors": targets - 1,
        "target_ids": input_ids[targets],
        "asked_ids": input_ids[targets],
        "episode_end": episode_end,
        "advantages": np.repeat(np.array([e.advantage for e in episodes], dtype=np.float32), counts),
        "episode_tokens": np.repeat(counts.astype(np.float32), counts),
    }
    names = ["behaviour_logprobs", "versions", "rewards", "turn_end"]
    names += [n for n in ("proximal_logprobs", "reference_logprobs") if getattr(episodes[0], n) is not None]
    return arrays | {name: np.concatenate([getattr(e, name) for e in episodes]) for name in names}


def empty_microbatch(decoder: ImageDecoder, token_id: int, context: Context = ALONE) -> Microbatch:
    """A stand-in of two tokens, on the host: a rank without episodes runs the same collectives; its loss counts 0."""
    ids = np.full(2, token_id, dtype=np.int64)
    episode = Episode(
        expanded=lambda: Expanded(ids, np.tile(np.arange(2), (4, 1)), np.array([1])),
        num_tokens=2,
        images=(),
        behaviour_logprobs=np.zeros(1, dtype=np.float32),
        versions=np.zeros(1, dtype=np.int32),
        rewards=np.zeros(1, dtype=np.float32),
        turn_end=np.ones(1, dtype=bool),
        advantage=0.0,
    )
    return replace(pack_on_host([episode], decoder, context), empty=True)
