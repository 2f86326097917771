"""The chaos run's own parts: its audit finds what is wrong, and what it does to messages is noticed."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from launch.engines.network import free_port
from learner.tickets.ticket_records import GroupVerdict
from shared.types import Bye, Group, Refusal
from shared.wire.codec import WireError, decode, encode
from tests.chaos.deaths import LOOK_S, Deaths
from tests.chaos.links import Link
from tests.chaos.proxy import corrupted, damaged, fingerprints, is_group, is_refusal, with_a_bad_image
from tests.chaos.recovery import is_served
from tests.chaos.report import Recovery, audit, slow, table
from tests.support.machine import is_copy
from tests.support.wires import episode


def run_of(folder: Path, steps: list[list[int]], **state: Any) -> Path:
    """A run whose last checkpoint is of the last step."""
    state = {"issued": 6, "dropped": {"env_error": 1}, "open": [[5, 2]], "reissued": 0, **state}
    last = folder / "checkpoints" / f"step_{len(steps):08d}"
    last.mkdir(parents=True)
    (last / "meta.json").write_text(json.dumps({"intake": {"tickets": state}}))
    lines = [json.dumps({"step": number, "tickets": tickets}) for number, tickets in enumerate(steps, 1)]
    (folder / "ledger.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_a_sound_run_has_neither_duplicates_nor_lost_tickets(tmp_path: Path) -> None:
    found = audit(run_of(tmp_path, [[0, 1], [2, 3]]))
    assert (found["trained"], found["open"], found["duplicates"], found["lost"]) == (4, 1, 0, 0)


@pytest.mark.parametrize(
    ("steps", "state", "duplicates", "lost"),
    [
        ([[0, 1], [1, 3]], {}, 1, 1),  # trained twice, and another one never
        ([[0, 1], [2, 5]], {}, 1, 0),  # trained and still open
        ([[0, 1], [2, 3]], {"issued": 7}, 0, 1),
        ([[0, 1], [2, 3]], {"open": []}, 0, 1),
    ],
)
def test_a_ticket_that_is_trained_twice_or_lost_is_found(
    tmp_path: Path, steps: list[list[int]], state: dict[str, Any], duplicates: int, lost: int
) -> None:
    found = audit(run_of(tmp_path, steps, **state))
    assert (found["duplicates"], found["lost"]) == (duplicates, lost)


def test_a_step_that_was_trained_again_has_undone_its_first_line(tmp_path: Path) -> None:
    folder = run_of(tmp_path, [[0, 1], [2, 3]])
    ledger = folder / "ledger.jsonl"
    lines = ledger.read_text().splitlines()
    ledger.write_text("\n".join([lines[0], json.dumps({"step": 2, "tickets": [3, 4]}), '{"step": 3, "ti', lines[1]]))
    assert audit(folder)["duplicates"] == audit(folder)["lost"] == 0


@pytest.mark.parametrize(
    ("held", "serves"),
    [
        *((name, True) for name in ("6-mine", "7-mine")),
        *((name, False) for name in ("5-mine", "8-mine", "6-dead", "9-dead", "6", "none", "")),
    ],
)
def test_an_engine_serves_when_it_holds_exactly_what_was_published(held: str, serves: bool) -> None:
    """The next version counts too: the ledger learns of it a moment later."""
    assert is_served("6-mine", held) is serves
    assert not is_served("", held)


def test_groups_are_told_by_their_first_bytes_and_most_corrupt_ones_are_refused_and_all_damaged_ones() -> None:
    frames = [bytes(frame) for frame in encode(Group("1-a", "tester", (episode(),), 0.1))]
    assert is_group(frames)
    rng, reasons = random.Random(0), Counter[str]()
    for _ in range(200):
        with pytest.raises(WireError):
            decode(damaged(frames, rng))
        try:
            decode(corrupted(frames, rng))
        except WireError as error:
            reasons[error.reason] += 1
    assert reasons.total() > 100
    assert "digest" not in reasons


def test_a_refusal_is_told_by_its_reason() -> None:
    for message, told in (
        (Refusal("1-a", "outdated"), True),
        (Refusal("1-a", "unknown"), False),
        (Bye("outdated"), False),
    ):
        assert is_refusal([bytes(frame) for frame in encode(message)], GroupVerdict.OUTDATED) is told


def test_the_table_and_the_limits_count_apart_what_had_to_wait_for_the_learner() -> None:
    times = {"actor killed: connected": [Recovery(4.0, False), Recovery(16.0, False), Recovery(70.0, True)]}
    text = table(Counter({"actor killed": 3}), times, {"lost": 0})
    assert "| actor killed: connected | 3 | 3 | 10.0 | 16.0 | 15 | 1 | 70.0 |" in text
    assert slow(times) == {"actor killed: connected": "1 of 2"}


def test_an_end_that_no_fault_has_caused_is_told_from_one_that_was_caused() -> None:
    running, now = {"actor": {0: 10, 1: 11}, "engine": {0: 20}, "learner": {0: 30}}, [0.0]
    deaths = Deaths(lambda kind: dict(running[kind]), clock=lambda: now[0])

    def later(seconds: float = LOOK_S) -> None:
        now[0] += seconds
        deaths.look()

    later()
    deaths.expect([10])
    deaths.expect([20], within_s=5.0)
    running["actor"][0] = 12  # killed, and started again
    later()
    assert (deaths.explained, deaths.unexplained) == (1, [])
    later(60.0)
    running["engine"].clear()  # long after it was without memory
    del running["actor"][1]
    later()
    assert [line.partition(" (")[0] for line in deaths.unexplained] == ["actor 1", "engine 0"]


def test_an_episode_that_is_trained_under_two_tickets_is_found(tmp_path: Path) -> None:
    def sent(ticket: str, seconds: float) -> dict[bytes, set[int]]:
        played = episode(metrics={"success": 1.0, "env_s": seconds})
        frames = [bytes(frame) for frame in encode(Group(ticket, "tester", (played,), seconds))]
        return {mark: {number} for mark, number in fingerprints(frames)}

    first, again, another = sent("0-a", 0.25), sent("1-b", 0.25), sent("1-b", 0.5)
    assert len(first) == 1
    assert set(first) == set(again) != set(another)
    folder = run_of(tmp_path, [[0, 1], [2, 3]])
    together = {mark: numbers | again.get(mark, set()) for mark, numbers in first.items()}
    assert audit(folder, together)["episodes_trained_twice"] == 1
    assert audit(folder, first | another)["episodes_trained_twice"] == 0


def test_a_bad_image_is_no_damage_of_the_message_but_of_the_picture() -> None:
    whole = [bytes(frame) for frame in encode(Group("1-a", "tester", (episode(),), 0.1))]
    group = decode(with_a_bad_image(whole, random.Random(0)))
    assert isinstance(group, Group)
    assert group.trajectories[0].images != episode().images


class Echo:
    """Answers each line with itself."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._answer, args=(self._listener.accept()[0],), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            while data := connection.recv(100):
                connection.sendall(data)

    def close(self) -> None:
        self._listener.close()


