"""Groups that no step could train on, found where they arrive."""

from __future__ import annotations

from learner.batch import check_layout
from learner.images import ImageDecoder
from shared.types import Group

MAX_REWARD = 1e15  # its square, and sums of them, are finite in float32


def check_group(group: Group, decoder: ImageDecoder, max_context: int | None = None) -> None:
    """ValueError, in one line, if `make_episodes` and `pack` cannot use `group`. No PNG is decoded for it.

    For the receiver of groups, so that no bad one reaches a step: neither one that takes more memory than an episode
    of `max_context` tokens, nor a number whose square is infinite.
    """
    trainable = [trajectory for trajectory in group.trajectories if trajectory.trainable]
    shown = {image.content_hash: image for trajectory in trainable for image in trajectory.images}
    visual = {key: decoder.spec.num_tokens(decoder.grid(image)) for key, image in shown.items()}
    for trajectory in trainable:
        check_layout(trajectory, decoder.spec)
        more = sum(visual[image.content_hash] - 1 for image in trajectory.images)
        num_tokens = len(trajectory.token_ids) + more
        if max_context is not None and num_tokens > max_context:
            raise ValueError(f"an episode of {num_tokens} tokens, images expanded; model.max_context is {max_context}")
        largest = max(abs(number) for number in (trajectory.reward, *(turn.reward for turn in trajectory.turns)))
        if largest > MAX_REWARD:
            raise ValueError(f"an episode earned {largest:g}; a reward may be up to {MAX_REWARD:g}")
    for image in shown.values():
        decoder.check(image)
