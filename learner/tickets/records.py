"""The records of the ticket book."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from shared.config import Recipe
from shared.types import TRAINABLE_ENDINGS, Group, PolicyVersion, Sampling, Ticket


class Verdict(StrEnum):
    """What the book said to a group. All but the first two refuse it."""

    ACCEPTED = "accepted"
    AGAIN = "again"  # this actor's group is here already and waits for its step
    DUPLICATE = "duplicate"  # another actor was faster, or the ticket is closed
    OUTDATED = "outdated"  # of weights, or of a ticket, that a restart has undone; the ticket is played again
    UNKNOWN = "unknown"  # no ticket of this run
    DROPPED = "dropped"  # refused for its content; the ticket is closed (training) or played again (evaluation)


@dataclass(frozen=True, slots=True)
class BookSettings:
    group_size: int
    groups_per_version: int  # groups per step * steps per publication
    max_staleness: int
    sampling: Sampling = field(default_factory=Sampling)
    lease_s: float = 300.0
    lost_after_s: float = 5.0  # a ticket that its actor does not name for so long was lost on the way
    return_s: float = 0.0  # the tickets of an actor that vanished wait so long for it
    seed: int = 0
    total_groups: int | None = None  # what the whole run trains on; nothing is issued beyond it
    refuse: Callable[[Group], str] | None = None  # why a sound training group is not trained on; "" = it is

    @staticmethod
    def of(recipe: Recipe, refuse: Callable[[Group], str] | None = None) -> BookSettings:
        learner, sampling = recipe.learner, recipe.sampling
        return BookSettings(
            group_size=learner.group_size,
            groups_per_version=learner.groups_per_step * learner.publish.every,
            max_staleness=learner.max_staleness,
            sampling=Sampling(sampling.temperature, sampling.top_p, sampling.top_k, recipe.env.turn_tokens),
            lease_s=learner.lease_s,
            return_s=recipe.actor.return_s if recipe.journaled else 0.0,
            seed=recipe.run.seed,
            total_groups=learner.groups_per_step * learner.total_steps,
            refuse=refuse,
        )


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Everything one evaluation brought; `lost` counts tickets that brought nothing usable, by reason."""

    name: str
    groups: tuple[tuple[Ticket, Group], ...]
    lost: dict[str, int]


@dataclass(slots=True)
class TicketState:
    """A ticket that is neither trained nor dropped."""

    ticket: Ticket
    number: int
    holders: dict[str, float] = field(default_factory=dict)  # actor -> when it got the ticket
    deadline: float = 0.0  # of the lease
    attempts: int = 0
    group: Group | None = None
    bringer: str = ""  # the actor that brought the group
    oldest: PolicyVersion = 0  # of the group's tokens


@dataclass(slots=True)
class Evaluation:
    open: dict[str, TicketState]
    done: list[TicketState] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)


def oldest_version(group: Group) -> PolicyVersion:
    """The oldest version that sampled a token of the group's trainable trajectories."""
    return min(int(t.policy_versions[t.loss_mask == 1].min()) for t in group.trajectories if t.trainable)


def newest_version(group: Group) -> PolicyVersion:
    """The newest version that sampled a token of the group; -1 without such a token."""
    return max((int(t.policy_versions.max(initial=-1)) for t in group.trajectories), default=-1)


def number_of(ticket_id: str) -> tuple[int, str]:
    """The position and the nonce of a training ticket's id; -1 for any other text."""
    number, _, nonce = ticket_id.rpartition("-")
    return (int(number) if number.isdecimal() and len(number) < 19 else -1), nonce


def fault(group: Group, ticket: Ticket, refuse: Callable[[Group], str] | None = None) -> tuple[str, str] | None:
    """Why a group of `ticket` is of no use to the learner: reason and detail; None = it is of use."""
    size = len(group.trajectories)
    if size != ticket.group_size:
        return "wrong_group_size", f"{size} trajectories for a group of {ticket.group_size}"
    if ticket.evaluation:
        sampled = [t.policy_versions[t.loss_mask == 1] for t in group.trajectories]
        oldest = min((int(versions.min(initial=ticket.version)) for versions in sampled), default=ticket.version)
        older = f"tokens of version {oldest}, and {ticket.version} is evaluated"
        return ("older_weights", older) if oldest < ticket.version else None
    if any(t.trainable for t in group.trajectories):
        reason = refuse(group) if refuse is not None else ""
        return (reason, "") if reason else None
    first = group.trajectories[0]
    ending = "no_turns" if first.ending in TRAINABLE_ENDINGS else first.ending.value
    return ending, first.error or f"ended as {first.ending}"
