"""Runs the start-up check of shared microbatches and experts, on correct code and with mistakes patched in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from learner import mesh_check
from learner.batch.microbatch import Microbatch
from learner.batch.packer import pack
from learner.distributed import Ranks
from learner.model import context_collectives, experts
from learner.model.policy import Policy

COMPUTED = experts._Dealt._computed


def positions_of_the_whole(*args: Any, **how: Any) -> Microbatch:
    """Pack with a mistake: number the tokens of a rank's share as if no other tokens were between them."""
    batch = pack(*args, **how)
    if batch.shard is None:
        return batch
    return replace(batch, position_ids=batch.position_ids.sort(-1).values - batch.position_ids.min())


def only_its_own(summed: Tensor, padded: Tensor, group: Any) -> None:
    """Sum over the ranks with a mistake: take only the rank's own part."""
    summed.copy_(padded.chunk(group.size())[group.rank()])


def neighbours(dealt: Any, stack: Any, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute dealt experts with a mistake: each gets its neighbour's rows."""
    return COMPUTED(dealt, stack, rows, chosen if dealt.alone else (chosen + 1) % stack.num_experts, weights)


def said(policy: Policy, ranks: Ranks) -> str:
    """Return the error of the check; "" if it passes."""
    try:
        mesh_check.check_shared(policy, ranks, 200)
    except ValueError as error:
        return str(error)
    return ""


def said_by_the_check(policy: Policy, ranks: Ranks) -> list[str]:
    """Return the check's errors for shared microbatches: correct ones, with wrong positions, and with gradients of a
    rank's own tokens only."""
    found = [said(policy, ranks)]
    with patch.object(mesh_check, "pack", positions_of_the_whole):
        found.append(said(policy, ranks))
    with patch.object(context_collectives, "reduce_scatter", only_its_own):
        found.append(said(policy, ranks))
    return found


def said_of_experts(policy: Policy, ranks: Ranks) -> list[str]:
    """Return the check's errors for dealt experts: correct ones, and mistaken ones."""
    found = [said(policy, ranks)]
    with patch.object(experts._Dealt, "_computed", neighbours):
        found.append(said(policy, ranks))
    return found
