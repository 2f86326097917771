"""Conversion of groups of trajectories into the episodes that a step trains on.

Shape suffixes: E = tokens of one episode with placeholders expanded, K = its sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from msgspec import structs

from learner.batch.image_decoder import ImageDecoder
from learner.objective.advantages import (
    are_equal,
    discounted_returns,
    group_advantages,
    group_signal,
    in_same_situation,
    most_varying,
    turn_advantages,
)
from shared.config.learner_section import LearnerConfig
from shared.config.objective_section import ObjectiveConfig
from shared.types import CUT_OFF, Group, Image, Trajectory
from shared.vision import Grid, VisionSpec, expand

MAX_REWARD = 1e15  # sums of squares of such rewards are still finite in float32


@dataclass(frozen=True, slots=True, eq=False)
class ExpandedTokens:
    """The tokens of one episode as the model reads them, with image placeholders expanded: a document for each of its
    segments, one after another."""

    input_ids: np.ndarray  # int64 [E]
    position_ids: np.ndarray  # int64 [4,E]: the position in the document, then M-RoPE
    targets: np.ndarray  # int64 [K], positions of the sampled tokens; the hidden state at targets-1 predicts them


class Document(NamedTuple):
    """The size of one segment, which the model reads by itself."""

    num_tokens: int  # with image placeholders expanded
    num_sampled: int
    num_images: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TrainingEpisode:
    """One trajectory as the learner trains on it, or a piece of one. Its tokens are expanded when it is packed, only on
    ranks that need it."""

    # Returns the same at each call. Of an episode with several documents, `documents` = (first, stop) selects some.
    expanded: Callable[..., ExpandedTokens]
    documents: tuple[Document, ...]  # its segments
    images: tuple[Image, ...]
    grids: tuple[Grid, ...]  # one for each image
    behaviour_logprobs: np.ndarray  # float32 [K]
    versions: np.ndarray  # int32 [K]
    rewards: np.ndarray  # float32 [K], a turn's reward at its last token
    turn_end: np.ndarray  # bool [K]
    advantage: float  # relative to its group
    group: int = 0  # index of its group in the step
    signal: float = 1.0  # signal of its group's rewards; below 1 their spread is regarded as noise
    index: int = -1  # among all trajectories of the step's groups, including those that are not trained on
    whole: TrainingEpisode | None = None  # the episode that this is a piece of
    first: int = 0  # index of its first sampled token among those of its whole episode
    turn_advantages: np.ndarray | None = None  # float32 [K], added to `advantage` on each turn's tokens; None = 0

    @property
    def num_tokens(self) -> int:
        """E, the tokens of all documents."""
        return sum(document.num_tokens for document in self.documents)

    @property
    def num_sampled(self) -> int:
        return len(self.behaviour_logprobs)

    @property
    def advantage_size(self) -> float:
        """Return how large its advantages are."""
        of_turns = 0.0 if self.turn_advantages is None else float(np.abs(self.turn_advantages).mean(dtype=np.float64))
        return abs(self.advantage) + of_turns


# ---------------------------------------------------------------------- rewards


def length_penalty(trajectory: Trajectory, objective: ObjectiveConfig) -> float:
    """Return the amount that is subtracted from an episode's reward for its length, in the reward's units.

    It is the whole `overlong_penalty` if a token limit cut the episode off. With `overlong_buffer` it also grows
    linearly from 0 to the whole penalty over that many tokens before `overlong_tokens` (DAPO: Yu et al., 2025, equation
    13).
    """
    if objective.overlong != "penalise":
        return 0.0
    if trajectory.ending in CUT_OFF:
        return objective.overlong_penalty
    if not objective.overlong_buffer:
        return 0.0
    excess = int(trajectory.loss_mask.sum()) - (objective.overlong_tokens - objective.overlong_buffer)
    return objective.overlong_penalty * min(max(excess / objective.overlong_buffer, 0.0), 1.0)


def episode_rewards(group: Group, objective: ObjectiveConfig) -> list[float]:
    """Return the trainable trajectories' rewards minus length penalties; group-relative advantages compare them."""
    return [t.reward - length_penalty(t, objective) for t in group.trajectories if t.trainable]


def critic_rewards(trajectory: Trajectory, objective: ObjectiveConfig) -> Hashable:
    """Return the rewards that a critic is trained on: those of the turns, or the episode's, minus the length
    penalty."""
    penalty = length_penalty(trajectory, objective)
    if objective.turn_rewards:
        return (*(turn.reward for turn in trajectory.turns), -penalty)
    return trajectory.reward - penalty


