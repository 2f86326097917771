"""Training on recorded groups without actors, engines or tickets: the learner's loop with a recording as its source of
groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch
import xxhash

from learner.batch.episodes import check_group
from learner.batch.image_decoder import ImageDecoder
from learner.checkpoints.contents import contents_of
from learner.checkpoints.restoring import restore
from learner.checkpoints.saver import Saver
from learner.distributed import Ranks, broadcast_flag, close_ranks, gpu_bytes, init_ranks
from learner.learner_loop import loop
from learner.metrics.episode_metrics import RunResult, rollout_metrics
from learner.metrics.metric_writer import MetricLogger
from learner.metrics.token_metrics import unused_names
from learner.plan.fit import check_recipe
from learner.recording.recorded_columns import RecordedColumns
from learner.setup import build_trainer
from learner.shutdown import Shutdown, ShutdownRequested
from shared.config.recipe import Recipe
from shared.metrics import ReportedMetrics
from shared.recordings.group_files import files, read
from shared.types import Group, PolicyVersion, Stop

TIMEOUT_S = 600.0  # time limit of a collective; short, since every rank reads its groups from the disk


def run_recorded(recipe: Recipe, recording: Path, shutdown: Shutdown, *, shuffled: bool = False) -> dict[str, float]:
    """Train on the groups of `recording` over and over, in their order or, if `shuffled`, each time in another one that
    `run.seed` determines; return the metrics of the last step. Every rank reads the folder.

    Raise ValueError if the folder has no groups, a group is invalid, or the recipe's run would refuse it. Raise
    ShutdownRequested after SIGTERM or SIGINT, when the checkpoint is written.
    """
    config = recipe.learner
    paths = files(recording)
    if not paths:
        raise ValueError(
            f"--from-recording {recording} holds no recorded groups; make some with launch/actors.py --record"
        )
    torch.set_num_threads(config.threads)
    ranks = init_ranks(config.device, timeout_s=TIMEOUT_S, parallel=config.parallel)
    with ExitStack() as stack:
        stack.callback(close_ranks)
        check_recipe(recipe, ranks.size, gpu_bytes(ranks))
        trainer = build_trainer(recipe, ranks)
        run_dir = Path(recipe.run.dir) / recipe.run.name
        contents = contents_of(recipe) | {"recorded groups": groups_digest(paths)} if ranks.is_main else {}
        restore(run_dir / "checkpoints", trainer, ranks, recipe, contents)
        saver = Saver(run_dir / "checkpoints", trainer, ranks, recipe, contents=contents)
        stack.callback(saver.close)
        order = recipe.run.seed if shuffled else None
        groups = endless(paths, trainer.num_steps * config.groups_per_step, order)
        metrics = MetricLogger(run_dir, steps_done=trainer.num_steps) if ranks.is_main else None
        coordinator = RecordedCoordinator(
            ranks,
            groups,
            config.groups_per_step,
            trainer.decoder,
            shutdown.requested,
            metrics,
            str(recording),
            unused_names(config.objective),
        )
        stack.callback(coordinator.close, None)
        shutdown.watch_progress(saver.written)
        with shutdown:
            try:
                loop(without_engines(recipe), coordinator, trainer, NoEngines(ranks), saver, version=0)
            except ShutdownRequested as left:
                raise ShutdownRequested(f"{left}; {saver.how_to_go_on()}") from None
            saver.wait()
        saver.check_last_written()
    return coordinator.values


def without_engines(recipe: Recipe) -> Recipe:
    """Return the recipe without evaluations and recordings, which need engines or tickets."""
    evaluation = recipe.eval.model_copy(update={"before": False, "greedy": False, "every_steps": 0, "best": ""})
    recording = recipe.record.model_copy(update={"every": 0})
    return recipe.model_copy(update={"eval": evaluation, "record": recording})


class NoEngines:
    """The publisher of a run without engines: publishes nothing."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.publication_due = Event()  # never set

    def publish(self, version: PolicyVersion, engines: Collection[str], *, wait: bool = True) -> dict[str, float]:
        return {}

    def verification_metrics(self) -> dict[str, float]:
        return {}

    @contextmanager
    def watch(
        self, engines: Callable[[], Collection[str]], version: PolicyVersion, *, fresh: bool, until: float
    ) -> Iterator[NoEngines]:
        yield self


