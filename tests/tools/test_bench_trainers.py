"""The benchmark of whole trainings: when a height counts as reached, and what is told of a run."""

from __future__ import annotations

from tests.bench.trainers.colour import Outcome, Step, reached, summary


def steps(*shares: float) -> list[Step]:
    return [Step(10.0 + 2.0 * k, 2.0 * k, share) for k, share in enumerate(shares)]


def test_a_height_is_reached_by_the_mean_of_three_steps_and_by_no_single_one():
    assert reached(steps(0.2, 1.0, 0.5, 1.0, 0.9, 0.8)) == Step(20.0, 10.0, 0.8)
    assert reached(steps(1.0, 1.0)) is None
    assert reached(steps(0.9, 0.8, 0.9, 0.8, 0.9)) is None


def test_a_run_that_comes_there_is_told_by_both_clocks_and_by_its_steps():
    told = summary(Outcome(steps(0.5, 0.9, 0.9, 0.9), 0.93))
    assert told["seconds_to_0.9"] == {"command": 16.0, "training": 6.0} and told["steps_to_0.9"] == 4
    assert told["seconds_a_step"] == 2.0 and told["held_out"] == 0.93
    never = summary(Outcome(steps(0.5, 0.5), 0.5))
    assert never["seconds_to_0.9"] is None and never["steps_to_0.9"] is None
