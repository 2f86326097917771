"""The ticket book: which groups may be played, which actor plays them, and their results. No sockets or threads.

A training ticket is the n-th sample of the run; n never repeats, so n is the dataset cursor too. Its states:

    issued -> leased by an actor -> ready (its group is here) -> trained -> acknowledged
       ^           | lease over, actor gone, lost in transit
       '-----------'              any fault of the group -> dropped, with the reason,
                                  or issued again: to others if it may be the actor's doing, `MAX_PLAYS` times at most

Always: issued = trained + dropped + open. At most one group is accepted for a ticket, from the actor that brings it
first; that actor keeps the group until the step on it is done. After a restart the checkpoint is valid: tickets that
were trained after it are open again, and a group that its actor kept is accepted if the versions of its tokens still
exist. Groups are consumed oldest first. A step waits for older tickets that it would otherwise make too late to train,
so that long episodes are neither dropped nor too old. Evaluation tickets are issued before all others and are never
trained on.

If a run continues with a smaller `max_staleness`, its open tickets may be older or more numerous than the bound allows.
Then all of them are held back and issued anew as the bound allows; episodes that were already played could be too old.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from learner.tickets.evaluations import Evaluations
from learner.tickets.leases import Leases
from learner.tickets.pools import PooledSource
from learner.tickets.process_history import EarlierProcess, ProcessHistory
from learner.tickets.sources import SampleSource
from learner.tickets.staleness import leaves_room, may_issue
from learner.tickets.ticket_records import (
    MAX_PLAYS,
    BookSettings,
    EvaluationResult,
    Fault,
    GroupVerdict,
    Retry,
    TicketState,
    group_fault,
    oldest_version,
)
from shared.types import Group, PolicyVersion, Sample, Ticket

__all__ = ["BookSettings", "EvaluationResult", "GroupVerdict", "TicketBook"]


class TicketBook:
    """The tickets of a run and their states. `nonce` must differ between the processes of a run: it is part of ticket
    ids."""

    def __init__(
        self, source: SampleSource, settings: BookSettings, *, nonce: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.source = source
        self.pooled = source if isinstance(source, PooledSource) else None
        self.settings = settings
        self.version: PolicyVersion = 0
        # Groups of versions beside the schedule: an earlier process's last step published one of them.
        self._extra_groups = 0
        self.issued = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()  # training tickets, by reason
        self.refused: Counter[str] = Counter()  # groups that came twice, too late or from another run
        self.retried: Counter[str] = Counter()  # groups of which no episode was sound, played again, by reason
        self.last_drop = ""  # text about the newest drop or retry
        # Returns the keys of the actors that should leave a ticket to others, which have not failed it.
        self.avoided: Callable[[TicketState], Collection[str]] = lambda _: ()
        self.nonce = nonce
        self._clock = clock
        self._history = ProcessHistory(nonce)
        self._leases = Leases(settings.lease_s, clock)
        self._open: dict[int, TicketState] = {}  # training tickets by number
        self._open_by_version: Counter[PolicyVersion] = Counter()  # number of open tickets that each version has issued
        self.held_back: deque[int] = deque()  # numbers of open tickets that are not issued yet
        self._ready: dict[int, TicketState] = {}  # number -> a ticket whose group is here
        self._in_training: dict[int, TicketState] = {}
        self._too_old: list[tuple[Ticket, Group, str]] = []  # dropped as stale; `take_stale` returns them
        self._acknowledgments: dict[str, list[str]] = {}  # actor -> ids of tickets to acknowledge
        self.evaluations = Evaluations(nonce, settings.lease_s, self._leases)

    @property
    def open(self) -> int:
        """The number of training tickets that are neither trained nor dropped."""
        return len(self._open) + len(self.held_back)

    @property
    def ready(self) -> int:
        """The number of groups that wait for their step."""
        return len(self._ready)

    @property
    def reissued(self) -> int:
        return self._leases.reissued

    def _find(self, ticket_id: str) -> TicketState | None:
        """Return the state of a ticket that is open or in training, also if an earlier process issued the id."""
        number = self._history.number(ticket_id)
        return self._open.get(number) or self._in_training.get(number) or self.evaluations.find(ticket_id)

    def is_process(self, process: str) -> bool:
        """Tell whether a process is an earlier one of this run."""
        return self._history.is_earlier(process)

    # -------------------------------------------------------------- issuing

    def issue(self, actor: str) -> Ticket | None:
        """Issue a ticket to `actor`: for an evaluation first, then one that is played again, then a new one; None if
        none may be issued now."""
        state = self._leases.next_for(actor, self._should_avoid)
        if state is None:
            if not self._may_issue():
                return None
            state = self._add(self.held_back.popleft() if self.held_back else self.issued, self.version)
            self.issued = max(self.issued, state.number + 1)
        state.attempts += 1
        self._leases.hold(state, actor, anew=True)
        return state.ticket

    def _should_avoid(self, state: TicketState, actor: str) -> bool:
        """Tell whether a ticket that failed should go to another actor; no longer once nobody has taken it for the time
        of a lease."""
        if not state.failed_by or self._clock() - max(state.failed_by.values()) >= self.settings.lease_s:
            return False
        return actor in self.avoided(state)

    def _may_issue(self) -> bool:
        s = self.settings
        dropped = self.dropped.total()
        issued = self.issued - len(self.held_back)
        if s.total_groups is not None and issued - dropped >= s.total_groups:
            return False
        return may_issue(issued + self._extra_groups, dropped, self.version, s.max_staleness, s.groups_per_version)

    def _add(self, number: int, version: PolicyVersion) -> TicketState:
        s, sample = self.settings, self._sample(number)
        ticket = Ticket(
            id=f"{number}-{self.nonce}",
            sample=sample,
            group_size=s.group_sizes.get(sample.task, s.group_size),
            version=version,
            sampling=s.sampling,
            lease_s=s.lease_s,
            seed=1 + (s.seed * 1_000_003 + number) % (2**31 - 1),  # never 0, which means no seed
        )
        state = self._open[number] = TicketState(ticket, number)
        self._open_by_version[version] += 1
        return state

    def _sample(self, number: int) -> Sample:
        """Return the sample of a ticket. With pools it is drawn by what was earned before the version before which the
        ticket cannot be issued: that is known by now, whatever the timing."""
        if self.pooled is None:
            return self.source.sample(number)
        s = self.settings
        block = (number + self._extra_groups - self.dropped.total()) // s.groups_per_version
        return self.pooled.draw(number, block - s.max_staleness)

    def _learn(self, state: TicketState, group: Group) -> None:
        """Note what the group of a ticket has earned, for the tickets of the next version on."""
        if self.pooled is not None and not state.ticket.evaluation:
            self.pooled.learn(state.number, group, self.version + 1)

    # -------------------------------------------------------------- who holds what

    def reconcile_held(self, actor: str, ticket_ids: Sequence[str]) -> tuple[str, ...]:
        """Compare the tickets that an actor lists as held with the book. Return the void ones.

        A ticket that the actor should hold but does not list counts as lost after `lost_after_s`. An actor that was
        counted as gone keeps a listed ticket if nobody else has brought its group; so does an actor that lists, after a
        restart of the learner, a ticket of the earlier process that is open again.
        """
        void: list[str] = []
        named: set[str] = set()
        for ticket_id in ticket_ids:
            state = self._find(ticket_id)
            if state is None or (state.group is not None and state.sender != actor):
                void.append(ticket_id)
            elif state.group is None:
                named.add(state.ticket.id)
                if actor not in state.holders:
                    self._leases.hold(state, actor, anew=False)
        lost_since = self._clock() - self.settings.lost_after_s
        for ticket_id, state in list(self._leases.held_by(actor).items()):
            if ticket_id not in named and state.holders[actor] < lost_since:
                self._leases.release(state, actor)
        self._leases.end_reservations(actor)
        return tuple(void)

    def actor_gone(self, actor: str, *, left: bool = False) -> None:
        """Issue the tickets again that only this actor held: at once if it `left`, otherwise if it is not back in
        `return_s`."""
        self._leases.release_all(actor, 0.0 if left else self.settings.return_s)
        self._acknowledgments.pop(actor, None)

    def expire(self) -> tuple[str, ...]:
        """Queue the tickets whose lease has ended for other actors, and return their ids. The first group that arrives
        is accepted."""
        return tuple(state.ticket.id for state in self._leases.expire())

    def holders(self, ticket_id: str) -> tuple[str, ...]:
        """Return the actors that hold this ticket while it is open and without a group."""
        return () if (state := self._find(ticket_id)) is None else tuple(state.holders)

    def ticket(self, ticket_id: str) -> Ticket | None:
        """Return the training ticket with this id if its group has not come; None otherwise."""
        state = self._find(ticket_id)
        return state.ticket if state is not None and state.group is None and not state.ticket.evaluation else None

    def holding(self, actor: str) -> int:
        """Return the number of tickets whose group this actor has yet to bring."""
        return len(self._leases.held_by(actor))

    def oldest_held_s(self, actor: str) -> float:
        """Return for how many seconds an actor has held its oldest ticket; 0 if it holds none."""
        return max(
            (self._clock() - state.holders[actor] for state in self._leases.held_by(actor).values()), default=0.0
        )

    # -------------------------------------------------------------- groups that arrive

    def accept(self, group: Group, actor: str) -> GroupVerdict:
        """Accept a well-formed group from `actor`, at most one for each ticket, or refuse it; return the verdict."""
        state = self._find(group.ticket_id)
        if state is None or (state.group is not None and state.sender != actor):
            return self._refuse(group.ticket_id)
        if state.group is not None:
            return GroupVerdict.AGAIN
        if self._history.is_undone(group, self.version):
            self._leases.release(state, actor)
            self.refused[GroupVerdict.OUTDATED] += 1
            return GroupVerdict.OUTDATED
        if fault := group_fault(group, state.ticket, self.settings.refuse):
            verdict = self._retry(state, actor, fault)
            if verdict is not None:
                return verdict
            if not (state.ticket.evaluation and fault.counts):
                self._learn(state, group)  # of equal rewards, which are not trained on
                return self._reject(state, fault)
        self._leases.close(state)
        state.group, state.sender = group, actor
        if state.ticket.evaluation:
            self.evaluations.accept(state)
            self._acknowledgments.setdefault(actor, []).append(group.ticket_id)
        else:
            state.oldest = oldest_version(group)
            self._ready[state.number] = state
        return GroupVerdict.ACCEPTED

    def refuse_unproven(self, ticket_id: str, actor: str) -> GroupVerdict | None:
        """Refuse a group that an engine with wrong weights may have sampled; its ticket is issued again. Return None if
        the group is not awaited."""
        state = self._find(ticket_id)
        if state is None or state.group is not None:
            return None
        self._leases.release(state, actor)
        self.refused[GroupVerdict.UNPROVEN] += 1
        return GroupVerdict.UNPROVEN

    def drop_unproven(self, is_unproven: Callable[[str, Group], bool]) -> int:
        """Drop the groups that wait for their step and of which `is_unproven`(sender, group) is true; return their
        number."""
        unproven = [s for s in self._ready.values() if s.group is not None and is_unproven(s.sender, s.group)]
        for state in unproven:
            self.last_drop = f"unproven: an engine of {state.sender} has shown wrong weights"
            self._drop(state, "unproven")
        return len(unproven)

    def reject(self, ticket_id: str, reason: str, detail: str = "", actor: str = "") -> GroupVerdict:
        """Issue the ticket of an unusable group of `actor` again if others could play it; otherwise drop it. Training
        continues with another sample. Without an actor nobody can play it."""
        state = self._find(ticket_id)
        if state is None or state.group is not None:
            return self._refuse(ticket_id)
        fault = Fault(reason, detail, Retry.OTHERS if actor else Retry.NOBODY)
        return self._retry(state, actor, fault) or self._reject(state, fault)

    def _retry(self, state: TicketState, actor: str, fault: Fault) -> GroupVerdict | None:
        """Take the ticket of an unusable group from its actor, and queue it again unless it is held by others; return
        None if it is not to be played again."""
        if fault.retry is Retry.NOBODY:
            return None
        if actor in state.failed_by and actor not in state.holders:  # the group was sent again
            return self._refuse(state.ticket.id)
        state.failed_by[actor] = self._clock()
        state.num_failed += 1
        again = fault.retry is Retry.ANYBODY or actor in self.avoided(state)
        if state.num_failed >= MAX_PLAYS or not again:
            return None
        self.last_drop = f"{fault.reason}: {fault.detail}"[:300]
        self.retried[fault.reason] += 1
        self._leases.release(state, actor)
        return GroupVerdict.RETRIED

    def _reject(self, state: TicketState, fault: Fault) -> GroupVerdict:
        self.last_drop = f"{fault.reason}: {fault.detail}"[:300]
        self._leases.close(state)
        if state.ticket.evaluation:
            self.evaluations.reject(state, fault.reason)
        else:
            self._drop(state, fault.reason)
        return GroupVerdict.DROPPED

    def _refuse(self, ticket_id: str) -> GroupVerdict:
        verdict = self._history.refusal(ticket_id)
        self.refused[verdict.value] += 1
        return verdict

    # -------------------------------------------------------------- training

    def take_groups(self, count: int) -> list[tuple[Ticket, Group]] | None:
        """Return the `count` oldest groups; None if there are fewer, or if taking them would make an older ticket too
        late.

        The groups count as trained; `commit` must follow when the step is done. Groups that are too old are dropped.
        """
        while self.ready >= count:
            batch = [self._ready[number] for number in heapq.nsmallest(count, self._ready)]
            stale = [state for state in batch if self.version - state.oldest > self.settings.max_staleness]
            if not stale:
                break
            for state in stale:
                self.last_drop = f"stale: tokens of version {state.oldest} at version {self.version}"
                self._drop(state, "stale")
            self._too_old += [(state.ticket, state.group, state.sender) for state in stale if state.group is not None]
        else:
            return None
        s = self.settings
        others = self._open_by_version - Counter(state.ticket.version for state in batch)
        trained = self.trained + count + self._extra_groups
        if not leaves_room(others, trained, self.version, s.max_staleness, s.groups_per_version):
            return None
        for state in batch:
            if state.group is not None:
                self._learn(state, state.group)
            self._close(state)
            self._in_training[state.number] = state
        self.trained += count
        return [(state.ticket, state.group) for state in batch if state.group is not None]

    def take_stale(self) -> list[tuple[Ticket, Group, str]]:
        """Return (ticket, group, actor that sent it) of the groups that `take_groups` has dropped as too old since the
        last call."""
        stale, self._too_old = self._too_old, []
        return stale

    def commit(self) -> None:
        """Acknowledge all groups taken so far: the step on them is done, and their actors may forget them."""
        for state in self._in_training.values():
            assert state.group is not None
            self._acknowledgments.setdefault(state.sender, []).append(state.group.ticket_id)
        self._in_training.clear()

    def acknowledgments(self) -> dict[str, list[str]]:
        """Return actor -> ids of the tickets to acknowledge since the last call."""
        due, self._acknowledgments = self._acknowledgments, {}
        return due

    def _drop(self, state: TicketState, reason: str) -> None:
        self._close(state)
        self.dropped[reason] += 1

    def _close(self, state: TicketState) -> None:
        del self._open[state.number]
        if self.pooled is not None:
            self.pooled.close(state.number)
        self._ready.pop(state.number, None)
        self._open_by_version -= Counter([state.ticket.version])

    # -------------------------------------------------------------- checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the cursor, counters, and [number, version] of each open ticket, which a restart
        issues again."""
        issued = [[state.number, state.ticket.version] for state in self._open.values()]
        return {
            "nonce": self.nonce,
            "version": self.version,
            "issued": self.issued,
            "trained": self.trained,
            "reissued": self.reissued,
            "dropped": dict(self.dropped),
            "open": issued + [[number, self.version] for number in self.held_back],
            "withheld": list(self.held_back),
            "pasts": self._history.state(),
            **({"pools": self.pooled.state()} if self.pooled is not None else {}),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue a run, in a new book: open tickets are issued again, with the version of their first issue.

        They get new ids; groups of the earlier process are accepted under the old ids if their versions still exist.
        """
        s = self.settings
        self.version = state["version"]
        self.issued = state["issued"]
        self.trained = state["trained"]
        self.dropped = Counter(state["dropped"])
        self._leases.reissued = state["reissued"]
        held_back = set(state.get("withheld", ()))
        versions = Counter(version for number, version in state["open"] if number not in held_back)
        self._extra_groups = s.groups_per_version * max(0, self.version - self.trained // s.groups_per_version)
        trained = self.trained + self._extra_groups
        fits = leaves_room(versions, trained, self.version, s.max_staleness, s.groups_per_version)
        fits &= all(version + s.max_staleness >= self.version for version in versions)
        if self.pooled is not None:
            self.pooled.load_state(state.get("pools"), self.issued, (number for number, _ in state["open"]))
        for number, version in sorted(state["open"]):
            if fits and number not in held_back:
                self._leases.queue(self._add(number, version))
            else:
                self.held_back.append(number)
        last = EarlierProcess(state["nonce"], self.version, self.issued)
        self._history.load_state(state["pasts"], last, forget_tickets=not fits)
        assert self.issued == self.trained + self.dropped.total() + self.open, f"ticket counters do not add up: {state}"