@dataclass(slots=True)
class RecordedCoordinator:
    """The coordinator of a run on recorded groups, on every rank: no engines, no evaluations, metrics only on rank
    0."""

    ranks: Ranks
    groups: Iterator[Group]
    groups_per_step: int
    decoder: ImageDecoder
    shutdown: Event
    metrics: MetricLogger | None
    recording: str
    unused: tuple[str, ...] = ()  # beginnings of the names of metrics that say nothing about the objective
    values: dict[str, float] = field(default_factory=dict)  # metrics of the last step
    reported: ReportedMetrics = field(default_factory=ReportedMetrics)
    process_id: str = ""
    is_recorded: bool = True

    def wait_for_engines(self) -> frozenset[str]:
        return frozenset()

    def engines(self) -> frozenset[str]:
        return frozenset()

    def open(self, version: PolicyVersion) -> None: ...

    def set_version(self, version: PolicyVersion) -> None: ...

    def is_process(self, process: str) -> bool:
        return False

    def refuse_engine(self, url: str, first: PolicyVersion, last: PolicyVersion) -> None: ...

    def next_groups(self, publication_due: Event) -> Sequence[Group]:
        """Return the next groups of the recording. Raise ValueError for a group that no step could train on."""
        if self.shutdown_requested():
            return ()
        groups = list(islice(self.groups, self.groups_per_step))
        for group in groups:
            check_group(group, self.decoder)
        return groups

    def policy_version(self, groups: Sequence[Group], version: PolicyVersion) -> PolicyVersion:
        """Return the newest version in the groups, so that lags are measured within the recording."""
        return max((int(t.policy_versions.max(initial=0)) for group in groups for t in group.trajectories), default=0)

    def shutdown_requested(self) -> bool:
        return broadcast_flag(self.shutdown.is_set(), self.ranks)

    def out_of_time(self) -> bool:
        return False

    def keep(
        self, step: int, version: PolicyVersion, groups: Sequence[Group], recorded: RecordedColumns | None
    ) -> None: ...

    def record(self, step: int, version: PolicyVersion, groups: Sequence[Group], values: dict[str, float]) -> None:
        values = rollout_metrics(groups, self.reported) | values
        self.values = {name: value for name, value in values.items() if not name.startswith(self.unused)}
        if self.metrics is not None:
            self.metrics.scalars(step, self.values)

    def keep_bad_batch(self, step: int, groups: Sequence[Group]) -> None:
        """Write nothing: the batch is in the recording."""

    def evaluate(self, name: str, *, greedy: bool = False) -> None: ...

    def finish_evaluations(self) -> bool:
        return True

    def value_of(self, name: str) -> float:
        return float("nan")

    def trace(self, *, new: bool, kept: bool) -> None: ...

    def take_traces(self) -> list[tuple[str, bytes]]:
        return []

    def state(self) -> dict[str, Any]:
        return {"recording": self.recording}

    def result(self, steps: int, version: PolicyVersion) -> RunResult | None:
        return None

    def close(self, message: Stop | None) -> None:
        if self.metrics is not None:
            self.metrics.close()


def endless(paths: list[Path], start: int, seed: int | None = None) -> Iterator[Group]:
    """Yield the groups from the `start`-th on, over and over: in their order or, with a seed, in another one each
    time."""
    count = len(paths)
    for time in itertools.count(start // count):
        order = range(count) if seed is None else np.random.default_rng((seed, time)).permutation(count)
        yield from (read(paths[index]) for index in order[max(0, start - time * count) :])


def groups_digest(paths: list[Path]) -> str:
    """Return the number of recorded groups and a digest of them in their order."""
    digest = xxhash.xxh3_128()
    for path in paths:
        digest.update(path.read_bytes())
    return f"{len(paths)} groups, {digest.hexdigest()[:16]}"
