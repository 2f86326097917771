"""One optimizer step of the learner against padded, unpacked loops of transformers, and against TRL's GRPOTrainer.

    python launch/actors.py --config launch/recipes/sokoban_tiny.toml --record DIR --learner.group_size 8 \
        --learner.groups_per_step 8 --learner.total_steps 1 --actor.groups 8          # 64 episodes
    pip install --target PEERS --no-deps trl accelerate datasets ...                   # whatever `import trl` lacks
    python tests/bench/learner.py --recording DIR [--peers PEERS] [--repeats 3] [--only ours padded ...]

All train the same float32 model on the same recorded episodes with the same group-relative loss, in turns, on one
thread. What each contestant does is told in learner_peers.py; ours is `Trainer.step`, from groups of the wire to the
metrics: as the recipes have it, without `parallel.share_prefixes`, and with `parallel.compile`. The last line is one
JSON object: medians of wall and CPU seconds of a step, and their ratios to ours. CPU seconds do not see other
processes. `grad_norm` tells that all compute the same (the peers do not ban the vision ids).
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
if "--peers" in sys.argv[:-1]:  # before transformers is imported, which looks for accelerate once
    sys.path.append(sys.argv[sys.argv.index("--peers") + 1])

import torch

from learner.batch.episodes import make_episodes
from learner.distributed import Ranks, close_ranks, init_ranks
from learner.model.policy import load_policy
from learner.model.sharding import parallelize
from learner.training.trainer import Trainer
from shared.config.learner_section import LearnerConfig
from shared.recordings.group_files import files, read
from shared.vision import VisionSpec
from tests.bench.learner_peers import CLIP_HIGH, CLIP_LOW, LR, MAX_NORM, PaddedLoop, TrlLoop
from tests.support.episodes import learner_config

PADDED: dict[str, dict[str, Any]] = {
    "padded": {},
    "padded_to_context": {"context": 1280},  # model.max_context of sokoban_tiny
    "padded_kept_logits": {"kept_logits": True},
    "sorted_kept_logits": {"kept_logits": True, "by_length": True},
}
OURS: dict[str, dict[str, Any]] = {"ours_whole": {"share_prefixes": False}, "ours_compiled": {"compile": True}}
CONTESTANTS = ("ours", *OURS, *PADDED, "trl")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "launch/models/sokoban_tiny"))
    parser.add_argument("--recording", required=True, help="a folder that launch/actors.py --record wrote")
    parser.add_argument("--peers", default="", help="a folder with TRL and what it needs")
    parser.add_argument("--groups", type=int, default=0, help="use this many groups; 0 = all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=CONTESTANTS, default=CONTESTANTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks = init_ranks("cpu")
    groups = [read(path) for path in files(Path(options.recording))[: options.groups or None]]
    size = len(groups[0].trajectories)
    settings: dict[str, Any] = {"objective": "grpo", "group_size": size, "pg_rho_bar": None}
    settings |= {"lr": LR, "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "max_grad_norm": MAX_NORM}
    config = learner_config(**settings)
    trainer = trainer_of(options.model, config, ranks)
    episodes = make_episodes(groups, trainer.decoder, config.objective)
    steps: dict[str, Callable[[], float]] = {"ours": lambda: trainer.step(groups, 0)["optim/grad_norm"]}
    for name, changes in OURS.items():
        if name in options.only:
            other = trainer_of(options.model, learner_config(**settings, **changes), ranks)
            steps[name] = lambda other=other: other.step(groups, 0)["optim/grad_norm"]
    for name, how in PADDED.items():
        if name in options.only:
            steps[name] = PaddedLoop(options.model, episodes, trainer.decoder, **how).step
    absent = {} if importlib.util.find_spec("trl") else {"trl": "not installed: give --peers"}
    if "trl" in options.only and not absent:
        steps["trl"] = TrlLoop(options.model, episodes, trainer.decoder, size).step
    gc.freeze()  # what has been imported is never garbage, as in a learner's process
    result = {
        "episodes": len(episodes),
        "tokens": sum(e.num_tokens for e in episodes),
        "pictures": sum(len(e.images) for e in episodes),
        "distinct_pictures": len({image.content_hash for e in episodes for image in e.images}),
        "load": os.getloadavg()[0],
        **measure(steps, options.repeats),
        "absent": absent,
    }
    close_ranks()
    print(json.dumps(result))
    return 0


def trainer_of(model: str, config: LearnerConfig, ranks: Ranks) -> Trainer:
    spec = VisionSpec.load(model, min_pixels=1024, max_pixels=1 << 20)
    policy = load_policy(model, spec, config.objective.critic_width)
    parallelize(policy, ranks, config, torch.float32)
    return Trainer(policy, config, ranks)


def measure(steps: dict[str, Callable[[], float]], repeats: int) -> dict[str, object]:
    """Medians of seconds of each contestant, all of them in turns; the first turn warms up."""
    wall: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    norms = {}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            starts = time.perf_counter(), time.process_time()
            norms[name] = round(step(), 5)
            if repeat:
                wall[name].append(time.perf_counter() - starts[0])
                cpu[name].append(time.process_time() - starts[1])
                print(f"{name}: {wall[name][-1]:.2f} s, {cpu[name][-1]:.2f} CPU s", file=sys.stderr, flush=True)
    report: dict[str, object] = {"grad_norm": norms}
    for kind, seconds in (("wall_s", wall), ("cpu_s", cpu)):
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        ours = medians.get("ours", float("nan"))
        report[kind] = {name: round(value, 3) for name, value in medians.items()}
        report[f"{kind} over ours"] = {name: round(value / ours, 2) for name, value in medians.items()}
    return report


if __name__ == "__main__":
    sys.exit(main())
