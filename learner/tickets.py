"""The ticket book: which group may be played, by whom, and what became of it. No sockets, no threads.

A training ticket is the n-th sample of the run; n never repeats, so n is the dataset cursor too. Its life:

    issued -> leased by an actor -> ready (its group is here) -> trained
       ^           | lease over, actor gone, lost on the way
       '-----------'              anything wrong with the group -> dropped, with the reason

and always: issued = trained + dropped + open. At most one group is taken for a ticket, whoever brings it first.
Groups are consumed oldest first, and a step waits for tickets that could not be trained in time afterwards, so that
long episodes are neither thrown away nor late. Evaluation tickets live beside this: first in the queue, never trained.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from learner.samples import SampleSource
from learner.ticket_records import BookSettings, Entry, Evaluation, EvaluationResult, Verdict, fault, oldest_version
from shared.staleness import age, may_issue
from shared.types import Group, PolicyVersion, Sample, Sampling, Ticket

__all__ = ["BookSettings", "EvaluationResult", "TicketBook", "Verdict"]

EVALUATION_ATTEMPTS = 3


class TicketBook:
    """The state machine. `nonce` must differ between two processes of one run: it tells their tickets apart."""

    def __init__(
        self, source: SampleSource, settings: BookSettings, *, nonce: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.source = source
        self.settings = settings
        self.version: PolicyVersion = 0
        self.issued = self.trained = self.reissued = self.ready = 0
        self.dropped: Counter[str] = Counter()  # training tickets, by reason
        self.refused: Counter[str] = Counter()  # groups that came twice or from elsewhere
        self.last_drop = ""  # the newest drop in words
        self._nonce = nonce
        self._clock = clock
        self._open: dict[str, Entry] = {}  # training tickets in order of issue
        self._queued: dict[str, Entry] = {}  # waiting to be handed out (again)
        self._evaluations: dict[str, Evaluation] = {}

    @property
    def open(self) -> int:
        return len(self._open)

    @property
    def open_evaluation(self) -> int:
        return sum(len(e.open) for e in self._evaluations.values())

    def _entries(self) -> Iterable[Entry]:
        return list(chain(*(e.open.values() for e in self._evaluations.values()), self._open.values()))

    def _unfulfilled(self, ticket_id: str) -> Entry | None:
        """The entry of an open ticket whose group is not here."""
        books = chain((self._open,), (e.open for e in self._evaluations.values()))
        entry = next((book[ticket_id] for book in books if ticket_id in book), None)
        return entry if entry is not None and entry.group is None else None

    # -------------------------------------------------------------- handing out

    def issue(self, actor: str) -> Ticket | None:
        """A ticket for `actor`: evaluation first, then one to be played again, then a new one; None = not now."""
        queued = [entry for entry in self._queued.values() if actor not in entry.holders]
        entry = next((e for e in queued if e.ticket.evaluation), queued[0] if queued else None)
        if entry is None:
            if not self._may_issue():
                return None
            entry = self._add(self.issued)
            self.issued += 1
        self._queued.pop(entry.ticket.id, None)
        entry.attempts += 1
        entry.holders[actor] = self._clock()
        entry.deadline = entry.holders[actor] + entry.ticket.lease_s
        return entry.ticket

    def _may_issue(self) -> bool:
        s, dropped = self.settings, self.dropped.total()
        if s.total_groups is not None and self.issued - dropped >= s.total_groups:
            return False
        return may_issue(self.issued, dropped, self.version, s.max_staleness, s.groups_per_version)

    def _add(self, number: int) -> Entry:
        s = self.settings
        ticket = Ticket(
            id=f"{number}-{self._nonce}",
            sample=self.source.sample(number),
            group_size=s.group_size,
            version=self.version,
            sampling=s.sampling,
            lease_s=s.lease_s,
            seed=(s.seed * 1_000_003 + number) % 2**31,
        )
        entry = self._open[ticket.id] = Entry(ticket, number)
        return entry

    # -------------------------------------------------------------- what actors say and do not say

    def held(self, actor: str, ticket_ids: Sequence[str]) -> tuple[str, ...]:
        """An actor names all tickets it holds. Returns the void ones; what it should hold but does not name is lost.

        An actor that was thought gone, and returns with a ticket nobody else has got, keeps it.
        """
        now, named = self._clock(), set(ticket_ids)
        for entry in self._entries():
            got = entry.holders.get(actor)
            if entry.ticket.id in named:
                if got is None:
                    entry.holders[actor] = now
                    if self._queued.pop(entry.ticket.id, None):
                        entry.deadline = now + entry.ticket.lease_s
            elif got is not None and now - got > self.settings.lost_after_s:
                self._release(entry, actor)
        return tuple(ticket_id for ticket_id in ticket_ids if self._unfulfilled(ticket_id) is None)

    def actor_gone(self, actor: str) -> None:
        """What only this actor held is issued again."""
        for entry in self._entries():
            self._release(entry, actor)

    def expire(self) -> tuple[str, ...]:
        """Queues the tickets whose lease is over for other actors, and returns their ids. The first group counts."""
        now = self._clock()
        leased = (e for e in self._entries() if e.group is None and e.holders and e.ticket.id not in self._queued)
        over = [entry for entry in leased if entry.deadline <= now]
        for entry in over:
            self._requeue(entry)
        return tuple(entry.ticket.id for entry in over)

    def holders(self, ticket_id: str) -> tuple[str, ...]:
        """The actors that have this ticket, as long as it is open and nobody has brought its group."""
        entry = self._unfulfilled(ticket_id)
        return () if entry is None else tuple(entry.holders)

    def holdings(self) -> dict[str, tuple[int, float]]:
        """For each actor: how many unfulfilled tickets it holds, and the age in seconds of the oldest."""
        now, found = self._clock(), dict[str, tuple[int, float]]()
        for entry in self._entries():
            for actor, got in entry.holders.items() if entry.group is None else ():
                count, oldest = found.get(actor, (0, 0.0))
                found[actor] = (count + 1, max(oldest, now - got))
        return found

    def _release(self, entry: Entry, actor: str) -> None:
        held = entry.holders.pop(actor, None) is not None
        if held and not entry.holders and entry.group is None and entry.ticket.id not in self._queued:
            self._requeue(entry)

    def _requeue(self, entry: Entry) -> None:
        self._queued[entry.ticket.id] = entry
        self.reissued += 1

    # -------------------------------------------------------------- what comes back

    def accept(self, group: Group) -> Verdict:
        """Takes a well-formed group, at most one for each ticket."""
        entry = self._unfulfilled(group.ticket_id)
        if entry is None:
            return self._refuse(group.ticket_id)
        wrong = fault(group, entry.ticket, self.version)
        if wrong:
            return self.reject(group.ticket_id, *wrong)
        if self.settings.refuse and not entry.ticket.evaluation and (reason := self.settings.refuse(group)):
            return self.reject(group.ticket_id, reason)
        entry.group = group
        self._queued.pop(group.ticket_id, None)
        if entry.ticket.evaluation:
            evaluation = self._evaluations[entry.ticket.evaluation]
            evaluation.done.append(evaluation.open.pop(group.ticket_id))
        else:
            self.ready += 1
        return Verdict.ACCEPTED

    def reject(self, ticket_id: str, reason: str, detail: str = "") -> Verdict:
        """A group of this ticket came and is of no use. Training goes on with another sample."""
        entry = self._unfulfilled(ticket_id)
        if entry is None:
            return self._refuse(ticket_id)
        self.last_drop = f"{reason}: {detail}"[:300]
        if not entry.ticket.evaluation:
            self._drop(entry, reason)
        elif entry.attempts < EVALUATION_ATTEMPTS:
            entry.holders.clear()
            if ticket_id not in self._queued:
                self._requeue(entry)
        else:
            self._queued.pop(ticket_id, None)
            evaluation = self._evaluations[entry.ticket.evaluation]
            del evaluation.open[ticket_id]
            evaluation.lost[reason] += 1
        return Verdict.DROPPED

    def _refuse(self, ticket_id: str) -> Verdict:
        verdict = Verdict.DUPLICATE if ticket_id.endswith(f"-{self._nonce}") else Verdict.UNKNOWN
        self.refused[verdict.value] += 1
        return verdict

    # -------------------------------------------------------------- training

    def take_groups(self, count: int) -> list[tuple[Ticket, Group]] | None:
        """The `count` oldest groups, if there are as many and nothing becomes too old by taking them; else None."""
        if self.ready < count:
            return None
        self._drop_stale()
        ready = [e for e in self._open.values() if e.group is not None]
        batch = ready[:count]
        if len(batch) < count or not self._leaves_room(batch):
            return None
        for entry in batch:
            del self._open[entry.ticket.id]
        self.trained += count
        self.ready -= count
        return [(e.ticket, e.group) for e in batch if e.group is not None]

    def _leaves_room(self, batch: list[Entry]) -> bool:
        """Whether all other open tickets can still be trained in time.

        A ticket issued at version v is trained at version v + max_staleness at the latest. So up to the end of each
        version there must be room for all that is due by then; whoever takes newer groups first takes it away.
        """
        s = self.settings
        taken = {entry.number for entry in batch}
        due = Counter(e.ticket.version + s.max_staleness for e in self._open.values() if e.number not in taken)
        trained, due_by_then = self.trained + len(batch), 0
        for version in sorted(due):
            due_by_then += due[version]
            if due_by_then > max(0, (max(version, self.version) + 1) * s.groups_per_version - trained):
                return False
        return True

    def _drop_stale(self) -> None:
        for entry in list(self._open.values()):
            if entry.group is not None:
                oldest = oldest_version(entry.group)
                if age(self.version, oldest) > self.settings.max_staleness:
                    self.last_drop = f"stale: tokens of version {oldest} at version {self.version}"
                    self._drop(entry, "stale")

    def _drop(self, entry: Entry, reason: str) -> None:
        self.ready -= entry.group is not None
        del self._open[entry.ticket.id]
        self._queued.pop(entry.ticket.id, None)
        self.dropped[reason] += 1

    # -------------------------------------------------------------- evaluation

    def start_evaluation(self, name: str, samples: Sequence[Sample], sampling: Sampling, group_size: int = 1) -> None:
        """Queues one ticket for each sample before all others; the i-th has seed i. ValueError: name in use."""
        if not name or name in self._evaluations:
            raise ValueError(f"evaluation {name!r} is running already (or has no name); give each one its own name")
        opened: dict[str, Entry] = {}
        for i, sample in enumerate(samples):
            ticket_id = f"{name}/{i}-{self._nonce}"
            lease_s = self.settings.lease_s
            ticket = Ticket(ticket_id, sample, group_size, self.version, sampling, lease_s, evaluation=name, seed=i)
            opened[ticket_id] = Entry(ticket, i)
        self._evaluations[name] = Evaluation(opened)
        self._queued.update(opened)

    def evaluation_result(self, name: str) -> EvaluationResult | None:
        """The result, in the samples' order, once; None = some tickets are open. KeyError: no such evaluation."""
        if self._evaluations[name].open:
            return None
        evaluation = self._evaluations.pop(name)
        done = sorted(evaluation.done, key=lambda e: e.number)
        return EvaluationResult(name, tuple((e.ticket, e.group) for e in done if e.group), dict(evaluation.lost))

    # -------------------------------------------------------------- checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values: the cursor, the counters, and the positions of all open tickets (to be issued again)."""
        return {
            "version": self.version,
            "issued": self.issued,
            "trained": self.trained,
            "reissued": self.reissued,
            "dropped": dict(self.dropped),
            "open": [entry.number for entry in self._open.values()],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues a run. Open tickets are issued again under new ids: what actors hold of the old ones is void."""
        self.version, self.issued, self.trained = state["version"], state["issued"], state["trained"]
        self.dropped = Counter(state["dropped"])
        self.reissued = state["reissued"]
        self._open.clear()
        self._queued.clear()
        self.ready = 0
        for number in state["open"]:
            self._requeue(self._add(number))
        assert self.issued == self.trained + self.dropped.total() + self.open, f"ticket counters do not add up: {state}"
