"""The compact stream of an episode as it grows, token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from actor.render import Fragment
from shared.engine_messages import weight_name
from shared.types import Completion, Ending, Image, Trajectory, Turn


class Stream:
    """All lists of tokens have the same length; `num_expanded` counts every image's visual tokens."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.images: list[Image] = []
        self.weights: set[str] = set()  # by their full names
        self.num_expanded = self.num_sampled = 0

    def observe(self, fragment: Fragment) -> None:
        """Appends what no policy sampled."""
        count = len(fragment.token_ids)
        self.token_ids += fragment.token_ids
        self.mask += [0] * count
        self.logprobs += [0.0] * count
        self.versions += [-1] * count
        self.images += fragment.images
        self.num_expanded += fragment.num_expanded

    def sample(self, completion: Completion) -> None:
        """Appends what the policy sampled, exactly as it came."""
        count = len(completion.token_ids)
        self.token_ids += completion.token_ids
        self.mask += [1] * count
        self.logprobs += completion.logprobs
        for span in completion.spans:
            self.versions += [span.version] * (span.end - span.start)
            if span.process:
                self.weights.add(weight_name(span.version, span.process))
        self.num_expanded += count
        self.num_sampled += count

    def trajectory(
        self,
        turns: Sequence[Turn],
        ending: Ending,
        *,
        reward: float = 0.0,
        metrics: Mapping[str, float] | None = None,
        text: str = "",
        error: str = "",
    ) -> Trajectory:
        """The episode's record."""
        return Trajectory(
            token_ids=np.asarray(self.token_ids, dtype=np.int32),
            loss_mask=np.asarray(self.mask, dtype=np.uint8),
            behaviour_logprobs=np.asarray(self.logprobs, dtype=np.float32),
            policy_versions=np.asarray(self.versions, dtype=np.int32),
            turns=tuple(turns),
            reward=float(reward),
            images=tuple(self.images),
            ending=ending,
            metrics=dict(metrics or {}),
            text=text,
            error=error,
            weights=tuple(sorted(self.weights)),
        )