def turn_returns(trajectory: Trajectory, objective: ObjectiveConfig) -> list[float]:
    """Return, for each turn, its reward and the later ones', discounted, minus the length penalty at the end."""
    rewards = [turn.reward for turn in trajectory.turns]
    rewards[-1] -= length_penalty(trajectory, objective)
    return discounted_returns(rewards, objective.gamma)


def situations_of(trajectory: Trajectory, objective: ObjectiveConfig) -> list[Hashable | None]:
    """Return what makes a turn comparable with others of its group: its place in the episode, or the environment's
    state before it; None for a turn that is compared with none."""
    if objective.turn_advantage == "returns":
        return list(range(len(trajectory.turns)))
    return [turn.state or None for turn in trajectory.turns]


def is_uninformative(group: Group, objective: ObjectiveConfig) -> bool:
    """Tell whether all episodes have equal rewards, and turns that are compared equal returns, so that a group-relative
    objective learns nothing from the group."""
    if objective.has_turn_advantages and any(not are_equal(r) for r in compared_returns(group, objective)):
        return False
    return are_equal(episode_rewards(group, objective))


def compared_returns(group: Group, objective: ObjectiveConfig) -> list[list[float]]:
    """Return the returns of a group's turns, those that are compared with each other in one list."""
    trainable = [t for t in group.trajectories if t.trainable]
    returns = [turn_returns(t, objective) for t in trainable]
    alike = in_same_situation([situations_of(t, objective) for t in trainable])
    return [[returns[i][t] for i, t in turns] for turns in alike.values()]


def has_variance(groups: Sequence[Group], config: LearnerConfig) -> bool:
    """Tell whether rewards differ among episodes that are compared with each other."""
    objective = config.objective
    if config.group_size == 1:
        return len({critic_rewards(t, objective) for group in groups for t in group.trajectories if t.trainable}) > 1
    if objective.is_group_relative:
        return not all(is_uninformative(group, objective) for group in groups)
    return any(len({critic_rewards(t, objective) for t in group.trajectories if t.trainable}) > 1 for group in groups)


# ---------------------------------------------------------------------- episodes


def make_episodes(
    groups: Sequence[Group], decoder: ImageDecoder, objective: ObjectiveConfig, *, noise: float = 0.0
) -> list[TrainingEpisode]:
    """Return the episodes of all trainable trajectories, with advantages relative to the trainable ones of each group.

    `noise`: deviation of a group's rewards that is regarded as noise (`RunningScale.reward_noise`). Raise ValueError
    if a layout is wrong or an image has no size.
    """
    episodes, start = [], 0
    taught_by = None
    if objective.keep_variance < 1:
        taught_by = most_varying([episode_rewards(group, objective) for group in groups], objective.keep_variance)
    for number, group in enumerate(groups):
        indices = [start + i for i, t in enumerate(group.trajectories) if t.trainable]
        trajectories = [group.trajectories[index - start] for index in indices]
        start += len(group.trajectories)
        rewards = episode_rewards(group, objective)
        advantages = group_advantages(
            rewards, divide_by_std=objective.divide_by_std, leave_one_out=objective.leave_one_out, floor=noise
        )
        if taught_by is not None and number not in taught_by:
            advantages = np.zeros_like(advantages)
        signal = group_signal(rewards, noise) if objective.is_group_relative else 1.0
        of_turns: Sequence[np.ndarray | None] = [None] * len(trajectories)
        if objective.has_turn_advantages and (taught_by is None or number in taught_by):
            of_turns = group_turn_advantages(trajectories, objective, noise)
            signal = max([signal, *(group_signal(r, noise) for r in compared_returns(group, objective))])
        for trajectory, advantage, added_T, index in zip(trajectories, advantages, of_turns, indices, strict=True):
            if objective.overlong == "mask" and trajectory.ending in CUT_OFF:
                continue
            episode = make_episode(trajectory, float(advantage), decoder, objective, group=number, index=index)
            if added_T is not None:
                lengths = np.diff([0, *(np.flatnonzero(episode.turn_end) + 1)])
                episode = replace(episode, turn_advantages=np.repeat(added_T.astype(np.float32), lengths))
            episodes.append(episode if signal == 1.0 else replace(episode, signal=signal))
    return whitened_episodes(episodes, noise) if objective.spec.whitens else episodes


