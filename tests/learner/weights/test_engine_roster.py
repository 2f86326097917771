"""Dead addresses beside a sound engine: no step waits for them, they take no descriptors, and one line counts them."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from learner.weights import engine_roster
from learner.weights.engine_link import EngineLink
from learner.weights.engine_roster import PROBES, EngineRecord
from shared.log import get_logger
from tests.support.engines import JoiningEngine, false_engine, hangs_up, refuses
from tests.support.publishing import policy, publish_settings, publishing, served

__all__ = ["policy"]  # a fixture


@pytest.fixture(params=["refuses", "silent"])
def dead(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Thousands of addresses: nobody listens there, or somebody who never answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if request.param == "silent":
            taken.listen(4096)
        yield [f"http://127.0.0.1:{taken.getsockname()[1]}/{number}" for number in range(2000)]


class Descriptors:
    """Counts the descriptors of this process while it is entered; `most` is the largest number."""

    def __enter__(self) -> Descriptors:
        self.most, self._over = 0, threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.most = max(self.most, len(os.listdir("/proc/self/fd")))


def test_thousands_of_dead_addresses_cost_no_publication_and_no_descriptors(policy, ranks, dead, caplog, monkeypatch):
    monkeypatch.setattr(get_logger("publisher"), "propagate", True)
    settings = publish_settings(health_timeout_s=10.0)
    with JoiningEngine({}) as good, publishing(policy, ranks, settings) as publisher, Descriptors() as descriptors:
        assert served(publisher.publish(1, [good])) == (1, 0)
        before, seconds = len(os.listdir("/proc/self/fd")), []
        for version in range(2, 9):
            began = time.monotonic()
            assert served(publisher.publish(version, [*dead, good])) == (1, len(dead))
            seconds.append(time.monotonic() - began)
    assert sum(seconds) < 15  # it waits for newcomers twice, a second each
    assert descriptors.most < before + PROBES + 60
    lines = {record.getMessage() for record in caplog.records if "did not take" in record.getMessage()}
    assert len(lines) == 1 and "2000 engines did not take version 2, for example engine http" in lines.pop()


def test_a_sound_engine_among_dead_ones_is_found_at_the_first_publication(policy, ranks, dead):
    with JoiningEngine({}) as good, publishing(policy, ranks, publish_settings(health_timeout_s=30.0)) as publisher:
        began = time.monotonic()
        assert served(publisher.publish(1, [*dead[:60], good])) == (1, 60)
        assert time.monotonic() - began < 20


def test_an_engine_that_never_answers_is_asked_after_growing_pauses() -> None:
    asked: list[float] = []

    def is_asked(request, body) -> None:
        asked.append(time.monotonic())
        hangs_up(request, body)

    link = EngineLink()
    try:
        with false_engine({"/health": is_asked}) as (url, _), false_engine({}) as (well, _):
            deadline = time.monotonic() + 8
            while time.monotonic() < deadline:
                healthy, silent = link.run(link.roster.find([url, well], 5.0))
                assert url in silent
                time.sleep(0.05)
            assert healthy == [well]
    finally:
        link.close()
    # A request whose connection breaks is repeated at once.
    pauses = [after - before for before, after in pairwise(asked) if after - before > 0.3]
    assert 2 <= len(pauses) <= 5
    assert all(later > 1.5 * earlier for earlier, later in pairwise(pauses))


def test_pauses_grow_to_a_limit_and_are_short_while_no_engine_is_well() -> None:
    record = EngineRecord()
    for _ in range(50):
        record.fail("away", well=False)
    assert record.pause_s == engine_roster.MAX_PAUSE_S
    soon = record.failed_at + engine_roster.RETRY_S
    assert record.is_due(soon, engine_roster.RETRY_S) and not record.is_due(soon, engine_roster.MAX_PAUSE_S)
    known = EngineRecord(has_answered=True)
    for _ in range(engine_roster.FREE_FAILURES):
        known.fail("away", well=False)
    assert known.pause_s == 0  # one that has served is tried at once


def test_an_engine_that_fails_in_every_update_is_left_alone_for_a_while(policy, ranks):
    with (
        JoiningEngine({}) as good,
        false_engine({"/init_weights_update_group": refuses}) as (bad, seen),
        publishing(policy, ranks, publish_settings(timeout_s=4.0, call_timeout_s=4.0)) as publisher,
    ):
        for version in range(1, 12):
            assert served(publisher.publish(version, [good, bad])) == (1, 1)
    assert 3 <= [path for path, _ in seen].count("/init_weights_update_group") <= 6


def test_engines_that_are_named_no_more_are_forgotten() -> None:
    link = EngineLink()
    try:
        with false_engine({}) as (well, _):
            dead = [f"http://127.0.0.1:9/{number}" for number in range(20)]
            link.run(link.roster.find([*dead, well], 5.0))
            assert link.run(link.roster.find([well], 5.0)) == ([well], {})
            assert set(link._clients) == {well}
    finally:
        link.close()
