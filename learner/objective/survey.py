"""What is known of a step's episodes before its first update: logprobs of the policy as it begins, of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from learner.advantages import penalised_advantages
from learner.batch import Episode
from shared.settings.objective import ObjectiveConfig


@dataclass(frozen=True, slots=True)
class Survey:
    """Whose logprobs have to be computed beforehand, by a forward of their own without gradient.

    Not the policy's where a step has one update: it is then what it was. Nor the reference's where each episode is
    trained on once, whose forward then is part of its update; with several passes one forward serves them all.
    """

    policy: bool
    reference: bool

    @staticmethod
    def of(config: ObjectiveConfig) -> Survey:
        several = config.passes * config.minibatches > 1
        in_advantages = config.kl_in_reward and config.group_relative
        moves = several and config.proximal == "learner"
        return Survey(moves or in_advantages, config.kl_coef != 0 and (config.passes > 1 or in_advantages))

    def added(self, episodes: Sequence[Episode], logprobs: np.ndarray, config: ObjectiveConfig) -> list[Episode]:
        """The episodes with what was found and, where the KL is in group-relative rewards, the advantages that follow.

        `logprobs`: float32 [2, tokens of all episodes], of policy and reference; a row not asked for is not read.
        """
        ends = np.cumsum([e.num_sampled for e in episodes])[:-1]
        proximal, reference = (np.split(row, ends) for row in logprobs)
        found = []
        for i, e in enumerate(episodes):
            mine = proximal[i] if self.policy else None
            found.append(
                replace(e, proximal_logprobs=mine, reference_logprobs=reference[i] if self.reference else None)
            )
        if not (config.kl_in_reward and config.group_relative):
            return found
        advantages = penalised_advantages(found, config)
        return [replace(e, advantage=advantage) for e, advantage in zip(found, advantages, strict=True)]
