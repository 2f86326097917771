"""The ticket book under everything that networks and actors do: nothing lost, nothing twice, nothing too old."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.samples import ListSource, SeedSource
from learner.tickets import TicketBook, Verdict
from shared.types import Ending, Group, Sample, Sampling, Ticket
from tests.wires import book_settings, episode, failed_episode, group_of


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_book(clock: Clock | None = None, nonce: str = "n", **changes: object) -> TicketBook:
    return TicketBook(SeedSource(), book_settings(**changes), nonce=nonce, clock=clock or Clock())


def issue_all(book: TicketBook, actor: str = "a") -> list[Ticket]:
    tickets = []
    while (ticket := book.issue(actor)) is not None:
        tickets.append(ticket)
    return tickets


def adds_up(book: TicketBook) -> bool:
    return book.issued == book.trained + book.dropped.total() + book.open


def test_tickets_are_issued_up_to_the_bound_and_again_after_a_publication() -> None:
    book = make_book(groups_per_version=4, max_staleness=1)
    assert [t.sample.metadata["seed"] for t in issue_all(book)] == list(range(8))
    book.version = 1
    assert len(issue_all(book)) == 4
    assert adds_up(book)


def test_nothing_is_issued_beyond_what_the_run_trains_on() -> None:
    assert len(issue_all(make_book(total_groups=5))) == 5


def test_a_ticket_gets_one_group_whoever_brings_it() -> None:
    book = make_book()
    ticket = issue_all(book)[0]
    assert book.accept(group_of(ticket)) is Verdict.ACCEPTED
    assert book.accept(group_of(ticket)) is Verdict.DUPLICATE
    book.accept(group_of(issue_all(make_book(nonce="n"))[1]))
    assert book.take_groups(2) is not None
    assert book.accept(group_of(ticket)) is Verdict.DUPLICATE
    assert book.refused == {"duplicate": 2}
    assert adds_up(book)


def test_a_group_of_another_process_is_unknown() -> None:
    assert make_book(nonce="n").accept(group_of(issue_all(make_book(nonce="m"))[0])) is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("trajectories", "reason"),
    [
        ((failed_episode(Ending.ENV_TIMEOUT),), "env_timeout"),
        ((failed_episode(Ending.CONTEXT_FULL),), "no_turns"),
        ((episode(ending=Ending.REWARD_ERROR),), "reward_error"),
        ((episode(), episode()), "wrong_group_size"),
        ((), "wrong_group_size"),
        ((episode(2),), "future_version"),
    ],
)
def test_a_group_of_no_use_closes_its_ticket_with_the_reason_and_makes_room(trajectories: tuple, reason: str) -> None:
    book = make_book()
    ticket = issue_all(book)[0]
    assert book.accept(Group(ticket.id, "a", trajectories)) is Verdict.DROPPED
    assert book.dropped == {reason: 1}
    assert book.last_drop.startswith(reason)
    assert len(issue_all(book)) == 1
    assert adds_up(book)


def test_a_group_that_teaches_nothing_makes_room_for_a_fresh_ticket_but_not_in_an_evaluation() -> None:
    book = make_book(groups_per_version=1, max_staleness=0, refuse=lambda group: "uninformative")
    (ticket,) = issue_all(book)
    assert book.accept(group_of(ticket)) is Verdict.DROPPED
    assert book.dropped == {"uninformative": 1} and adds_up(book)
    (fresh,) = issue_all(book)
    assert fresh.sample != ticket.sample
    book.start_evaluation("e", [Sample("s")], Sampling())
    assert book.accept(group_of(issue_all(book)[0])) is Verdict.ACCEPTED


def test_one_trainable_episode_is_enough_for_a_group() -> None:
    book = make_book(group_size=2)
    ticket = issue_all(book)[0]
    assert book.accept(Group(ticket.id, "a", (failed_episode(), episode()))) is Verdict.ACCEPTED


def test_a_ticket_whose_lease_is_over_goes_to_another_actor_and_the_first_group_counts() -> None:
    clock = Clock()
    book = make_book(clock, lease_s=10.0)
    tickets = issue_all(book, "slow")
    clock.now = 10.0
    assert book.expire() == tuple(t.id for t in tickets)
    assert book.expire() == ()
    assert book.issue("slow") is None
    assert issue_all(book, "fast") == tickets
    assert book.reissued == len(tickets)
    assert book.holders(tickets[0].id) == ("slow", "fast")
    assert book.accept(group_of(tickets[0])) is Verdict.ACCEPTED
    assert book.accept(group_of(tickets[0])) is Verdict.DUPLICATE
    assert book.holders(tickets[0].id) == ()


def test_the_tickets_of_an_actor_that_is_gone_are_issued_again_and_stay_with_it_if_it_returns_first() -> None:
    book = make_book()
    tickets = issue_all(book, "a")
    book.actor_gone("a")
    assert book.holdings() == {}
    assert book.held("a", (tickets[0].id,)) == ()
    assert book.issue("b") == tickets[1]
    assert book.holders(tickets[0].id) == ("a",)


def test_a_ticket_that_its_actor_does_not_name_was_lost_on_the_way() -> None:
    clock = Clock()
    book = make_book(clock, lost_after_s=5.0)
    lost, kept = issue_all(book)[:2]
    clock.now = 4.0
    book.held("a", (kept.id,))
    assert book.issue("b") is None
    clock.now = 6.0
    book.held("a", (kept.id,))
    assert book.issue("b") == lost
    assert book.holders(kept.id) == ("a",)


def test_an_actor_learns_which_of_its_tickets_are_void() -> None:
    book = make_book()
    first, second = issue_all(book)[:2]
    book.accept(group_of(first))
    assert book.held("a", (first.id, second.id, "9-other")) == (first.id, "9-other")


def test_groups_are_taken_oldest_first() -> None:
    book = make_book()
    tickets = issue_all(book)
    for ticket in reversed(tickets[:4]):
        book.accept(group_of(ticket))
    batch = book.take_groups(2)
    assert batch is not None
    assert [t.id for t, _ in batch] == [t.id for t in tickets[:2]]


def test_a_step_waits_for_a_slow_group_rather_than_make_it_too_old() -> None:
    book = make_book(groups_per_version=4, max_staleness=1)
    slow, *others = issue_all(book)
    for ticket in others:
        book.accept(group_of(ticket))
    assert book.take_groups(4) is not None  # version 0: the slow one has another version to go
    book.version = 1
    more = issue_all(book)
    for ticket in more:
        book.accept(group_of(ticket))
    assert book.take_groups(2) is not None  # room for the slow one stays
    assert book.take_groups(2) is None
    book.accept(group_of(slow))
    batch = book.take_groups(2)
    assert batch is not None
    assert slow.id in [t.id for t, _ in batch]
    assert not book.dropped


def test_a_group_with_tokens_beyond_the_bound_is_dropped_at_consumption() -> None:
    book = make_book(groups_per_version=1, max_staleness=1)
    book.version = 3
    ticket, *others = issue_all(book)[:3]
    book.accept(group_of(ticket, version=1))
    assert book.take_groups(1) is None
    assert book.dropped == {"stale": 1}
    book.accept(group_of(others[0], version=2))
    assert book.take_groups(1) is not None
    assert adds_up(book)


def test_evaluation_tickets_come_first_are_never_trained_and_return_in_order() -> None:
    book = make_book()
    samples = SeedSource(900)
    book.start_evaluation("before", [samples.sample(i) for i in range(3)], Sampling(temperature=0))
    tickets = [book.issue("a") for _ in range(3)]
    assert [t.evaluation for t in tickets if t] == ["before"] * 3
    assert [t.seed for t in tickets if t] == [0, 1, 2]
    assert book.evaluation_result("before") is None
    for ticket in reversed(tickets):
        assert ticket is not None
        assert book.accept(Group(ticket.id, "a", (failed_episode(),))) is Verdict.ACCEPTED
    assert book.take_groups(1) is None
    result = book.evaluation_result("before")
    assert result is not None
    assert [t.sample.metadata["seed"] for t, _ in result.groups] == [900, 901, 902]
    assert book.issued == book.open_evaluation == 0
    with pytest.raises(KeyError):
        book.evaluation_result("before")


def test_a_malformed_evaluation_group_is_played_again_and_counted_as_lost_after_three_times() -> None:
    book = make_book()
    book.start_evaluation("e", [SeedSource().sample(0)], Sampling())
    with pytest.raises(ValueError, match="own name"):
        book.start_evaluation("e", [], Sampling())
    for _ in range(3):
        ticket = book.issue("a")
        assert ticket is not None
        assert ticket.evaluation == "e"
        assert book.reject(ticket.id, "malformed") is Verdict.DROPPED
    result = book.evaluation_result("e")
    assert result is not None
    assert result.lost == {"malformed": 1}


def test_a_restarted_book_issues_what_was_open_and_refuses_the_old_tickets() -> None:
    book = make_book(nonce="first")
    tickets = issue_all(book)
    for ticket in tickets[:5]:
        book.accept(group_of(ticket))
    book.take_groups(4)
    state = json.loads(json.dumps(book.state_dict()))
    again = make_book(nonce="second")
    again.load_state(state)
    assert adds_up(again)
    assert again.held("a", tuple(t.id for t in tickets)) == tuple(t.id for t in tickets)
    assert again.accept(group_of(tickets[5])) is Verdict.UNKNOWN
    assert [t.sample for t in issue_all(again)] == [t.sample for t in tickets[4:]]
    assert again.trained == 4


def test_a_dataset_comes_in_a_new_order_each_epoch_that_depends_on_the_seed_alone() -> None:
    samples = [Sample(str(i)) for i in range(20)]
    source, same, other = ListSource(samples, 1), ListSource(samples, 1), ListSource(samples, 2)
    epochs = [[source.sample(e * 20 + i).id for i in range(20)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(s.id for s in samples)
    assert epochs[0] != epochs[1]
    assert [same.sample(20 + i).id for i in range(20)] == epochs[1]
    assert [other.sample(i).id for i in range(20)] != epochs[0]
    with pytest.raises(ValueError, match=r"data\.source"):
        ListSource([])


# ------------------------------------------------------------------ any schedule


@dataclass
class World:
    """A learner, actors and a network between them that loses, repeats, delays and reorders."""

    rng: random.Random
    staleness: int
    per_version: int
    per_step: int
    clock: Clock = field(default_factory=Clock)
    actors: dict[str, dict[str, Ticket]] = field(default_factory=dict)
    flying: list[Group] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    restarts: int = 0

    def __post_init__(self) -> None:
        self.book = self.new_book()
        self.saved = (self.book.state_dict(), 0)
        self.actors = {name: {} for name in "abc"}

    def new_book(self) -> TicketBook:
        shape = {"groups_per_version": self.per_version, "max_staleness": self.staleness}
        return make_book(self.clock, f"r{self.restarts}", lease_s=20.0, lost_after_s=3.0, **shape)

    def act(self, lossy: bool) -> None:
        names = ["issue"] * 4 + ["finish"] * 4 + ["deliver"] * 4 + ["train"] * 3 + ["beat", "time"]
        rare = ["lose", "repeat", "crash", "restart", "save", "fail"] if lossy else []
        getattr(self, self.rng.choice(names + rare))(lossy)
        self.check()

    def issue(self, lossy: bool) -> None:
        name = self.rng.choice(sorted(self.actors))
        ticket = self.book.issue(name) if len(self.actors[name]) < 6 else None
        if ticket is not None and not (lossy and self.rng.random() < 0.1):
            self.actors[name][ticket.id] = ticket

    def finish(self, lossy: bool, *, good: bool = True) -> None:
        name = self.rng.choice(sorted(self.actors))
        for ticket in list(self.actors[name].values())[: self.rng.randrange(4)]:
            version = self.rng.randint(ticket.version, max(ticket.version, self.book.version))
            made = episode(version) if good else failed_episode()
            self.flying.append(Group(ticket.id, name, (made,)))

    def fail(self, lossy: bool) -> None:
        self.finish(lossy, good=False)

    def deliver(self, lossy: bool) -> None:
        self.rng.shuffle(self.flying)
        for group in self.flying[:3]:
            self.book.accept(group)
            for tickets in self.actors.values():  # the acknowledgment; if it is lost, the actor sends again
                if not (lossy and self.rng.random() < 0.2):
                    tickets.pop(group.ticket_id, None)
        del self.flying[:3]

    def lose(self, lossy: bool) -> None:
        self.flying = self.flying[1:]

    def repeat(self, lossy: bool) -> None:
        self.flying += self.flying[:2]

    def crash(self, lossy: bool) -> None:
        name = self.rng.choice(sorted(self.actors))
        self.actors[name].clear()
        if self.rng.random() < 0.5:
            self.book.actor_gone(name)

    def beat(self, lossy: bool) -> None:
        for name, tickets in self.actors.items():
            for void in self.book.held(name, tuple(tickets)):
                del tickets[void]

    def time(self, lossy: bool) -> None:
        self.clock.now += self.rng.choice([0.5, 2.0, 10.0])
        self.book.expire()

    def train(self, lossy: bool) -> None:
        batch = self.book.take_groups(self.per_step)
        for ticket, group in batch or ():
            self.trained.append(ticket.sample.metadata["seed"])
            assert self.book.version - int(group.trajectories[0].policy_versions[2]) <= self.staleness
        if batch and len(self.trained) % self.per_version == 0:
            self.book.version += 1

    def save(self, lossy: bool) -> None:
        self.saved = (json.loads(json.dumps(self.book.state_dict())), len(self.trained))

    def restart(self, lossy: bool) -> None:
        self.restarts += 1
        self.book = self.new_book()
        self.book.load_state(self.saved[0])
        del self.trained[self.saved[1] :]

    def check(self) -> None:
        assert adds_up(self.book)
        assert len(set(self.trained)) == len(self.trained) == self.book.trained
        assert self.book.open <= (self.staleness + 1) * self.per_version
        assert not self.book.dropped["stale"]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    steps=st.integers(0, 300),
    staleness=st.integers(0, 2),
    shape=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2)]),
)
def test_any_schedule_trains_each_ticket_at_most_once_and_in_the_end_once(
    seed: int, steps: int, staleness: int, shape: tuple[int, int]
) -> None:
    world = World(random.Random(seed), staleness, *shape)
    for _ in range(steps):
        world.act(lossy=True)
    open_now = set(world.book.state_dict()["open"])
    for _ in range(4000):
        if open_now <= set(world.trained):
            break
        world.act(lossy=False)
        open_now -= open_now - set(world.trained) - set(world.book.state_dict()["open"])  # dropped: a group had failed
    assert open_now <= set(world.trained)


def test_long_episodes_are_trained_in_the_proportion_in_which_they_are_issued() -> None:
    rng = np.random.default_rng(0)
    book = make_book(groups_per_version=8, max_staleness=2)
    long = {int(n) for n in np.flatnonzero(rng.random(400) < 0.3)}
    finish_at: list[tuple[int, Ticket]] = []
    trained: list[int] = []
    for now in range(4000):
        while (ticket := book.issue("a")) is not None:
            seconds = 20 if ticket.sample.metadata["seed"] in long else 1
            finish_at.append((now + seconds, ticket))
        for entry in [e for e in finish_at if e[0] <= now]:
            finish_at.remove(entry)
            book.accept(group_of(entry[1]))
        batch = book.take_groups(8)
        if batch:
            trained += [t.sample.metadata["seed"] for t, _ in batch]
            book.version += 1
        if len(trained) >= 320:
            break
    assert not book.dropped
    assert abs(len(long & set(trained)) - len(long & set(range(len(trained))))) <= 16
