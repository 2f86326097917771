"""An actor that is killed every so often: long episodes are trained in the proportion in which they were issued."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from learner.tickets.sources import SeedSource
from learner.tickets.ticket_server import TicketServer, TicketServerSettings
from tests.support.killed_actor import LONG_TURNS, TURN_S, engine_of, rules
from tests.support.wires import book_settings

GROUPS, PER_STEP = 160, 8
LIFE_S = (0.4 * LONG_TURNS * TURN_S, 0.9 * LONG_TURNS * TURN_S)  # no life is as long as a long episode
LEAST_TOSSES = 32  # of a life on a machine that is busy with something else: two turns of each of 16 episodes
LIMIT_S = 250.0


def train(folder: Path, *, journaled: bool) -> tuple[dict[str, float], int]:
    """The learner's metrics once all groups are trained, and how often the actor was killed by then."""
    book = book_settings(
        groups_per_version=PER_STEP, max_staleness=2, total_groups=GROUPS, return_s=10.0 if journaled else 0.0
    )
    server = TicketServer(
        SeedSource(), book, TicketServerSettings("tcp://127.0.0.1:*", folder, "r", rules(), actor_timeout_s=1.0)
    )
    server.open()
    weights = folder / "version"
    weights.write_text("0")
    command = [sys.executable, "-m", "tests.support.killed_actor", server.address, str(folder), str(int(journaled))]
    actor = subprocess.Popen(command, stdin=subprocess.PIPE)
    chance, lives, version, end, kill_at = random.Random(0), 0, 0, time.monotonic() + LIMIT_S, math.inf
    try:
        while version < GROUPS // PER_STEP:
            assert time.monotonic() < end, server.metrics()
            if kill_at == math.inf and engine_of(lives) in server.engines():
                kill_at = time.monotonic() + chance.uniform(*LIFE_S)
            if time.monotonic() > kill_at and tosses(folder, lives) >= LEAST_TOSSES:
                actor.stdin.write(b"\n")
                actor.stdin.flush()
                lives, kill_at = lives + 1, math.inf
            try:
                server.next_batch(PER_STEP, 0.02)
            except TimeoutError:
                continue
            version += 1
            server.commit()
            (folder / "next").write_text(f"{version}")
            (folder / "next").replace(weights)
            server.set_version(version)
        return server.metrics(), lives
    finally:
        actor.stdin.close()
        actor.wait(10)
        server.stop("over")


def tosses(folder: Path, life: int) -> int:
    path = folder / f"tosses-{life}"
    return path.stat().st_size if path.exists() else 0


def long_shares(folder: Path, values: dict[str, float]) -> tuple[float, float, float]:
    """The share of long episodes as they were issued, which their first turn decided the first time it was played; the
    share that was trained, by the meter; and two standard errors."""
    first: dict[str, int] = {}
    for line in (folder / "flips").read_text().splitlines():
        seed, turns = line.split()
        first.setdefault(seed, int(turns))
    issued = sum(turns > 1 for turns in first.values()) / len(first)
    trained = (values["selection/trained/turns"] - 1) / (LONG_TURNS - 1)
    return issued, trained, 2 * math.sqrt(issued * (1 - issued) / GROUPS)


@pytest.mark.slow
def test_under_kills_long_episodes_are_trained_in_the_proportion_in_which_they_were_issued(tmp_path: Path) -> None:
    values, kills = train(tmp_path, journaled=True)
    issued, trained, errors = long_shares(tmp_path, values)
    print(f"{kills} kills, long: {issued:.3f} issued, {trained:.3f} trained, two standard errors {errors:.3f}")
    assert kills >= 5
    assert abs(trained - issued) <= errors
    assert values["selection/episodes/trained"] == values["selection/episodes/issued"] == GROUPS


@pytest.mark.slow
def test_without_a_journal_the_meter_shows_that_long_episodes_are_lost(tmp_path: Path) -> None:
    values, kills = train(tmp_path, journaled=False)
    issued, trained, errors = long_shares(tmp_path, values)
    print(f"{kills} kills, long: {issued:.3f} issued, {trained:.3f} trained, two standard errors {errors:.3f}")
    assert trained < issued - errors
