"""Any schedule of loss, repetition, delay, crashes and restarts: the real book and reception, actors, a bad network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from learner.tickets.pools import PooledSource
from learner.tickets.protocol import TicketProtocol, TicketServerSettings
from learner.tickets.sources import SeedSource, TaskSource
from learner.tickets.ticket_book import TicketBook
from learner.tickets.ticket_records import parse_ticket_id
from shared.config.pools_section import PoolConfig
from shared.types import Group, Hello, Request, Sampling
from tests.support.schedules import Actor, Stamp, Wire, is_part_of_history
from tests.support.wires import RULES, SAMPLE, VOCAB, book_settings, episode, failed_episode

SLOTS, LEASE_S, LOST_S, MOST_EVALUATED = 3, 20.0, 3.0, 6
POOLS = [PoolConfig(name="low", bounds=(0, 0.5)), PoolConfig(name="high", bounds=(0.5, 1), weight=0.2)]
BITS = st.integers(0, 7)  # one for each actor's engine
SETTINGS = TicketServerSettings("", Path("/nonexistent"), "run", RULES, actor_timeout_s=10.0)


class Schedule(RuleBasedStateMachine):
    @initialize(
        staleness=st.integers(0, 2),
        shape=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2)]),
        actors=st.integers(1, 3),
        return_s=st.sampled_from([0.0, 7.0]),
        pools=st.booleans(),
    )
    def begin(self, staleness: int, shape: tuple[int, int], actors: int, return_s: float, pools: bool) -> None:
        self.pools = pools
        self.per_version, self.per_step = shape
        self.return_s = return_s
        self.staleness, self.now, self.born, self.process = staleness, 0.0, 0, 0
        self.weights: Stamp = (0, 0)  # as the learner has published them
        self.wire = Wire()
        self.actors: list[Actor] = []
        for _ in range(actors):
            self.arrive()
        self.trained: list[int] = []  # in the history that the weights have
        self.forks = {0: (0, 10**9)}  # process -> the one it goes on from, the last version of that which it has
        self.stamps: dict[int, list[Stamp]] = {}  # of a group's tokens, by id(group)
        self.groups: list[Group] = []  # so that no id is used twice
        self.committed = True
        self.saves: list[tuple[Any, int, int, int]] = []  # of each checkpoint: state, tickets trained, process, bound
        self.start()
        self.save()

    def start(self) -> None:
        shape = {"groups_per_version": self.per_version, "max_staleness": self.staleness}
        leases = {"lease_s": LEASE_S, "lost_after_s": LOST_S, "return_s": self.return_s}
        clock = lambda: self.now  # noqa: E731
        source = (
            PooledSource([TaskSource(name, SeedSource(0, 5)) for name in "ab"], POOLS) if self.pools else SeedSource()
        )
        self.book = TicketBook(source, book_settings(**shape, **leases), nonce=f"p{self.process}", clock=clock)
        self.protocol = TicketProtocol(self.wire, self.book, SETTINGS, clock)  # type: ignore[arg-type]
        self.protocol.issuing = True
        self.evaluations, self.num_evaluations = dict[str, int](), 0  # samples of those that run; how many have begun

    # ------------------------------------------------------------------ actors

    def arrive(self, name: str = "") -> None:
        self.born += 1
        self.actors.append(Actor(f"{name or f'a{self.born}'}#{self.born}", self.weights))
        self.wire.present.add(self.actors[-1].key)

    @rule(data=st.data())
    def an_actor_crashes_and_another_one_starts(self, data: st.DataObject) -> None:
        dead = self.actors.pop(data.draw(st.integers(0, len(self.actors) - 1)))
        self.wire.present.discard(dead.key)
        self.arrive()

    @rule(data=st.data(), seen=st.booleans())
    def an_actor_is_killed_and_goes_on(self, data: st.DataObject, seen: bool) -> None:
        """Its next process has a journal of what was not taken; the learner may have missed it meanwhile (`seen`)."""
        dead = self.actors.pop(data.draw(st.integers(0, len(self.actors) - 1)))
        self.wire.present.discard(dead.key)
        if seen:
            self.protocol.forget(dead.key.encode(), "its connection is closed")
        self.arrive(dead.key.partition("#")[0])
        self.actors[-1].playing, self.actors[-1].finished = dead.playing, dead.finished

    @rule(data=st.data())
    def an_actor_beats(self, data: st.DataObject) -> None:
        self.beat(data.draw(st.sampled_from(self.actors)))

    def beat(self, actor: Actor) -> None:
        self.wire.to_learner.append((actor.key, Hello("a", ("http://e",), VOCAB, actor.held())))
        self.wire.to_learner.append((actor.key, Request(SLOTS)))
        self.wire.to_learner += [(actor.key, group) for group in actor.finished.values()]

    @rule(data=st.data(), good=st.integers(0, 5))
    def an_actor_finishes_a_group(self, data: st.DataObject, good: int) -> None:
        busy = [actor for actor in self.actors if actor.playing]
        if busy:
            actor = data.draw(st.sampled_from(busy))
            self.finish(actor, data.draw(st.sampled_from(sorted(actor.playing))), good > 0)

    def finish(self, actor: Actor, ticket_id: str, good: bool) -> None:
        """Its tokens are of its engine's weights at its start and of those at its end."""
        _, began = actor.playing.pop(ticket_id)
        names = tuple(sorted({f"{version}-p{process}" for process, version in (began, actor.weights)}))
        made = episode(actor.weights[1], weights=names) if good else failed_episode()
        if good:
            made.policy_versions[2] = began[1]
        group = Group(ticket_id, "a", (made,))
        self.groups.append(group)
        self.stamps[id(group)] = [began, actor.weights] if good else []
        actor.finished[ticket_id] = group
        self.wire.to_learner.append((actor.key, group))

    # ------------------------------------------------------------------ the network

    @precondition(lambda self: self.wire.to_learner)
    @rule(data=st.data(), fate=st.sampled_from(["deliver"] * 6 + ["lose", "repeat"]))
    def a_message_to_the_learner(self, data: st.DataObject, fate: str) -> None:
        self.pass_on(self.wire.to_learner, data.draw(st.integers(0, len(self.wire.to_learner) - 1)), fate)

    @precondition(lambda self: self.wire.to_actors)
    @rule(data=st.data(), fate=st.sampled_from(["deliver"] * 6 + ["lose", "repeat"]))
    def a_message_to_an_actor(self, data: st.DataObject, fate: str) -> None:
        self.pass_on(self.wire.to_actors, data.draw(st.integers(0, len(self.wire.to_actors) - 1)), fate)

    @rule()
    def all_messages_arrive(self) -> None:
        while self.wire.to_learner or self.wire.to_actors:
            self.pass_on(self.wire.to_learner or self.wire.to_actors, 0, "deliver")

    def pass_on(self, queue: list[tuple[str, Any]], index: int, fate: str) -> None:
        key, message = queue[index]
        if fate != "repeat":
            del queue[index]
        if fate == "lose":
            return
        if queue is self.wire.to_learner and (key in self.wire.present or isinstance(message, Group)):
            self.protocol.answer(key.encode(), message, ())
        for actor in self.actors:
            if queue is self.wire.to_actors and actor.key == key:
                actor.hear(message)

    @rule(seconds=st.sampled_from([0.0, 0.5, 4.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.protocol.tick(drained=not self.wire.to_learner)

    # ------------------------------------------------------------------ the learner

    @precondition(lambda self: self.committed)
    @rule()
    def a_step_begins(self) -> None:
        for ticket, group in self.book.take_groups(self.per_step) or ():
            self.committed = False
            assert not ticket.evaluation
            self.trained.append(parse_ticket_id(ticket.id)[0])
            assert all(self.exists(stamp) for stamp in self.stamps[id(group)])
            assert all(self.book.version - version <= self.staleness for _, version in self.stamps[id(group)])

    @precondition(lambda self: not self.committed)
    @rule()
    def a_step_ends(self) -> None:
        self.committed = True
        self.book.commit()
        if len(self.trained) % self.per_version == 0:
            self.book.version += 1
            self.weights = (self.process, self.book.version)
            self.all_engines_are_served()

    @precondition(lambda self: self.committed)
    @rule()
    def save(self) -> None:
        state = json.loads(json.dumps(self.book.state_dict()))
        self.saves.append((state, len(self.trained), self.process, self.staleness))

    @rule(staleness=st.none() | st.integers(0, 2), reached=BITS, damaged=st.sampled_from([0, 0, 0, 1, 2]))
    def the_learner_is_killed_and_resumes(
        self, staleness: int | None = None, reached: int = 7, damaged: int = 0
    ) -> None:
        """With the bound that it had, or another one, from the newest checkpoint but those that are `damaged`. Engines
        that it does not reach go on with undone weights; `reached` are the bits of those that it does."""
        del self.saves[max(1, len(self.saves) - damaged) :]
        state, trained, of_process, before = self.saves[-1]
        self.process += 1
        self.staleness = before if staleness is None else staleness
        self.start()
        self.book.load_state(state)
        assert self.book.state_dict().get("pools") == state.get("pools")  # with the samples of the open tickets
        self.forks[self.process] = (of_process, state["version"])
        assert self.staleness < before or list(self.book.held_back) == state["withheld"]
        del self.trained[trained:]
        self.committed = True
        self.weights = (self.process, self.book.version)
        for index, actor in enumerate(self.actors):
            if reached >> index & 1:
                actor.weights = self.weights

    @rule()
    def all_engines_are_served(self) -> None:
        for actor in self.actors:
            actor.weights = self.weights

    @precondition(lambda self: len(self.evaluations) < 2)
    @rule(samples=st.integers(1, MOST_EVALUATED // 2))
    def an_evaluation_begins(self, samples: int) -> None:
        """Its name comes again in each process, as that of a step does."""
        name, self.num_evaluations = f"step_{self.num_evaluations}", self.num_evaluations + 1
        self.book.evaluations.start(name, [SAMPLE] * samples, Sampling(), 1, self.book.version)
        self.evaluations[name] = samples

    @invariant()
    def an_evaluation_that_is_whole_has_each_of_its_samples_once(self) -> None:
        for name in list(self.evaluations):
            if result := self.book.evaluations.result(name):
                played = [ticket.seed for ticket, _ in result.groups]
                assert len(set(played)) == len(played) == self.evaluations.pop(name) - sum(result.lost.values())
                assert all(self.exists(stamp) for _, group in result.groups for stamp in self.stamps[id(group)])

    def exists(self, stamp: Stamp) -> bool:
        return is_part_of_history(stamp, self.process, self.book.version, self.forks)

    # ------------------------------------------------------------------ all at once

    @rule(seconds=st.sampled_from([0.0, 0.5, 4.0]), done=st.integers(0, 2**12 - 1), arrives=st.booleans())
    def a_quiet_round(self, seconds: float, done: int, arrives: bool) -> None:
        """Everything is delivered; of what is being played, the groups named by the bits of `done` are finished."""
        self.time_passes(seconds)
        for actor in self.actors:
            self.beat(actor)
        self.all_messages_arrive()
        self.time_passes(0.0)
        self.all_messages_arrive()
        playing = [(actor, ticket_id) for actor in self.actors for ticket_id in actor.playing]
        for index, (actor, ticket_id) in enumerate(playing):
            if done >> index & 1:
                self.finish(actor, ticket_id, True)
        if arrives:
            self.all_messages_arrive()

    @rule(done=st.lists(st.integers(0, 2**8 - 1), min_size=1, max_size=6), arrives=st.booleans())
    def a_quiet_time(self, done: list[int], arrives: bool) -> None:
        for bits in done:
            self.a_quiet_round(0.5, bits, arrives)
            if not self.committed:
                self.a_step_ends()
            self.a_step_begins()
            if not self.committed:
                self.a_step_ends()

    @rule(
        before=st.lists(st.integers(0, 2**8 - 1), min_size=1, max_size=3),
        after=st.integers(0, 2**8 - 1),
        reached=BITS,
        damaged=st.booleans(),
    )
    def a_checkpoint_and_a_kill_later(self, before: list[int], after: int, reached: int, damaged: bool) -> None:
        self.a_quiet_time(before[:1], True)
        self.save()
        self.a_quiet_time(before, True)
        if damaged:
            self.save()
        self.a_quiet_round(0.5, after, False)
        self.the_learner_is_killed_and_resumes(reached=reached, damaged=int(damaged))

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def the_ledger_adds_up(self) -> None:
        book, reach = self.book, (self.staleness + 1) * self.per_version
        assert book.issued == book.trained + book.dropped.total() + book.open
        assert len(set(self.trained)) == len(self.trained) == book.trained
        assert not book.dropped["stale"]
        assert book.open - len(book.held_back) <= reach
        if self.pools:
            state = book.state_dict()
            assert {number for number, *_ in state["pools"]["drawn"]} == {number for number, _ in state["open"]}
        assert all(book.holding(actor.key) <= reach + book.evaluations.open for actor in self.actors)
        assert len(self.protocol.actors) <= self.born

    def teardown(self) -> None:
        """Once the faults end, all that is open now is trained, or dropped because its group failed."""
        if not hasattr(self, "saves"):
            return
        self.all_engines_are_served()
        due = {number for number, _ in self.book.state_dict()["open"]}
        dropped = self.book.dropped.total()
        for _ in range(200):
            self.a_quiet_round(2.0, -1, True)
            if self.committed:
                self.a_step_begins()
            if not self.committed:
                self.a_step_ends()
            self.the_ledger_adds_up()
            self.an_evaluation_that_is_whole_has_each_of_its_samples_once()
            left = due - set(self.trained)
            if len(left) <= self.book.dropped.total() - dropped and not self.evaluations:
                break
        assert len(left) <= self.book.dropped.total() - dropped, f"never trained: {sorted(left)}"
        assert not self.evaluations
        most = 2 * (self.staleness + 1) * self.per_version + MOST_EVALUATED
        assert all(len(actor.held()) <= most for actor in self.actors)


Schedule.TestCase.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None, report_multiple_bugs=False
)
TestAnySchedule = Schedule.TestCase
