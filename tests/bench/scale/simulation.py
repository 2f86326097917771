"""A run of actors, engines, environments and learner as a simulation of discrete events.

    admission ──group──▶ engine ──turn──▶ environment ──next turn──▶ engine ... ──group──▶ admission
        ▲                  ▲                                                                  │
        └── version ── publication ◀── every `publish_every` ── optimizer step ◀──── a batch ─┘

An episode stays on one engine, the one with the fewest episodes when it began. Nothing fails, is late or takes time but
what `Loop` names: messages and the learner's own bookkeeping are free.

A ticket whose lease is over is played once more as soon as an actor has a place for it. The first group counts: the
places of the ticket's other plays are free from then on, and their episodes end when their environment answers.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from random import Random

from tests.bench.scale.admission import Admission
from tests.bench.scale.draws import TurnSize
from tests.bench.scale.sim_engines import Sampled, SharedEngine
from tests.bench.scale.sim_records import Loop, Outcome


@dataclass(slots=True)
class _Group:
    """One play of a ticket."""

    number: int
    episodes: int  # that are under way
    turns: int = 0
    tokens: float = 0.0
    token_versions: float = 0.0  # tokens times their versions
    oldest: int = 2**31


@dataclass(slots=True)
class _Episode:
    group: _Group
    turns: tuple[TurnSize, ...]
    engine: int
    next_turn: int = 0


@dataclass(slots=True)
class _Totals:
    """Since the run began."""

    time: float = 0.0
    turns: int = 0
    tokens: float = 0.0
    lag: float = 0.0  # versions, summed over tokens
    oldest: int = 0  # of a group, since `skip` steps are over
    learner_s: float = 0.0
    engines_s: float = 0.0
    running_s: float = 0.0


def simulate(loop: Loop, steps: int, *, skip: int = 0, seed: int = 0, ends: bool = False) -> Outcome:
    """`steps` optimizer steps, of which the first `skip` are not counted. `ends`: nothing is issued beyond them.
    ValueError: no step would be counted."""
    if not 0 <= skip < steps:
        raise ValueError(f"skip = {skip} leaves none of {steps} steps")
    return _Simulation(loop, steps, skip, seed, ends).run()


class Stalled(RuntimeError):
    """A run in which nothing is under way any more although steps are missing: its loop admits no group."""


class _Simulation:
    def __init__(self, loop: Loop, steps: int, skip: int, seed: int, ends: bool) -> None:
        self._loop, self._steps, self._skip, self._random = loop, steps, skip, Random(seed)
        self._admission = Admission(loop, steps * loop.groups_per_step if ends else None)
        self._engines: list[SharedEngine[_Episode]] = [SharedEngine(loop.engine) for _ in range(loop.engines)]
        self._open = [0] * loop.engines  # episodes of each engine
        self._least = [(0, index) for index in range(loop.engines)]  # a heap; entries may be out of date
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._plays, self._plays_of = 0, dict[int, int]()  # that have an actor's place: all, and of each open ticket
        self._again: deque[int] = deque()  # tickets whose lease is over; some have their group by now
        self._done: dict[int, _Group] = {}
        self._now = 0.0
        self._learner_idle, self._publication_waits, self._steps_done, self._reissued = True, False, 0, 0
        self._totals, self._from = _Totals(), _Totals()

    def run(self) -> Outcome:
        self._issue()
        while self._steps_done < self._steps:
            if not self._events:
                raise Stalled(f"nothing is under way after {self._steps_done} of {self._steps} steps of {self._loop}")
            self._now, _, event = heapq.heappop(self._events)
            event()
        return self._outcome()

    def _at(self, time: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, event))

    # -------------------------------------------------------------- actors, engines, environments

    def _issue(self) -> None:
        most = self._loop.groups_in_play or inf
        while self._plays < most:
            while self._again and not self._admission.is_open(self._again[0]):
                self._again.popleft()
            if self._again:
                self._play(self._again.popleft())
            elif self._admission.may_issue():
                self._play(self._admission.issue())
            else:
                return

    def _play(self, number: int) -> None:
        group = _Group(number, self._loop.group_size)
        self._plays, self._plays_of[number] = self._plays + 1, self._plays_of.get(number, 0) + 1
        if self._loop.lease_s < inf:
            self._at(self._now + self._loop.lease_s, lambda: self._lease_over(number))
        for _ in range(self._loop.group_size):
            engine = self._seat()
            self._ask(_Episode(group, self._loop.episodes.draw(self._random), engine))

    def _lease_over(self, number: int) -> None:
        if self._admission.is_open(number):
            self._reissued += 1
            self._again.append(number)
            self._issue()

    def _seat(self) -> int:
        """The engine with the fewest episodes."""
        while True:
            count, index = heapq.heappop(self._least)
            if count == self._open[index]:
                self._moved(index, +1)
                return index

    def _moved(self, index: int, change: int) -> None:
        self._open[index] += change
        heapq.heappush(self._least, (self._open[index], index))

    def _ask(self, episode: _Episode) -> None:
        self._engines[episode.engine].submit(episode.turns[episode.next_turn], episode, self._now)
        self._predict(episode.engine)

    def _predict(self, index: int) -> None:
        engine = self._engines[index]
        end, stamp = engine.next_end(), engine.changed
        if end is not None:
            self._at(end, lambda: self._finish(index) if engine.changed == stamp else None)

    def _finish(self, index: int) -> None:
        for sampled in self._engines[index].finish(self._now):
            self._sampled(sampled)
        self._predict(index)

    def _sampled(self, sampled: Sampled[_Episode]) -> None:
        episode = sampled.owner
        group, turn = episode.group, episode.turns[episode.next_turn]
        for version, tokens in sampled.tokens_by_version:
            group.tokens += tokens
            group.token_versions += tokens * version
        group.oldest = min(group.oldest, sampled.tokens_by_version[0][0])
        group.turns += 1
        episode.next_turn += 1
        self._at(self._now + turn.env_s, lambda: self._answered(episode))

    def _answered(self, episode: _Episode) -> None:
        """The environment has; an episode whose ticket another play has fulfilled ends here."""
        group = episode.group
        if episode.next_turn < len(episode.turns) and self._admission.is_open(group.number):
            self._ask(episode)
            return
        self._moved(episode.engine, -1)
        group.episodes -= 1
        if not group.episodes and self._admission.is_open(group.number):
            self._plays -= self._plays_of.pop(group.number)  # the ticket's other plays are called off
            self._admission.arrived(group.number)
            self._done[group.number] = group
            self._proceed()

    # -------------------------------------------------------------- learner

    def _proceed(self) -> None:
        """A group is here, or the learner is free."""
        if self._publication_waits and not self._admission.playing:
            self._publication_waits = False
            self._publish()
        elif self._learner_idle and (batch := self._admission.take()):
            self._learner_idle = False
            seconds = self._loop.step_s.draw(self._random)
            self._totals.learner_s += seconds
            self._add([self._done.pop(number) for number in batch])
            self._at(self._now + seconds, self._step_done)
        self._issue()

    def _add(self, groups: list[_Group]) -> None:
        totals, version = self._totals, self._admission.version
        for group in groups:
            totals.turns += group.turns
            totals.tokens += group.tokens
            totals.lag += version * group.tokens - group.token_versions
            if self._steps_done >= self._skip:
                totals.oldest = max(totals.oldest, version - group.oldest)

    def _step_done(self) -> None:
        if (self._steps_done + 1) % self._loop.publish_every:
            self._learner_free()
        elif self._loop.rule == "one_step_off" and self._admission.playing:
            self._publication_waits = True
        else:
            self._publish()

    def _publish(self) -> None:
        publication, now = self._loop.publication, self._now
        self._admission.version += 1
        version = self._admission.version
        if publication.design == "relay":
            self._at(now + publication.handover_s, self._learner_free)
            self._at(now + publication.handover_s + publication.send_s, lambda: self._load(version))
            return
        if publication.design == "paused":
            for engine in self._engines:
                engine.pause(now)
        self._at(now + publication.send_s, lambda: self._load(version))
        self._at(now + publication.send_s + publication.load_s, self._learner_free)

    def _load(self, version: int) -> None:
        """All engines begin to load. Tickets of `version` are issued when they have."""
        load_s = self._loop.publication.load_s
        for index, engine in enumerate(self._engines):
            engine.load(version, load_s, self._now)
            self._predict(index)
        self._at(self._now + load_s, lambda: self._serve(version))

    def _serve(self, version: int) -> None:
        self._admission.served = version
        self._issue()

    def _learner_free(self) -> None:
        self._steps_done += 1
        self._totals.time = self._now
        if self._steps_done in (self._skip, self._steps):
            self._totals.engines_s = sum(engine.busy_s for engine in self._engines)
            self._totals.running_s = sum(engine.running_s for engine in self._engines)
        if self._steps_done == self._skip:
            self._from = _Totals(**{name: getattr(self._totals, name) for name in _Totals.__slots__})
        self._learner_idle = True
        if self._steps_done < self._steps:
            self._proceed()

    def _outcome(self) -> Outcome:
        last, first, loop = self._totals, self._from, self._loop
        steps, seconds = self._steps - self._skip, last.time - first.time
        tokens, engine_seconds = last.tokens - first.tokens, seconds * loop.engines
        return Outcome(
            steps=steps,
            seconds=seconds,
            episodes_per_s=steps * loop.groups_per_step * loop.group_size / seconds,
            turns_per_s=(last.turns - first.turns) / seconds,
            tokens_per_s=tokens / seconds,
            staleness=(last.lag - first.lag) / tokens,
            max_staleness=last.oldest,
            learner_busy=(last.learner_s - first.learner_s) / seconds,
            engines_busy=(last.engines_s - first.engines_s) / engine_seconds,
            running=(last.running_s - first.running_s) / engine_seconds,
            reissued=self._reissued,
        )
