"""Who holds a ticket: over leases that end, actors that vanish or forget, and restarts of the learner."""

from __future__ import annotations

import json
from collections import deque

import pytest

from learner.tickets.process_history import MAX_PROCESSES
from learner.tickets.ticket_book import GroupVerdict, TicketBook
from shared.types import Group, Sampling, Ticket
from tests.support.tickets.book_rig import Clock, adds_up, issue_all, make_book
from tests.support.wires import SAMPLE, episode, group_of


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
    assert book.accept(group_of(tickets[0]), "fast") is GroupVerdict.ACCEPTED
    assert book.accept(group_of(tickets[0]), "slow") is GroupVerdict.DUPLICATE
    assert book.holders(tickets[0].id) == ()


def test_the_tickets_of_an_actor_that_is_gone_are_issued_again_and_stay_with_it_if_it_returns_first() -> None:
    book = make_book()
    tickets = issue_all(book, "a")
    book.actor_gone("a")
    assert book.holding("a") == 0
    assert book.reconcile_held("a", (tickets[0].id,)) == ()
    assert book.issue("b") == tickets[1]
    assert book.holders(tickets[0].id) == ("a",)


def test_the_tickets_of_an_actor_that_vanished_wait_for_it_and_those_of_one_that_left_do_not() -> None:
    clock = Clock()
    book = make_book(clock, return_s=30.0)
    tickets = issue_all(book, "a#1")
    book.actor_gone("a#1")
    clock.now = 29.0
    assert book.expire() == ()
    assert book.issue("b#1") is None
    clock.now = 30.0
    book.expire()
    assert issue_all(book, "b#1") == tickets
    assert book.reissued == len(tickets)
    book.actor_gone("b#1", left=True)
    assert issue_all(book, "c#1") == tickets


def test_an_actor_that_was_started_again_keeps_the_tickets_it_names_and_the_others_wait_no_longer() -> None:
    clock = Clock()
    book = make_book(clock, return_s=30.0, lease_s=300.0)
    kept, lost = issue_all(book, "a#1")[:2]
    book.actor_gone("a#1")
    clock.now = 5.0
    book.reconcile_held("b#7", ())
    assert book.issue("b#7") is None
    assert book.reconcile_held("a#2", (kept.id,)) == ()
    assert book.issue("b#7") == lost
    assert book.holders(kept.id) == ("a#2",)
    clock.now = 100.0
    assert book.expire() == ()
    assert book.accept(group_of(kept), "a#2") is GroupVerdict.ACCEPTED


def test_an_actor_that_is_back_before_it_was_missed_keeps_its_tickets_too() -> None:
    clock = Clock()
    book = make_book(clock, return_s=30.0)
    kept, lost = issue_all(book, "a#1")[:2]
    book.reconcile_held("a#2", (kept.id,))
    book.actor_gone("a#1")
    assert book.issue("b#7") is None
    book.reconcile_held("a#2", (kept.id,))
    assert book.issue("b#7") == lost
    assert book.holders(kept.id) == ("a#2",)


def test_a_lease_that_runs_out_meanwhile_ends_the_wait() -> None:
    clock = Clock()
    book = make_book(clock, return_s=30.0, lease_s=10.0)
    tickets = issue_all(book, "a#1")
    book.actor_gone("a#1")
    clock.now = 10.0
    assert book.expire() == tuple(each.id for each in tickets)
    assert issue_all(book, "b#1") == tickets
    clock.now = 15.0
    assert book.reconcile_held("a#2", (tickets[0].id,)) == ()
    assert book.accept(group_of(tickets[0]), "a#2") is GroupVerdict.ACCEPTED
    assert book.accept(group_of(tickets[0]), "b#1") is GroupVerdict.DUPLICATE
    clock.now = 200.0
    book.expire()
    assert tickets[0] not in issue_all(book, "c#1")


def test_a_ticket_that_its_actor_does_not_name_was_lost_on_the_way() -> None:
    clock = Clock()
    book = make_book(clock, lost_after_s=5.0)
    lost, kept = issue_all(book)[:2]
    clock.now = 4.0
    book.reconcile_held("a", (kept.id,))
    assert book.issue("b") is None
    clock.now = 6.0
    book.reconcile_held("a", (kept.id,))
    assert book.issue("b") == lost
    assert book.holders(kept.id) == ("a",)


def test_an_actor_learns_which_of_its_tickets_are_void() -> None:
    book = make_book()
    first, second = issue_all(book)[:2]
    book.accept(group_of(first), "b")
    assert book.reconcile_held("a", (first.id, second.id, "9-other")) == (first.id, "9-other")


def test_an_actor_keeps_its_group_until_the_step_on_it_is_done() -> None:
    book = make_book()
    first, second = issue_all(book)[:2]
    for ticket in (first, second):
        book.accept(group_of(ticket), "a")
    assert book.take_groups(1) is not None
    assert book.acknowledgments() == {}
    assert book.reconcile_held("a", (first.id, second.id)) == ()
    book.commit()
    assert book.acknowledgments() == {"a": [first.id]}
    assert book.acknowledgments() == {}
    assert book.reconcile_held("a", (first.id, second.id)) == (first.id,)


