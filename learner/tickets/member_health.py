"""Whose episodes fail: shares of failures by actor and host, pauses for those that fail, and the end of a run in which
nobody is sound. No sockets or threads."""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from logging import Logger
from typing import NamedTuple

from shared.types import TRAINABLE_ENDINGS, Ending, Group, Trajectory

SYSTEMATIC = frozenset(
    {
        Ending.ENV_ERROR,
        Ending.ENV_TIMEOUT,
        Ending.REWARD_ERROR,
        Ending.REWARD_TIMEOUT,
        Ending.AGENT_GONE,
        Ending.WIRE_ERROR,
    }
)
WINDOW = 256  # number of an actor's latest episodes that are counted
KEPT_REASONS = 8  # failures of that window whose reason is kept
REASON_CHARACTERS = 1000  # a failure's reason is cut to this length
MIN_EPISODES = 32  # fewer episodes allow no conclusion
MIN_EPISODES_ON_HOST = 8  # of each of two actors, before their whole host is paused
MAX_MEMBERS = 4096  # actors that are remembered, by name
FIRST_PAUSE_S = 10.0  # each further pause is twice as long
LONGEST_PAUSE_S = 300.0
ABSENT_S = 60.0  # a sound actor that is gone for so long is not expected back
FULL_AT_ONCE = (
    "the prompt and the first observation leave no room for an answer: raise model.max_context, or lower "
    "model.max_pixels"
)


class EndingCounts:
    """Counts the endings of the training episodes since the last `drain`, including unusable episodes."""

    def __init__(self) -> None:
        self._counts: Counter[Ending] = Counter()

    def add(self, group: Group) -> None:
        """Count the endings of a group's episodes."""
        self._counts.update(t.ending for t in group.trajectories)

    def drain(self) -> dict[str, float]:
        """Return the share of each ending and of all untrainable endings, and reset the counts; empty without
        episodes."""
        counts, total = self._counts, self._counts.total()
        self._counts = Counter()
        if not total:
            return {}
        shares = {f"arrived/ending/{ending.value}": counts[ending] / total for ending in Ending}
        failed = sum(counts[ending] for ending in frozenset(Ending) - TRAINABLE_ENDINGS)
        return shares | {"arrived/failed": failed / total}


class TooManyFailures(ValueError):
    """The share of failed episodes is too large for the run to continue; the message is one line with the first
    reason."""


class Failure(NamedTuple):
    """Why an episode or a whole group is of no use. Later ones fail for a `lasting` reason too; others, such as those
    of an engine, may pass."""

    reason: str
    lasting: bool


def failure_of(t: Trajectory) -> Failure | None:
    """Return why an episode failed; None if it did not."""
    if t.ending in SYSTEMATIC:
        return Failure(f"{t.ending}: {t.error}", lasting=True)
    if t.ending is Ending.CONTEXT_FULL and not t.turns:
        return Failure(f"{t.ending}: {FULL_AT_ONCE}", lasting=True)
    return None if t.ending in TRAINABLE_ENDINGS else Failure(f"{t.ending}: {t.error}", lasting=False)


def host_of(name: str) -> str:
    """Return the host in an actor's name or key, `HOST-actorN` or `HOST-actorN#RANDOM`; all before `#` of another."""
    return re.sub(r"(-actor\d+)?(#[^#]*)?$", "", name, count=1)


