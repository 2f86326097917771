"""Training on recorded groups, without actors, engines or tickets: the same trainer, metrics and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import torch

from learner.checkpoints.restoring import restore
from learner.checkpoints.saver import Saver
from learner.coordinator import Follower
from learner.distributed import close_ranks, gpu_bytes, init_ranks
from learner.guards.bad_groups import check_group
from learner.guards.guards import Guards
from learner.loop import check_step, is_due
from learner.metrics.episodes import rollout_metrics
from learner.metrics.writer import MetricLogger
from learner.plan import check_recipe
from learner.setup import build_trainer
from shared.config import Recipe
from shared.recordings.groups import files, read
from shared.types import Group


def run_recorded(recipe: Recipe, recording: Path) -> dict[str, float]:
    """Trains on the groups of `recording` in their order, again from the first after the last; returns the last
    step's metrics. Every rank reads the folder.

    ValueError: no groups there, one that is none, or what the recipe's run would refuse.
    """
    config = recipe.learner
    paths = files(recording)
    if not paths:
        raise ValueError(
            f"--from-recording {recording} holds no recorded groups; make some with launch/actors.py --record"
        )
    torch.set_num_threads(config.threads)
    ranks = init_ranks(config.device, timeout_s=600, parallel=config.parallel)
    with ExitStack() as stack:
        stack.callback(close_ranks)
        check_recipe(recipe, ranks.size, gpu_bytes(ranks))
        trainer = build_trainer(recipe, ranks)
        run_dir = Path(recipe.run.dir) / recipe.run.name
        restore(run_dir / "checkpoints", trainer, ranks, recipe)
        saver = Saver(run_dir / "checkpoints", trainer, ranks, recipe)
        metrics = MetricLogger(run_dir) if ranks.is_main else None
        if metrics is not None:
            stack.callback(metrics.close)
        groups = endless(paths, trainer.num_steps * config.groups_per_step)
        values, guards = dict[str, float](), Guards(recipe, trainer, saver, recorded=True)
        while trainer.num_steps < config.total_steps:
            batch = list(islice(groups, config.groups_per_step))
            for group in batch:
                check_group(group, trainer.decoder)
            values = rollout_metrics(batch) | trainer.step(batch, newest_version(batch))
            check_step(trainer, Follower(ranks), batch)
            values |= guards.after_step(batch, values)
            if metrics is not None:
                metrics.scalars(trainer.num_steps, values)
            if trainer.num_steps == config.total_steps or is_due(config.checkpoint.every, trainer.num_steps):
                saver.save(0, {"recording": str(recording)})
        saver.wait()
    return values


def endless(paths: list[Path], start: int) -> Iterator[Group]:
    """The groups from the `start`-th on, round and round."""
    while True:
        yield read(paths[start % len(paths)])
        start += 1


def newest_version(groups: list[Group]) -> int:
    """What counts as the policy's version now: lags are those within the recording."""
    return max((int(t.policy_versions.max(initial=0)) for group in groups for t in group.trajectories), default=0)