def whitened_episodes(episodes: Sequence[TrainingEpisode], noise: float) -> list[TrainingEpisode]:
    """Return episodes whose advantages are less their mean over all sampled tokens, and divided by their deviation, at
    least `noise` (REINFORCE++: Hu et al., 2025); as they are if all advantages are equal."""
    if not episodes:
        return []
    own = [e.advantage + (np.zeros(1) if e.turn_advantages is None else e.turn_advantages) for e in episodes]
    all_N = np.concatenate([np.broadcast_to(a, e.num_sampled) for a, e in zip(own, episodes, strict=True)])
    if are_equal(all_N):
        return list(episodes)
    mean, scale = float(all_N.mean()), 1.0 / max(float(all_N.std()), noise, 1e-6)
    return [
        replace(
            e,
            advantage=(e.advantage - mean) * scale,
            turn_advantages=None if e.turn_advantages is None else e.turn_advantages * np.float32(scale),
        )
        for e in episodes
    ]


def group_turn_advantages(
    trajectories: Sequence[Trajectory], objective: ObjectiveConfig, noise: float = 0.0
) -> list[np.ndarray]:
    """Return what the turns of a group's episodes add to their episode's advantage, float64 [T] each."""
    advantages = turn_advantages(
        [turn_returns(t, objective) for t in trajectories],
        [situations_of(t, objective) for t in trajectories],
        divide_by_std=objective.divide_by_std,
        leave_one_out=objective.leave_one_out,
        floor=noise,
    )
    return [objective.turn_weight * of_episode for of_episode in advantages]


