"""The comparison of settings: which runs are made, which are not made again, and what the table says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.plots.curve_data import read_run
from tests.bench.compare import SETS, Plan, main, measured, plans_of, play_all, ranged, reached, report

RECIPE = "launch/recipes/sokoban_tiny.toml"
SMALL = """
[pair.all]
"learner.max_staleness" = 1
[pair.one]
"learner.optimizer.lr" = 1e-4
[pair."two, slower"]
"learner.optimizer.lr" = 1e-5
"""


def options(tmp_path: Path, **changes):
    from argparse import Namespace

    given = {"sets": SETS, "only": [], "seeds": 2, "minutes": 6.0, "samples": 500, "recipe": RECIPE, "height": 0.5}
    return Namespace(**given | {"out": tmp_path / "out"} | changes)


@pytest.fixture
def pair(tmp_path: Path):
    path = tmp_path / "sets.toml"
    path.write_text(SMALL)
    return options(tmp_path, sets=path)


def pretend(plan: Plan) -> dict:
    """40 steps of half a minute and 64 episodes; success rises by 0.02 a step, with the lower rate by 0.01."""
    slope = 0.02 if plan.fields["learner.optimizer.lr"] == 1e-4 else 0.01
    plan.folder.mkdir(parents=True, exist_ok=True)
    with (plan.folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 41):
            row = {"step": step, "rollout/reward": 0.0, "rollout/success": slope * step, "staleness/token/mean": 0.5}
            row |= {"policy/entropy": 1.0, "behaviour/logprob_gap": 0.1}
            file.write(json.dumps(row | {"progress/minutes": 0.5 * step, "progress/episodes": 64.0 * step}) + "\n")
    if plan.seed == 1:
        return {"stopped": "exit code 2: entropy"}
    return {"result": {"success_after": 40 * slope, "greedy_success_after": 40 * slope}}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["objectives", "staleness", "uncorrected"])
def test_every_label_of_the_shipped_sets_is_a_recipe_with_as_many_episodes_a_step(tmp_path: Path, name: str) -> None:
    for plan in plans_of(name, options(tmp_path)):
        assert plan.fields["learner.group_size"] * plan.fields["learner.groups_per_step"] == 64
        assert plan.fields["learner.max_minutes"] == 6.0


@pytest.mark.slow
def test_a_run_that_has_ended_is_not_made_again_until_its_fields_change(tmp_path: Path, pair) -> None:
    made: list[tuple[str, int]] = []

    def play(plan: Plan) -> dict:
        made.append((plan.label, plan.seed))
        if len(made) == 3:
            raise KeyboardInterrupt
        return pretend(plan)

    with pytest.raises(KeyboardInterrupt):
        play_all(plans_of("pair", pair), play)
    assert made == [("one", 0), ("two, slower", 0), ("one", 1)]
    play_all(plans_of("pair", pair), play)
    assert made[3:] == [("one", 1), ("two, slower", 1)]
    play_all(plans_of("pair", pair), play)
    assert len(made) == 5
    pair.sets.write_text(SMALL.replace("1e-5", "2e-5"))
    play_all(plans_of("pair", pair), play)
    assert made[5:] == [("two, slower", 0), ("two, slower", 1)]


@pytest.mark.slow
def test_the_table_has_success_by_time_and_episodes_and_when_a_height_was_reached(tmp_path: Path, pair, capsys) -> None:
    plans = plans_of("pair", pair)
    play_all(plans, pretend)
    found = report("pair", plans, pair)
    run = read_run(plans[0].folder)
    one = measured(run, {}, [5.0, 10.0], [640.0], height=0.5)
    assert one.at_minutes == pytest.approx([0.21, 0.41])  # the mean of steps 6 to 15 and of 16 to 25
    assert one.at_episodes == pytest.approx([0.21])
    assert (one.minutes_to, one.episodes_to) == (15.0, 1920.0)  # the mean of steps 21 to 30 is 0.51
    assert found["one"]["minutes_to"] == [15.0, 15.0]
    assert found["two, slower"]["minutes_to"] == [None, None]
    assert found["one"]["success_after"] == [pytest.approx(0.8), None]
    head, _, first, second = capsys.readouterr().out.strip().splitlines()
    assert "5 min | 10 min | 20 min | 0.64k episodes" in head and "minutes to 0.5" in head
    assert first.startswith("| one | 2, 1 stopped | 0.800 (0.80 to 0.80) |") and "| 15.0 (15.0, 15.0) |" in first
    assert "never" in second
    assert {path.name for path in pair.out.glob("pair*")} >= {"pair.md", "pair-minutes.png", "pair-episodes.png"}


def test_figures_name_their_range_and_the_seeds_that_never_came_there() -> None:
    assert ranged([0.5, None, 0.75]) == "0.625 (0.50 to 0.75)"
    assert reached([1.0, None, 3.0], "{:.1f}") == "2.0 (1.0, 3.0), 2 of 3"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nothing"], "has no set 'nothing'; it has objectives, clipped, shipped, staleness, uncorrected"),
        (["staleness", "--only", "max_staleness 3"], "set 'staleness' has no max_staleness 3"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], expected: str, capsys) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and expected in said
