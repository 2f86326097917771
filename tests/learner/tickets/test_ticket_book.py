"""The ticket book under everything that networks and actors do: nothing lost, nothing twice, nothing too old."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from actor.episode import episode_seed
from learner.tickets.evaluations import FIRST_SEED
from learner.tickets.sources import ListSource, SeedSource
from learner.tickets.ticket_book import GroupVerdict
from shared.types import Ending, Group, Sample, Sampling, Ticket
from tests.support.tickets.book_rig import adds_up, issue_all, make_book
from tests.support.wires import episode, failed_episode, group_of


def test_tickets_are_issued_up_to_the_bound_and_again_after_a_publication() -> None:
    book = make_book(groups_per_version=4, max_staleness=1)
    assert [t.sample.metadata["seed"] for t in issue_all(book)] == list(range(8))
    book.version = 1
    assert len(issue_all(book)) == 4
    assert adds_up(book)


def test_every_ticket_has_a_seed_of_its_own_the_first_too() -> None:
    seeds = [t.seed for t in issue_all(make_book(groups_per_version=4, max_staleness=1))]
    assert len(set(seeds)) == 8 and min(seeds) > 0  # 0 would leave its episodes to the engine's chance


def test_nothing_is_issued_beyond_what_the_run_trains_on() -> None:
    assert len(issue_all(make_book(total_groups=5))) == 5


def test_a_ticket_gets_one_group_whoever_brings_it() -> None:
    book = make_book()
    ticket = issue_all(book)[0]
    assert book.accept(group_of(ticket), "a") is GroupVerdict.ACCEPTED
    assert book.accept(group_of(ticket), "a") is GroupVerdict.AGAIN
    assert book.accept(group_of(ticket), "b") is GroupVerdict.DUPLICATE
    book.accept(group_of(issue_all(make_book(nonce="n"))[1]), "a")
    assert book.take_groups(2) is not None
    assert book.accept(group_of(ticket), "b") is GroupVerdict.DUPLICATE
    book.commit()
    assert book.accept(group_of(ticket), "a") is GroupVerdict.DUPLICATE
    assert book.refused == {"duplicate": 3}
    assert adds_up(book)


def test_a_group_of_another_process_is_unknown() -> None:
    assert make_book(nonce="n").accept(group_of(issue_all(make_book(nonce="m"))[0]), "a") is GroupVerdict.UNKNOWN


@pytest.mark.parametrize(
    ("trajectories", "reason"),
    [
        ((failed_episode(Ending.ENV_TIMEOUT),), "env_timeout"),
        ((failed_episode(Ending.CONTEXT_FULL),), "no_turns"),
        ((episode(ending=Ending.REWARD_ERROR),), "reward_error"),
        ((episode(), episode()), "wrong_group_size"),
        ((), "wrong_group_size"),
    ],
)
def test_a_group_of_no_use_closes_its_ticket_with_the_reason_and_makes_room(trajectories: tuple, reason: str) -> None:
    book = make_book()
    ticket = issue_all(book)[0]
    assert book.accept(Group(ticket.id, "a", trajectories), "a") is GroupVerdict.DROPPED
    assert book.dropped == {reason: 1}
    assert book.last_drop.startswith(reason)
    assert len(issue_all(book)) == 1
    assert adds_up(book)


def test_a_group_that_teaches_nothing_makes_room_for_a_fresh_ticket_but_not_in_an_evaluation() -> None:
    book = make_book(groups_per_version=1, max_staleness=0, refuse=lambda group: "uninformative")
    (ticket,) = issue_all(book)
    assert book.accept(group_of(ticket), "a") is GroupVerdict.DROPPED
    assert book.dropped == {"uninformative": 1} and adds_up(book)
    (fresh,) = issue_all(book)
    assert fresh.sample != ticket.sample
    book.evaluations.start("e", [Sample("s")], Sampling(), 1, 0)
    assert book.accept(group_of(issue_all(book)[0]), "a") is GroupVerdict.ACCEPTED


def test_one_trainable_episode_is_enough_for_a_group() -> None:
    book = make_book(group_size=2)
    ticket = issue_all(book)[0]
    assert book.accept(Group(ticket.id, "a", (failed_episode(), episode())), "a") is GroupVerdict.ACCEPTED


def test_groups_are_taken_oldest_first() -> None:
    book = make_book()
    tickets = issue_all(book)
    for ticket in reversed(tickets[:4]):
        book.accept(group_of(ticket), "a")
    batch = book.take_groups(2)
    assert batch is not None
    assert [t.id for t, _ in batch] == [t.id for t in tickets[:2]]


def test_a_step_waits_for_a_slow_group_rather_than_make_it_too_old() -> None:
    book = make_book(groups_per_version=4, max_staleness=1)
    slow, *others = issue_all(book)
    for ticket in others:
        book.accept(group_of(ticket), "a")
    assert book.take_groups(4) is not None  # version 0: the slow one has another version to go
    book.version = 1
    more = issue_all(book)
    for ticket in more:
        book.accept(group_of(ticket), "a")
    assert book.take_groups(2) is not None  # room for the slow one stays
    assert book.take_groups(2) is None
    book.accept(group_of(slow), "a")
    batch = book.take_groups(2)
    assert batch is not None
    assert slow.id in [t.id for t, _ in batch]
    assert not book.dropped


def test_a_group_with_tokens_beyond_the_bound_is_dropped_at_consumption() -> None:
    book = make_book(groups_per_version=1, max_staleness=1)
    book.version = 3
    ticket, *others = issue_all(book)[:3]
    book.accept(group_of(ticket, version=1), "a")
    assert book.take_groups(1) is None
    assert book.dropped == {"stale": 1}
    book.accept(group_of(others[0], version=2), "a")
    assert book.take_groups(1) is not None
    assert adds_up(book)


def test_no_turn_of_an_evaluation_has_the_seed_of_a_training_turn() -> None:
    """Of the first thousand training tickets of runs with small seeds, and an evaluation of a thousand samples."""
    book = make_book()
    book.evaluations.start("before", [SeedSource().sample(i) for i in range(1000)], Sampling(), 1, 0)
    evaluated = [book.issue("a") for _ in range(1000)]
    (training,) = issue_all(make_book(groups_per_version=1, max_staleness=0))
    turns = [(index, turn) for index in range(2) for turn in range(3)]
    seeds = {episode_seed(ticket, index, turn) for ticket in evaluated for index, turn in turns}
    assert len(seeds) == len(evaluated) * len(turns)
    for number in range(1000):
        for run_seed in (0, 1, 7):
            later = replace(training, seed=1 + (run_seed * 1_000_003 + number) % (2**31 - 1))
            assert seeds.isdisjoint(episode_seed(later, index, turn) for index, turn in turns)


def test_evaluation_tickets_come_first_are_never_trained_and_return_in_order() -> None:
    book = make_book()
    samples = SeedSource(900)
    book.evaluations.start("before", [samples.sample(i) for i in range(3)], Sampling(temperature=0), 1, 0)
    tickets = [book.issue("a") for _ in range(3)]
    assert [t.evaluation for t in tickets if t] == ["before"] * 3
    assert [t.seed for t in tickets if t] == [FIRST_SEED, FIRST_SEED + 1, FIRST_SEED + 2]
    assert book.evaluations.result("before") is None
    for ticket in reversed(tickets):
        assert ticket is not None
        assert book.accept(Group(ticket.id, "a", (failed_episode(),)), "a") is GroupVerdict.ACCEPTED
    assert book.take_groups(1) is None
    result = book.evaluations.result("before")
    assert result is not None
    assert [t.sample.metadata["seed"] for t, _ in result.groups] == [900, 901, 902]
    assert book.issued == book.evaluations.open == 0
    with pytest.raises(KeyError):
        book.evaluations.result("before")


def test_seeds_take_their_variants_in_turn_and_one_seed_always_the_same() -> None:
    source = SeedSource(first=10, count=3, split="train", variants=({}, {"wall_chance": 0.15}))
    found = [source.sample(i).metadata for i in range(4)]
    assert [m["seed"] for m in found] == [10, 11, 12, 10]
    assert [m["env_config"] for m in found] == [{}, {"wall_chance": 0.15}, {}, {}]
    assert "env_config" not in SeedSource().sample(0).metadata


def test_a_malformed_evaluation_group_is_played_again_and_counted_as_lost_after_three_times() -> None:
    book = make_book()
    book.evaluations.start("e", [SeedSource().sample(0)], Sampling(), 1, 0)
    with pytest.raises(ValueError, match="own name"):
        book.evaluations.start("e", [], Sampling(), 1, 0)
    for _ in range(3):
        ticket = book.issue("a")
        assert ticket is not None
        assert ticket.evaluation == "e"
        assert book.reject(ticket.id, "malformed") is GroupVerdict.DROPPED
    result = book.evaluations.result("e")
    assert result is not None
    assert result.lost == {"malformed": 1}


def test_an_evaluation_takes_no_episode_of_older_weights_than_it_is_of() -> None:
    book = make_book()
    book.version = 5
    book.evaluations.start("e", [SeedSource().sample(0), SeedSource().sample(1)], Sampling(), 1, 5)
    first, second = (book.issue("a") for _ in range(2))
    assert first is not None and second is not None
    assert book.accept(group_of(first, version=4), "a") is GroupVerdict.DROPPED
    assert book.last_drop == "older_weights: tokens of version 4, and 5 is evaluated"
    assert book.issue("a") == first  # it is played again
    assert book.accept(group_of(first, version=5), "a") is GroupVerdict.ACCEPTED
    for version in (4, 4, 3):
        assert book.accept(group_of(second, version=version), "a") is GroupVerdict.DROPPED
        book.issue("a")
    result = book.evaluations.result("e")
    assert result is not None and [t.id for t, _ in result.groups] == [first.id]
    assert result.lost == {"older_weights": 1}


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
            book.accept(group_of(entry[1]), "a")
        batch = book.take_groups(8)
        if batch:
            trained += [t.sample.metadata["seed"] for t, _ in batch]
            book.version += 1
        if len(trained) >= 320:
            break
    assert not book.dropped
    assert abs(len(long & set(trained)) - len(long & set(range(len(trained))))) <= 16


def test_the_last_step_of_a_run_has_groups_in_place_of_those_that_were_dropped() -> None:
    book = make_book(groups_per_version=2, max_staleness=1, total_groups=4)
    first, *others = issue_all(book)
    assert len(others) == 3
    assert book.reject(first.id, "malformed") is GroupVerdict.DROPPED
    (replacement,) = issue_all(book)
    for ticket in (*others, replacement):
        assert book.accept(group_of(ticket), "a") is GroupVerdict.ACCEPTED
    for version in (1, 2):
        assert book.take_groups(2) is not None
        book.commit()
        book.version = version
    assert (book.trained, book.open, issue_all(book)) == (4, 0, [])


def test_runs_of_other_seeds_have_tickets_of_other_seeds() -> None:
    seeds = [{ticket.seed for ticket in issue_all(make_book(seed=seed))} for seed in (0, 1, 2)]
    assert len(set.union(*seeds)) == sum(map(len, seeds))
