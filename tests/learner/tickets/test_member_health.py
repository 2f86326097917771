"""One sick actor or host beside sound ones: it is named and paused, its work goes to others, and the run goes on."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from learner.tickets.member_health import (
    ABSENT_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MAX_MEMBERS,
    MIN_EPISODES,
    MemberHealth,
    TooManyFailures,
)
from shared.log import get_logger
from shared.types import Ending, Group, Sample, Sampling, Ticket
from tests.support.tickets.book_rig import Clock
from tests.support.tickets.cluster import MISSING, Cluster
from tests.support.wires import episode, failed_episode

get_logger("tickets")  # caplog hears the loggers that are there when a test begins


def pauses(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "gets no tickets for" in r.getMessage()]


def test_a_sick_host_beside_slow_sound_ones_is_named_once_and_costs_no_sample(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(tmp_path, ("h1-actor0", "h2-actor0", "h3-actor0", "sick-actor0"), total_groups=480)
    cluster.endings["sick-actor0"] = Ending.ENV_ERROR
    cluster.seconds = dict.fromkeys(("h1-actor0", "h2-actor0", "h3-actor0"), 1.0)
    cluster.run(1000.0)
    assert cluster.book.trained == 480 == len(set(cluster.trained))
    assert not cluster.book.dropped
    assert cluster.book.retried["env_error"] == cluster.tickets_of("sick-actor0") < 2 * MIN_EPISODES
    lines = pauses(caplog)
    assert "actor sick-actor0 gets no tickets for 10 s" in lines[0] and MISSING in lines[0]
    assert [f"for {s} s" in line for s, line in zip((10, 20, 40), lines, strict=False)] == [True] * len(lines)


def test_actors_of_one_sick_host_are_paused_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sick = tuple(f"sick-actor{i}" for i in range(8))
    cluster = Cluster(tmp_path, ("h1-actor0", *sick), groups_per_version=64)
    cluster.endings = dict.fromkeys(sick, Ending.ENV_ERROR)
    cluster.run(9.0)
    assert sum(map(cluster.tickets_of, sick)) < 5 * MIN_EPISODES
    assert "host sick (8 actors) gets no tickets" in pauses(caplog)[-1]
    assert not cluster.book.dropped
    before = sum(map(cluster.tickets_of, sick))
    cluster.run(12.0)
    assert sum(map(cluster.tickets_of, sick)) == before + 1  # one trial for all of them
    assert not cluster.book.dropped


def test_a_new_actor_of_a_paused_host_is_paused_too(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ("h1-actor0", "sick-actor0", "sick-actor1"))
    cluster.endings = dict.fromkeys(("sick-actor0", "sick-actor1", "sick-actor2"), Ending.ENV_ERROR)
    cluster.run(8.0)
    cluster.arrive("sick-actor2")  # a process that has never run is one more trial of the host
    cluster.run(8.0)
    assert cluster.tickets_of("sick-actor2") <= 1


def test_a_sick_actor_beside_sound_ones_of_its_host_is_paused_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(tmp_path, tuple(f"h-actor{i}" for i in range(4)), total_groups=320)
    cluster.endings["h-actor2"] = Ending.ENV_TIMEOUT
    cluster.run(1000.0)
    assert cluster.book.trained == 320 and not cluster.book.dropped
    assert all("actor h-actor2 gets no tickets" in line for line in pauses(caplog))


def test_an_actor_that_recovers_comes_back_after_one_trial(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(tmp_path, ("good", "sick"))
    cluster.endings["sick"] = Ending.ENV_ERROR
    cluster.run(5.0)
    assert cluster.protocol.health.paused("sick")
    del cluster.endings["sick"]
    before = cluster.tickets_of("sick")
    cluster.run(FIRST_PAUSE_S - 5.0)
    assert cluster.tickets_of("sick") == before
    cluster.run(10.0)
    assert not cluster.protocol.health.paused("sick")
    assert cluster.tickets_of("sick") > before + 20
    assert "sick gets tickets again: its trial was sound" in caplog.text


def test_a_new_process_of_a_paused_actor_has_its_trial_at_once(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ("good", "sick"))
    cluster.endings["sick"] = Ending.ENV_ERROR
    cluster.run(5.0)
    cluster.leave("sick")
    del cluster.endings["sick"]
    cluster.arrive("sick")
    cluster.run(2.0)
    assert not cluster.protocol.health.paused("sick")


def test_pauses_grow_up_to_a_bound_with_one_line_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(tmp_path, ("good", "sick"))
    cluster.endings["sick"] = Ending.REWARD_ERROR
    cluster.run(1500.0)
    lengths = [float(line.split(" gets no tickets for ")[1].split(" s:")[0]) for line in pauses(caplog)]
    assert lengths[:5] == [10.0, 20.0, 40.0, 80.0, 160.0]
    assert set(lengths[5:]) == {LONGEST_PAUSE_S}
    assert cluster.tickets_of("sick") < 2 * MIN_EPISODES
    assert not cluster.book.dropped


def test_a_mistake_in_the_environment_ends_the_run_however_many_actors_there_are(tmp_path: Path) -> None:
    names = tuple(f"h{host}-actor{i}" for host in range(10) for i in range(5))
    cluster = Cluster(tmp_path, names)
    cluster.endings = dict.fromkeys(names, Ending.ENV_ERROR)
    with pytest.raises(TooManyFailures, match=r"on all \d+ actors.*env.max_failure_share = 0.5; the first: env_error"):
        cluster.run(60.0)
    assert cluster.clock.now < 20.0


@pytest.mark.parametrize("ending", [Ending.ENV_ERROR, Ending.WIRE_ERROR])
def test_a_lone_actor_that_fails_ends_the_run_at_once(tmp_path: Path, ending: Ending) -> None:
    cluster = Cluster(tmp_path, ("h-actor0",))
    cluster.endings["h-actor0"] = ending
    with pytest.raises(TooManyFailures, match=rf"3\d of the last 3\d episodes failed, more .* the first: {ending}"):
        cluster.run(60.0)
    assert cluster.clock.now < 5.0
    assert cluster.book.dropped.total() >= MIN_EPISODES  # nobody else could have played them


def test_a_sick_actor_that_is_first_does_not_end_the_run_before_the_others_have_brought_anything(
    tmp_path: Path,
) -> None:
    cluster = Cluster(tmp_path, ("sick", "slow"), total_groups=64)
    cluster.endings["sick"] = Ending.ENV_ERROR
    cluster.seconds["slow"] = 60.0
    cluster.run(3000.0)
    assert cluster.book.trained == 64 and not cluster.book.dropped


def test_the_run_ends_when_the_last_sound_actor_falls_sick_or_stays_away(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ("good", "sick"))
    cluster.endings["sick"] = Ending.ENV_ERROR
    cluster.run(60.0)
    cluster.leave("good")
    cluster.run(ABSENT_S - 1.0)  # it may come back
    with pytest.raises(TooManyFailures):
        cluster.run(5.0)


def test_a_sound_actor_that_falls_sick_ends_the_run_where_all_others_are_sick(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ("good", "sick"))
    cluster.endings["sick"] = Ending.ENV_ERROR
    cluster.run(60.0)
    cluster.endings["good"] = Ending.ENV_ERROR
    with pytest.raises(TooManyFailures):
        cluster.run(60.0)


def test_a_sample_that_fails_on_every_host_is_dropped_after_three_plays(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ("h1", "h2", "h3", "h4"), total_groups=64)
    played: list[str] = []
    play = cluster.play

    def playing(ticket: Ticket, name: str) -> Group:
        if ticket.sample.metadata["seed"] == 5:
            played.append(name)
            return Group(ticket.id, name, (failed_episode(),))
        return play(ticket, name)

    cluster.play = playing  # type: ignore[method-assign]
    cluster.run(100.0)
    assert len(played) == len(set(played)) == 3
    assert cluster.book.dropped == {"env_error": 1}
    assert cluster.book.trained == 64


@pytest.mark.parametrize("ending", [Ending.ENGINE_ERROR, Ending.ABORTED])
def test_a_ticket_that_an_engine_failed_is_played_again_by_a_lone_actor_too(tmp_path: Path, ending: Ending) -> None:
    cluster = Cluster(tmp_path, ("h",), total_groups=32)
    cluster.endings["h"] = ending
    cluster.run(0.4)
    del cluster.endings["h"]
    cluster.run(100.0)
    assert cluster.book.trained == 32 and not cluster.book.dropped
    assert cluster.book.retried[ending.value] > 0


def test_a_dead_engine_costs_a_lone_actor_a_pause_and_not_a_flood_of_tickets(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ("h",), total_groups=320)
    cluster.endings["h"] = Ending.ENGINE_ERROR
    cluster.run(600.0)
    assert cluster.tickets_of("h") < MIN_EPISODES + 8 + 600 / FIRST_PAUSE_S
    del cluster.endings["h"]
    cluster.run(FIRST_PAUSE_S + 1.0)  # as nobody else could play, its pauses do not grow
    assert not cluster.protocol.health.paused("h")
    cluster.run(100.0)
    assert cluster.book.trained == 320


def test_evaluations_are_played_by_sound_actors(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ("good", "sick"))
    cluster.endings["sick"] = Ending.ENV_ERROR
    cluster.seconds["good"] = 2.0
    cluster.book.evaluations.start("e", [Sample(str(i)) for i in range(40)], Sampling(), 1, 0)
    for _ in range(400):
        cluster.run(1.0)
        if result := cluster.book.evaluations.result("e"):
            break
    assert len(result.groups) == 40 and not result.lost
    assert all(group.trajectories[0].trainable for _, group in result.groups)


def test_an_evaluation_of_a_lone_actor_counts_its_failures(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ("lone",), max_share=1.0)
    cluster.endings["lone"] = Ending.ENV_ERROR
    cluster.book.evaluations.start("e", [Sample(str(i)) for i in range(8)], Sampling(), 1, 0)
    cluster.run(5.0)
    result = cluster.book.evaluations.result("e")
    assert result is not None and len(result.groups) == 8 and not result.lost


def test_a_group_of_the_wrong_size_is_somebodys_failure_and_another_plays_the_ticket(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(tmp_path, ("good", "odd"), total_groups=320)
    play = cluster.play
    cluster.play = lambda t, name: Group(t.id, name, ()) if name == "odd" else play(t, name)  # type: ignore
    cluster.run(100.0)
    assert cluster.book.trained == 320 and not cluster.book.dropped
    assert "wrong_group_size" in pauses(caplog)[0]


def test_a_failed_group_that_is_sent_again_counts_once(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ("h1", "h2", "h3"))
    cluster.protocol.tick(drained=True)
    cluster.deliver()
    actor = cluster.actors["h1"]
    ticket_id = next(iter(actor.playing))
    for _ in range(5):
        cluster.say(actor, Group(ticket_id, "h1", (failed_episode(),)))
    assert cluster.book.retried == {"env_error": 1}
    assert cluster.protocol.health.failed_share("h1") == 1.0
    assert not cluster.book.dropped


def test_random_failures_below_the_share_pause_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(tmp_path, ("a", "b", "c"), total_groups=1600)
    chance, play = random.Random(0), cluster.play
    cluster.play = lambda t, name: (  # type: ignore[method-assign]
        Group(t.id, name, (failed_episode(),)) if chance.random() < 0.2 else play(t, name)
    )
    cluster.run(1000.0)
    assert cluster.book.trained == 1600
    assert not pauses(caplog)


def test_the_members_that_are_remembered_are_bounded() -> None:
    health = MemberHealth(0.5, logging.getLogger("test"), Clock())
    for number in range(MAX_MEMBERS + 100):
        health.add(f"a{number}", Group("0-a", "a", (failed_episode(error="x" * 10_000),) * 40), lambda: {"good"})
    assert len(health._members) == MAX_MEMBERS
    assert health.num_paused <= MAX_MEMBERS
    assert len(health.describe()) < 4000


@pytest.mark.parametrize("sick", ["first", "last"])
def test_several_launchers_of_one_host_whose_actors_have_one_name_are_told_apart(tmp_path: Path, sick: str) -> None:
    cluster = Cluster(tmp_path, (), total_groups=320)
    for name in ("first", "middle", "last"):
        cluster.arrive(name, key=f"host-actor0#{name}")
    cluster.endings[sick] = Ending.ENV_ERROR
    cluster.seconds = {name: 1.0 for name in cluster.actors if name != sick}
    cluster.run(1000.0)
    assert cluster.book.trained == 320 and not cluster.book.dropped
    assert cluster.issued[f"host-actor0#{sick}"] < 2 * MIN_EPISODES


def test_what_a_host_failed_goes_to_another_host_first(tmp_path: Path) -> None:
    """However busy that is: a neighbour would fail it too."""
    sick = tuple(f"sick-actor{i}" for i in range(4))
    cluster = Cluster(tmp_path, ("h1-actor0", *sick), groups_per_version=64)
    cluster.endings = dict.fromkeys(sick, Ending.ENV_ERROR)
    cluster.seconds["h1-actor0"] = 50.0
    played: dict[str, list[str]] = {}
    play = cluster.play

    def playing(ticket: Ticket, name: str) -> Group:
        played.setdefault(ticket.id, []).append(name)
        return play(ticket, name)

    cluster.play = playing  # type: ignore[method-assign]
    cluster.run(200.0)
    assert sum(len(names) > 1 for names in played.values()) > 5
    assert all(names[1:] in ([], ["h1-actor0"]) for names in played.values())


def test_an_actor_whose_engine_has_undone_weights_is_paused_and_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(tmp_path, ("good", "behind"))
    play = cluster.play
    undone = episode(weights=("0-otherlife",))
    cluster.play = lambda t, name: Group(t.id, name, (undone,)) if name == "behind" else play(t, name)  # type: ignore
    cluster.run(60.0)
    assert cluster.book.refused["outdated"] < 2 * MIN_EPISODES
    assert "actor behind gets no tickets" in pauses(caplog)[0] and "outdated" in pauses(caplog)[0]


def test_what_ends_the_run_is_said_once_by_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(tmp_path, ("h-actor0",))
    cluster.endings["h-actor0"] = Ending.ENV_ERROR
    with pytest.raises(TooManyFailures):
        cluster.run(60.0)
    assert not pauses(caplog)


def test_a_long_sound_time_forgives_earlier_pauses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(tmp_path, ("h1-actor0", "h2-actor0"))
    for seconds in (200.0, 100.0):
        cluster.endings["h2-actor0"] = Ending.ENV_ERROR
        cluster.run(45.0)
        del cluster.endings["h2-actor0"]
        cluster.run(seconds)
        assert not cluster.protocol.health.paused("h2-actor0")
    firsts = [line for line in pauses(caplog) if "for 10 s" in line]
    assert len(firsts) == 2