@pytest.mark.slow
def test_a_link_passes_on_and_is_late_cut_half_open_dripping_or_without_weights_when_it_is_told() -> None:
    echo, port = Echo(), free_port()
    link = Link(port, echo.port)

    def say(text: bytes, line: socket.socket | None = None, limit_s: float = 5.0) -> bytes:
        with suppress(OSError):
            line = line or socket.create_connection(("127.0.0.1", port), timeout=limit_s)
            line.settimeout(limit_s)
            line.sendall(text)
            return line.recv(100)
        return b""

    line = socket.create_connection(("127.0.0.1", port))
    assert say(b"hello", line) == b"hello"
    link.disturb("drip", 60.0)
    assert say(b"drop", line) == b"d"
    link.disturb("drip", 0.0)
    link.disturb("late", 60.0)
    assert say(b"late") == b"late"
    assert link.counts["engine's line delayed"] == 2  # there and back
    link.disturb("late", 0.0)
    link.disturb("nowhere", 60.0)
    lost = socket.create_connection(("127.0.0.1", port))
    assert say(b"nobody", lost, 0.3) == b""
    link.disturb("nowhere", 0.0)
    assert say(b"still nobody", lost, 0.3) == b""
    assert say(b"again") == b"again"
    link.disturb("cut", 60.0)
    assert say(b"cut") == b""
    link.disturb("cut", 0.0)
    assert say(b"again") == b"again"
    link.disturb("deaf", 60.0)
    assert say(b"POST /begin_weight_update HTTP/1.1") == b""
    assert say(b"POST /generate HTTP/1.1") == b"POST /generate HTTP/1.1"
    link.close()
    echo.close()


def test_a_copy_of_a_process_that_is_about_to_start_a_program_is_told_from_the_process() -> None:
    forks = "import os, sys; print(os.fork() or '', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", forks], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as it:
        assert it.stdin is not None and it.stdout is not None
        copy = int(next(line for line in it.stdout if line.strip()))
        assert is_copy(copy) and not is_copy(it.pid)
        it.stdin.close()
