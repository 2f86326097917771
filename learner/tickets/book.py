"""The ticket book: which groups may be played, which actor plays them, and what became of each. No sockets or threads.

A training ticket is the n-th sample of the run; n never repeats, so n is the dataset cursor too. Its life:

    issued -> leased by an actor -> ready (its group is here) -> trained -> acknowledged
       ^           | lease over, actor gone, lost on the way
       '-----------'              anything wrong with the group -> dropped, with the reason

and always: issued = trained + dropped + open. At most one group is taken for a ticket, whoever brings it first, and
its actor keeps it until the step on it is done. The checkpoint decides what a restart finds: tickets trained later are
open again, and a group kept by its actor counts if its tokens are of versions that still exist. Groups are consumed
oldest first, and a step waits for tickets that could not be trained in time afterwards, so that long episodes are
neither dropped nor too old. Evaluation tickets are issued before all others and are never trained on.

A run that goes on with a smaller `max_staleness` may have older tickets open than the bound admits, or more of them.
Then all are withheld, and issued anew as the bound allows; what was played of them could be too old.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from learner.tickets.evaluations import Evaluations
from learner.tickets.history import EarlierProcess, History
from learner.tickets.leases import Leases
from learner.tickets.records import BookSettings, EvaluationResult, TicketState, Verdict, fault, oldest_version
from learner.tickets.sources import SampleSource
from learner.tickets.staleness import leaves_room, may_issue
from shared.types import Group, PolicyVersion, Ticket

__all__ = ["BookSettings", "EvaluationResult", "TicketBook", "Verdict"]


class TicketBook:
    """The state machine. `nonce` must differ between two processes of one run: it tells their tickets apart."""

    def __init__(
        self, source: SampleSource, settings: BookSettings, *, nonce: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.source, self.settings = source, settings
        self.version: PolicyVersion = 0
        self._ahead = 0  # groups that versions beside the schedule count for: an earlier process's last step made one
        self.issued = self.trained = 0
        self.dropped: Counter[str] = Counter()  # training tickets, by reason
        self.refused: Counter[str] = Counter()  # groups that came twice, too late or from elsewhere
        self.last_drop = ""  # the newest drop in words
        self.nonce, self._clock, self._history = nonce, clock, History(nonce)
        self._leases = Leases(settings.lease_s, clock)
        self._open: dict[int, TicketState] = {}  # training tickets by number
        self._open_by_version: Counter[PolicyVersion] = Counter()  # how many of them each version has issued
        self.withheld: deque[int] = deque()  # numbers of open tickets that no actor may have yet
        self._ready: dict[int, TicketState] = {}  # those with their group
        self._in_training: dict[int, TicketState] = {}
        self._too_old: list[tuple[Ticket, Group]] = []  # dropped as stale, see `take_stale`
        self._acknowledgments: dict[str, list[str]] = {}  # by actor
        self.evaluations = Evaluations(nonce, settings.lease_s, self._leases)

    @property
    def open(self) -> int:
        return len(self._open) + len(self.withheld)

    @property
    def ready(self) -> int:
        """Groups that wait for their step."""
        return len(self._ready)

    @property
    def reissued(self) -> int:
        return self._leases.reissued

    def _find(self, ticket_id: str) -> TicketState | None:
        """The state of a ticket that is open or in training, also by the id that an earlier process gave it."""
        number = self._history.number(ticket_id)
        return self._open.get(number) or self._in_training.get(number) or self.evaluations.find(ticket_id)

    # -------------------------------------------------------------- issuing

    def issue(self, actor: str) -> Ticket | None:
        """A ticket for `actor`: evaluation first, then one to be played again, then a new one; None = not now."""
        state = self._leases.next_for(actor)
        if state is None:
            if not self._may_issue():
                return None
            state = self._add(self.withheld.popleft() if self.withheld else self.issued, self.version)
            self.issued = max(self.issued, state.number + 1)
        state.attempts += 1
        self._leases.hold(state, actor, anew=True)
        return state.ticket

    def _may_issue(self) -> bool:
        s, dropped = self.settings, self.dropped.total()
        issued = self.issued - len(self.withheld)
        if s.total_groups is not None and issued - dropped >= s.total_groups:
            return False
        return may_issue(issued + self._ahead, dropped, self.version, s.max_staleness, s.groups_per_version)

    def _add(self, number: int, version: PolicyVersion) -> TicketState:
        s = self.settings
        ticket = Ticket(
            id=f"{number}-{self.nonce}",
            sample=self.source.sample(number),
            group_size=s.group_size,
            version=version,
            sampling=s.sampling,
            lease_s=s.lease_s,
            seed=1 + (s.seed * 1_000_003 + number) % (2**31 - 1),  # 0 would be none
        )
        state = self._open[number] = TicketState(ticket, number)
        self._open_by_version[version] += 1
        return state

    # -------------------------------------------------------------- who holds what

    def held(self, actor: str, ticket_ids: Sequence[str]) -> tuple[str, ...]:
        """An actor names all tickets it holds. Returns the void ones; what it should hold but does not name is lost.

        An actor that was thought gone, and returns with a ticket nobody else has got, keeps it; so does one that
        comes to a restarted learner with a ticket of the earlier process that is open again.
        """
        void, named = [], set[str]()
        for ticket_id in ticket_ids:
            state = self._find(ticket_id)
            if state is None or (state.group is not None and state.bringer != actor):
                void.append(ticket_id)
            elif state.group is None:
                named.add(state.ticket.id)
                if actor not in state.holders:
                    self._leases.hold(state, actor, anew=False)
        lost_since = self._clock() - self.settings.lost_after_s
        for ticket_id, state in list(self._leases.of(actor).items()):
            if ticket_id not in named and state.holders[actor] < lost_since:
                self._leases.release(state, actor)
        self._leases.back(actor)
        return tuple(void)

    def actor_gone(self, actor: str, *, left: bool = False) -> None:
        """What only this actor held is issued again: at once if it `left`, else unless it is back in `return_s`."""
        self._leases.gone(actor, 0.0 if left else self.settings.return_s)
        self._acknowledgments.pop(actor, None)

    def expire(self) -> tuple[str, ...]:
        """Queues the tickets whose lease is over for other actors, and returns their ids. The first group counts."""
        return tuple(state.ticket.id for state in self._leases.expire())

    def holders(self, ticket_id: str) -> tuple[str, ...]:
        """The actors that have this ticket, as long as it is open and nobody has brought its group."""
        return () if (state := self._find(ticket_id)) is None else tuple(state.holders)

    def ticket(self, ticket_id: str) -> Ticket | None:
        """If it is open and for training."""
        state = self._find(ticket_id)
        return state.ticket if state is not None and state.group is None and not state.ticket.evaluation else None

    def holding(self, actor: str) -> int:
        """How many tickets an actor has yet to bring the group of."""
        return len(self._leases.of(actor))

    def oldest_held_s(self, actor: str) -> float:
        return max((self._clock() - state.holders[actor] for state in self._leases.of(actor).values()), default=0.0)

    # -------------------------------------------------------------- groups that arrive

    def accept(self, group: Group, actor: str) -> Verdict:
        """Takes a well-formed group that `actor` brings, at most one for each ticket."""
        state = self._find(group.ticket_id)
        if state is None or (state.group is not None and state.bringer != actor):
            return self._refuse(group.ticket_id)
        if state.group is not None:
            return Verdict.AGAIN
        if self._history.is_undone(group, self.version):
            self._leases.release(state, actor)
            self.refused[Verdict.OUTDATED] += 1
            return Verdict.OUTDATED
        if wrong := fault(group, state.ticket, self.settings.refuse):
            return self.reject(group.ticket_id, *wrong)
        self._leases.close(state)
        state.group, state.bringer = group, actor
        if state.ticket.evaluation:
            self.evaluations.accept(state)
            self._acknowledgments.setdefault(actor, []).append(group.ticket_id)
        else:
            state.oldest = oldest_version(group)
            self._ready[state.number] = state
        return Verdict.ACCEPTED

    def reject(self, ticket_id: str, reason: str, detail: str = "") -> Verdict:
        """A group of this ticket came and is of no use. Training goes on with another sample."""
        state = self._find(ticket_id)
        if state is None or state.group is not None:
            return self._refuse(ticket_id)
        self.last_drop = f"{reason}: {detail}"[:300]
        self._leases.close(state)
        if state.ticket.evaluation:
            self.evaluations.reject(state, reason)
        else:
            self._drop(state, reason)
        return Verdict.DROPPED

    def _refuse(self, ticket_id: str) -> Verdict:
        verdict = self._history.refusal(ticket_id)
        self.refused[verdict.value] += 1
        return verdict

    # -------------------------------------------------------------- training

    def take_groups(self, count: int) -> list[tuple[Ticket, Group]] | None:
        """The `count` oldest groups, if there are as many and nothing becomes too old by taking them; else None.

        They count as trained. `commit` must follow when the step is done.
        """
        while self.ready >= count:
            batch = [self._ready[number] for number in heapq.nsmallest(count, self._ready)]
            stale = [state for state in batch if self.version - state.oldest > self.settings.max_staleness]
            if not stale:
                break
            for state in stale:
                self.last_drop = f"stale: tokens of version {state.oldest} at version {self.version}"
                self._drop(state, "stale")
            self._too_old += [(state.ticket, state.group) for state in stale if state.group is not None]
        else:
            return None
        others, s = self._open_by_version - Counter(state.ticket.version for state in batch), self.settings
        trained = self.trained + count + self._ahead
        if not leaves_room(others, trained, self.version, s.max_staleness, s.groups_per_version):
            return None
        for state in batch:
            self._close(state)
            self._in_training[state.number] = state
        self.trained += count
        return [(state.ticket, state.group) for state in batch if state.group is not None]

    def take_stale(self) -> list[tuple[Ticket, Group]]:
        """The groups that `take_groups` has found to be too old since the last call."""
        stale, self._too_old = self._too_old, []
        return stale

    def commit(self) -> None:
        """The step on all groups taken so far is done: their actors may forget them."""
        for state in self._in_training.values():
            assert state.group is not None
            self._acknowledgments.setdefault(state.bringer, []).append(state.group.ticket_id)
        self._in_training.clear()

    def acknowledgments(self) -> dict[str, list[str]]:
        """Tickets to be acknowledged since the last call, by actor."""
        due, self._acknowledgments = self._acknowledgments, {}
        return due

    def _drop(self, state: TicketState, reason: str) -> None:
        self._close(state)
        self.dropped[reason] += 1

    def _close(self, state: TicketState) -> None:
        del self._open[state.number]
        self._ready.pop(state.number, None)
        self._open_by_version -= Counter([state.ticket.version])

    # -------------------------------------------------------------- checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values: cursor, counters, and [position, version] of each open ticket (to be issued again)."""
        issued = [[state.number, state.ticket.version] for state in self._open.values()]
        return {
            "nonce": self.nonce,
            "version": self.version,
            "issued": self.issued,
            "trained": self.trained,
            "reissued": self.reissued,
            "dropped": dict(self.dropped),
            "open": issued + [[number, self.version] for number in self.withheld],
            "withheld": list(self.withheld),
            "pasts": self._history.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues a run, in a new book: open tickets are issued again, with the version of their first issue.

        They have new ids; groups of the earlier process count under their old ones if their versions still exist."""
        self.version, self.issued, self.trained = state["version"], state["issued"], state["trained"]
        self.dropped = Counter(state["dropped"])
        self._leases.reissued = state["reissued"]
        held, s = set(state.get("withheld", ())), self.settings
        versions = Counter(version for number, version in state["open"] if number not in held)
        self._ahead = s.groups_per_version * max(0, self.version - self.trained // s.groups_per_version)
        trained = self.trained + self._ahead
        fits = leaves_room(versions, trained, self.version, s.max_staleness, s.groups_per_version)
        fits &= all(version + s.max_staleness >= self.version for version in versions)
        for number, version in sorted(state["open"]):
            if fits and number not in held:
                self._leases.queue(self._add(number, version))
            else:
                self.withheld.append(number)
        last = EarlierProcess(state["nonce"], self.version, self.issued)
        self._history.load_state(state["pasts"], last, forget_tickets=not fits)
        assert self.issued == self.trained + self.dropped.total() + self.open, f"ticket counters do not add up: {state}"
