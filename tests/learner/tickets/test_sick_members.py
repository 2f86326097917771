"""Any schedule of actors that fall sick, recover, come, go and restart, of learners that resume, and of evaluations:
each sample is trained at most once, the run ends iff nobody sound is left, and it never stands still."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from learner.tickets.member_health import TooManyFailures
from shared.types import Ending, Group, Sample, Sampling, Ticket
from tests.support.tickets.cluster import Cluster
from tests.support.wires import failed_episode

NAMES = ("h1-actor0", "h1-actor1", "h2-actor0", "h3-actor0")
FAILURES = (
    *(Ending.ENV_ERROR, Ending.ENV_TIMEOUT, Ending.REWARD_ERROR, Ending.WIRE_ERROR),
    *(Ending.ENGINE_ERROR, Ending.ABORTED),
)
LASTING = FAILURES[:4]
LONG_S = 60_000.0  # actors that hang cost a lease each for each step


class Members(Cluster):
    """Groups of some samples teach nothing, and are replaced; one sample fails wherever it is played."""

    def play(self, ticket: Ticket, name: str) -> Group:
        if ticket.sample.metadata.get("seed") == 7:
            return Group(ticket.id, name, (failed_episode(error="the sample is broken"),) * ticket.group_size)
        return super().play(ticket, name)


def is_dull(group: Group) -> str:
    return "uninformative" if int(group.ticket_id.split("-")[0]) % 5 == 3 else ""


class SickMembers(RuleBasedStateMachine):
    @initialize(
        per_step=st.integers(1, 8),
        staleness=st.integers(0, 2),
        steps=st.integers(20, 80),
        return_s=st.sampled_from([0.0, 7.0]),
        group_size=st.integers(1, 2),
        dull=st.booleans(),
        names=st.sets(st.sampled_from(NAMES), min_size=1),
    )
    def begin(
        self, per_step: int, staleness: int, steps: int, return_s: float, group_size: int, dull: bool, names: set[str]
    ) -> None:
        self.cluster = Members(
            Path("/nonexistent"), tuple(sorted(names)), tick_s=1.0, groups_per_version=per_step,
            max_staleness=staleness, total_groups=per_step * steps, lease_s=60.0, lost_after_s=3.0, return_s=return_s,
            group_size=group_size, refuse=is_dull if dull else None,
        )  # fmt: skip
        self.always_sound = set(names)
        self.ended = False
        self.evaluations: dict[str, int] = {}

    def run(self, seconds: float) -> None:
        if self.ended:
            return
        try:
            self.cluster.run(seconds)
        except TooManyFailures as error:
            self.ended = True
            assert not self.always_sound, f"{self.always_sound} can play, but: {error}"

    # ------------------------------------------------------------------ what happens

    @rule(seconds=st.sampled_from([1.0, 3.0, 12.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.run(seconds)

    @rule(name=st.sampled_from(NAMES), ending=st.sampled_from(FAILURES))
    def falls_sick(self, name: str, ending: Ending) -> None:
        self.cluster.endings[name] = ending
        self.always_sound.discard(name)

    @rule(name=st.sampled_from(NAMES))
    def recovers(self, name: str) -> None:
        self.cluster.endings.pop(name, None)

    @rule(name=st.sampled_from(NAMES), seconds=st.sampled_from([0.0, 2.0, 30.0, 1e9]))
    def becomes_slow(self, name: str, seconds: float) -> None:
        self.cluster.seconds[name] = seconds

    @rule(name=st.sampled_from(NAMES), slots=st.integers(1, 8))
    def comes_or_goes(self, name: str, slots: int) -> None:
        if name in self.cluster.actors:
            self.cluster.leave(name)
            self.always_sound.discard(name)
        else:
            self.cluster.arrive(name, slots)

    @rule(name=st.sampled_from(NAMES), remembers=st.booleans())
    def restarts(self, name: str, remembers: bool) -> None:
        if name in self.cluster.actors:
            self.cluster.restart(name, remembers=remembers)

    @rule()
    def the_learner_resumes(self) -> None:
        self.cluster.resume()
        self.evaluations.clear()

    @precondition(lambda self: len(self.evaluations) < 2)
    @rule(samples=st.integers(1, 12))
    def an_evaluation_begins(self, samples: int) -> None:
        name = f"e{self.cluster.clock.now}-{len(self.evaluations)}"
        if self.cluster.book.evaluations.open or name in self.evaluations:
            return
        book = self.cluster.book
        book.evaluations.start(name, [Sample(str(i)) for i in range(samples)], Sampling(), 1, book.version)
        self.evaluations[name] = samples

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        if not hasattr(self, "cluster"):
            return
        trained = self.cluster.trained
        assert len(trained) == len(set(trained)) == self.cluster.book.trained
        for name in list(self.evaluations):
            if result := self.cluster.book.evaluations.result(name):
                seen = [ticket.seed for ticket, _ in result.groups]
                assert len(seen) == len(set(seen)) == self.evaluations.pop(name) - sum(result.lost.values())


class RunsToItsEnd(SickMembers):
    def teardown(self) -> None:
        """As long as one actor is sound, the run comes to its end, whatever the others do."""
        if not hasattr(self, "cluster") or self.ended:
            return
        cluster = self.cluster
        cluster.arrive("sound", 4)
        self.always_sound.add("sound")
        self.run(LONG_S)
        assert not self.ended
        assert cluster.book.trained == cluster.book.settings.total_groups, "the run stands still"
        self.nothing_is_trained_twice()


class EndsWhenAllAreSick(SickMembers):
    def teardown(self) -> None:
        """When all are sick for good, the run ends with a line that says so, unless it is over before."""
        if not hasattr(self, "cluster") or self.ended or not self.cluster.actors:
            return
        cluster = self.cluster
        for number, name in enumerate(NAMES):
            cluster.endings[name] = LASTING[number]
            cluster.seconds[name] = 0.0
        for name in list(cluster.actors):  # those that hang
            cluster.restart(name, remembers=False)
        self.always_sound.clear()
        self.run(LONG_S)
        assert self.ended or cluster.book.trained == cluster.book.settings.total_groups


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "pronk.tickets")


for machine in (RunsToItsEnd, EndsWhenAllAreSick):
    machine.TestCase.settings = settings(
        max_examples=120, stateful_step_count=30, deadline=None, report_multiple_bugs=False
    )
TestRunsToItsEnd = RunsToItsEnd.TestCase
TestEndsWhenAllAreSick = EndsWhenAllAreSick.TestCase
