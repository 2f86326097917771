"""What recording costs: milliseconds of a step, and of a list of many episodes.

    python tests/bench/recording.py [--steps 20] [--groups 8] [--group-size 8] [--listed 15000]

Records steps of random episodes of the size that small-model Sokoban has (8 turns with an image each), as a run does,
and prints one JSON object: `handed_over_ms` of wall time that the learner's thread spends on a recorded step, `cpu_ms`
of the recorder's thread for it, `bytes` of it on disk; then the time (`list_ms` of the clock, `list_cpu_ms`) and the
memory that a list of `--listed` episodes takes to read from their indices.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch

from learner.recording.recorded_columns import RecordedColumns, watch
from learner.recording.recorder import Recorder
from shared.config.recipe import Recipe
from shared.config.sections import EnvConfig, ModelConfig, RecordConfig, RunConfig
from shared.recordings.episode_format import COLUMNS
from shared.recordings.reader import read_step, steps
from shared.types import Group
from shared.vision import VisionSpec
from tests.support.episodes import learner_config, random_groups

MODEL = str(ROOT / "launch/models/sokoban_tiny")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--listed", type=int, default=15000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    spec = VisionSpec.load(MODEL, min_pixels=1024, max_pixels=1 << 20)
    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe(
            run=RunConfig(dir=folder, name="bench"),
            model=ModelConfig(path=MODEL),
            env=EnvConfig(module="envs.sokoban"),
            learner=learner_config(group_size=options.group_size),
            record=RecordConfig(every=1, groups=options.groups, max_gb=50),
        )
        result = recorded(recipe, spec, options.steps)
        result |= listed(Path(folder) / "bench" / "recordings", options.listed)
    print(json.dumps({"episodes": options.groups * options.group_size, **result, "load": os.getloadavg()[0]}))
    return 0


def recorded(recipe: Recipe, spec: VisionSpec, num_steps: int) -> dict[str, float]:
    """The first step is left out: the recorder reads the tokenizer then."""
    recorder, handed, spent = Recorder(recipe, spec), list[float](), list[float]()
    shape: dict[str, Any] = {"turns": 8, "turn_tokens": (12, 30), "sides": (192,)}
    shape["group_size"] = recipe.learner.group_size
    for step in range(1, num_steps + 2):
        groups = random_groups(spec, recipe.record.groups, seed=step, **shape)
        watched, before = watched_of(groups, step, recipe.record), recorder.metrics()
        began = time.perf_counter()
        recorder.step(step, step - 1, groups, watched=watched)
        handed.append(time.perf_counter() - began)
        while recorder.metrics()["record/seconds"] == before["record/seconds"]:
            time.sleep(0.01)
        spent.append(recorder.metrics()["record/seconds"] - before["record/seconds"])
    recorder.close(60)
    values = recorder.metrics()
    assert values["record/dropped"] == 0
    return {
        "handed_over_ms": round(1000 * statistics.median(handed[1:]), 3),
        "cpu_ms": round(1000 * statistics.median(spent[1:]), 2),
        "bytes": round(values["record/bytes"] / (num_steps + 1)),
    }


def watched_of(groups: list[Group], step: int, config: RecordConfig) -> RecordedColumns:
    """With columns, as a trainer gives them."""
    watched = watch(groups, step, config)
    assert watched is not None
    lengths = [int(np.count_nonzero(t.loss_mask)) for group in groups for t in group.trajectories]
    watched._columns = {place: np.random.rand(len(COLUMNS), n).astype(np.float32) for place, n in enumerate(lengths)}
    return watched


def listed(folder: Path, count: int) -> dict[str, float]:
    """What is there, read again and again until so many episodes are listed, all of which are kept."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, cpu, found = time.perf_counter(), time.process_time(), []
    while len(found) < count:
        for path in steps(folder):
            found += read_step(path).summaries
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    times = {"list_ms": round(1000 * seconds, 1), "list_cpu_ms": round(1000 * cpu, 1)}
    return {"listed": len(found), **times, "list_mb": round(grown, 1)}


if __name__ == "__main__":
    sys.exit(main())
