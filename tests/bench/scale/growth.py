"""Where cost stops being linear: by context, episodes a step, engines and actors, on this machine's CPU.

    python -m tests.bench.scale.growth [--only episodes contexts engines actors] [--draw FILE]

Each row is the cost of one unit while their number grows; where growth is linear, rows are equal.
`contexts`: of the small Sokoban model, processor time a token of the learner's step on 16,384 tokens in episodes of one
length, and of the embedded engine, for a prompt and for decoding eight sequences of that length. `episodes`: processor
time and the most memory of a learner's step, an episode of 128 tokens, with a tiny model; `host` is all of it but
forward, backward and optimizer. `engines`: what a publication of the parameters of a 30B model, shrunk, takes beyond
the bare broadcast, a bucket and engine; the engines are simulated in one process. `actors`: processor time of the
learner's process a group. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch

from actor.engine.runner import Row, Runner
from launch.plots.figure import COLOURS
from learner.distributed import Ranks, close_ranks, init_ranks
from shared.types import Group
from tests.bench.learner import trainer_of
from tests.bench.scale.options import picture_to_write
from tests.bench.transport import trajectory
from tests.support.episodes import learner_config
from tests.support.runs import finished
from tests.support.tiny import load_model, tiny_model_dir

MODEL = "launch/models/sokoban_tiny"
VOCAB = 100  # ids below those of images
CONTEXTS, STEP_TOKENS, TURN_TOKENS = (256, 512, 1024, 2048, 4096, 8192), 16384, 128
EPISODES, EPISODE_TOKENS = (64, 256, 1024, 4096), 128
ENGINES, ACTORS = (1, 4, 16, 64), (1, 8, 64, 512)
DECODED, DECODE_STEPS = 8, 20
REPEATS = 3
CONFIG = learner_config(critic_width=64)
Rows = list[dict[str, Any]]


def groups(count: int, tokens: int, turns: int) -> list[Group]:
    rng = np.random.default_rng(0)
    return [Group(f"{k}-0", "bench", (trajectory(tokens, turns, 0, 0, rng, vocab=VOCAB),), 1.0) for k in range(count)]


def cpu_of(step: Callable[[], Any]) -> tuple[float, Any]:
    """Processor seconds, and what it returns."""
    began = time.process_time()
    found = step()
    return time.process_time() - began, found


def contexts(ranks: Ranks) -> Rows:
    trainer, rows = trainer_of(MODEL, CONFIG, ranks), []
    runner = Runner(load_model(MODEL), trainer.decoder.spec, num_slots=DECODED, max_context=CONTEXTS[-1] + DECODE_STEPS)
    for length in CONTEXTS:
        made = groups(STEP_TOKENS // length, length, length // TURN_TOKENS)
        steps = [cpu_of(partial(trainer.step, made, 3))[0] for _ in range(REPEATS)]
        prompt, decode = _engine(runner, length)
        costs = {"learner_us": 1e6 * min(steps) / STEP_TOKENS, "prompt_us": prompt, "decode_us": decode}
        rows.append({"context": length, **costs})
    return rows


def _engine(runner: Runner, length: int) -> tuple[float, float]:
    """Microseconds a token, of prompts and of decoding after them."""
    rng = np.random.default_rng(0)

    def row(slot: int, past: int, count: int) -> Row:
        places = np.broadcast_to(np.arange(past, past + count), (3, count))
        return Row(slot, past, rng.integers(2, VOCAB, count), places)

    prompts = [cpu_of(partial(runner.forward, [row(slot, 0, length)]))[0] for slot in range(DECODED)]
    decoded = [
        cpu_of(partial(runner.forward, [row(slot, length + k, 1) for slot in range(DECODED)]))[0]
        for k in range(DECODE_STEPS)
    ]
    return 1e6 * statistics.median(prompts) / length, 1e6 * statistics.median(decoded) / DECODED


def episodes(ranks: Ranks) -> Rows:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(str(tiny_model_dir(folder)), CONFIG, ranks)
        trainer.step(groups(8, EPISODE_TOKENS, 1), 3)  # warms up
        for count in EPISODES:
            made = groups(count, EPISODE_TOKENS, 1)
            seconds, metrics = cpu_of(partial(trainer.step, made, 3))
            computed = sum(metrics[f"time/{part}_s"] for part in ("forward", "backward", "optimizer"))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            host = max(seconds - computed, metrics["time/prepare_s"])
            rows.append(
                {"episodes": count, "ms": 1e3 * seconds / count, "host_ms": 1e3 * host / count, "peak_mib": peak}
            )
    return rows


def engines(_: Ranks) -> Rows:
    rows = []
    for count in ENGINES:
        found = _told("-m", "tests.bench.parallel.publish_many", "--engines", str(count), "--rounds", "3")
        kept = {name: found[name] for name in ("overhead_ms", "overhead_cpu_ms", "bare_s", "publication_s", "buckets")}
        rows.append({"engines": count, **kept, "cpu_us_an_engine": 1e3 * found["overhead_cpu_ms"] / count})
    return rows


def actors(_: Ranks) -> Rows:
    rows = []
    for count in ACTORS:
        processes = str(min(2, count))
        found = _told("tests/bench/load.py", "--seconds", "10", "--actors", str(count), "--processes", processes)
        rows.append({"actors": count, **{name: found[name] for name in ("groups_per_s", "learner_cpu_us", "lost")}})
    return rows


def _told(*command: str) -> dict[str, Any]:
    """The last line that a benchmark prints."""
    return json.loads(finished([sys.executable, *command], timeout_s=600).stdout.splitlines()[-1])


SWEEPS: dict[str, Callable[[Ranks], Rows]] = {
    "episodes": episodes,  # first: the most memory is that of the process so far
    "contexts": contexts,
    "engines": engines,
    "actors": actors,
}
PANELS = {
    "contexts": (
        "µs a token",
        {"learner_us": "learner", "prompt_us": "engine, prompt", "decode_us": "engine, decoding"},
    ),
    "episodes": ("ms an episode", {"ms": "learner's step", "host_ms": "its host work"}),
    "engines": ("µs of CPU a bucket and engine", {"cpu_us_an_engine": "publication beyond the broadcast"}),
    "actors": ("µs of CPU a group", {"learner_cpu_us": "learner's process"}),
}


def draw(found: dict[str, Rows], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.2, 3.6), layout="constrained")
    for panel, (name, rows) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        unit, lines = PANELS[name]
        axis = name.removesuffix("s") if name == "contexts" else name
        places = [row[axis] for row in rows]
        for (key, label), colour in zip(lines.items(), COLOURS, strict=False):
            panel.plot(places, [row[key] for row in rows], "o-", color=colour, label=label)
        highest = max(row[key] for row in rows for key in lines)
        panel.set(xlabel=axis, ylabel=unit, ylim=(0, 1.15 * highest))
        panel.set_xscale("log", base=2)
        panel.set_xticks(places, [f"{place:,}" for place in places])
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        if len(lines) > 1:
            panel.legend(frameon=False)
        else:
            panel.set_title(*lines.values(), fontsize="medium")
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    parser.add_argument("--draw", type=picture_to_write, help="a picture's file")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    ranks, found = init_ranks("cpu"), {}
    try:
        for name in options.only:
            found[name] = [{key: round(value, 3) for key, value in row.items()} for row in SWEEPS[name](ranks)]
            for row in found[name]:
                print(name, json.dumps(row), file=sys.stderr, flush=True)
    finally:
        close_ranks()
    print(json.dumps({"benchmark": "growth", **found}), flush=True)
    if options.draw:
        draw(found, options.draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
