"""What the check of shared microbatches says at the start: of what is right, and of two mistakes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from learner.batch import Microbatch, pack
from learner.distributed import Ranks
from learner.model.policy import Policy
from learner.parallel import check, collectives


def positions_of_the_whole(*args: Any) -> Microbatch:
    """A share that numbers its tokens as if no others were between them."""
    batch = pack(*args)
    if batch.share is None:
        return batch
    return replace(batch, position_ids=batch.position_ids.sort(-1).values - batch.position_ids.min())


def only_its_own(summed: Tensor, padded: Tensor, group: Any) -> None:
    """A sum over the ranks that forgets the others."""
    summed.copy_(padded.chunk(group.size())[group.rank()])


def said_by_the_check(policy: Policy, ranks: Ranks) -> list[str]:
    """Empty where nothing is wrong."""

    def said() -> str:
        try:
            check.check_context(policy, ranks, 200)
        except ValueError as error:
            return str(error)
        return ""

    found = [said()]
    with patch.object(check, "pack", positions_of_the_whole):
        found.append(said())
    with patch.object(collectives, "reduce_scatter", only_its_own):
        found.append(said())
    return found