def with_hints(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory as a teacher reads it: with its hints in the stream, as tokens that nobody sampled."""
    hints = trajectory.hints
    if not hints:
        return trajectory
    at = np.repeat([hint.at for hint in hints], [len(hint.token_ids) for hint in hints])
    told = [token for hint in hints for token in hint.token_ids]
    changes = {
        "token_ids": np.insert(trajectory.token_ids, at, told),
        "loss_mask": np.insert(trajectory.loss_mask, at, 0),
        "behaviour_logprobs": np.insert(trajectory.behaviour_logprobs, at, 0.0),
        "policy_versions": np.insert(trajectory.policy_versions, at, -1),
    }
    turns = tuple(
        structs.replace(
            turn, start=turn.start + int((at <= turn.start).sum()), end=turn.end + int((at < turn.end).sum())
        )
        for turn in trajectory.turns
    )
    segments = tuple(start + int((at < start).sum()) for start in trajectory.segments)
    return structs.replace(trajectory, **changes, turns=turns, segments=segments, hints=())


def make_episode(
    trajectory: Trajectory,
    advantage: float,
    decoder: ImageDecoder,
    objective: ObjectiveConfig,
    *,
    group: int = 0,
    index: int = -1,
) -> TrainingEpisode:
    """Return one trajectory's episode. Raise ValueError if the layout is wrong or an image has no size."""
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
    rewards[-1] -= length_penalty(trajectory, objective) * objective.reward_scale
    turn_end[-1] = True
    return TrainingEpisode(
        expanded=partial(expand_trajectory, trajectory, grids, decoder.spec),
        documents=documents_of(trajectory, [decoder.spec.num_tokens(grid) for grid in grids], decoder.spec),
        images=trajectory.images,
        grids=grids,
        behaviour_logprobs=trajectory.behaviour_logprobs[sampled],
        versions=trajectory.policy_versions[sampled],
        rewards=rewards,
        turn_end=turn_end,
        advantage=advantage,
        group=group,
        index=index,
    )


def pieces_of(episode: TrainingEpisode, budget: int) -> list[TrainingEpisode]:
    """Return an episode of more than `budget` tokens as pieces, each of consecutive segments with at most as many
    tokens or of one longer segment; other episodes as they are."""
    if episode.num_tokens <= budget or len(episode.documents) == 1:
        return [episode]
    firsts, filled = [], budget
    for number, document in enumerate(episode.documents):
        if filled + document.num_tokens > budget:
            firsts.append(number)
            filled = 0
        filled += document.num_tokens
    stops = [*firsts[1:], len(episode.documents)]
    return [_piece(episode, first, stop) for first, stop in zip(firsts, stops, strict=True)]


def _piece(episode: TrainingEpisode, first: int, stop: int) -> TrainingEpisode:
    """Return the piece of an episode that consists of the documents from `first` to before `stop`."""
    sampled = [0, *accumulate(document.num_sampled for document in episode.documents)]
    images = [0, *accumulate(document.num_images for document in episode.documents)]
    tokens, shown = slice(sampled[first], sampled[stop]), slice(images[first], images[stop])
    return replace(
        episode,
        expanded=partial(episode.expanded, documents=(first, stop)),
        documents=episode.documents[first:stop],
        images=episode.images[shown],
        grids=episode.grids[shown],
        behaviour_logprobs=episode.behaviour_logprobs[tokens],
        versions=episode.versions[tokens],
        rewards=episode.rewards[tokens],
        turn_end=episode.turn_end[tokens],
        turn_advantages=None if episode.turn_advantages is None else episode.turn_advantages[tokens],
        whole=episode,
        first=sampled[first],
    )


def expand_trajectory(
    trajectory: Trajectory, grids: Sequence[Grid], spec: VisionSpec, documents: tuple[int, int] | None = None
) -> ExpandedTokens:
    """Return the tokens with each image's placeholder repeated for all of its visual tokens. Positions begin anew in
    each segment. `documents`: only the segments from the first to before the second number."""
    first, stop = documents or (0, len(trajectory.bounds))
    begin = trajectory.bounds[first][0]
    skipped = np.count_nonzero(trajectory.token_ids[:begin] == spec.image_token_id)
    ids_parts, position_parts, mask_parts, left = [], [], [], list(grids)[skipped:]
    for start, end in trajectory.bounds[first:stop]:
        compact = trajectory.token_ids[start:end]
        count = np.count_nonzero(compact == spec.image_token_id)
        own, left = left[:count], left[count:]
        ids, compact_index = expand(compact, own, spec)
        ids_parts.append(ids)
        position_parts.append(np.concatenate([np.arange(len(ids))[None], spec.position_ids(ids, own)]))
        mask_parts.append(trajectory.loss_mask[start:end][compact_index])
    positions = np.concatenate(position_parts, axis=1)
    return ExpandedTokens(np.concatenate(ids_parts), positions, np.flatnonzero(np.concatenate(mask_parts)))


def documents_of(trajectory: Trajectory, visual_tokens: Sequence[int], spec: VisionSpec) -> tuple[Document, ...]:
    """Return the size of each segment. `visual_tokens`: of each image."""
    images = np.flatnonzero(trajectory.token_ids == spec.image_token_id)
    return tuple(
        Document(
            end - start + sum(visual_tokens[first:last]) - (last - first),
            int(np.count_nonzero(trajectory.loss_mask[start:end])),
            last - first,
        )
        for start, end in trajectory.bounds
        for first, last in [np.searchsorted(images, (start, end)).tolist()]
    )


def shortest_first(episodes: Sequence[TrainingEpisode]) -> list[TrainingEpisode]:
    """Return episodes in their order in a microbatch, in which episodes of equal length are neighbours."""
    return sorted(episodes, key=lambda e: e.num_tokens)


# ---------------------------------------------------------------------- checks of what arrives


def check_layout(trajectory: Trajectory, spec: VisionSpec) -> None:
    """Raise ValueError unless each image has its placeholder and the sampled tokens of each segment follow a prompt."""
    placeholders, sampled = trajectory.token_ids == spec.image_token_id, trajectory.loss_mask == 1
    if placeholders.sum() != len(trajectory.images):
        raise ValueError(f"{placeholders.sum()} image placeholders but {len(trajectory.images)} images")
    begins = [start for start, _ in trajectory.bounds]
    if not sampled.any() or sampled[begins].any() or (placeholders & sampled).any():
        raise ValueError("an episode needs a prompt, then sampled tokens, none of which is an image's placeholder")


def check_group(group: Group, decoder: ImageDecoder, max_context: int | None = None) -> None:
    """Raise ValueError, in one line, if no step could train on `group`. No PNG is decoded for this check.

    The receiver of groups calls it, so that no step gets an episode of more than `max_context` tokens or a number whose
    square is infinite.
    """
    trainable = [trajectory for trajectory in group.trajectories if trajectory.trainable]
    images = {image.content_hash: image for trajectory in trainable for image in trajectory.images}
    visual = {key: decoder.spec.num_tokens(decoder.grid(image)) for key, image in images.items()}
    for trajectory in trainable:
        check_layout(trajectory, decoder.spec)
        visual_tokens = [visual[image.content_hash] for image in trajectory.images]
        num_tokens = max(d.num_tokens for d in documents_of(trajectory, visual_tokens, decoder.spec))
        if max_context is not None and num_tokens > max_context:
            raise ValueError(f"an episode of {num_tokens} tokens, images expanded; model.max_context is {max_context}")
        largest = max(abs(number) for number in (trajectory.reward, *(turn.reward for turn in trajectory.turns)))
        if largest > MAX_REWARD:
            raise ValueError(f"an episode earned {largest:g}; a reward may be up to {MAX_REWARD:g}")
    for image in images.values():
        decoder.check(image)
