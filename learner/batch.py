"""Groups of trajectories -> episodes -> packed microbatches, balanced over ranks.

Shape suffixes: E = tokens of one episode with placeholders expanded, K = its sampled tokens; T = tokens of a
microbatch, N = its sampled tokens, P = patches of its distinct images, I = its distinct images, M = its visual
tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learner.advantages import equal, group_advantages
from learner.images import ImageDecoder
from shared.types import Ending, Group, Image, Trajectory
from shared.vision import expand, mrope_positions


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One trajectory, as the model sees it."""

    input_ids: np.ndarray  # int64 [E]
    position_ids: np.ndarray  # int64 [4,E]: place in the document, then M-RoPE
    images: tuple[Image, ...]
    targets: np.ndarray  # int64 [K], places of the sampled tokens; the hidden state at targets-1 predicts them
    behaviour_logprobs: np.ndarray  # float32 [K]
    versions: np.ndarray  # int32 [K]
    rewards: np.ndarray  # float32 [K], a turn's reward at its last token
    turn_end: np.ndarray  # bool [K]
    advantage: float  # relative to its group

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    reward_scale: float = 1.0
    turn_rewards: bool = True  # false: the whole episode's reward at its last token
    divide_by_std: bool = True
    leave_one_out: bool = False
    mask_overlong: bool = False  # episodes cut off by a token limit get no gradient; they still count in their group
    overlong_penalty: float = 0.0  # what such an episode's reward is less


_OVERLONG = frozenset({Ending.OUT_OF_TOKENS, Ending.CONTEXT_FULL})


def episode_rewards(group: Group, settings: EpisodeSettings) -> list[float]:
    """Of the trainable trajectories, as advantages see them."""
    return [t.reward - settings.overlong_penalty * (t.ending in _OVERLONG) for t in group.trajectories if t.trainable]


def is_uninformative(group: Group, settings: EpisodeSettings) -> bool:
    """Whether all its episodes earned exactly the same, so that no group-relative objective learns from it."""
    return equal(episode_rewards(group, settings))


def make_episode(trajectory: Trajectory, advantage: float, decoder: ImageDecoder, settings: EpisodeSettings) -> Episode:
    """Expands the placeholders. ValueError when an image cannot be read or the first token is a sampled one."""
    grids = [decoder.grid(image) for image in trajectory.images]
    merge, image_token = decoder.spec.merge_size, decoder.spec.image_token_id
    ids, compact_index = expand(trajectory.token_ids, grids, image_token_id=image_token, merge_size=merge)
    rope = mrope_positions(ids, grids, image_token_id=image_token, merge_size=merge)
    targets = np.flatnonzero(trajectory.loss_mask[compact_index])
    sampled = np.flatnonzero(trajectory.loss_mask)
    if len(targets) == 0 or targets[0] == 0 or len(sampled) != len(targets):
        raise ValueError("an episode needs a prompt, then sampled tokens, none of which is an image's placeholder")
    rewards = np.zeros(len(sampled), dtype=np.float32)
    turn_end = np.zeros(len(sampled), dtype=bool)
    for turn in trajectory.turns:
        last = int(np.searchsorted(sampled, turn.end)) - 1
        turn_end[last] = True
        if settings.turn_rewards:
            rewards[last] += turn.reward * settings.reward_scale
    if not settings.turn_rewards:
        rewards[-1] = trajectory.reward * settings.reward_scale
    if trajectory.ending in _OVERLONG:
        rewards[-1] -= settings.overlong_penalty * settings.reward_scale
    turn_end[-1] = True
    return Episode(
        input_ids=ids,
        position_ids=np.concatenate([np.arange(len(ids))[None], rope]),
        images=trajectory.images,
        targets=targets,
        behaviour_logprobs=trajectory.behaviour_logprobs[sampled],
        versions=trajectory.policy_versions[sampled],
        rewards=rewards,
        turn_end=turn_end,
        advantage=advantage,
    )


