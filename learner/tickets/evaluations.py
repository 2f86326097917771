"""Evaluations that run beside the training: their tickets and results. No sockets or threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from learner.tickets.leases import Leases
from learner.tickets.ticket_records import EvaluationResult, OpenEvaluation, TicketState
from shared.config.recipe import Recipe
from shared.types import PolicyVersion, Sample, Sampling, Ticket

FIRST_SEED = 1_234_567_891  # of an evaluation's tickets; those of a run's first training tickets are far from it
ATTEMPTS = 3  # times that a ticket is played before it counts as lost


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """The sampling of an evaluation's episodes, and how often each sample is played."""

    sampling: Sampling
    repeats: int

    @classmethod
    def of(cls, recipe: Recipe, *, greedy: bool = False) -> Self:
        """Return the plan of a recipe: at the training temperature, `eval.repeats` times; or greedy, once for each
        sample."""
        temperature, repeats = (0.0, 1) if greedy else (recipe.sampling.temperature, recipe.eval.repeats)
        return cls(Sampling(temperature, 1.0, -1, recipe.most_turn_tokens), repeats)


class Evaluations:
    """All running evaluations by name. A ticket whose group is unusable is played again, `ATTEMPTS` times at most."""

    def __init__(self, nonce: str, lease_s: float, leases: Leases) -> None:
        self._nonce = nonce
        self._lease_s = lease_s
        self._leases = leases
        self._running: dict[str, OpenEvaluation] = {}

    @property
    def open(self) -> int:
        """The number of tickets whose group has not arrived."""
        return sum(len(evaluation.open) for evaluation in self._running.values())

    def left(self, name: str) -> int:
        """Return how many tickets of an evaluation are open."""
        return len(self._running[name].open)

    def progress(self) -> tuple[str, int, int] | None:
        """Return (name, finished tickets, all tickets) of the oldest evaluation that is not complete; None if there is
        none."""
        for name, evaluation in self._running.items():
            if evaluation.open:
                finished = len(evaluation.done) + evaluation.lost.total()
                return name, finished, finished + len(evaluation.open)
        return None

    def find(self, ticket_id: str) -> TicketState | None:
        """Return the state of an open ticket; None for any other."""
        evaluation = self._running.get(ticket_id.rpartition("/")[0])
        return evaluation.open.get(ticket_id) if evaluation is not None else None

    def start(
        self, name: str, samples: Sequence[Sample], sampling: Sampling, group_size: int, version: PolicyVersion
    ) -> None:
        """Queue one ticket for each sample; the seeds begin at FIRST_SEED. Raise ValueError if the name is in use."""
        if not name or name in self._running:
            raise ValueError(f"evaluation {name!r} is running already (or has no name); give each one its own name")
        opened: dict[str, TicketState] = {}
        for i, sample in enumerate(samples):
            ticket_id = f"{name}/{i}-{self._nonce}"
            ticket = Ticket(
                ticket_id, sample, group_size, version, sampling, self._lease_s, evaluation=name, seed=FIRST_SEED + i
            )
            opened[ticket_id] = TicketState(ticket, i)
        self._running[name] = OpenEvaluation(opened)
        self._leases.add(opened.values())

    def accept(self, state: TicketState) -> None:
        """Count a ticket as done; its state holds the group."""
        evaluation = self._running[state.ticket.evaluation]
        evaluation.done.append(evaluation.open.pop(state.ticket.id))

    def reject(self, state: TicketState, reason: str) -> None:
        """Queue a ticket with an unusable group again, or count it as lost after `ATTEMPTS`."""
        if state.attempts < ATTEMPTS:
            self._leases.queue(state)
        else:
            evaluation = self._running[state.ticket.evaluation]
            del evaluation.open[state.ticket.id]
            evaluation.lost[reason] += 1

    def result(self, name: str) -> EvaluationResult | None:
        """Return an evaluation's result, in the samples' order, and forget the evaluation; None while tickets are open.

        Raise KeyError if no evaluation has this name.
        """
        if self._running[name].open:
            return None
        evaluation = self._running.pop(name)
        done = sorted(evaluation.done, key=lambda state: state.number)
        return EvaluationResult(
            name, tuple((state.ticket, state.group) for state in done if state.group), dict(evaluation.lost)
        )
