"""Lines that repeat: the first is written, the others are counted, and none is lost."""

from __future__ import annotations

import logging

import pytest

from shared.util.repeated_lines import EVERY_S, MAX_REASONS, RepeatedLines


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lines(clock: Clock, caplog: pytest.LogCaptureFixture) -> RepeatedLines:
    caplog.set_level(logging.INFO)
    return RepeatedLines(logging.getLogger("repeated"), clock)


def test_the_first_line_of_a_reason_is_written_and_the_others_are_counted(
    lines: RepeatedLines, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(24):
        lines.add(logging.WARNING, "env_error", f"ticket {number}")
    lines.add(logging.WARNING, "other", "another reason")
    assert caplog.messages == ["ticket 0", "another reason"]
    clock.now = EVERY_S
    lines.flush()
    lines.flush()
    assert caplog.messages[2:] == ["23 more of env_error, the last: ticket 23"]
    lines.add(logging.WARNING, "env_error", "ticket 24")
    assert len(caplog.messages) == 3  # the count was a line of this reason
    clock.now = 2 * EVERY_S
    lines.add(logging.WARNING, "env_error", "ticket 25")
    assert caplog.messages[3:] == ["ticket 24", "ticket 25"]


def test_what_is_counted_is_written_at_the_end(lines: RepeatedLines, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3):
        lines.add(logging.ERROR, "x", f"line {number}")
    lines.flush(end=True)
    assert caplog.messages == ["line 0", "2 more of x, the last: line 2"]


def test_reasons_are_bounded_and_the_counts_of_forgotten_ones_are_written(
    lines: RepeatedLines, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3 * MAX_REASONS):
        for _ in range(3):
            lines.add(logging.ERROR, f"reason {number}", f"line of {number}")
    lines.flush(end=True)
    assert len(lines._since) <= MAX_REASONS
    assert sum(line.startswith("2 more of") for line in caplog.messages) == 3 * MAX_REASONS
