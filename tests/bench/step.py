"""Seconds of one optimizer step, and the share of a GPU's peak that it uses, on random episodes or recorded ones.

    python -m tests.bench.step --make Qwen3-VL-2B FOLDER      # once: random bfloat16 weights in that model's sizes
    torchrun --nproc-per-node 1 -m tests.bench.step --config launch/recipes/sokoban.toml --model.path FOLDER \
        [--tokens 16384 | --recording DIR] [--steps 5] [--section.key VALUE ...]

A step is `Trainer.step` of the recipe, as a run makes it, on groups of no more than so many tokens for each rank: four
turns an episode, each with an image of about 190 tokens and an answer of about 100; or on the groups that
`launch/actors.py --record DIR` wrote. The first step warms up. The last line is one JSON object: medians, and the most
memory that rank 0's GPU held.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from learner.batch.episodes import make_episodes
from learner.batch.image_decoder import ImageDecoder
from learner.distributed import Ranks, close_ranks, init_ranks
from learner.setup import build_trainer
from shared.config.recipe import Recipe, fail, load
from shared.engine import nccl_variables
from shared.recordings.group_files import files, read
from shared.types import Group
from tests.support.episodes import random_groups
from tests.support.small.published import save_random

SIDES = (384, 512)  # pixels: 144, 192 or 256 tokens of Qwen3-VL
TURNS, TURN_TOKENS = 4, (64, 129)
TIMES = ("time/forward_s", "time/backward_s", "time/optimizer_s")
KEPT = ("batch/prefix_share", *TIMES, "speed/tflops_per_rank", "speed/mfu")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--make", nargs=2, metavar=("MODEL", "FOLDER"), help="write random weights, and nothing else")
    parser.add_argument("--config", default="launch/recipes/sokoban.toml")
    parser.add_argument("--tokens", type=int, default=16384, help="of a step, for each rank")
    parser.add_argument("--recording", default="", help="a folder of recorded groups, all of which make a step")
    parser.add_argument("--steps", type=int, default=5)
    options, overrides = parser.parse_known_args(argv)
    if options.make:
        save_random(*options.make)
        return 0
    recipe = load(options.config, overrides)
    if not (Path(recipe.model.path) / "config.json").exists():
        return fail(ValueError(f"model.path = {recipe.model.path!r} is no folder; --make MODEL FOLDER writes one"))
    if recipe.learner.device == "cuda":
        os.environ.update(nccl_variables.settings(os.environ))
    torch.set_num_threads(recipe.learner.threads)
    gc.freeze()  # what has been imported is never garbage, as in a learner's process
    ranks = init_ranks(recipe.learner.device)
    try:
        found = measure(recipe, ranks, options.tokens, options.steps, options.recording)
    finally:
        close_ranks()
    if ranks.is_main:
        print(json.dumps(found))
    return 0


def measure(recipe: Recipe, ranks: Ranks, num_tokens: int, num_steps: int, recording: str = "") -> dict[str, Any]:
    trainer = build_trainer(recipe, ranks)
    if recording:
        groups = [read(path) for path in files(Path(recording))]
    else:
        groups = groups_of(recipe, trainer.decoder, num_tokens * ranks.size)
    rows = []
    for number in range(num_steps + 1):
        rows.append(trainer.step(groups, number))
        if ranks.is_main:
            print(f"step {number}: {seconds(rows[-1]):.2f} s", file=sys.stderr, flush=True)
    timed = rows[1:]
    medians = {name: statistics.median(row[name] for row in timed) for name in KEPT if name in timed[0]}
    peak = torch.cuda.max_memory_allocated(ranks.device) if ranks.device.type == "cuda" else 0
    return {
        "model": recipe.model.path,
        "dtype": recipe.model.dtype,
        "ranks": ranks.size,
        "tokens": timed[0]["batch/tokens"],
        "microbatches": timed[0]["batch/microbatches"],
        "seconds": statistics.median(map(seconds, timed)),
        **medians,
        "gpu_bytes": peak,
    }


def groups_of(recipe: Recipe, decoder: ImageDecoder, num_tokens: int) -> list[Group]:
    """As many as these tokens hold, images expanded, and one at least."""
    chosen: list[Group] = []
    left, size, objective = num_tokens, recipe.learner.group_size, recipe.learner.objective
    while True:
        (group,) = random_groups(
            decoder.spec, 1, group_size=size, seed=len(chosen), turns=TURNS, turn_tokens=TURN_TOKENS, sides=SIDES
        )
        left -= sum(episode.num_tokens for episode in make_episodes([group], decoder, objective))
        if chosen and left < 0:
            return chosen
        chosen.append(group)


def seconds(metrics: dict[str, float]) -> float:
    return sum(value for name, value in metrics.items() if name.startswith("time/"))


if __name__ == "__main__":
    sys.exit(main())
