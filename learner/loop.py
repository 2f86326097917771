"""The learner: one loop, the same on every rank; rank 0 also has a desk (tickets, metrics) and the publisher's sockets.

    desk.batch ─▶ share ─▶ trainer.step ─▶ every publish_every steps: publisher.publish ─▶ desk.record ─▶ checkpoint

Each turn of the loop consumes `groups_per_step` groups and produces one optimizer step. It waits for groups (the actors
unblock it, within `wait_timeout_s`) and, before a publication, for open evaluations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from learner import distributed
from learner.batch import check_group
from learner.checkpoints import saver as checkpoint
from learner.checkpoints.saver import Saver
from learner.coordinator import Coordinator
from learner.distributed import Ranks
from learner.metrics.episodes import RunResult
from learner.model import attention_backend
from learner.model.policy import Policy, load_policy
from learner.model.sharding import parallelize
from learner.plan import check_recipe
from learner.shutdown import Shutdown, ShutdownRequested
from learner.tickets.sources import SampleSource
from learner.trainer import Trainer
from learner.weights.publisher import Publisher, PublishSettings
from learner.weights.verify import VerifierSettings, WeightVerifier
from shared.codec import TokenRules, decode, frames_of
from shared.config import Recipe
from shared.keys import read_api_key
from shared.learner_config import LearnerConfig
from shared.log import get_logger
from shared.types import Group, Sample
from shared.vision import VisionSpec


def run(recipe: Recipe, source: SampleSource, held_out: Sequence[Sample]) -> RunResult | None:
    """Trains as the recipe says. Returns the run's summary on rank 0.

    Left after SIGTERM or SIGINT; ValueError for what the user can mend (model, port, checkpoint) and for an engine
    that holds wrong weights; TimeoutError when actors or engines stay away.
    """
    config, parallel = recipe.learner, recipe.learner.parallel
    torch.set_num_threads(config.threads)
    shutdown, complete = Shutdown(config.leave_timeout_s), False
    shutdown.guard()
    ranks = distributed.init(config.device, timeout_s=config.wait_timeout_s + 600, shard_size=parallel.shard_size)
    coordinator: Coordinator | None = None
    publisher: Publisher | None = None
    saver: Saver | None = None
    try:
        check_recipe(recipe, ranks.size, distributed.gpu_bytes(ranks))
        trainer = build_trainer(recipe, ranks)
        folder = Path(recipe.run.dir) / recipe.run.name / "checkpoints"
        chosen = checkpoint.choose(folder, config.resume)
        restored = checkpoint.load(chosen, trainer, ranks, recipe) if chosen else None
        if restored and trainer.num_steps >= config.total_steps:
            raise ValueError(
                f"run {recipe.run.name!r} has its {config.total_steps} steps; choose another --run.name, "
                "raise --learner.total_steps or start anew with --learner.resume never"
            )
        if ranks.is_main:
            check = partial(check_group, decoder=trainer.decoder)
            coordinator = Coordinator(
                recipe, source, held_out, token_rules(trainer), check, restored.ticket_server if restored else {}
            )
        verifier = build_verifier(recipe, trainer, ranks)
        api_key = read_api_key(recipe.engine.api_key_file) if ranks.is_main else ""
        publisher = Publisher(trainer.policy, ranks, publish_settings(config), verifier, api_key)
        saver = Saver(folder, trainer, ranks, recipe)
        with shutdown:
            result = loop(
                recipe, ranks, trainer, publisher, saver, coordinator, restored.version if restored else 0, shutdown
            )
            saver.wait()
        complete = True
        return result
    finally:
        if saver is not None:
            saver.close()
        if publisher is not None:
            publisher.close()  # the engines leave while the actors still keep them
        if coordinator is not None:
            coordinator.close(shutdown.farewell(complete=complete))
        distributed.close()


def loop(
    recipe: Recipe,
    ranks: Ranks,
    trainer: Trainer,
    publisher: Publisher,
    saver: Saver,
    coordinator: Coordinator | None,
    version: int,
    shutdown: Shutdown,
) -> RunResult | None:
    config, evaluation = recipe.learner, recipe.eval
    log = get_logger(f"learner[{ranks.rank}]")
    publisher.publish(version, coordinator.wait_for_engines(config.wait_timeout_s) if coordinator else ())
    if coordinator:
        coordinator.open(version)
        if trainer.num_steps == 0:
            coordinator.evaluate("before")
            if evaluation.greedy:
                coordinator.evaluate("greedy_before", greedy=True)
    last = False
    while not last:
        groups = next_groups(
            coordinator, shutdown, ranks, publisher, version, fresh=trainer.num_steps % config.publish.every == 0
        )
        if not groups:  # rank 0 was asked to leave
            saver.save(version, coordinator.state() if coordinator else {})
            saver.wait()
            raise ShutdownRequested(f"asked to leave after step {trainer.num_steps}")
        values = trainer.step(groups, version)
        step = trainer.num_steps
        check_step(trainer, coordinator, groups)
        last = step == config.total_steps or distributed.broadcast_flag(
            bool(coordinator and coordinator.out_of_time()), ranks
        )
        if step % config.publish.every == 0 or last:
            if coordinator:
                coordinator.finish_evaluations(step, shutdown.requested)
                saver.best.result(coordinator.result_of_candidate(saver.best.candidate))
            version += 1
            values |= publisher.publish(version, coordinator.ticket_server.engines() if coordinator else ())
            if coordinator:
                coordinator.ticket_server.set_version(version)
        evaluated = bool(evaluation.every_steps and step % evaluation.every_steps == 0 and not last)
        if coordinator:
            coordinator.record(step, version, groups, values | {"checkpoint/failed": float(saver.num_failed)})
            if evaluated:
                coordinator.evaluate(f"step_{step}")
        due = bool(config.checkpoint.every and step % config.checkpoint.every == 0)
        if last or due or (evaluated and evaluation.best):
            saver.best.candidate = step if (last or evaluated) and evaluation.best else saver.best.candidate
            saver.save(version, coordinator.state() if coordinator else {})
    if not coordinator:
        return None
    coordinator.evaluate("after")
    if evaluation.greedy:
        coordinator.evaluate("greedy_after", greedy=True)
    coordinator.finish_evaluations(trainer.num_steps, shutdown.requested)
    saver.result_of_last(coordinator.result_of_candidate(saver.best.candidate, final=True))
    log.info("%d steps, %d versions", trainer.num_steps, version)
    return coordinator.result(trainer.num_steps, version)


def next_groups(
    coordinator: Coordinator | None,
    shutdown: Shutdown,
    ranks: Ranks,
    publisher: Publisher,
    version: int,
    *,
    fresh: bool,
) -> Sequence[Group]:
    """The groups of the next step, on every rank; none when rank 0 was asked to leave. An engine that comes back
    meanwhile is given `version` again. Where the weights have moved on since (not `fresh`), that waits for the next
    publication, unless no engine is left that holds `version`: then the current weights go out under its name, which
    makes their tokens younger than they say."""
    while True:
        groups: Sequence[Group] | None = None
        if coordinator:
            with publisher.watch(coordinator.ticket_server.engines, version, fresh=fresh) as watch:
                groups = coordinator.batch(shutdown.requested, watch.found)
        groups = broadcast_groups(groups, ranks)
        if groups or distributed.broadcast_flag(shutdown.requested.is_set(), ranks):
            return groups
        publisher.publish(version, coordinator.ticket_server.engines() if coordinator else ())


def check_step(trainer: Trainer, coordinator: Coordinator | None, groups: Sequence[Group]) -> None:
    """Keeps the batch of a step without a finite loss and gradient; ValueError after too many in a row."""
    bad, limit = trainer.num_bad_in_a_row, trainer.config.optimizer.max_bad_steps
    if bad and coordinator:
        coordinator.keep_bad_batch(trainer.num_steps, groups)
    if bad >= limit:
        raise ValueError(
            f"{bad} steps in a row (learner.optimizer.max_bad_steps = {limit}), the last of them "
            f"{trainer.num_steps}, had a loss or gradient that is not finite; their batches are in the run's folder "
            "bad_steps/; lower learner.optimizer.lr or resume from an earlier checkpoint"
        )


def build_trainer(recipe: Recipe, ranks: Ranks) -> Trainer:
    """The policy on its device, sharded where there are several ranks, with its optimizer."""
    attention_backend.activate(recipe.learner.parallel.attention, recipe.model.dtype, ranks.device)
    torch.manual_seed(recipe.run.seed)
    policy = build_policy(recipe, ranks)
    reference = None
    if recipe.learner.objective.kl_coef:
        reference = build_policy(recipe, ranks).requires_grad_(False)
    return Trainer(policy, recipe.learner, ranks, temperature=recipe.sampling.temperature, reference=reference)


def build_policy(recipe: Recipe, ranks: Ranks) -> Policy:
    """The model of `model.path`, also where a checkpoint is to be resumed from."""
    model = recipe.model
    spec = VisionSpec.load(model.path, min_pixels=model.min_pixels, max_pixels=model.max_pixels)
    policy = load_policy(model.path, spec)
    parallelize(policy, ranks, recipe.learner, getattr(torch, model.dtype))
    return policy


def publish_settings(config: LearnerConfig) -> PublishSettings:
    backend = "nccl" if config.device == "cuda" else "gloo"
    return PublishSettings(
        backend,
        config.publish.bucket_bytes,
        config.publish.timeout_s,
        pause_mode=config.publish.pause_mode,
        give_up_s=config.wait_timeout_s,
    )


def build_verifier(recipe: Recipe, trainer: Trainer, ranks: Ranks) -> WeightVerifier | None:
    """What checks the engines' weights at a publication, unless the recipe wants none."""
    config = recipe.learner.publish
    if not config.verify_every:
        return None
    settings = VerifierSettings(config.verify_every, config.canary_tolerance)
    return WeightVerifier(trainer.policy, recipe.model.path, ranks, settings)


def token_rules(trainer: Trainer) -> TokenRules:
    config = trainer.policy.vlm.config
    return TokenRules(config.image_token_id, trainer.policy.banned_ids, config.text_config.vocab_size)


def broadcast_groups(groups: Sequence[Group] | None, ranks: Ranks) -> Sequence[Group]:
    """Rank 0's groups on every rank, as the wire's frames; none = it was asked to leave."""
    if ranks.size == 1:
        assert groups is not None
        return groups
    frames: list[bytes | memoryview] | None = None
    if groups is not None:
        parts = [frames_of(group) for group in groups]
        counts = torch.tensor([len(part) for part in parts], dtype=torch.int64).numpy().tobytes()
        frames = [counts, *(frame for part in parts for frame in part)]
    received = distributed.broadcast_frames(frames, ranks)
    if groups is not None:
        return groups
    if not received[0]:
        return ()
    rest = iter(received[1:])
    sizes = torch.frombuffer(bytearray(received[0]), dtype=torch.int64).tolist()
    decoded = [decode([next(rest) for _ in range(size)]) for size in sizes]
    return [group for group in decoded if isinstance(group, Group)]
