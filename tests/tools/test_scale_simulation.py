"""The simulation of a run against answers that are known, and against the ticket book."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.tickets.ticket_book import GroupVerdict
from learner.tickets.ticket_records import parse_ticket_id
from shared.types import Ticket
from tests.bench.scale.admission import Admission
from tests.bench.scale.calibrate import Asked, speed_of
from tests.bench.scale.draws import Constant, Drawn, LogNormal, Measured, Pareto, Seen, TurnSize
from tests.bench.scale.sim_miniature import bounds
from tests.bench.scale.sim_records import EngineSpeed, Loop, Publication
from tests.bench.scale.simulation import Stalled, simulate
from tests.support.tickets.book_rig import make_book
from tests.support.wires import group_of

ENGINE = EngineSpeed(token_s=0.01, request_s=0.001, prefill_s=0.0001, turn_s=0.05, max_batch=16)
PAUSED = Publication("paused", send_s=3.0)
EVEN = Drawn(Constant(2), Constant(100), Constant(50), Constant(0.5))
LONG_TAILED = Drawn(Constant(2), Constant(100), LogNormal(50, 1.0), LogNormal(0.5, 1.0))


def small(**changes):
    loop = Loop(EVEN, ENGINE, PAUSED, Constant(4.0), engines=2, group_size=2, groups_per_step=4, max_staleness=1)
    return replace(loop, **changes)


def test_one_request_on_one_engine_takes_as_long_as_its_parts():
    one = small(engines=1, group_size=1, groups_per_step=1, max_staleness=0)
    turn = 50 * 0.0001 + 0.05 + 25 * 0.011 + 0.5  # 25 of 50 tokens, 50 of 100 read, and the environment
    outcome = simulate(one, 5, skip=1)
    assert outcome.step_s == pytest.approx(2 * turn + 4.0 + 3.0)
    assert outcome.tokens_per_s == pytest.approx(50 / outcome.step_s) and outcome.staleness == 0
    assert outcome.turns_per_s == pytest.approx(2 / outcome.step_s)


def test_requests_that_run_together_share_the_steps_and_wait_while_others_are_read():
    both = small(engines=1, group_size=2, groups_per_step=1, max_staleness=0, episodes=Seen(((TurnSize(100, 20, 1),),)))
    assert simulate(both, 3).step_s == pytest.approx(2 * (0.01 + 0.05) + 20 * 0.012 + 1 + 4.0 + 3.0)


def test_requests_beyond_max_batch_wait_for_those_that_run():
    engine = replace(ENGINE, max_batch=1, turn_s=0.0)
    loop = small(
        engines=1, groups_per_step=3, group_size=1, max_staleness=0, engine=engine,
        episodes=Seen(((TurnSize(0, 20, 0),),)),
    )  # fmt: skip
    assert simulate(loop, 3).step_s == pytest.approx(3 * 20 * 0.011 + 4.0 + 3.0)


def test_without_staleness_a_step_is_generation_and_training_and_publication_one_after_the_other():
    loop = small(max_staleness=0, episodes=Seen(((TurnSize(0, 30, 1.0),), (TurnSize(0, 200, 0.0),))))
    alone = replace(loop, step_s=Constant(1e-9), publication=Publication("paused", 1e-9))
    generation = simulate(alone, 8).seconds
    assert simulate(loop, 8).seconds == pytest.approx(generation + 8 * (4.0 + 3.0))
    assert simulate(loop, 8).max_staleness == 0


def test_one_step_off_takes_the_longer_of_generation_and_training():
    generation = simulate(small(max_staleness=0), 4, skip=1).step_s - 7.0
    for seconds in (0.1, generation / 2, 3 * generation):
        outcome = simulate(small(rule="one_step_off", step_s=Constant(seconds)), 6, skip=2)
        assert outcome.step_s == pytest.approx(max(seconds, generation) + 3.0)
        assert (outcome.staleness, outcome.max_staleness) == (pytest.approx(1.0), 1)


@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("publication", [PAUSED, Publication("staged", 3.0, 0.5), Publication("relay", 3.0, 0.5, 0.2)])
@pytest.mark.parametrize("publish_every", [1, 2])
def test_nothing_is_staler_than_its_bound(bound, publication, publish_every):
    loop = small(
        episodes=LONG_TAILED, max_staleness=bound, publication=publication, publish_every=publish_every, engines=3
    )
    outcome = simulate(loop, 24)
    assert outcome.max_staleness <= bound
    assert outcome.staleness <= outcome.max_staleness + 1e-9
    assert outcome.max_staleness == bound  # and the bound is used


def test_throughput_is_bounded_by_the_learner_and_by_the_engines():
    for step_s in (0.2, 4.0, 40.0):
        loop = small(step_s=Constant(step_s), max_staleness=8)
        assert simulate(loop, 20, skip=10).episodes_per_s <= bounds(loop).least * 1.001
    slow = small(step_s=Constant(400.0), max_staleness=8)
    waited = simulate(slow, 20, skip=10)
    assert waited.episodes_per_s == pytest.approx(bounds(slow).learner)
    assert waited.turns_per_s == pytest.approx(2 * waited.episodes_per_s)
    assert waited.learner_busy == pytest.approx(400 / 403)
    busy = small(step_s=Constant(1e-6), publication=Publication("paused", 0.0), max_staleness=5, engines=1)
    full = simulate(busy, 220, skip=20)  # more than 16 episodes are in play, but few beside those of the window
    assert full.episodes_per_s == pytest.approx(bounds(busy).engines, rel=0.05)
    assert full.engines_busy > 0.99 and full.running > 15


@pytest.mark.parametrize("heavier", [LogNormal(50, 1.5), Pareto(50, 1.5, 5000)])
def test_a_heavier_tail_hurts_the_synchronous_loop_more(heavier):
    tails = [replace(LONG_TAILED, tokens=tokens) for tokens in (Constant(50), heavier)]
    synchronous, ours = (
        [simulate(small(groups_per_step=16, max_staleness=bound, episodes=tail), 40, skip=9) for tail in tails]
        for bound in (0, 8)
    )
    assert synchronous[1].episodes_per_s < synchronous[0].episodes_per_s
    loss = [one[1].episodes_per_s / one[0].episodes_per_s for one in (synchronous, ours)]
    assert loss[0] < loss[1]


def test_a_seed_makes_a_run():
    loop = small(episodes=LONG_TAILED)
    assert simulate(loop, 12, seed=3) == simulate(loop, 12, seed=3) != simulate(loop, 12, seed=4)


def test_a_run_of_no_counted_step_is_refused():
    with pytest.raises(ValueError, match="skip = 4 leaves none of 4 steps"):
        simulate(small(), 4, skip=4)


def test_weights_that_travel_beside_generation_cost_less_and_relays_let_the_learner_go_on():
    step = Constant(0.1)
    designs = (PAUSED, Publication("staged", 2.9, 0.1), Publication("relay", 2.9, 0.1, 0.2))
    made = [simulate(small(publication=one, step_s=step, max_staleness=4), 40, skip=10) for one in designs]
    seconds = [outcome.step_s for outcome in made]
    assert seconds[0] >= seconds[1] > seconds[2]
    assert bounds(small(publication=designs[2], step_s=step)).learner == pytest.approx(8 / 0.3)


def test_a_ticket_whose_lease_is_over_is_played_twice_and_trained_once():
    loop = small(episodes=Seen(((TurnSize(0, 10, 1.0),), (TurnSize(0, 10, 300.0),))), lease_s=20.0, max_staleness=2)
    leased, waiting = simulate(loop, 20), simulate(replace(loop, lease_s=float("inf")), 20)
    assert leased.reissued > 0 == waiting.reissued
    assert leased.steps == waiting.steps == 20
    assert leased.seconds < waiting.seconds


HALF_LONG = Seen(((TurnSize(0, 10, 1.0),), (TurnSize(0, 10, 300.0),)))


@pytest.mark.parametrize("groups_in_play", [1, 2, 4, 8, 16])
def test_actors_with_few_places_play_tickets_again_whose_lease_is_over(groups_in_play):
    loop = small(episodes=HALF_LONG, lease_s=20.0, max_staleness=2, groups_in_play=groups_in_play)
    leased, waiting = simulate(loop, 20), simulate(replace(loop, lease_s=float("inf")), 20)
    assert leased.steps == 20 and leased.reissued > 0 == waiting.reissued
    assert leased.max_staleness <= 2
    assert leased.seconds < 1.1 * waiting.seconds  # what is played twice takes places of others


class OneHangs:
    """Of all episodes the third one's environment answers after 10,000 s."""

    def __init__(self):
        self.drawn = 0

    def draw(self, random):
        self.drawn += 1
        return (TurnSize(0, 10, 10_000.0 if self.drawn == 3 else 1.0),)


