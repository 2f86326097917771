"""Difficulty pools: what is always or never solved is drawn less; neither timing nor a restart changes that."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest
from msgspec.structs import replace

from learner.tickets import pools as pools_module
from learner.tickets.interleave import Interleave
from learner.tickets.pools import PooledSource, PoolTable, SampleKey
from learner.tickets.sources import ListSource, SeedSource, TaskSource
from learner.tickets.ticket_book import TicketBook
from shared.config.pools_section import PoolConfig
from shared.types import Group, Sample, Ticket
from tests.support.wires import book_settings, episode

POOLS = tuple(
    PoolConfig(name=name, bounds=bounds, weight=weight)
    for name, bounds, weight in (("never", (0, 0.1), 0.3), ("some", (0.1, 0.9), 1.0), ("always", (0.9, 1), 0.2))
)
PER_STEP, PER_VERSION = 4, 8


def source(seed: int = 1) -> PooledSource:
    rows = ListSource([Sample(f"a/{i}", task="a") for i in range(12)], seed)
    return PooledSource([TaskSource("a", rows, 2.0), TaskSource("b", SeedSource(100, 9, task="b"), 1.0)], POOLS, seed)


def reward_of(ticket: Ticket) -> float:
    """Half of the samples are always solved, some never, the others now and then."""
    kind = sum(map(ord, ticket.sample.id)) % 4
    return (1.0, 1.0, 0.0, float(ticket.seed % 2))[kind]


class Run:
    """A run whose groups come in order. `late`: tickets are asked for as late as possible, and otherwise as soon."""

    def __init__(self, nonce: str, state: str = "", *, late: bool = False, staleness: int = 2) -> None:
        shape = {"groups_per_version": PER_VERSION, "max_staleness": staleness, "group_size": 2}
        self.book = TicketBook(source(), book_settings(**shape), nonce=nonce, clock=lambda: 0.0)
        self.late, self.steps = late, 0
        self.open: list[Ticket] = []
        self.played: list[tuple[int, str, int, int]] = []
        if state:
            self.book.load_state(json.loads(state))
            self.steps = self.book.trained // PER_STEP

    def step(self) -> None:
        while not self.late or len(self.open) < PER_STEP:
            ticket = self.book.issue("a")
            if ticket is None:
                break
            self.open.append(ticket)
        now, self.open = self.open[:PER_STEP], self.open[PER_STEP:]
        for ticket in now:
            number = int(ticket.id.partition("-")[0])
            self.played.append((number, ticket.sample.id, ticket.seed, ticket.group_size))
            trajectories = tuple(
                replace(episode(version=self.book.version), reward=reward_of(ticket)) for _ in range(2)
            )
            assert self.book.accept(Group(ticket.id, "a", trajectories), "a").value == "accepted"
        assert self.book.take_groups(PER_STEP) is not None
        self.book.commit()
        self.steps += 1
        self.book.version = self.steps * PER_STEP // PER_VERSION

    def state(self) -> str:
        return json.dumps(self.book.state_dict())


def test_solved_and_hopeless_samples_are_drawn_less_and_unknown_ones_always():
    run = Run("n")
    for _ in range(150):
        run.step()
    plays = Counter(name for _, name, _, _ in run.played)
    kinds: dict[int, list[int]] = {0: [], 1: [], 2: [], 3: []}
    for name, count in plays.items():
        kinds[sum(map(ord, name)) % 4].append(count)
    assert len(plays) == 21  # all were played
    of = {kind: sum(counts) / len(counts) for kind, counts in kinds.items()}
    assert max(of[0], of[1]) < 0.4 * of[3] and of[2] < 0.5 * of[3]
    tasks = Counter(name.partition("/")[0] for _, name, _, _ in run.played)
    assert tasks == {"a": 400, "b": 200}  # pools are within each task
    known = run.book.pooled.metrics()
    assert known["pools/always/samples"] + known["pools/never/samples"] + known["pools/some/samples"] == 21
    assert known["pools/skipped"] > 0


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_which_samples_tickets_have_does_not_hang_on_when_they_are_asked_for(staleness):
    soon, late = Run("n", staleness=staleness), Run("n", late=True, staleness=staleness)
    for _ in range(60):
        soon.step()
        late.step()
    assert soon.played == late.played


@pytest.mark.parametrize("late", [False, True])
def test_a_resumed_run_plays_the_same_tickets_bit_for_bit(late):
    whole, states = Run("n", late=late), []
    for _ in range(60):
        states.append(whole.state())
        whole.step()
    for begun in (1, 7, 8, 30, 41):
        resumed = Run(f"r{begun}", states[begun], late=not late)
        for _ in range(60 - begun):
            resumed.step()
        assert resumed.played == whole.played[PER_STEP * begun :]


def test_a_state_does_not_change_when_the_run_goes_on():
    """It is written beside the steps that follow."""
    run = Run("n")
    run.step()
    state, as_it_was = run.book.state_dict(), run.state()
    run.step()
    assert json.dumps(state) == as_it_was


def test_a_run_that_gets_pools_on_the_way_goes_on_in_its_order():
    shape = {"groups_per_version": PER_VERSION, "max_staleness": 2}
    plain = TicketBook(PooledSource(source().tasks, ()), book_settings(**shape), nonce="n", clock=lambda: 0.0)
    plain.pooled = None
    tickets = [plain.issue("a") for _ in range(10)]
    state = plain.state_dict()
    assert "pools" not in state
    run = Run("r", json.dumps(state))
    again = [run.book.issue("a") for _ in range(14)]
    ids = [ticket.sample.id for ticket in tickets]
    assert [ticket.sample.id for ticket in again[:10]] == ids
    turns = Interleave([2.0, 1.0])
    assert [t.sample.id for t in again[10:]] == [
        source().tasks[task].source.sample(turn).id for task, turn in map(turns.turn, range(10, 14))
    ]


def test_a_task_all_of_whose_samples_are_rare_still_plays_one_after_a_round():
    rare = (PoolConfig(name="all", bounds=(0, 1), weight=1e-9),)
    pooled = PooledSource([TaskSource("", SeedSource(0, 5))], rare)
    drawn = [pooled.draw(number, 0) for number in range(5)]
    for number in range(5):
        pooled.learn(number, Group("g", "a", (episode(),)), 1)
    assert sorted(s.metadata["seed"] for s in drawn) == list(range(5))
    assert [pooled.draw(number, 1).metadata["seed"] for number in range(5, 12)] == [0, 1, 2, 3, 4, 0, 1]


def test_results_count_from_their_version_on_and_old_ones_fade():
    table, key = PoolTable(POOLS), SampleKey(0, 3)
    table.note(2, key, 1.0)
    table.settle(1)
    assert table.pool_of(key) is None
    table.settle(2)
    assert table.pool_of(key).name == "always"
    for version in range(3, 20):
        table.note(version, key, -5.0)  # below all bounds
    table.settle(30)
    assert table.pool_of(key).name == "never"


def test_the_table_is_bounded_and_forgets_what_was_played_longest_ago():
    table = PoolTable(POOLS, kept=10)
    for row in range(25):
        table.note(1, SampleKey(0, row), 0.0)
        table.note(1, SampleKey(0, 0), 0.0)
    table.settle(1)
    assert sum(table.counts().values()) == 10
    assert table.pool_of(SampleKey(0, 0)) is not None and table.pool_of(SampleKey(0, 1)) is None


def test_groups_that_are_refused_for_equal_rewards_are_learned_from():
    """With dynamic sampling those are the very samples that pools are for."""
    refuse = lambda group: "uninformative"  # noqa: E731
    book = TicketBook(
        source(), book_settings(groups_per_version=4, max_staleness=1, group_size=1, refuse=refuse), nonce="n"
    )
    ticket = book.issue("a")
    book.accept(Group(ticket.id, "a", (episode(),)), "a")
    book.version = 1
    book.pooled.table.settle(1)
    assert sum(book.pooled.table.counts().values()) == 1


def test_skipping_ends_within_a_bound_of_turns(monkeypatch):
    monkeypatch.setattr(pools_module, "MAX_SKIPS", 7)
    rare = (PoolConfig(name="all", bounds=(0, 1), weight=1e-9),)
    pooled = PooledSource([TaskSource("", SeedSource(0, 50))], rare)
    for row in range(50):
        pooled.table.note(0, SampleKey(0, row), 0.0)
    assert [pooled.draw(number, 0).metadata["seed"] for number in range(3)] == [0, 1, 2]


def test_the_order_of_a_dataset_is_the_same_with_pools_until_samples_are_skipped():
    plain, rng = source(), Random(0)
    numbers = sorted(rng.sample(range(30), 30))
    assert [plain.draw(n, 0).id for n in numbers] == [super(PooledSource, plain).sample(n).id for n in numbers]
