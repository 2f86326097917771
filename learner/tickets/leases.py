"""Which actor holds which ticket, and which tickets wait to be issued. A call costs what it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from learner.tickets.records import TicketState


class Leases:
    """Every ticket whose group has not arrived: waiting to be issued, or held by one or more actors, or both; or kept
    for an actor that vanished."""

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self.reissued = 0
        self._lease_s = lease_s
        self._clock = clock
        self._evaluation: dict[str, TicketState] = {}  # waiting, before all others
        self._training: dict[str, TicketState] = {}  # waiting
        self._held: dict[str, dict[str, TicketState]] = {}  # by actor
        self._running: dict[str, TicketState] = {}  # leased and not waiting, in the order in which the leases end
        self._kept: dict[str, tuple[TicketState, float, str]] = {}  # until when, and for an actor of which name

    def _waiting(self, state: TicketState) -> dict[str, TicketState]:
        return self._evaluation if state.ticket.evaluation else self._training

    def add(self, states: Iterable[TicketState]) -> None:
        """New tickets wait to be issued."""
        for state in states:
            self._waiting(state)[state.ticket.id] = state

    def queue(self, state: TicketState) -> None:
        """The ticket waits to be issued again; actors that hold it may still bring its group."""
        self._running.pop(state.ticket.id, None)
        self._kept.pop(state.ticket.id, None)
        if state.ticket.id not in self._waiting(state):
            self._waiting(state)[state.ticket.id] = state
            self.reissued += 1

    def next_for(self, actor: str) -> TicketState | None:
        """The first waiting ticket that `actor` does not hold."""
        for waiting in (self._evaluation, self._training):
            for state in waiting.values():
                if actor not in state.holders:
                    return state
        return None

    def hold(self, state: TicketState, actor: str, *, anew: bool) -> None:
        """`actor` has this ticket now; `anew` restarts a lease that is running."""
        waited = self._waiting(state).pop(state.ticket.id, None) is not None
        self._kept.pop(state.ticket.id, None)
        state.holders[actor] = self._clock()
        self._held.setdefault(actor, {})[state.ticket.id] = state
        if anew or waited:
            state.deadline = self._clock() + self._lease_s
            self._running.pop(state.ticket.id, None)
            self._running[state.ticket.id] = state

    def of(self, actor: str) -> dict[str, TicketState]:
        """What `actor` holds, by ticket id. Not to be changed."""
        return self._held.get(actor, {})

    def release(self, state: TicketState, actor: str, keep_s: float = 0.0) -> None:
        """`actor` no longer has it; a ticket that no actor has waits again, after `keep_s`."""
        if state.holders.pop(actor, None) is None:
            return
        self._forget(actor, state)
        if state.holders or state.ticket.id in self._waiting(state):
            return
        if keep_s:
            self._kept[state.ticket.id] = state, self._clock() + keep_s, name_of(actor)
        else:
            self.queue(state)

    def gone(self, actor: str, keep_s: float) -> None:
        for state in list(self.of(actor).values()):
            self.release(state, actor, keep_s)

    def back(self, actor: str) -> None:
        """An actor has said what it holds: what is kept for one of its name, and it has not, waits again."""
        for state, _, name in list(self._kept.values()):
            if name == name_of(actor):
                self.queue(state)

    def close(self, state: TicketState) -> None:
        """Its group has arrived, or is no longer wanted."""
        self._waiting(state).pop(state.ticket.id, None)
        self._running.pop(state.ticket.id, None)
        self._kept.pop(state.ticket.id, None)
        for actor in state.holders:
            self._forget(actor, state)
        state.holders.clear()

    def expire(self) -> list[TicketState]:
        """Queues the tickets whose lease is over, and returns them; and those that nobody came back for."""
        now, over = self._clock(), []
        for state, until, _ in list(self._kept.values()):
            if until > now:
                break
            self.queue(state)
        for state in self._running.values():
            if state.deadline > now:
                break
            over.append(state)
        for state in over:
            self.queue(state)
        return over

    def _forget(self, actor: str, state: TicketState) -> None:
        held = self._held[actor]
        del held[state.ticket.id]
        if not held:
            del self._held[actor]


def name_of(actor: str) -> str:
    """What all processes of an actor are called; each has a `#` and something of its own after it."""
    return actor.rpartition("#")[0] or actor
