"""The inputs and outputs of objectives. All columns are [N], N = sampled tokens of one microbatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Labels(NamedTuple):
    """The tokens to which the reference assigns a high probability, at the positions of N sampled tokens."""

    agrees_N: Tensor  # bool: the sampled token is such a token
    rows_K: Tensor  # int64: positions at which such a token was not sampled
    ids_K: Tensor  # int64: the tokens at these positions


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Sampled tokens of whole episodes, one after another; all [N]. The first three are differentiable."""

    logprobs: Tensor
    entropies: Tensor
    values: Tensor
    behaviour_logprobs: Tensor
    rewards: Tensor  # a turn's reward at its last token
    turn_end: Tensor  # bool
    episode_end: Tensor  # bool
    advantages: Tensor  # relative to the group
    weights: Tensor  # weight of each token in the sums: 1 (token mean), or 1 / tokens of its episode (sequence mean)
    reference_logprobs: Tensor | None = None  # logprobs of the frozen reference policy
    reference_entropies: Tensor | None = None  # set if `kl_max_entropy` needs them
    proximal_logprobs: Tensor | None = None  # logprobs of the policy as the step began; None: clips use pi/mu
    teacher_logprobs: Tensor | None = None  # logprobs of the frozen teacher
    teacher_baselines: Tensor | None = None  # the step's mean of log mu/teacher at the token's place in a turn
    hold: Tensor | None = None  # -log pi of the reference's label, 0 without a label; differentiable


class Dropped(NamedTuple):
    """The tokens that the objective's masks drop, by reason; bool [N] each."""

    token: Tensor  # because of the token's own ratio
    sequence: Tensor  # because of the geometric mean of its episode's ratios
    veto: Tensor  # because of the smallest ratio of its episode

    @property
    def any_N(self) -> Tensor:
        return self.token | self.sequence | self.veto


class Loss(NamedTuple):
    """The result of an objective. `total`: the scalar to differentiate, not yet divided. The other fields are detached,
    [N]."""

    total: Tensor
    policy_N: Tensor  # each token's policy term
    clipped_N: Tensor  # bool: the clip removed the gradient
    kl_N: Tensor  # estimates of KL(pi, reference); 0 without a reference, or if its entropy is above `kl_max_entropy`
    advantages_N: Tensor  # before any weight
    vs_N: Tensor  # targets of the value
    value_weights_N: Tensor  # weight of each token in the value term; their mean is 1
    hold_N: Tensor | None = None  # -log pi of the reference's label; None without a hold term
    teacher_N: Tensor | None = None  # estimates of the KL to or from the teacher; None without a teacher
    trace_N: Tensor | None = None  # length in tokens of each token's V-trace trace; None without traces
    whole_trace_N: Tensor | None = None  # the same if every ratio were 1
    dropped: Dropped | None = None  # None if the recipe masks nothing
