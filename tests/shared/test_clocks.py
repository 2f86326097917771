"""The clocks of several hosts as one."""

from __future__ import annotations

import math
import subprocess
import sys
import time

from hypothesis import given
from hypothesis import strategies as st

from shared.clocks import ClockOffset, clock_name


def test_processes_of_one_host_have_one_clock() -> None:
    program = "import time; from shared.clocks import clock_name; print(clock_name()); print(time.monotonic())"
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    name, reading = done.stdout.splitlines()
    assert name == clock_name()
    assert before <= float(reading) <= time.monotonic()
    offset = ClockOffset()
    offset.measure(name, 1.0, 777.0, 9.0)  # whatever the message took
    assert (offset.add_s, offset.error_s) == (0.0, 0.0)


def test_before_any_answer_the_error_has_no_bound() -> None:
    assert math.isinf(ClockOffset().error_s)


trips = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 100)), min_size=1, max_size=20)


@given(trips, st.floats(-1e6, 1e6))
def test_another_hosts_clock_is_known_to_half_the_shortest_round_trip(
    taken: list[tuple[float, float, float]], true: float
) -> None:
    offset = ClockOffset()
    for there, back, asked in taken:
        offset.measure("elsewhere", asked, asked + there + true, asked + there + back)
    assert abs(offset.add_s - true) <= offset.error_s + 1e-9
    assert offset.error_s <= min(there + back for there, back, _ in taken) / 2 + 1e-9


def test_an_answer_of_another_clock_begins_anew() -> None:
    offset = ClockOffset()
    offset.measure("elsewhere", 0.0, 100.0, 0.1)
    offset.measure("moved", 0.0, 50.0, 8.0)
    assert (offset.add_s, offset.error_s) == (46.0, 4.0)


def test_readings_that_cannot_be_change_nothing() -> None:
    offset = ClockOffset()
    offset.measure("elsewhere", 5.0, 100.0, 6.0)
    for asked, theirs, answered in ((5.0, math.nan, 5.1), (5.0, math.inf, 5.1), (9.0, 100.0, 8.0)):
        offset.measure("elsewhere", asked, theirs, answered)
    assert (offset.add_s, offset.error_s) == (94.5, 0.5)