def restarted(book: TicketBook, nonce: str, **changes: int) -> TicketBook:
    again = make_book(nonce=nonce, **changes)
    again.load_state(json.loads(json.dumps(book.state_dict())))
    return again


def test_a_restarted_book_issues_what_was_open_and_takes_groups_that_their_actors_kept() -> None:
    book = make_book(nonce="first")
    tickets = issue_all(book)
    for ticket in tickets[:5]:
        book.accept(group_of(ticket), "a")
    book.take_groups(4)
    again = restarted(book, "second")
    assert adds_up(again)
    assert again.reconcile_held("a", tuple(t.id for t in tickets[3:5])) == (tickets[3].id,)
    assert again.accept(group_of(tickets[0]), "a") is GroupVerdict.DUPLICATE
    assert again.accept(group_of(tickets[4]), "a") is GroupVerdict.ACCEPTED
    assert [t.sample for t in issue_all(again)] == [t.sample for t in tickets[5:]]
    assert again.trained == 4


def test_what_came_after_the_checkpoint_is_refused_by_a_restarted_book() -> None:
    book = make_book(nonce="first", groups_per_version=2, max_staleness=1)
    early = issue_all(book)
    again = restarted(book, "second")
    for ticket in early[:2]:
        book.accept(group_of(ticket), "a")
    book.take_groups(2)
    book.version = 1
    late = issue_all(book)
    assert book.accept(group_of(late[1], version=3), "a") is GroupVerdict.OUTDATED  # an engine that missed a restart
    again.reconcile_held("a", tuple(t.id for t in early))
    assert again.accept(group_of(early[2], version=1), "a") is GroupVerdict.OUTDATED
    assert again.accept(group_of(late[0]), "a") is GroupVerdict.OUTDATED
    assert again.issue("b").sample == early[2].sample  # type: ignore[union-attr]
    assert again.refused == {"outdated": 2}
    third = restarted(again, "third")
    assert third.accept(group_of(early[3]), "a") is GroupVerdict.ACCEPTED


@pytest.mark.parametrize("smaller", [3, 1, 0])
def test_a_run_goes_on_with_a_smaller_bound_on_staleness(smaller: int) -> None:
    """Its tickets were issued under the larger one: no order of training them keeps the smaller one."""
    book = make_book(nonce="first", groups_per_version=4, max_staleness=4)
    for version in range(5):
        book.version = version
        tickets = issue_all(book)
        for ticket in tickets if version < 4 else ():
            book.accept(group_of(ticket), "a")
            if ticket.sample.metadata["seed"] % 4 == 3 and book.trained < 16:
                book.take_groups(4)
        book.commit()
    again = make_book(nonce="second", groups_per_version=4, max_staleness=smaller)
    again.load_state(json.loads(json.dumps(book.state_dict())))
    kept = tickets[0]
    assert again.accept(group_of(kept), "a") is GroupVerdict.OUTDATED  # it may be too old by its turn
    assert again.reconcile_held("a", (kept.id,)) == (kept.id,)
    due = {number for number, _ in again.state_dict()["open"]}
    trained: list[int] = []
    for _ in range(8):
        for ticket in issue_all(again):
            assert again.accept(group_of(ticket, again.version), "a") is GroupVerdict.ACCEPTED
        trained += [ticket.sample.metadata["seed"] for ticket, _ in again.take_groups(4) or ()]
        again.commit()
        again.version += 1
        assert adds_up(again)
    assert len(trained) == 32 and len(set(trained)) == 32
    assert due <= set(trained) and not again.dropped


def test_a_run_goes_on_with_the_same_or_a_larger_bound_without_playing_anything_anew() -> None:
    book = make_book(nonce="first", groups_per_version=4, max_staleness=1)
    tickets = issue_all(book)
    for larger in (1, 2):
        again = make_book(nonce="second", groups_per_version=4, max_staleness=larger)
        again.load_state(json.loads(json.dumps(book.state_dict())))
        assert not again.held_back
        assert again.accept(group_of(tickets[0]), "a") is GroupVerdict.ACCEPTED


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_a_run_goes_on_after_a_version_beside_the_schedule_and_drops_nothing(max_staleness: int) -> None:
    """The last step of a run publishes, also where the next publication was due later."""
    settings = {"groups_per_version": 4, "max_staleness": max_staleness}
    book = make_book(nonce="0", **settings)
    for step in range(40):
        if step in (6, 7, 17):  # where the process before had its last step, and checkpoints after it
            book.version += step != 7
            state = json.loads(json.dumps(book.state_dict()))
            book = make_book(nonce=str(step), **settings)
            book.load_state(state)
        for ticket in issue_all(book):
            assert book.accept(group_of(ticket, book.version), "a") is GroupVerdict.ACCEPTED
        assert book.take_groups(1) is not None
        book.commit()
        book.version += (step + 1) % 4 == 0
        assert adds_up(book)
    assert book.trained == 40 and not book.dropped