class _Member:
    """The latest episodes of one actor, over all its processes."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.seen = 0.0
        self.has_vanished = False  # with tickets, and has brought nothing since
        self.recent: deque[Failure | None] = deque()  # None: the episode did not fail
        self.num_failed = self.num_lasting = self._num_reasons = 0

    def add(self, failure: Failure | None) -> None:
        """Record one episode. The reasons of all but a few failures are left out."""
        if failure is not None:
            keep = self._num_reasons < KEPT_REASONS
            failure = Failure(failure.reason[:REASON_CHARACTERS] if keep else "", failure.lasting)
        self.recent.append(failure)
        self._count(failure, 1)
        if len(self.recent) > WINDOW:
            self._count(self.recent.popleft(), -1)

    def clear(self) -> None:
        """Forget all episodes."""
        self.recent.clear()
        self.num_failed = self.num_lasting = self._num_reasons = 0

    @property
    def reason(self) -> str:
        """The first reason, in one line."""
        reasons = (f.reason for f in self.recent if f is not None and f.reason)
        return " ".join(next(reasons, "").split())[:500]

    def _count(self, failure: Failure | None, by: int) -> None:
        if failure is not None:
            self.num_failed += by
            self.num_lasting += by * failure.lasting
            self._num_reasons += by * bool(failure.reason)


@dataclass(slots=True)
class _Pause:
    """Time in which an actor or a host gets no work. After it, the outcome of one ticket decides."""

    since: float
    seconds: float
    on_trial: bool = False  # the ticket has been issued


class MemberHealth:
    """The failures of each actor, of which `max_share` may fail (1.0: all of them), and the pauses that follow.

    An actor above the share gets no tickets for a pause; then one ticket is its trial. If that fails too, the next
    pause is twice as long. A whole host is paused if all its actors are above the share. An actor that is alone is not
    paused for what ends the run, and never for longer than the first pause.
    """

    def __init__(self, max_share: float, log: Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_share = max_share
        self._log = log
        self._clock = clock
        self._members: dict[str, _Member] = {}  # by actor name, in the order in which they were seen last
        self._pauses: dict[str, _Pause] = {}  # by actor or host
        self._forgiven: dict[str, float] = {}  # length of the last pause of those that play again

    # -------------------------------------------------------------- what the actors bring

    def see(self, name: str, *, new: bool = False) -> None:
        """Note that an actor is here. A `new` process of a paused actor has its trial at once, unless the one before
        vanished."""
        member = self._member(name)
        if new and not member.has_vanished and (scope := self.paused(name)):
            pause = self._pauses[scope]
            pause.since = min(pause.since, self._clock() - pause.seconds)

    def add(self, name: str, group: Group, present: Callable[[], Collection[str]]) -> None:
        """Record the episodes of a group that an actor brought. `present` returns the actors that can play now."""
        self._member(name).has_vanished = False
        self._add(name, [failure_of(t) for t in group.trajectories], present)

    def add_lost(self, name: str, reason: str, present: Callable[[], Collection[str]]) -> None:
        """Record one failure for tickets that an actor has lost. Otherwise one that vanishes with every ticket would
        have the fewest failures, and get those tickets again before all others."""
        self._member(name).has_vanished = True
        self._add(name, [Failure(reason, lasting=False)], present)

    def add_refused(
        self, name: str, reason: str, present: Callable[[], Collection[str]], *, lasting: bool = True
    ) -> None:
        """Record one failure for a whole group that is of no use, for example one with a reward out of bounds."""
        self._add(name, [Failure(reason, lasting)], present)

    def _add(self, name: str, outcomes: list[Failure | None], present: Callable[[], Collection[str]]) -> None:
        member = self._member(name)
        for failure in outcomes:
            member.add(failure)
        if self._max_share >= 1 or not outcomes:
            return
        failed = sum(failure is not None for failure in outcomes) > self._max_share * len(outcomes)
        paused = self.paused(name)
        if not paused:
            if failed:
                self._judge(name, present())
            elif len(member.recent) == WINDOW and not self._is_failing([member]):
                self._forgiven.pop(name, None)
                self._forgiven.pop(member.host, None)
        elif self._pauses[paused].on_trial:
            if failed:
                self._pause(paused)
            else:
                self._end_pause(paused)
                for failure in outcomes:
                    member.add(failure)

    def _judge(self, name: str, present: Collection[str]) -> None:
        """Pause an actor or its host if they fail, unless that ends the run."""
        if self._all_fail(present):
            return
        host = host_of(name)
        others = self._on(host)
        judged = [m for m in others if len(m.recent) >= MIN_EPISODES_ON_HOST]
        if len(judged) > 1 and self._is_failing(others):
            for other in [scope for scope in self._pauses if host_of(scope) == host]:
                del self._pauses[other]
            self._pause(host)
        elif self._is_failing([self._members[name]]):
            self._pause(name)

    def _is_failing(self, members: Collection[_Member], *, lasting: bool = False) -> bool:
        """Tell whether each of these actors that has brought any episode is above the share, and all of them have
        brought enough to tell."""
        brought = [m for m in members if m.recent]
        if sum(len(m.recent) for m in brought) < MIN_EPISODES:
            return False
        return all((m.num_lasting if lasting else m.num_failed) > self._max_share * len(m.recent) for m in brought)

    def _pause(self, scope: str) -> None:
        before = self._pauses.get(scope)
        last = before.seconds if before else self._forgiven.pop(scope, 0.0)
        seconds = min(LONGEST_PAUSE_S, 2 * last or FIRST_PAUSE_S)
        self._pauses[scope] = _Pause(self._clock(), seconds)
        members = self._on(scope)
        failed, total = sum(m.num_failed for m in members), sum(len(m.recent) for m in members)
        who = f"actor {scope}" if scope in self._members else f"host {scope} ({len(members)} actors)"
        self._log.warning(
            "%s gets no tickets for %g s: %d of its last %d episodes failed, more than env.max_failure_share = %g; "
            "the first: %s; then one ticket is its trial, and what it failed goes to others",
            *(who[:200], seconds, failed, total, self._max_share, self._first_reason(members)),
        )

    def _end_pause(self, scope: str) -> None:
        self._forgiven[scope] = self._pauses.pop(scope).seconds
        for member in self._on(scope):
            member.clear()
        self._log.info("%s gets tickets again: its trial was sound", scope[:200])

    # -------------------------------------------------------------- who may play

    def paused(self, name: str) -> str:
        """Return what is paused with this actor: itself or its host; "" if it plays."""
        return next((scope for scope in (host_of(name), name) if scope in self._pauses), "")

    def may_try(self, scope: str, *, alone: bool) -> bool:
        """Tell whether the pause of an actor or a host is over, so that it may play one ticket. `alone`: nobody else
        could play it."""
        pause = self._pauses[scope]
        seconds = min(pause.seconds, FIRST_PAUSE_S) if alone else pause.seconds
        return self._clock() >= pause.since + seconds

    def begin_trial(self, scope: str) -> None:
        """Note that a paused actor or host plays its ticket: the outcome decides."""
        self._pauses[scope].on_trial = True

    def failed_share(self, name: str) -> float:
        """Return the share of an actor's latest episodes that failed."""
        member = self._members.get(name)
        return member.num_failed / len(member.recent) if member is not None and member.recent else 0.0

    def describe(self) -> str:
        """Return in words who is paused, and why; "" if nobody is."""
        parts = [f"{scope} ({self._first_reason(self._on(scope))[:200]})" for scope in list(self._pauses)[:8]]
        more = f" and {len(self._pauses) - 8} more" if len(self._pauses) > 8 else ""
        return f"paused since their episodes fail: {', '.join(parts)}{more}" if parts else ""

    @property
    def num_paused(self) -> int:
        """The number of actors and hosts that are paused or on trial."""
        return len(self._pauses)

    # -------------------------------------------------------------- the end of the run

    def check(self, present: Collection[str]) -> None:
        """Raise TooManyFailures, with the first recorded reason, if everybody who has brought an episode is above the
        share, for lasting reasons. `present` are the actors that can play now: one that has brought nothing yet may
        be sound, and so may one that was sound and has been gone for a short time."""
        if not self._all_fail(present):
            return
        members = self._expected(present)
        failed = sum(m.num_lasting for m in members)
        all_of_them = f", on all {len(members)} actors" if len(members) > 1 else ""
        raise TooManyFailures(
            f"{failed} of the last {sum(len(m.recent) for m in members)} episodes failed{all_of_them}, more than "
            f"env.max_failure_share = {self._max_share:g}; the first: {self._first_reason(members)}"
        )

    def _all_fail(self, present: Collection[str]) -> bool:
        if self._max_share >= 1 or any(name not in self._members or not self._members[name].recent for name in present):
            return False
        return self._is_failing(self._expected(present), lasting=True)

    def _expected(self, present: Collection[str]) -> list[_Member]:
        """Return the actors that have brought an episode and are here, or may come back."""
        since = self._clock() - ABSENT_S
        return [m for name, m in self._members.items() if m.recent and (name in present or m.seen >= since)]

    # -------------------------------------------------------------- members

    def _member(self, name: str) -> _Member:
        """Return an actor's record, and note that it was seen; beyond `MAX_MEMBERS` the one that was not seen for the
        longest time is forgotten."""
        member = self._members.pop(name, None) or _Member(host_of(name))
        member.seen = self._clock()
        self._members[name] = member
        if len(self._members) > MAX_MEMBERS:
            gone = next(iter(self._members))
            del self._members[gone]
            hosts = {other.host for other in self._members.values()}
            for scope in (gone, host_of(gone)):
                if scope not in self._members and scope not in hosts:
                    self._pauses.pop(scope, None)
                    self._forgiven.pop(scope, None)
        return member

    def _on(self, scope: str) -> list[_Member]:
        """Return the actor with this name, or all actors of the host."""
        if scope in self._members:
            return [self._members[scope]]
        return [member for member in self._members.values() if member.host == scope]

    def _first_reason(self, members: Iterable[_Member]) -> str:
        return next((m.reason for m in members if m.reason), "")
