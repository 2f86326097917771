"""What objectives take and give; all columns are [N], N = sampled tokens of one microbatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Labels(NamedTuple):
    """What the reference is sure of, for N sampled tokens."""

    agrees_N: Tensor  # bool: it is sure of the sampled token
    rows_K: Tensor  # int64: of other tokens at these places
    ids_K: Tensor  # int64: namely of these


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
    weights: Tensor  # of each token in the sums: 1 (token mean), or 1 / tokens of its episode (sequence mean)
    reference_logprobs: Tensor | None = None  # of the frozen reference policy
    reference_entropies: Tensor | None = None  # where `kl_max_entropy` asks for them
    proximal_logprobs: Tensor | None = None  # of the policy as the step began; None: clips act on pi/mu
    hold: Tensor | None = None  # -log pi of what the reference is sure of, 0 elsewhere; differentiable


class Dropped(NamedTuple):
    """bool [N] each: what the masks of the objective leave out, and why."""

    token: Tensor  # its own ratio
    sequence: Tensor  # the geometric mean of its episode's ratios
    veto: Tensor  # the smallest ratio of its episode

    @property
    def any_N(self) -> Tensor:
        return self.token | self.sequence | self.veto


class Loss(NamedTuple):
    """`total`: the scalar to differentiate, not yet divided. The others are detached, [N]."""

    total: Tensor
    policy_N: Tensor  # each token's policy term
    clipped_N: Tensor  # bool: the clip removed the gradient
    kl_N: Tensor  # estimates of KL(pi, reference); 0 without one, and where its entropy is above `kl_max_entropy`
    advantages_N: Tensor  # before any weight
    vs_N: Tensor  # the value's targets
    value_weights_N: Tensor  # of each token in the value's term; their mean is 1
    hold_N: Tensor | None = None  # -log pi of what the reference is sure of; None where nothing is held
    trace_N: Tensor | None = None  # tokens that V-trace's trace of each spans; None without traces
    whole_trace_N: Tensor | None = None  # the same if every ratio were 1
    dropped: Dropped | None = None  # None: the recipe masks nothing
