"""Which actor holds which ticket, and which tickets wait to be issued. A call takes time in proportion to what it
changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from learner.tickets.ticket_records import MAX_HOLDERS, TicketState


class Leases:
    """The state of every ticket whose group has not arrived.

    A ticket waits to be issued, or is held by one or more actors, or both; or it is reserved for an actor that
    vanished.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self.reissued = 0
        self._lease_s = lease_s
        self._clock = clock
        self._evaluation: dict[str, TicketState] = {}  # waiting; issued before all training tickets
        self._training: dict[str, TicketState] = {}  # waiting
        self._held: dict[str, dict[str, TicketState]] = {}  # actor -> the tickets that it holds
        self._running: dict[str, TicketState] = {}  # leased and not waiting, in the order in which the leases end
        # (ticket, end of the reservation, name of the actor)
        self._reserved: dict[str, tuple[TicketState, float, str]] = {}

    def _waiting_like(self, state: TicketState) -> dict[str, TicketState]:
        return self._evaluation if state.ticket.evaluation else self._training

    def add(self, states: Iterable[TicketState]) -> None:
        """Queue new tickets."""
        for state in states:
            self._waiting_like(state)[state.ticket.id] = state

    def queue(self, state: TicketState) -> None:
        """Queue a ticket to be issued again; actors that hold it may still bring its group."""
        self._running.pop(state.ticket.id, None)
        self._reserved.pop(state.ticket.id, None)
        if state.ticket.id not in self._waiting_like(state):
            self._waiting_like(state)[state.ticket.id] = state
            self.reissued += 1

    def next_for(self, actor: str, should_avoid: Callable[[TicketState, str], bool]) -> TicketState | None:
        """Return the first waiting ticket that `actor` does not hold and need not avoid."""
        for waiting in (self._evaluation, self._training):
            for state in waiting.values():
                if actor not in state.holders and not should_avoid(state, actor):
                    return state
        return None

    def hold(self, state: TicketState, actor: str, *, anew: bool) -> None:
        """Record that `actor` holds this ticket now, beyond `MAX_HOLDERS` instead of the first holder; `anew` restarts
        a running lease."""
        if actor not in state.holders and len(state.holders) >= MAX_HOLDERS:
            self.release(state, next(iter(state.holders)))
        waited = self._waiting_like(state).pop(state.ticket.id, None) is not None
        self._reserved.pop(state.ticket.id, None)
        state.holders[actor] = self._clock()
        self._held.setdefault(actor, {})[state.ticket.id] = state
        if anew or waited:
            state.deadline = self._clock() + self._lease_s
            self._running.pop(state.ticket.id, None)
            self._running[state.ticket.id] = state

    def held_by(self, actor: str) -> dict[str, TicketState]:
        """Return the tickets that `actor` holds, by id. The caller must not change the dict."""
        return self._held.get(actor, {})

    def release(self, state: TicketState, actor: str, reserve_s: float = 0.0) -> None:
        """Take a ticket from `actor`. If no other actor holds it, it is queued again, after `reserve_s`."""
        if state.holders.pop(actor, None) is None:
            return
        self._forget(actor, state)
        if state.holders or state.ticket.id in self._waiting_like(state):
            return
        if reserve_s:
            self._reserved[state.ticket.id] = state, self._clock() + reserve_s, name_of(actor)
        else:
            self.queue(state)

    def release_all(self, actor: str, reserve_s: float) -> None:
        """Take all tickets from `actor`; those that no other actor holds are reserved for its name for `reserve_s`."""
        for state in list(self.held_by(actor).values()):
            self.release(state, actor, reserve_s)

    def end_reservations(self, actor: str) -> None:
        """Queue the tickets that are reserved for this actor's name: it has listed what it holds, without these."""
        for state, _, name in list(self._reserved.values()):
            if name == name_of(actor):
                self.queue(state)

    def close(self, state: TicketState) -> None:
        """Forget a ticket whose group has arrived or is no longer wanted."""
        self._waiting_like(state).pop(state.ticket.id, None)
        self._running.pop(state.ticket.id, None)
        self._reserved.pop(state.ticket.id, None)
        for actor in state.holders:
            self._forget(actor, state)
        state.holders.clear()

    def expire(self) -> list[TicketState]:
        """Queue the tickets whose lease has ended and return them; also queue those whose reservation has ended."""
        now = self._clock()
        over: list[TicketState] = []
        for state, until, _ in list(self._reserved.values()):
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
    """Return the name that all processes of an actor share: the part of the key before `#`; after it, each process has
    its own text."""
    return actor.rpartition("#")[0] or actor