def named(ticket: Ticket, *names: str) -> Group:
    """Its tokens are of these weights, the last of them the newest."""
    version = int(names[-1].partition("-")[0])
    return Group(ticket.id, "a", (episode(version, weights=names),))


def test_a_version_counts_as_the_weights_of_the_process_that_published_it() -> None:
    """The first process published 0, 1 and 2 and dies; its checkpoint is of version 1."""
    first = make_book(nonce="first", max_staleness=2)
    tickets = issue_all(first)
    for _ in range(first.settings.groups_per_version):
        first.accept(group_of(tickets.pop(0)), "a")
    assert first.take_groups(first.settings.groups_per_version) is not None
    first.version = 1
    again = restarted(first, "second", max_staleness=2)
    again.reconcile_held("a", tuple(ticket.id for ticket in tickets))
    assert again.accept(named(tickets[0], "1-first"), "a") is GroupVerdict.ACCEPTED
    assert again.accept(named(tickets[1], "0-first", "1-second"), "a") is GroupVerdict.ACCEPTED
    assert again.accept(named(tickets[2], "2-first"), "a") is GroupVerdict.OUTDATED
    assert again.accept(named(tickets[3], "1-stranger"), "a") is GroupVerdict.OUTDATED
    again.version = 2  # now the number exists again, and stands for other weights
    own = issue_all(again)
    assert again.accept(named(own[-1], "2-first"), "a") is GroupVerdict.OUTDATED
    assert again.accept(named(own[-1], "1-second", "2-first"), "a") is GroupVerdict.OUTDATED
    lie = Group(own[-1].id, "a", (episode(3, weights=("2-second",)),))
    assert again.accept(lie, "a") is GroupVerdict.OUTDATED
    assert again.accept(named(own[-1], "1-first", "3-second"), "a") is GroupVerdict.ACCEPTED
    assert again.accept(named(tickets[4], "3-second"), "a") is GroupVerdict.ACCEPTED  # played on with the new weights
    assert again.refused == {"outdated": 5}


def test_a_ticket_with_which_its_actor_returns_has_a_new_lease() -> None:
    clock = Clock()
    book = make_book(clock, lease_s=10.0)
    ticket = issue_all(book, "a")[0]
    book.actor_gone("a")
    clock.now = 8.0
    book.reconcile_held("a", (ticket.id,))
    clock.now = 17.0
    assert ticket.id not in book.expire()
    clock.now = 18.0
    assert ticket.id in book.expire()


def test_a_group_ends_the_wait_for_the_actor_that_vanished_with_its_ticket() -> None:
    clock = Clock()
    book = make_book(clock, return_s=30.0)
    first = issue_all(book, "a#1")[0]
    book.actor_gone("a#1")
    assert book.accept(group_of(first), "a#2") is GroupVerdict.ACCEPTED
    clock.now = 30.0
    book.expire()
    assert first.id not in {ticket.id for ticket in issue_all(book, "b#1")}


def test_nothing_is_left_to_be_told_to_an_actor_that_is_gone() -> None:
    book = make_book()
    ticket = issue_all(book)[0]
    book.accept(group_of(ticket), "a")
    assert book.take_groups(1) is not None
    book.commit()
    book.actor_gone("a")
    assert book.acknowledgments() == {}


def test_a_group_is_acknowledged_under_the_name_that_its_actor_knows() -> None:
    book = make_book(nonce="first")
    ticket = issue_all(book)[0]
    again = restarted(book, "second")
    assert again.accept(group_of(ticket), "a") is GroupVerdict.ACCEPTED
    assert again.take_groups(1) is not None
    again.commit()
    assert again.acknowledgments() == {"a": [ticket.id]} and ticket.id.endswith("-first")


def test_the_last_processes_of_a_long_run_are_remembered_and_not_the_first() -> None:
    book = make_book(nonce="p0")
    tickets = {"p0": issue_all(book)[0]}
    for number in range(1, MAX_PROCESSES + 2):
        book = restarted(book, f"p{number}")
        tickets[f"p{number}"] = issue_all(book)[0]
    assert book.accept(group_of(tickets["p0"]), "a") is GroupVerdict.UNKNOWN
    assert book.accept(group_of(tickets["p1"]), "a") is GroupVerdict.ACCEPTED
    assert book.accept(group_of(tickets[f"p{MAX_PROCESSES}"]), "b") is GroupVerdict.DUPLICATE  # it is the same ticket


def test_an_open_ticket_that_a_smaller_bound_has_made_too_old_is_played_anew() -> None:
    """There is room for it in the next step, but what was played of it is of version 2."""
    state = {"nonce": "first", "version": 5, "issued": 21, "trained": 20, "reissued": 0, "dropped": {}, "pasts": []}
    again = make_book(nonce="second", groups_per_version=4, max_staleness=1)
    again.load_state(state | {"open": [[20, 2]], "withheld": []})
    assert again.held_back == deque([20])
    assert again.accept(group_of(Ticket("20-first", SAMPLE, 1, 2, Sampling(), 1.0), 2), "a") is GroupVerdict.OUTDATED
    assert issue_all(again)[0].version == 5
