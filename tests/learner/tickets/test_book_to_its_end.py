"""The ticket book under random returns, leases, drops, acknowledgments and restarts, each run played to its end."""

from __future__ import annotations

import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from learner.tickets.ticket_book import GroupVerdict, TicketBook
from shared.types import Group, Ticket
from tests.support.tickets.book_rig import Clock, adds_up, make_book
from tests.support.wires import failed_episode, group_of

LEASE_S, RETURN_S, LOST_S = 10.0, 4.0, 2.0
NAMES = ("a", "b", "c")


class Actor:
    """What one actor process holds: tickets that it plays, and groups that it keeps until they are acknowledged."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.playing: dict[str, Ticket] = {}
        self.finished: dict[str, Group] = {}


class BookToItsEnd(RuleBasedStateMachine):
    @initialize(
        per_step=st.integers(1, 3),
        staleness=st.integers(0, 2),
        return_s=st.sampled_from([0.0, RETURN_S]),
        steps=st.integers(1, 4),
    )
    def begin(self, per_step: int, staleness: int, return_s: float, steps: int) -> None:
        self.shape = {
            "groups_per_version": per_step,
            "max_staleness": staleness,
            "total_groups": per_step * steps,
            "lease_s": LEASE_S,
            "return_s": return_s,
            "lost_after_s": LOST_S,
        }
        self.clock = Clock()
        self.processes = 0
        self.book = self.new_book()
        self.trained: list[str] = []
        self.actors = {name: Actor(f"{name}#0") for name in NAMES}

    def new_book(self) -> TicketBook:
        self.processes += 1
        return make_book(self.clock, nonce=f"p{self.processes}", **self.shape)

    # ------------------------------------------------------------------ actors

    @rule(name=st.sampled_from(NAMES))
    def asks_for_a_ticket(self, name: str) -> None:
        actor = self.actors[name]
        if (ticket := self.book.issue(actor.key)) is not None:
            assert ticket.id not in actor.playing
            actor.playing[ticket.id] = ticket

    @rule(name=st.sampled_from(NAMES), good=st.integers(0, 3), data=st.data())
    def finishes_a_group(self, name: str, good: int, data: st.DataObject) -> None:
        actor = self.actors[name]
        if actor.playing:
            self.finish(actor, data.draw(st.sampled_from(sorted(actor.playing))), good=good > 0)

    def finish(self, actor: Actor, ticket_id: str, *, good: bool) -> None:
        ticket = actor.playing.pop(ticket_id)
        group = group_of(ticket) if good else Group(ticket_id, "a", (failed_episode(),))
        dropped = self.book.dropped.total()
        verdict = self.book.accept(group, actor.key)
        assert self.book.dropped.total() - dropped == (verdict is GroupVerdict.DROPPED)
        if verdict is GroupVerdict.ACCEPTED:
            assert good
            assert self.book.accept(group, actor.key) is GroupVerdict.AGAIN
            actor.finished[ticket_id] = group
        else:
            assert verdict in (GroupVerdict.DUPLICATE, GroupVerdict.DROPPED, GroupVerdict.OUTDATED)

    @rule(name=st.sampled_from(NAMES))
    def says_what_it_holds(self, name: str) -> None:
        self.reconcile(self.actors[name])

    def reconcile(self, actor: Actor) -> None:
        for ticket_id in self.book.reconcile_held(actor.key, (*actor.playing, *actor.finished)):
            actor.playing.pop(ticket_id, None)
            actor.finished.pop(ticket_id, None)

    @rule(name=st.sampled_from(NAMES), remembers=st.booleans(), left=st.booleans())
    def ends_and_another_process_begins(self, name: str, remembers: bool, left: bool) -> None:
        """A process that `remembers` comes back with what the one before was playing."""
        old = self.actors[name]
        self.book.actor_gone(old.key, left=left)
        assert self.book.holding(old.key) == 0
        new = self.actors[name] = Actor(f"{name}#{int(old.key.partition('#')[2]) + 1}")
        if remembers:
            new.playing = old.playing
            self.reconcile(new)

    @rule(seconds=st.sampled_from([1.0, 3.0, 5.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.book.expire()

    # ------------------------------------------------------------------ the learner

    @rule()
    def trains(self) -> None:
        self.train()

    def train(self) -> None:
        batch = self.book.take_groups(self.shape["groups_per_version"])
        if batch is None:
            return
        for ticket, group in batch:
            assert 0 <= self.book.version - ticket.version <= self.shape["max_staleness"]
            assert group.trajectories[0].trainable
            self.trained.append(ticket.sample.id)
        self.book.commit()
        acknowledged = self.book.acknowledgments()
        for actor in self.actors.values():
            for ticket_id in acknowledged.pop(actor.key, ()):
                del actor.finished[ticket_id]  # under the name that the actor knows
        self.book.version += 1

    @rule()
    def starts_again_from_its_checkpoint(self) -> None:
        state = json.loads(json.dumps(self.book.state_dict()))
        self.book = self.new_book()
        self.book.load_state(state)
        for actor in self.actors.values():
            kept = actor.finished
            actor.finished = {}
            self.reconcile(actor)
            for ticket_id, group in kept.items():  # the new process has none of the groups that the old one took
                if self.book.accept(group, actor.key) is GroupVerdict.ACCEPTED:
                    actor.finished[ticket_id] = group

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def counters_add_up_and_nothing_is_trained_twice(self) -> None:
        if hasattr(self, "book"):
            assert adds_up(self.book)
            assert len(self.trained) == len(set(self.trained)) == self.book.trained
            assert self.book.trained + self.book.open <= self.shape["total_groups"]

    def teardown(self) -> None:
        """The run ends: every group that was dropped is replaced, every ticket is played, every actor is released; also
        the first one, which hangs from now on and only says what it holds."""
        if not hasattr(self, "book"):
            return
        for _ in range(200):
            if self.book.trained == self.shape["total_groups"]:
                break
            self.clock.now += LEASE_S
            self.book.expire()
            for actor in self.actors.values():
                self.reconcile(actor)
                if actor is self.actors[NAMES[0]]:
                    continue
                while (ticket := self.book.issue(actor.key)) is not None:
                    actor.playing[ticket.id] = ticket
                for ticket_id in sorted(actor.playing):
                    self.finish(actor, ticket_id, good=True)
            self.train()
        assert self.book.trained == self.shape["total_groups"], "the run does not come to its end"
        assert self.book.open == 0
        for actor in self.actors.values():
            self.reconcile(actor)
            assert not actor.playing and not actor.finished
            assert self.book.issue(actor.key) is None
        assert self.book.acknowledgments() == {}


BookToItsEnd.TestCase.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
TestBookToItsEnd = BookToItsEnd.TestCase
