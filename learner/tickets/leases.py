"""Who plays what: tickets that wait to be handed out, and tickets that actors hold. Each call costs what it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from learner.tickets.records import Entry


class Leases:
    """Knows every ticket whose group is not here yet: waiting, or held by one or more actors, or both."""

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self.reissued = 0
        self._lease_s = lease_s
        self._clock = clock
        self._evaluation: dict[str, Entry] = {}  # waiting, before all others
        self._training: dict[str, Entry] = {}  # waiting
        self._held: dict[str, dict[str, Entry]] = {}  # by actor
        self._running: dict[str, Entry] = {}  # leased and not waiting, in the order in which the leases end

    def _waiting(self, entry: Entry) -> dict[str, Entry]:
        return self._evaluation if entry.ticket.evaluation else self._training

    def add(self, entries: Iterable[Entry]) -> None:
        """New tickets, to be handed out."""
        for entry in entries:
            self._waiting(entry)[entry.ticket.id] = entry

    def queue(self, entry: Entry) -> None:
        """To be handed out again; who holds it still may bring its group."""
        self._running.pop(entry.ticket.id, None)
        if entry.ticket.id not in self._waiting(entry):
            self._waiting(entry)[entry.ticket.id] = entry
            self.reissued += 1

    def next_for(self, actor: str) -> Entry | None:
        """The first waiting ticket that `actor` does not hold."""
        for waiting in (self._evaluation, self._training):
            for entry in waiting.values():
                if actor not in entry.holders:
                    return entry
        return None

    def hold(self, entry: Entry, actor: str, *, anew: bool) -> None:
        """`actor` has this ticket now; `anew` starts its lease, which else goes on if it runs."""
        waited = self._waiting(entry).pop(entry.ticket.id, None) is not None
        entry.holders[actor] = self._clock()
        self._held.setdefault(actor, {})[entry.ticket.id] = entry
        if anew or waited:
            entry.deadline = self._clock() + self._lease_s
            self._running.pop(entry.ticket.id, None)
            self._running[entry.ticket.id] = entry

    def of(self, actor: str) -> dict[str, Entry]:
        """What `actor` holds, by ticket id. Not to be changed."""
        return self._held.get(actor, {})

    def release(self, entry: Entry, actor: str) -> None:
        """`actor` does not have it any more; what nobody has waits again."""
        if entry.holders.pop(actor, None) is None:
            return
        self._forget(actor, entry)
        if not entry.holders:
            self.queue(entry)

    def gone(self, actor: str) -> None:
        for entry in list(self.of(actor).values()):
            self.release(entry, actor)

    def close(self, entry: Entry) -> None:
        """Its group is here, or is no longer wanted."""
        self._waiting(entry).pop(entry.ticket.id, None)
        self._running.pop(entry.ticket.id, None)
        for actor in entry.holders:
            self._forget(actor, entry)
        entry.holders.clear()

    def expire(self) -> list[Entry]:
        """Queues the tickets whose lease is over, and returns them."""
        now, over = self._clock(), []
        for entry in self._running.values():
            if entry.deadline > now:
                break
            over.append(entry)
        for entry in over:
            self.queue(entry)
        return over

    def _forget(self, actor: str, entry: Entry) -> None:
        held = self._held[actor]
        del held[entry.ticket.id]
        if not held:
            del self._held[actor]
