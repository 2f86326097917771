"""The order of a mixture's tasks: each has its share at every place, and no turn is left out or had twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from learner.tickets.interleave import Interleave
from learner.tickets.sources import MixedSource, SeedSource, TaskSource

WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


@given(WEIGHTS, st.integers(0, 10**12))
def test_every_turn_is_had_once_and_in_order_wherever_one_begins(weights: list[float], start: int) -> None:
    turns = Interleave(weights)
    had = turns.counts(start)
    assert sum(had) == start
    for place in range(start, start + 50):
        task, turn = turns.turn(place)
        assert turn == had[task]
        had[task] += 1


@given(WEIGHTS)
def test_the_shares_are_the_weights_at_every_place(weights: list[float]) -> None:
    turns = Interleave(weights)
    for place in (1, 7, 100, 4_000, 1_000_003):
        for had, weight in zip(turns.counts(place), weights, strict=True):
            assert abs(had - place * weight / sum(weights)) <= len(weights) / 2


def test_a_mixture_is_a_pure_function_of_the_position() -> None:
    tasks = [TaskSource("a", SeedSource(task="a"), 2.0), TaskSource("b", SeedSource(first=100, task="b"), 1.0)]
    samples = [MixedSource(tasks).sample(position) for position in range(3000)]
    assert [sample.task for sample in samples].count("a") == 2000
    assert sorted(sample.metadata["seed"] for sample in samples if sample.task == "b") == list(range(100, 1100))
    again = MixedSource(tasks)
    assert [again.sample(position) for position in reversed(range(3000))] == samples[::-1]
    assert {sample.id.partition("/")[0] for sample in samples} == {"a", "b"}