def make_episodes(groups: Sequence[Group], decoder: ImageDecoder, settings: EpisodeSettings) -> list[Episode]:
    """Episodes of all trainable trajectories; advantages are relative to the trainable ones of each group."""
    episodes = []
    for group in groups:
        trajectories = [t for t in group.trajectories if t.trainable]
        rewards, how = episode_rewards(group, settings), (settings.divide_by_std, settings.leave_one_out)
        advantages = group_advantages(rewards, divide_by_std=how[0], leave_one_out=how[1])
        for trajectory, advantage in zip(trajectories, advantages, strict=True):
            if not (settings.mask_overlong and trajectory.ending in _OVERLONG):
                episodes.append(make_episode(trajectory, float(advantage), decoder, settings))
    return episodes


def check_group(group: Group, decoder: ImageDecoder) -> None:
    """Does everything that training on `group` will do with its tokens and images, and keeps the images.

    ValueError, in one line, if it cannot be done: for the receiver of groups, so that no bad one reaches a step.
    """
    make_episodes([group], decoder, EpisodeSettings())
    for image in (image for t in group.trajectories if t.trainable for image in t.images):
        decoder.get(image)


def plan(lengths: Sequence[int], num_ranks: int, budget: int) -> list[list[list[int]]]:
    """Which episodes go into which microbatch of which rank: plan[rank][microbatch] = indices of `lengths`.

    Every rank gets the same number of microbatches (some may be empty), none above `budget` tokens unless a single
    episode is, and token sums as even as longest-first placement makes them.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    per_rank = max(1, -(-sum(lengths) // (budget * num_ranks)))
    while True:
        bins: list[list[int]] = [[] for _ in range(per_rank * num_ranks)]
        heap = [(0, b) for b in range(len(bins))]
        fits = True
        for i in order:
            tokens, b = heapq.heappop(heap)
            fits = fits and (tokens == 0 or tokens + lengths[i] <= budget)
            bins[b].append(i)
            heapq.heappush(heap, (tokens + lengths[i], b))
        if fits:
            return [bins[rank::num_ranks] for rank in range(num_ranks)]
        per_rank += 1


def plan_together(lengths: Sequence[int], num_ranks: int, budget: int) -> list[list[list[int]]]:
    """As `plan`, for episodes whose neighbours share images (those of a group): each microbatch is a stretch of them.

    An image is then encoded once, but for groups at the seams; token sums are even up to one episode.
    """
    middles = np.cumsum(lengths) - np.asarray(lengths) / 2
    per_rank = max(1, -(-sum(lengths) // (budget * num_ranks)))
    while True:
        count = per_rank * num_ranks
        bins: list[list[int]] = [[] for _ in range(count)]
        for i, b in enumerate((middles * count // sum(lengths)).astype(int).tolist()):
            bins[b].append(i)
        if all(len(b) < 2 or sum(lengths[i] for i in b) <= budget for b in bins):
            return [bins[rank * per_rank : (rank + 1) * per_rank] for rank in range(num_ranks)]
        per_rank += 1


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """Packed documents, one after another, as tensors of one device. `empty` marks a stand-in without any episode."""

    input_ids: Tensor  # int64 [1,T]
    position_ids: Tensor  # int64 [4,1,T]
    lengths: tuple[int, ...]  # of the documents
    patches: Tensor  # uint8 [P,3,patch,patch], of distinct images
    grids_thw: Tensor  # int64 [I,3]
    image_lengths: tuple[int, ...]  # patches of each distinct image
    visual_positions: Tensor  # int64 [M], places of visual tokens among the T
    visual_rows: Tensor  # int64 [M], the row of the tower's output that belongs there
    predictors: Tensor  # int64 [N], places whose hidden state predicts a sampled token
    target_ids: Tensor  # int64 [N]
    behaviour_logprobs: Tensor  # float32 [N]
    versions: Tensor  # int32 [N]
    rewards: Tensor  # float32 [N]
    turn_end: Tensor  # bool [N]
    episode_end: Tensor  # bool [N]
    advantages: Tensor  # float32 [N], relative to the group
    episode_tokens: Tensor  # float32 [N], sampled tokens of the token's episode
    empty: bool = False

    @property
    def num_tokens(self) -> int:
        return 0 if self.empty else self.target_ids.shape[0]


def pack(episodes: Sequence[Episode], decoder: ImageDecoder, device: torch.device) -> Microbatch:
    """Packs episodes (shortest first, so that equal lengths are neighbours) into one microbatch."""
    episodes = sorted(episodes, key=lambda e: e.num_tokens)
    input_ids = np.concatenate([e.input_ids for e in episodes])
    offsets = np.cumsum([0] + [e.num_tokens for e in episodes])
    targets = np.concatenate([e.targets + offset for e, offset in zip(episodes, offsets, strict=False)])
    episode_end = np.zeros(len(targets), dtype=bool)
    episode_end[np.cumsum([len(e.targets) for e in episodes]) - 1] = True

    row_of: dict[str, int] = {}  # hash -> first row of the image's features in the tower's output
    distinct, rows, num_rows = [], [], 0
    for image in (image for e in episodes for image in e.images):
        source = decoder.get(image)
        length = len(source.patches) // decoder.spec.merge_size**2
        if image.content_hash not in row_of:
            row_of[image.content_hash] = num_rows
            distinct.append(source)
            num_rows += length
        rows.append(np.arange(row_of[image.content_hash], row_of[image.content_hash] + length))

    def cat(name: str) -> np.ndarray:
        return np.concatenate([getattr(e, name) for e in episodes])

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    counts = [len(e.targets) for e in episodes]
    advantages = np.repeat(np.array([e.advantage for e in episodes], dtype=np.float32), counts)
    no_patches = np.zeros((0, 3, decoder.spec.patch_size, decoder.spec.patch_size), dtype=np.uint8)
    return Microbatch(
        input_ids=tensor(input_ids[None]),
        position_ids=tensor(np.concatenate([e.position_ids for e in episodes], axis=1)[:, None]),
        lengths=tuple(e.num_tokens for e in episodes),
        patches=tensor(np.concatenate([p.patches for p in distinct]) if distinct else no_patches),
        grids_thw=tensor(np.array([p.grid for p in distinct], dtype=np.int64).reshape(-1, 3)),
        image_lengths=tuple(len(p.patches) for p in distinct),
        visual_positions=tensor(np.flatnonzero(input_ids == decoder.spec.image_token_id)),
        visual_rows=tensor(np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)),
        predictors=tensor(targets - 1),
        target_ids=tensor(input_ids[targets]),
        behaviour_logprobs=tensor(cat("behaviour_logprobs")),
        versions=tensor(cat("versions")),
        rewards=tensor(cat("rewards")),
        turn_end=tensor(cat("turn_end")),
        episode_end=tensor(episode_end),
        advantages=tensor(advantages),
        episode_tokens=tensor(np.repeat(np.array(counts, dtype=np.float32), counts)),
    )


def empty_microbatch(decoder: ImageDecoder, token_id: int, device: torch.device) -> Microbatch:
    """A stand-in of two tokens, so that a rank without episodes runs the same collectives; its loss counts 0."""
    ids = np.full(2, token_id, dtype=np.int64)
    episode = Episode(
        input_ids=ids,
        position_ids=np.tile(np.arange(2), (4, 1)),
        images=(),
        targets=np.array([1]),
        behaviour_logprobs=np.zeros(1, dtype=np.float32),
        versions=np.zeros(1, dtype=np.int32),
        rewards=np.zeros(1, dtype=np.float32),
        turn_end=np.ones(1, dtype=bool),
        advantage=0.0,
    )
    packed = pack([episode], decoder, device)
    fields = {name: getattr(packed, name) for name in packed.__slots__}
    return Microbatch(**(fields | {"empty": True}))