@pytest.mark.parametrize("groups_in_play", [2, 4, 0])
def test_a_ticket_that_hangs_costs_about_its_lease_and_one_place(groups_in_play):
    def seconds(lease_s):
        loop = small(episodes=OneHangs(), lease_s=lease_s, max_staleness=2, groups_in_play=groups_in_play)
        return simulate(loop, 12).seconds

    assert seconds(20.0) < 120.0 < 10_000.0 < seconds(float("inf"))


def test_a_ticket_that_waits_to_be_played_again_is_not_once_its_group_is_here():
    """With one place the first play comes to its end before a second one can begin."""
    loop = small(episodes=HALF_LONG, lease_s=20.0, max_staleness=2, groups_in_play=1)
    leased, waiting = simulate(loop, 20), simulate(replace(loop, lease_s=float("inf")), 20)
    assert leased.reissued > 0
    assert replace(leased, reissued=0) == waiting


def test_a_run_in_which_nothing_can_be_played_says_so():
    with pytest.raises(Stalled, match="nothing is under way after 0 of 4 steps"):
        simulate(small(max_staleness=-1), 4)


def test_actors_that_play_few_groups_at_once_make_data_young_and_slow():
    few, many = (simulate(small(max_staleness=8, groups_in_play=n), 30, skip=10) for n in (1, 0))
    assert few.episodes_per_s < many.episodes_per_s and few.staleness < many.staleness


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 4), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2**32))
def test_the_simulation_admits_what_the_ticket_book_admits(bound, groups, every, seed):
    """Both are asked the same in a random order: which tickets, and which batches."""
    book = make_book(groups_per_version=groups * every, max_staleness=bound)
    admission = Admission(small(groups_per_step=groups, publish_every=every, max_staleness=bound))
    random, playing, taken = Random(seed), list[Ticket](), 0
    for _ in range(120):
        what = random.choice(("issue", "bring", "take"))
        if what == "issue":
            ticket = book.issue("tester")
            assert (ticket is not None) == admission.may_issue()
            if ticket is not None:
                assert admission.issue() == parse_ticket_id(ticket.id)[0]
                playing.append(ticket)
        elif what == "bring" and playing:
            ticket = playing.pop(random.randrange(len(playing)))
            assert book.accept(group_of(ticket), "tester") is GroupVerdict.ACCEPTED
            admission.arrived(parse_ticket_id(ticket.id)[0])
        elif what == "take":
            batch = book.take_groups(groups)
            assert admission.take() == (batch and [parse_ticket_id(ticket.id)[0] for ticket, _ in batch])
            if batch:
                taken += 1
                book.version = admission.version = admission.served = taken // every
    assert (book.issued, book.trained, book.dropped.total()) == (admission.issued, admission.trained, 0)
    assert book.trained > 0


