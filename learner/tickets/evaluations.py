"""Evaluations beside the training: their tickets and their results. No sockets or threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from learner.tickets.leases import Leases
from learner.tickets.records import Evaluation, EvaluationResult, TicketState
from shared.config import Recipe
from shared.types import PolicyVersion, Sample, Sampling, Ticket

ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """How an evaluation plays each of its samples, and how often."""

    sampling: Sampling
    repeats: int

    @classmethod
    def of(cls, recipe: Recipe, *, greedy: bool = False) -> Self:
        """At the training temperature; a greedy one plays each sample once."""
        temperature, repeats = (0.0, 1) if greedy else (recipe.sampling.temperature, recipe.eval.repeats)
        return cls(Sampling(temperature, 1.0, -1, recipe.env.turn_tokens), repeats)


class Evaluations:
    """All that run now, by name. A ticket is played up to three times until its group is of use."""

    def __init__(self, nonce: str, lease_s: float, leases: Leases) -> None:
        self._nonce = nonce
        self._lease_s = lease_s
        self._leases = leases
        self._running: dict[str, Evaluation] = {}

    @property
    def open(self) -> int:
        """Tickets without a group."""
        return sum(len(evaluation.open) for evaluation in self._running.values())

    def left(self, name: str) -> int:
        """Open tickets of one that runs."""
        return len(self._running[name].open)

    def find(self, ticket_id: str) -> TicketState | None:
        """The state of an open ticket."""
        evaluation = self._running.get(ticket_id.rpartition("/")[0])
        return evaluation.open.get(ticket_id) if evaluation is not None else None

    def start(
        self, name: str, samples: Sequence[Sample], sampling: Sampling, group_size: int, version: PolicyVersion
    ) -> None:
        """Queues one ticket for each sample; the i-th has seed i + 1. ValueError: name in use."""
        if not name or name in self._running:
            raise ValueError(f"evaluation {name!r} is running already (or has no name); give each one its own name")
        opened: dict[str, TicketState] = {}
        for i, sample in enumerate(samples):
            ticket_id = f"{name}/{i}-{self._nonce}"
            ticket = Ticket(
                ticket_id, sample, group_size, version, sampling, self._lease_s, evaluation=name, seed=i + 1
            )
            opened[ticket_id] = TicketState(ticket, i)
        self._running[name] = Evaluation(opened)
        self._leases.add(opened.values())

    def accept(self, state: TicketState) -> None:
        """Its group is in the state."""
        evaluation = self._running[state.ticket.evaluation]
        evaluation.done.append(evaluation.open.pop(state.ticket.id))

    def reject(self, state: TicketState, reason: str) -> None:
        """Its group cannot be used: the ticket is played again, or counted as lost."""
        if state.attempts < ATTEMPTS:
            self._leases.queue(state)
        else:
            evaluation = self._running[state.ticket.evaluation]
            del evaluation.open[state.ticket.id]
            evaluation.lost[reason] += 1

    def result(self, name: str) -> EvaluationResult | None:
        """The result, in the samples' order, once; None = some tickets are open. KeyError: no such evaluation."""
        if self._running[name].open:
            return None
        evaluation = self._running.pop(name)
        done = sorted(evaluation.done, key=lambda state: state.number)
        return EvaluationResult(
            name, tuple((state.ticket, state.group) for state in done if state.group), dict(evaluation.lost)
        )
