"""Frozen lakes: random ones, moves on firm and slippery ice, and the best play on both."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from envs.boards.board import MOVES, split_of
from envs.boards.lake import Lake, LakeSpec, lake_of, make_lake, outcomes, slipped
from envs.boards.lake_values import best_move, win_chance
from envs.boards.lake_words import reading
from envs.boards.walks import shortest_way

LAKE = lake_of(("SFH", "FFF", "HFG"))
GYMNASIUM = lake_of(("SFFF", "FHFH", "FFFH", "HFFG"))


def walked(lake: Lake, moves: list[str]) -> Lake:
    for move in moves:
        lake = lake.moved(move)
    return lake


def test_a_shortest_way_is_as_short_as_trying_every_way_finds() -> None:
    for seed in range(40):
        lake = make_lake(seed, LakeSpec(sizes=((3, 3), (3, 4)), hole_chance=0.3))
        way = shortest_way(lake)
        assert walked(lake, way).solved
        assert not any(walked(lake, list(moves)).solved for moves in product(MOVES, repeat=min(len(way) - 1, 6)))


@pytest.mark.parametrize("rate", [1.0, 0.8, 1 / 3])
def test_the_best_play_on_slippery_ice_wins_as_often_as_trying_every_plan_does(rate: float) -> None:
    def best(lake: Lake, left: int) -> float:
        if lake.over or not left:
            return float(lake.solved)
        return max(sum(c * best(after, left - 1) for c, after in outcomes(lake, move, rate)) for move in MOVES)

    for left in range(6):
        assert win_chance(LAKE, rate, left) == pytest.approx(best(LAKE, left), abs=1e-12)


def test_the_best_play_wins_as_often_as_is_foretold() -> None:
    """On Gymnasium's 4x4 map, whose best play is known to win 0.82 of the games without a limit."""
    assert win_chance(GYMNASIUM, 1 / 3, 2000) == pytest.approx(0.8235, abs=1e-3)
    rng, steps, games = Random(0), 60, 3000
    won = 0
    for _ in range(games):
        lake, left = GYMNASIUM, steps
        while left and not lake.over:
            lake = lake.moved(slipped(rng, best_move(lake, 1 / 3, left), 1 / 3))
            left -= 1
        won += lake.solved
    assert won / games == pytest.approx(win_chance(GYMNASIUM, 1 / 3, steps), abs=0.03)


def test_moves_slip_to_both_sides_equally_often_and_never_back() -> None:
    rng = Random(1)
    ways = Counter(slipped(rng, "up", 0.5) for _ in range(20_000))
    assert set(ways) == {"up", "left", "right"}
    assert ways["up"] / 20_000 == pytest.approx(0.5, abs=0.02)
    assert ways["left"] / 20_000 == pytest.approx(0.25, abs=0.02)
    middle = replace(LAKE, player=4)
    assert {after.player: chance for chance, after in outcomes(middle, "up", 0.5)} == {1: 0.5, 3: 0.25, 5: 0.25}
    assert [slipped(rng, "up", 1.0) for _ in range(50)] == ["up"] * 50


def test_a_random_lake_can_be_crossed_and_fits_its_spec() -> None:
    spec = LakeSpec(sizes=((4, 4), (5, 3)), hole_chance=0.4, min_solution=3, max_solution=5)
    lakes = [make_lake(seed, spec) for seed in range(50)]
    assert all(3 <= len(shortest_way(lake)) <= 5 for lake in lakes)
    assert {(lake.height, lake.width) for lake in lakes} == {(4, 4), (5, 3)}
    assert make_lake(7, spec) == make_lake(7, spec)
    corner = make_lake(1, LakeSpec(corners=True))
    assert (corner.player, corner.goal) == (0, 15)


def test_splits_share_no_lake() -> None:
    held_out, trained = (
        [make_lake(seed, LakeSpec(split=split)) for seed in range(30)] for split in ("heldout", "train")
    )
    assert {split_of(lake) for lake in held_out} == {"heldout"}
    assert {split_of(lake) for lake in trained} == {"train"}


def test_the_game_is_over_in_a_hole_and_at_the_goal() -> None:
    assert walked(LAKE, ["right", "right"]).over and not walked(LAKE, ["right", "right"]).solved
    assert walked(LAKE, ["right", "right", "left"]).player == 2
    assert walked(LAKE, ["up"]) is LAKE


def test_a_reading_names_goal_and_holes_as_seen_from_the_player_and_what_loses() -> None:
    assert reading(LAKE.moved("right")) == "01 22 +2+1 02 +0+1 20 +2-1 !ur"


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        (("SF", "G"), "one length"),
        (("SX", "FG"), "'X'"),
        (("SF", "FF"), "one G"),
        (("SH", "HG"), "no way"),
        (("", ""), "one length"),
    ],
)
def test_a_map_that_is_none_is_refused(rows: tuple[str, ...], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        lake_of(rows)