def test_draws_have_the_means_and_cuts_that_they_say():
    random = Random(0)
    for draw in (LogNormal(7.0, 0.5), Pareto(7.0, 3.5), Measured((5.0, 9.0)), Constant(7.0)):
        assert np.mean([draw.draw(random) for _ in range(20000)]) == pytest.approx(7.0, rel=0.02)
    values = np.array([LogNormal(7.0, 1.0).draw(random) for _ in range(40000)])
    assert np.quantile(values, 0.99) / np.median(values) == pytest.approx(np.exp(2.326), rel=0.06)
    assert max(LogNormal(7.0, 2.0, 30.0).draw(random) for _ in range(2000)) == 30.0


def test_an_engine_is_measured_by_the_turns_that_ran_beside_each_other():
    """Turns of simulated batches, whose speed is known."""
    turns = []
    for batch, running in enumerate([1, 2, 4, 8] * 5):
        for tokens in (20, 40):
            start = 1000.0 * (2 * batch + (tokens == 40))
            turns += [Asked(start, tokens * (0.01 + 0.002 * running) + 0.03 * running, tokens)] * running
    found = speed_of(turns, 8)
    assert (found.token_s, found.request_s, found.turn_s) == pytest.approx((0.01, 0.002, 0.03), rel=1e-6)
