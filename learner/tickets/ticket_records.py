"""The records of the ticket book."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from shared.config.recipe import Recipe
from shared.types import TRAINABLE_ENDINGS, Ending, Group, PolicyVersion, Sampling, Ticket


class GroupVerdict(StrEnum):
    """The book's answer to a group. All verdicts but ACCEPTED and AGAIN refuse the group."""

    ACCEPTED = "accepted"
    AGAIN = "again"  # the same actor sent this group before, and it waits for its step
    DUPLICATE = "duplicate"  # another actor was faster, or the ticket is closed
    OUTDATED = "outdated"  # a restart has undone its weights or its ticket; the ticket is played again
    UNPROVEN = "unproven"  # an engine with wrong weights may have sampled it; the ticket is played again
    UNKNOWN = "unknown"  # the ticket is not of this run
    RETRIED = "retried"  # refused since all its episodes failed; the ticket is played again
    DROPPED = "dropped"  # refused for its content; the ticket is closed (training) or played again (evaluation)


class Retry(StrEnum):
    """Who may play a ticket again after its group was of no use."""

    NOBODY = "nobody"  # it is the sample's doing
    OTHERS = "others"  # any other actor: it may be this one's fault
    ANYBODY = "anybody"  # this actor too: its engine failed


class Fault(NamedTuple):
    """Why the learner cannot use a group; `counts`: it is a result in an evaluation, where failures are counted."""

    reason: str
    detail: str
    retry: Retry
    counts: bool = False


ENGINE_FAILURES = frozenset({Ending.ENGINE_ERROR, Ending.ABORTED})
MAX_PLAYS = 3
"""Times that a ticket is played at most, if all its groups fail."""
MAX_HOLDERS = 8
"""Actors that the book notes for one ticket; beyond them, the one that got it first is no longer noted."""
RETURN_S = 30.0
"""Seconds for which the tickets of a vanished actor are reserved for it, if it keeps a journal."""


@dataclass(frozen=True, slots=True)
class BookSettings:
    """The ticket book's part of a recipe."""

    group_size: int
    groups_per_version: int  # groups per step * steps per publication
    max_staleness: int
    sampling: Sampling = field(default_factory=Sampling)
    lease_s: float = 300.0
    lost_after_s: float = 5.0  # a ticket that its actor does not name for so long counts as lost in transit
    return_s: float = 0.0  # the tickets of an actor that vanished are reserved for it for so long
    seed: int = 0
    total_groups: int | None = None  # groups that the whole run trains on; no more tickets are issued
    group_sizes: Mapping[str, int] = field(default_factory=dict)  # of tasks that have another one, by name
    refuse: Callable[[Group], str] | None = None  # returns why a sound training group is not trained on; "" = it is

    @staticmethod
    def of(recipe: Recipe, refuse: Callable[[Group], str] | None = None) -> BookSettings:
        learner, sampling = recipe.learner, recipe.sampling
        return BookSettings(
            group_size=learner.group_size,
            groups_per_version=learner.groups_per_step * learner.publish.every,
            max_staleness=learner.max_staleness,
            sampling=Sampling(sampling.temperature, max_new_tokens=recipe.most_turn_tokens),
            lease_s=learner.lease_s,
            return_s=RETURN_S if recipe.journaled else 0.0,
            seed=recipe.run.seed,
            total_groups=learner.groups_per_step * learner.total_steps,
            group_sizes={task.name: task.group_size for task in recipe.tasks if task.group_size},
            refuse=refuse,
        )


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The result of one evaluation. `lost` counts, by reason, the tickets without a usable group."""

    name: str
    groups: tuple[tuple[Ticket, Group], ...]
    lost: dict[str, int]


@dataclass(slots=True)
class TicketState:
    """A ticket that is neither trained nor dropped."""

    ticket: Ticket
    number: int
    holders: dict[str, float] = field(default_factory=dict)  # actor -> time at which it got the ticket
    deadline: float = 0.0  # time at which the lease ends
    attempts: int = 0
    failed_by: dict[str, float] = field(default_factory=dict)  # actor that failed it -> when it did
    num_failed: int = 0  # groups of which no episode was sound
    group: Group | None = None
    sender: str = ""  # the actor that sent the group
    oldest: PolicyVersion = 0  # oldest version that sampled a token of the group


@dataclass(slots=True)
class OpenEvaluation:
    """A running evaluation: its open tickets, those with a group, and the number of lost ones by reason."""

    open: dict[str, TicketState]
    done: list[TicketState] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)


def oldest_version(group: Group) -> PolicyVersion:
    """Return the oldest version that sampled a token of the group's trainable trajectories."""
    return min(int(t.policy_versions[t.loss_mask == 1].min()) for t in group.trajectories if t.trainable)


def newest_version(group: Group) -> PolicyVersion:
    """Return the newest version that sampled a token of the group; -1 without such a token."""
    return max((int(t.policy_versions.max(initial=-1)) for t in group.trajectories), default=-1)


def parse_ticket_id(ticket_id: str) -> tuple[int, str]:
    """Return the number and the nonce in a training ticket's id; the number is -1 if the text is no such id."""
    number, _, nonce = ticket_id.rpartition("-")
    return (int(number) if number.isdecimal() and len(number) < 19 else -1), nonce


def group_fault(group: Group, ticket: Ticket, refuse: Callable[[Group], str] | None = None) -> Fault | None:
    """Return why the learner cannot use a group of `ticket`; None if it can."""
    size = len(group.trajectories)
    if size != ticket.group_size:
        return Fault("wrong_group_size", f"{size} trajectories for a group of {ticket.group_size}", Retry.OTHERS)
    if ticket.evaluation:
        sampled = [t.policy_versions[t.loss_mask == 1] for t in group.trajectories]
        oldest = min((int(versions.min(initial=ticket.version)) for versions in sampled), default=ticket.version)
        if oldest < ticket.version:
            older = f"tokens of version {oldest}, and {ticket.version} is evaluated"
            return Fault("older_weights", older, Retry.NOBODY)
        return _failure_of_all(group) if all(t.ending not in TRAINABLE_ENDINGS for t in group.trajectories) else None
    if any(t.trainable for t in group.trajectories):
        reason = refuse(group) if refuse is not None else ""
        return Fault(reason, "", Retry.NOBODY) if reason else None
    return _failure_of_all(group)


def _failure_of_all(group: Group) -> Fault:
    """Return the fault of a group of which no episode is sound."""
    endings = [t.ending for t in group.trajectories]
    failed = next((t for t in group.trajectories if t.ending not in TRAINABLE_ENDINGS), None)
    if failed is None:
        return Fault("no_turns", f"ended as {endings[0]}", Retry.NOBODY, counts=True)
    retry = Retry.ANYBODY if not ENGINE_FAILURES.isdisjoint(endings) else Retry.OTHERS
    return Fault(failed.ending.value, failed.error or f"ended as {failed.ending}", retry, counts=True)
