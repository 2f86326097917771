"""A run of several tasks with difficulty pools, real processes: a killed learner goes on with the same tickets."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from launch.dashboard_server.catalogue import described
from shared.recordings.reader import FOLDER, episodes, steps
from tests.support.mixtures import HEAD, mixture_toml
from tests.support.runs import command, finished, metrics, places

STEPS, PER_STEP, KILL_AFTER = 8, 4, 5
TASKS = """
[[tasks]]
name = "plain"
module = "envs.colour"
weight = 2
reward = "REWARD:score"
data = { num_samples = 6 }
[[tasks]]
name = "few"
module = "envs.colour"
group_size = 3
reward = "REWARD:score"
data = { num_samples = 3 }
[[tasks]]
name = "late"
module = "envs.colour"
reward = "REWARD:score"
data = { first_seed = 1000, num_samples = 4 }
[[pools]]
name = "low"
bounds = [0, 0.5]
weight = 0.3
[[pools]]
name = "high"
bounds = [0.5, 1]
weight = 0.6
"""
# A reward that the sample alone decides: what is drawn then hangs on nothing that differs from run to run.
REWARD = "def score(played):\n    return (played.sample.metadata['seed'] % 3) / 2\n"
# Without staleness a step has the tickets of its version, whichever comes first.
FIELDS = {"learner.max_staleness": 0, "learner.total_steps": STEPS, "record.every": 1, "eval.before": "false"}


def recipe_in(tmp_path: Path) -> str:
    (tmp_path / "reward.py").write_text(REWARD)
    return mixture_toml(tmp_path, TASKS.replace("REWARD", str(tmp_path / "reward.py")), head=HEAD)


def drawn(folder: Path) -> dict[int, tuple[str, str, int]]:
    """Return (sample, task, episodes of its group) of each trained ticket, by number."""
    found: dict[int, tuple[str, str, int]] = {}
    for path in steps(folder / FOLDER):
        for episode in episodes(path):
            number = int(episode.ticket_id.partition("-")[0])
            value = (episode.sample_id, episode.task, episode.group_size)
            assert found.setdefault(number, value) == value
    return found


def trained(folder: Path) -> list[int]:
    """Return the numbers of the trained tickets, step after step, without those of steps that were undone."""
    rows = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return [number for row in {row["step"]: row for row in rows}.values() for number in row["tickets"]]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_a_killed_run_of_several_tasks_goes_on_with_the_tickets_of_one_that_was_not_and_so_do_two_ranks(
    tmp_path: Path,
) -> None:
    recipe = recipe_in(tmp_path)
    whole = places(tmp_path, **{"run.name": "whole"}, **FIELDS)
    finished(command("local", whole, recipe))
    arguments = places(tmp_path, **{"run.name": "killed", "learner.resume": "auto"}, **FIELDS)
    folder = tmp_path / "killed"
    actors, learner = (
        subprocess.Popen(command(script, arguments, recipe), stdout=subprocess.DEVNULL)
        for script in ("actors", "learner")
    )
    try:
        deadline = time.monotonic() + 200
        while not list(folder.glob("checkpoints/step_*")) or not done(tmp_path) >= KILL_AFTER:
            assert learner.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        learner.kill()
        learner.wait(20)
        finished(command("learner", arguments, recipe))
        actors.wait(60)
    finally:
        for process in (learner, actors):
            if process.poll() is None:
                process.terminate()
                process.wait(30)
    expected, found = drawn(tmp_path / "whole"), drawn(folder)
    assert len(expected) == STEPS * PER_STEP and found == expected
    assert sorted(trained(folder)) == sorted(trained(tmp_path / "whole")) == sorted(expected)
    assert Counter(task for _, task, _ in expected.values()) == {"plain": 16, "few": 8, "late": 8}
    finished([*command("local", places(tmp_path, **{"run.name": "two"}, **FIELDS), recipe), "--ranks", "2"])
    assert drawn(tmp_path / "two") == expected  # two ranks
    assert {(task, size) for _, task, size in expected.values()} == {("plain", 2), ("few", 3), ("late", 2)}
    check_metrics(metrics(tmp_path, "whole"))


def done(tmp_path: Path) -> int:
    if not (tmp_path / "killed" / "metrics.jsonl").exists():
        return 0
    return max((row["step"] for row in metrics(tmp_path, "killed") if "rollout/reward" in row), default=0)


def check_metrics(rows: list[dict]) -> None:
    """Check that each task and each held-out set has metrics of its own, all of which the catalogue describes."""
    names = {name for row in rows for name in row} - {"step", "time"}
    for task in ("plain", "few", "late"):
        assert {f"tasks/{task}/{name}" for name in ("reward", "success", "turns", "share", "without_variance")} <= names
        assert {f"eval/sets/{task}/{name}" for name in ("reward", "success")} <= names
    assert {"pools/low/samples", "pools/high/samples", "pools/skipped"} <= names
    assert [name for name in sorted(names) if not described(name)["meaning"]] == []
    step = [row for row in rows if "rollout/reward" in row]
    shares = [sum(row.get(f"tasks/{task}/share", 0.0) for task in ("plain", "few", "late")) for row in step]
    assert shares == [pytest.approx(1.0)] * STEPS
    assert step[-1]["pools/skipped"] > 0
