"""One optimizer step of the learner against padded, unpacked loops of transformers.

    python tests/bench/learner.py [--model launch/models/sokoban_tiny] [--episodes 64] [--repeats 5]

Both train the same float32 model on the same picture episodes with group-relative advantages, interleaved in one run on
one thread; the medians are compared. The last line is one JSON object. The padded loop uses SDPA attention and computes
the logits of the sampled span alone; it takes batches in the order of arrival ("padded") or, which saves most of the
padding, sorted by length ("sorted").
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
import torch
from episodes import random_groups
from transformers import AutoModelForImageTextToText

from learner import dist
from learner.batch import Episode, make_episodes
from learner.model import load_policy
from learner.step import Trainer, episode_settings
from shared.config import LearnerConfig
from shared.recording import recorded
from shared.types import Group
from shared.vision import VisionSpec, pixel_values

BATCH = 8


class PaddedLoop:
    """Right-padded batches through transformers' own forward, each picture of each episode encoded anew."""

    def __init__(self, path: str, trainer: Trainer, *, by_length: bool) -> None:
        self.by_length = by_length
        self.model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.pictures, self.config = trainer.pictures, trainer.config

    def step(self, groups: list[Group]) -> float:
        episodes = make_episodes(groups, self.pictures, episode_settings(self.config))
        if self.by_length:
            episodes.sort(key=lambda e: e.num_tokens)
        num_tokens = sum(len(e.targets) for e in episodes)
        total = 0.0
        self.optimizer.zero_grad()
        for start in range(0, len(episodes), BATCH):
            loss = self._loss(episodes[start : start + BATCH]) / num_tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return total

    def _loss(self, batch: list[Episode]) -> torch.Tensor:
        spec, longest = self.pictures.spec, max(e.num_tokens for e in batch)
        ids, mask = np.zeros((2, len(batch), longest), dtype=np.int64)
        for row, e in enumerate(batch):
            ids[row, : e.num_tokens], mask[row, : e.num_tokens] = e.input_ids, 1
        images = [self.pictures.get(image) for e in batch for image in e.images]
        logits = self.model(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            mm_token_type_ids=torch.from_numpy((ids == spec.image_token_id).astype(np.int64)),
            pixel_values=torch.from_numpy(np.concatenate([pixel_values(p.patches, spec) for p in images])),
            image_grid_thw=torch.tensor([p.grid for p in images]),
            logits_to_keep=longest - min(int(e.targets[0]) for e in batch) + 1,
        ).logits
        offset = longest - logits.shape[1]
        loss = torch.zeros(())
        for row, e in enumerate(batch):
            places = torch.from_numpy(e.targets)
            rows = logits[row, places - 1 - offset].log_softmax(-1)
            logprobs = rows.gather(1, torch.from_numpy(e.input_ids[e.targets])[:, None])[:, 0]
            ratio = (logprobs - torch.from_numpy(e.behaviour_logprobs)).exp()
            low, high = self.config.clip_low, self.config.clip_high
            loss = loss - torch.minimum(ratio * e.advantage, ratio.clamp(1 - low, 1 + high) * e.advantage).sum()
        return loss


def episodes_of(spec: VisionSpec, count: int, recording: str) -> list[Group]:
    """Recorded groups, or drawn ones: groups of 4, 1 to 8 turns of one picture each."""
    if recording:
        return list(recorded(Path(recording)))
    sizes = {"turn_tokens": (6, 20), "prompt_tokens": 12, "sides": (192,)}
    return [random_groups(spec, 1, group_size=4, seed=g, turns=1 + g % 8, **sizes)[0] for g in range(count // 4)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "launch/models/sokoban_tiny"))
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--recording", default="", help="a folder that launch/actors.py --record wrote")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks = dist.init("cpu")
    spec = VisionSpec.load(options.model, min_pixels=1024, max_pixels=1 << 20)
    config = LearnerConfig(objective="grpo", group_size=4, pg_rho_bar=None, lr=1e-6)
    trainer = Trainer(load_policy(options.model, spec), config, ranks)
    groups = episodes_of(spec, options.episodes, options.recording)
    loops = {name: PaddedLoop(options.model, trainer, by_length=name == "sorted") for name in ("padded", "sorted")}
    steps: dict[str, Callable[[], object]] = {"packed": lambda: trainer.step(groups, 0)}
    steps |= {name: partial(loop.step, groups) for name, loop in loops.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(options.repeats + 1):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if repeat:  # the first warms up
                seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    tokens = trainer.step(groups, 0)["batch/tokens"]
    result = {"episodes": sum(len(g.trajectories) for g in groups), "tokens": tokens, "seconds": medians}
    result |= {f"{name}_over_packed": medians[name] / medians["packed"] for name in loops}
    dist.close()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
