"""What the check of shared microbatches and experts says at the start: of what is right, and of mistakes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from learner.batch import Microbatch, pack
from learner.distributed import Ranks
from learner.model.policy import Policy
from learner.parallel import check, collectives, experts

COMPUTED = experts._Dealt._computed


def positions_of_the_whole(*args: Any, **how: Any) -> Microbatch:
    """A share that numbers its tokens as if no others were between them."""
    batch = pack(*args, **how)
    if batch.share is None:
        return batch
    return replace(batch, position_ids=batch.position_ids.sort(-1).values - batch.position_ids.min())


def only_its_own(summed: Tensor, padded: Tensor, group: Any) -> None:
    """A sum over the ranks that forgets the others."""
    summed.copy_(padded.chunk(group.size())[group.rank()])


def neighbours(dealt: Any, stack: Any, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Dealt experts that take one another's rows."""
    return COMPUTED(dealt, stack, rows, chosen if dealt.alone else (chosen + 1) % stack.num_experts, weights)


def said(policy: Policy, ranks: Ranks) -> str:
    """Empty where nothing is wrong."""
    try:
        check.check_shared(policy, ranks, 200)
    except ValueError as error:
        return str(error)
    return ""


def said_by_the_check(policy: Policy, ranks: Ranks) -> list[str]:
    """Of microbatches that are shared: rightly, with wrong positions, with gradients of its own tokens alone."""
    found = [said(policy, ranks)]
    with patch.object(check, "pack", positions_of_the_whole):
        found.append(said(policy, ranks))
    with patch.object(collectives, "reduce_scatter", only_its_own):
        found.append(said(policy, ranks))
    return found


def said_of_experts(policy: Policy, ranks: Ranks) -> list[str]:
    """Of experts that are dealt: rightly, and wrongly."""
    found = [said(policy, ranks)]
    with patch.object(experts._Dealt, "_computed", neighbours):
        found.append(said(policy, ranks))
    return found
