"""The learner's loop, the same on every rank; rank 0's coordinator also has the ticket server and the run folder.

coordinator.next_groups ─▶ trainer.step ─▶ publisher.publish ─▶ coordinator.record ─▶ saver.save
     (from actors)         (one optimizer    (every K steps,      (acknowledges,        (every M steps)
                            step)             to the engines)      writes metrics)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Protocol

import torch

from learner.checkpoints.contents import contents_of
from learner.checkpoints.restoring import restore
from learner.checkpoints.saver import Saver
from learner.coordinator import Coordinator
from learner.distributed import Ranks, broadcast_flag, close_ranks, init_ranks
from learner.guards.guards import Guards
from learner.metrics.episode_metrics import RunResult, group_metrics, has_result
from learner.plan.fit import check_recipe
from learner.recording.recorded_columns import watch
from learner.setup import build_coordinator, build_publisher, build_trainer, collective_limit_s
from learner.shared_gpu import keep_to_share, learner_bytes
from learner.shutdown import Shutdown, ShutdownRequested
from learner.step_profile import profiled
from learner.step_trace import StepTrace
from learner.tickets.sources import SampleSource
from learner.training.trainer import Trainer
from shared.config.recipe import Recipe
from shared.spans import span
from shared.types import Group, PolicyVersion, Sample

MAX_BAD_STEPS = 5
"""Steps in a row without a finite loss and gradient before the run ends; each is skipped."""


def run(recipe: Recipe, source: SampleSource, held_out: Sequence[Sample], shutdown: Shutdown) -> RunResult | None:
    """Train as the recipe says, until `shutdown` is requested; return the run's summary on rank 0.

    Raise ShutdownRequested after SIGTERM or SIGINT; ValueError for errors that the user can correct (model, port,
    checkpoint), for an engine with wrong weights, and if the last checkpoint could not be written; TimeoutError if
    actors or engines do not come.
    """
    config = recipe.learner
    torch.set_num_threads(config.threads)
    ranks = init_ranks(config.device, timeout_s=collective_limit_s(recipe), parallel=config.parallel)
    # Callbacks run last to first, so the engines leave the weight group before the actors, which run them, are told to
    # stop.
    with ExitStack() as stack:
        stack.callback(close_ranks)
        check_recipe(recipe, ranks.size, learner_bytes(recipe, ranks))
        keep_to_share(recipe, ranks)
        trainer = build_trainer(recipe, ranks)
        folder = Path(recipe.run.dir) / recipe.run.name / "checkpoints"
        contents = contents_of(recipe, source, held_out) if ranks.is_main else {}
        restored = restore(folder, trainer, ranks, recipe, contents)
        check_unfinished(recipe, trainer)
        coordinator = build_coordinator(recipe, source, held_out, trainer, restored, shutdown.requested)
        stack.push(lambda failure, *_: coordinator.close(shutdown.stop_message(complete=failure is None)))
        publisher = build_publisher(
            recipe, trainer, coordinator.process_id, coordinator.refuse_engine, coordinator.is_process
        )
        stack.callback(publisher.close)
        saver = Saver(folder, trainer, ranks, recipe, contents=contents)
        stack.callback(saver.close)
        shutdown.watch_progress(saver.written)
        with shutdown:
            try:
                result = loop(recipe, coordinator, trainer, publisher, saver, restored.version)
            except ShutdownRequested as left:
                raise ShutdownRequested(f"{left}; {saver.how_to_go_on()}") from None
            saver.wait()
        saver.check_last_written()
    return result


def check_unfinished(recipe: Recipe, trainer: Trainer) -> None:
    """Raise ValueError, on all ranks, if the run has made all its steps and has the result of its last evaluation."""
    folder, total = Path(recipe.run.dir) / recipe.run.name, recipe.learner.total_steps
    has_all = trainer.num_steps >= total
    if has_all and broadcast_flag(has_result(folder, trainer.num_steps), trainer.ranks):
        raise ValueError(
            f"run {recipe.run.name!r} has its {total} steps; choose another --run.name, "
            "raise --learner.total_steps or start anew with --learner.resume never"
        )


class WeightPublisher(Protocol):
    """Sends the policy's weights to engines, if there are any. Its methods are collectives, except `watch`."""

    ranks: Ranks

    def publish(self, version: PolicyVersion, engines: Collection[str], *, wait: bool = True) -> dict[str, float]:
        """Send the weights to the engines as `version`; return metrics. `wait`: return only after the engines have been
        verified."""
        ...

    def verification_metrics(self) -> dict[str, float]:
        """Return the metrics of the last publication's verification if nobody has waited for it yet."""
        ...

    def watch(
        self, engines: Callable[[], Collection[str]], version: PolicyVersion, *, fresh: bool, until: float
    ) -> AbstractContextManager[PublicationWatch]:
        """Return a context that watches for engines that come back without the weights of `version`."""
        ...


