"""The chaos run's own parts: its audit finds what is wrong, and what it does to messages is noticed."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shared.codec import WireError, decode, encode
from shared.types import Group
from tests.chaos.proxy import corrupted, damaged, is_group
from tests.chaos.recovery import is_served
from tests.chaos.report import Recovery, audit, slow, table
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


def test_the_table_and_the_limits_count_apart_what_had_to_wait_for_the_learner() -> None:
    times = {"actor killed: connected": [Recovery(4.0, False), Recovery(16.0, False), Recovery(70.0, True)]}
    text = table(Counter({"actor killed": 3}), times, {"lost": 0})
    assert "| actor killed: connected | 3 | 3 | 10.0 | 16.0 | 15 | 1 | 70.0 |" in text
    assert slow(times) == {"actor killed: connected": "1 of 2"}
