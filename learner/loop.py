"""The learner's loop, the same on every rank; rank 0's coordinator also has the ticket server and the run folder.

coordinator.next_groups ─▶ trainer.step ─▶ publisher.publish ─▶ coordinator.record ─▶ saver.save
     (from actors)         (one optimizer    (every K steps,      (acknowledges,        (every M steps)
                            step)             to the engines)      writes metrics)
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from learner.checkpoints.restoring import restore
from learner.checkpoints.saver import Saver
from learner.coordinator import Follower
from learner.distributed import broadcast_flag, close_ranks, init_ranks
from learner.guards.guards import Guards
from learner.metrics.episodes import RunResult, has_result
from learner.parallel.one_gpu import keep_to_share, learner_bytes
from learner.plan import check_recipe
from learner.recording.columns import watch
from learner.setup import build_coordinator, build_publisher, build_trainer, collective_limit_s
from learner.shutdown import Shutdown, ShutdownRequested
from learner.tickets.sources import SampleSource
from learner.trainer import Trainer
from learner.weights.publisher import Publisher
from shared.config import Recipe
from shared.types import Group, PolicyVersion, Sample


def run(recipe: Recipe, source: SampleSource, held_out: Sequence[Sample], shutdown: Shutdown) -> RunResult | None:
    """Trains as the recipe says, until `shutdown` is requested. Returns the run's summary on rank 0.

    ShutdownRequested after SIGTERM or SIGINT; ValueError for what the user can mend (model, port, checkpoint) and for
    an engine that holds wrong weights; TimeoutError when actors or engines stay away.
    """
    config = recipe.learner
    torch.set_num_threads(config.threads)
    ranks = init_ranks(config.device, timeout_s=collective_limit_s(recipe), parallel=config.parallel)
    with ExitStack() as stack:  # its callbacks run last to first: the engines leave while the actors still keep them
        stack.callback(close_ranks)
        check_recipe(recipe, ranks.size, learner_bytes(recipe, ranks))
        keep_to_share(recipe, ranks)
        trainer = build_trainer(recipe, ranks)
        folder = Path(recipe.run.dir) / recipe.run.name / "checkpoints"
        restored = restore(folder, trainer, ranks, recipe)
        check_unfinished(recipe, trainer)
        coordinator = build_coordinator(recipe, source, held_out, trainer, restored, shutdown.requested)
        stack.push(lambda failure, *_: coordinator.close(shutdown.farewell(complete=failure is None)))
        publisher = build_publisher(recipe, trainer, coordinator.process_id)
        stack.callback(publisher.close)
        saver = Saver(folder, trainer, ranks, recipe)
        stack.callback(saver.close)
        shutdown.progress = saver.written
        with shutdown:
            result = loop(recipe, coordinator, trainer, publisher, saver, restored.version)
            saver.wait()
    return result


def check_unfinished(recipe: Recipe, trainer: Trainer) -> None:
    """ValueError, on all ranks, for a run that has all its steps and the result of its last evaluation."""
    folder, total = Path(recipe.run.dir) / recipe.run.name, recipe.learner.total_steps
    has_all = trainer.num_steps >= total
    if has_all and broadcast_flag(has_result(folder, trainer.num_steps), trainer.ranks):
        raise ValueError(
            f"run {recipe.run.name!r} has its {total} steps; choose another --run.name, "
            "raise --learner.total_steps or start anew with --learner.resume never"
        )


def loop(
    recipe: Recipe, coordinator: Follower, trainer: Trainer, publisher: Publisher, saver: Saver, version: PolicyVersion
) -> RunResult | None:
    """Each turn consumes `groups_per_step` groups and makes one optimizer step.

    It waits for groups (the actors unblock it, within `wait_timeout_s`) and, before a publication, for open
    evaluations, so that each result belongs to one version. Engines show during the next step what they hold; the first
    and the last publication wait for that.
    """
    engines = coordinator.wait_for_engines()
    if coordinator.shutdown_requested():
        raise ShutdownRequested(f"asked to shut down after step {trainer.num_steps}, before an engine had weights")
    publisher.publish(version, engines)
    coordinator.open(version)
    due, guards = begin(recipe, coordinator, trainer, saver, version), Guards(recipe, trainer, saver)
    while not due.last:
        groups = next_groups(recipe, coordinator, trainer, publisher, version)
        if not groups:
            saver.save(version, coordinator.state())
            saver.wait()
            raise ShutdownRequested(f"asked to shut down after step {trainer.num_steps}")
        watched = watch(groups, trainer.num_steps + 1, recipe.record)
        metrics = trainer.step(groups, version, watched) | publisher.proven()
        step = trainer.num_steps
        coordinator.keep(step, version, groups, watched)
        check_step(trainer, coordinator, groups)
        metrics |= guards.after_step(groups, metrics)
        due = Due.after(step, recipe, last=step == recipe.learner.total_steps or coordinator.out_of_time())
        if due.publish:
            if not coordinator.finish_evaluations():
                leave_candidate(step, saver)
            saver.best.result(coordinator.value_of(f"step_{saver.best.candidate}"))
            version += 1
            metrics |= publisher.publish(version, coordinator.engines(), wait=due.last)
            coordinator.set_version(version)
        coordinator.record(step, version, groups, metrics | saver.metrics())
        if due.evaluate:
            coordinator.evaluate(f"step_{step}")
        if due.checkpoint:
            if due.candidate:
                saver.best.candidate = step
            saver.save(version, coordinator.state())
    coordinator.evaluate("after", greedy=recipe.eval.greedy)
    if not coordinator.finish_evaluations():
        saver.wait()
        raise ShutdownRequested(f"asked to shut down after step {trainer.num_steps}, before it was evaluated")
    saver.result_of_last(coordinator.value_of("after"))
    return coordinator.result(trainer.num_steps, version)


def leave_candidate(step: int, saver: Saver) -> None:
    """The run is to end, and has cut evaluations off. ShutdownRequested if one was that of a checkpoint that may be the
    best: the run goes on from there, and makes it again."""
    saver.wait()  # after which all ranks know whether it is written
    if saver.best.candidate >= 0:
        words = f"asked to shut down after step {step}, and step {saver.best.candidate} is not evaluated"
        raise ShutdownRequested(f"{words}; the run goes on from there")


def begin(recipe: Recipe, coordinator: Follower, trainer: Trainer, saver: Saver, version: PolicyVersion) -> Due:
    """What comes before the next step, and whether there is none: a run is evaluated before its first; one that goes on
    makes the evaluation again whose result was awaited when its checkpoint was made."""
    step = trainer.num_steps
    if not step:
        if recipe.eval.before:
            coordinator.evaluate("before", greedy=recipe.eval.greedy)
        if recipe.learner.guard.on_entropy == "rewind":
            saver.save(version, coordinator.state())
        return Due()
    due = Due.after(step, recipe, last=step >= recipe.learner.total_steps)
    if due.evaluate:
        coordinator.evaluate(f"step_{step}")
    if due.candidate:
        saver.best.candidate = step
    return due


@dataclass(frozen=True, slots=True)
class Due:
    """What follows a step."""

    publish: bool = False
    evaluate: bool = False
    checkpoint: bool = False
    candidate: bool = False  # the checkpoint may turn out to be the best: an evaluation of it follows
    last: bool = False

    @staticmethod
    def after(step: int, recipe: Recipe, *, last: bool) -> Due:
        learner, evaluation = recipe.learner, recipe.eval
        evaluate = is_due(evaluation.every_steps, step) and not last
        candidate = bool(evaluation.best) and (evaluate or last)
        return Due(
            publish=last or is_due(learner.publish.every, step),
            evaluate=evaluate,
            checkpoint=last or candidate or is_due(learner.checkpoint.every, step),
            candidate=candidate,
            last=last,
        )


def is_due(every: int, step: int) -> bool:
    """Whether something happens after `step` that happens every so many steps; never if `every` is 0."""
    return every > 0 and step % every == 0


def next_groups(
    recipe: Recipe, coordinator: Follower, trainer: Trainer, publisher: Publisher, version: PolicyVersion
) -> Sequence[Group]:
    """The groups of the next step; none when rank 0 was asked to shut down.

    An engine that comes back meanwhile is given `version` again. Where the weights have moved on since (they are not
    `fresh`), that waits for the next publication, unless no engine is left that holds `version`: then the current
    weights go out under its name, which makes their tokens younger than they say.

    TimeoutError after `wait_timeout_s`, however often engines come back: the coordinator's before any has, which says
    what it waited for; then one on all ranks.
    """
    fresh = trainer.num_steps % recipe.learner.publish.every == 0
    limit_s, until = recipe.learner.wait_timeout_s, math.inf
    deadline = time.monotonic() + limit_s
    while True:
        with publisher.watch(coordinator.engines, version, fresh=fresh, until=until) as watch:
            groups = coordinator.next_groups(watch.found)
        if groups or coordinator.shutdown_requested():
            return groups
        if broadcast_flag(time.monotonic() >= deadline, publisher.ranks):
            raise TimeoutError(
                f"no batch of groups within learner.wait_timeout_s = {limit_s:g} s, in which engines came back and "
                f"version {version} went out again; the log of rank 0 names them: see why they end, then resume"
            )
        publisher.publish(version, coordinator.engines())
        until = deadline


def check_step(trainer: Trainer, coordinator: Follower, groups: Sequence[Group]) -> None:
    """Keeps the batch of a step without a finite loss and gradient; ValueError after too many in a row."""
    bad, limit = trainer.guard.bad_steps, trainer.config.optimizer.max_bad_steps
    if bad:
        coordinator.keep_bad_batch(trainer.num_steps, groups)
    if bad >= limit:
        raise ValueError(
            f"{bad} steps in a row (learner.optimizer.max_bad_steps = {limit}), the last of them "
            f"{trainer.num_steps}, had a loss or gradient that is not finite; their batches are in the run's folder "
            "bad_steps/; lower learner.optimizer.lr or resume from an earlier checkpoint"
        )