class PublicationWatch(Protocol):
    """Tells whether weights must be published before the next groups can come."""

    publication_due: Event


def loop(
    recipe: Recipe,
    coordinator: Coordinator,
    trainer: Trainer,
    publisher: WeightPublisher,
    saver: Saver,
    version: PolicyVersion,
) -> RunResult | None:
    """Train until the run is complete; return its summary on rank 0. Each pass makes one optimizer step on
    `groups_per_step` groups.

    A pass waits for groups from the actors (up to `wait_timeout_s`) and, before a publication, for open evaluations, so
    that each result belongs to one version. Engines are verified during the next step; only the first and the last
    publication wait for the verification. Training on recorded groups needs no engine and publishes nothing.
    """
    folder = Path(recipe.run.dir) / recipe.run.name
    engines = coordinator.wait_for_engines()
    if coordinator.shutdown_requested():
        raise ShutdownRequested(f"asked to shut down after step {trainer.num_steps}, before an engine had weights")
    publisher.publish(version, engines)
    with StepTrace(recipe, trainer.ranks, coordinator, trainer.num_steps) as trace:
        coordinator.open(version)
        due = begin(recipe, coordinator, trainer, saver, version)
        guards = Guards(recipe, trainer, saver, recorded=coordinator.is_recorded)
        while not due.last:
            trace.before(trainer.num_steps + 1)
            with span("wait for groups"):
                groups = next_groups(recipe, coordinator, trainer, publisher, version)
            if not groups:
                saver.save(version, coordinator.state())
                saver.wait()
                raise ShutdownRequested(f"asked to shut down after step {trainer.num_steps}")
            recorded = watch(groups, trainer.num_steps + 1, recipe.record)
            trained = coordinator.policy_version(groups, version)
            trainer.start_critic(groups)
            note = " ".join((str(trainer.num_steps + 1), *(group.ticket_id for group in groups)))
            with span("step", note=note), profiled(folder, trainer.num_steps + 1, trainer.ranks):
                metrics = trainer.step(groups, trained, recorded) | group_metrics(groups, trained, recipe.learner)
                metrics |= publisher.verification_metrics()
            step = trainer.num_steps
            coordinator.keep(step, version, groups, recorded)
            check_step(trainer, coordinator, groups)
            metrics |= guards.after_step(groups, metrics)
            due = Due.after(step, recipe, last=step == recipe.learner.total_steps or coordinator.out_of_time())
            if due.publish and not coordinator.is_recorded:
                with span("wait for evaluations"):
                    finished = coordinator.finish_evaluations()
                if not finished:
                    leave_candidate(step, saver)
                saver.best.result(coordinator.value_of(f"step_{saver.best.candidate}"))
                version += 1
                with span("publish", note=f"version {version}"):
                    metrics |= publisher.publish(version, coordinator.engines(), wait=due.last)
                coordinator.set_version(version)
            with span("record"):
                coordinator.record(step, version, groups, metrics | saver.metrics())
            if due.evaluate:
                coordinator.evaluate(f"step_{step}")
            if due.checkpoint:
                if due.candidate:
                    saver.best.await_result(step)
                with span("checkpoint"):
                    saver.save(version, coordinator.state())
            trace.after(step, groups, last=due.last)
    coordinator.evaluate("after", greedy=recipe.eval.greedy)
    if not coordinator.finish_evaluations():
        saver.wait()
        raise ShutdownRequested(f"asked to shut down after step {trainer.num_steps}, before it was evaluated")
    saver.result_of_last(coordinator.value_of("after"))
    return coordinator.result(trainer.num_steps, version)


def leave_candidate(step: int, saver: Saver) -> None:
    """Raise ShutdownRequested if the shutdown interrupted the evaluation of a checkpoint that may be the best: the
    resumed run continues from that checkpoint and evaluates it again."""
    saver.wait()  # afterwards all ranks know whether the checkpoint is written
    if saver.best.candidate >= 0:
        words = f"asked to shut down after step {step}, and step {saver.best.candidate} is not evaluated"
        raise ShutdownRequested(f"{words}; the run goes on from there")


def begin(recipe: Recipe, coordinator: Coordinator, trainer: Trainer, saver: Saver, version: PolicyVersion) -> Due:
    """Do the work before the next step; return what is due, and whether no step is left.

    A new run is evaluated before its first step. A resumed run repeats the evaluation whose result was awaited when its
    checkpoint was written.
    """
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
        saver.best.await_result(step)
    return due


@dataclass(frozen=True, slots=True)
class Due:
    """The actions that follow a step."""

    publish: bool = False
    evaluate: bool = False
    checkpoint: bool = False
    # The checkpoint may turn out to be the best: an evaluation of it follows.
    candidate: bool = False
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
    """Tell whether something that happens every `every` steps happens after `step`; never if `every` is 0."""
    return every > 0 and step % every == 0


def next_groups(
    recipe: Recipe, coordinator: Coordinator, trainer: Trainer, publisher: WeightPublisher, version: PolicyVersion
) -> Sequence[Group]:
    """Return the groups of the next step; none if rank 0 was asked to shut down.

    If an engine comes back meanwhile, it gets the weights of `version` again. If the weights have changed since that
    version was published (`fresh` is false), the engine has to wait for the next publication, unless no engine holds
    `version` any more. Then the current weights are published under its name, and their tokens are younger than their
    version says.

    Raise TimeoutError after `wait_timeout_s`, however often engines come back: at first the coordinator's, which names
    what it waited for; after the first new publication, one on all ranks.
    """
    fresh = trainer.num_steps % recipe.learner.publish.every == 0
    limit_s, until = recipe.learner.wait_timeout_s, math.inf
    deadline = time.monotonic() + limit_s
    while True:
        with publisher.watch(coordinator.engines, version, fresh=fresh, until=until) as watch:
            groups = coordinator.next_groups(watch.publication_due)
        if groups or coordinator.shutdown_requested():
            return groups
        if broadcast_flag(time.monotonic() >= deadline, publisher.ranks):
            raise TimeoutError(
                f"no batch of groups within learner.wait_timeout_s = {limit_s:g} s, in which engines came back and "
                f"version {version} went out again; the log of rank 0 names them: see why they end, then resume"
            )
        publisher.publish(version, coordinator.engines())
        until = deadline


def check_step(trainer: Trainer, coordinator: Coordinator, groups: Sequence[Group]) -> None:
    """Save the batch of a step without a finite loss and gradient. Raise ValueError after `MAX_BAD_STEPS` such steps in
    a row."""
    bad, limit = trainer.guard.bad_steps, MAX_BAD_STEPS
    if bad:
        coordinator.keep_bad_batch(trainer.num_steps, groups)
    if bad >= limit:
        raise ValueError(
            f"{bad} steps in a row, the last of them "
            f"{trainer.num_steps}, had a loss or gradient that is not finite; their batches are in the run's folder "
            "bad_steps/; lower learner.optimizer.lr or resume from an earlier checkpoint"
        )
