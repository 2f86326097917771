"""The work of the doctor's trial: each stage is a method, called on all ranks, that returns its result in words."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import uuid
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from actor.engine_pool import EnginePool
from actor.render import Renderer
from actor.worker import make_players
from launch.actors import check
from launch.engines.engine_supervisor import EngineServer, wait_until_serving
from launch.processes.children import stop_all
from launch.task_samples import training_samples
from learner.batch.delivery import broadcast_groups
from learner.checkpoints.restoring import load_checkpoint
from learner.checkpoints.saver import Saver
from learner.checkpoints.trainer_state import trained
from learner.distributed import close_ranks, init_ranks, own_part
from learner.model import attention_backend
from learner.model.lora_adapters import is_factor
from learner.plan.fit import check_recipe
from learner.setup import build_publisher, build_trainer
from learner.shared_gpu import keep_to_share, learner_bytes
from learner.weights.canary import CEILING, Canary, gap
from learner.weights.publisher import Publisher
from shared.config.recipe import Recipe
from shared.config.tasks import tasks_of
from shared.engine.engine_api import EngineClient
from shared.keys import read_api_key
from shared.log import get_logger
from shared.types import Group, Sampling, Ticket, Trajectory

PATIENCE_S = 120.0  # time limit of a collective
# Weights are multiplied by this: an engine that has not received them gives a different answer.
MOVED = 1.1
SEEN = 0.1  # a publication must reduce the gap to less than this share


class LastWarning(logging.Handler):
    """Keeps the last warning of a logger: parts of the learner log a failure and go on instead of raising."""

    def __init__(self, logger: str) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        get_logger(logger).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


class Trial:
    """The trial on one rank. As a context manager it starts the engine on rank 0, and ends everything that it has
    started."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self._key = recipe, read_api_key(recipe.engine.api_key_file)
        self._engine: EngineServer | None = None
        self._publisher: Publisher | None = None
        if os.environ.get("RANK", "0") == "0":
            self._facts, (spec,) = check(recipe)
            self._engine = EngineServer(spec, recipe.engine)
        self._warnings = LastWarning("publisher")
        self._errors = LastWarning("learner")
        self._groups: list[Group] = []

    def __enter__(self) -> Trial:
        if self._engine is not None:
            self._engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._engine is not None and self._engine.child is not None:
            stop_all([self._engine.child])
        close_ranks()

    @property
    def _urls(self) -> tuple[str, ...]:
        return (self._engine.spec.url,) if self._engine is not None else ()

    # ------------------------------------------------------------------ the stages

    def load(self) -> str:
        """Join the learner's ranks and load the model in the recipe's dtype."""
        recipe, learner = self.recipe, self.recipe.learner
        torch.set_num_threads(learner.threads)
        patience_s = PATIENCE_S + recipe.engine.start_limit_s  # others wait while rank 0 waits for the engine
        self.ranks = init_ranks(learner.device, timeout_s=patience_s, parallel=learner.parallel)
        check_recipe(recipe, self.ranks.size, learner_bytes(recipe, self.ranks))
        keep_to_share(recipe, self.ranks)
        self.trainer = build_trainer(recipe, self.ranks)
        self._canary = Canary(self.trainer.policy, recipe.model.path, self.ranks.device)
        kernel = attention_backend.activate(learner.parallel.attention, recipe.model.dtype, self.ranks.device)
        count = sum(p.numel() for p in self.trainer.policy.parameters())
        words = f"{self.ranks.size} rank{'s' * (self.ranks.size > 1)} on {learner.device}"
        sizes = {name: getattr(learner.parallel, name) for name in ("context", "expert")}
        mesh = " and ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        shared = f"; {mesh} compute what each rank does alone" if mesh else ""  # checked by `build_trainer`
        return f"{words}, {count / 1e6:.1f} M parameters, {recipe.model.dtype}, attention {kernel}{shared}"

    def serve(self) -> str:
        """Check that the engine answers, counts an image's tokens as the learner does, and computes the same from the
        model's files (tensors missing there would be initialised at random, and differ)."""
        engine = self.recipe.engine
        if self._engine is not None:
            wait_until_serving(self._urls, [self._engine], self._facts, engine.start_limit_s, self._key)
        off, limit = self._gap(), CEILING[self.trainer.policy.dtype]
        if self.ranks.is_main and off > limit:
            raise ValueError(
                f"of the same files in {self.recipe.model.path}, engine and learner do not compute the same: the "
                f"logprobs after an image are {off:.2g} apart, above {limit:g}; is a tensor missing there?"
            )
        return f"{engine.kind} on {engine.device} answers an image, with logprobs {off:.2g} off the learner's"

    def publish_moved(self) -> str:
        """Publish changed weights, and check by the engine's answer that they have arrived."""
        with torch.no_grad():
            for name, parameter in self.trainer.policy.vlm.named_parameters():
                if self.trainer.policy.adapters is None:
                    parameter.mul_(MOVED)
                elif is_factor(name):  # B is initially zero, so add instead
                    parameter.add_(MOVED - 1)
        self._publisher = build_publisher(self.recipe, self.trainer, "doctor")
        before = self._gap()
        words, after = self._publish(0)
        if self.ranks.is_main and not after < SEEN * before:
            raise ValueError(
                f"the weights were sent, but the engine's answer has hardly changed: its canary is {after:.2g} off the "
                f"learner's, {before:.2g} before"
            )
        return f"{words}; before, the canary was {before:.2g} off"

    def play(self) -> str:
        """Play episodes of the task, with images, as an actor does."""
        own = asyncio.run(self._play()) if self.ranks.is_main else None
        self._groups = list(broadcast_groups(own, self.ranks))
        episodes = [episode for group in self._groups for episode in group.trajectories]
        tokens = sum(int(episode.loss_mask.sum()) for episode in episodes)
        images = sum(len(episode.images) for episode in episodes)
        modules = ", ".join(task.recipe.env.module for task in tasks_of(self.recipe))
        return f"{len(episodes)} of {modules}: {images} images, {tokens} sampled tokens with their version"

    def step(self) -> str:
        """Make one optimizer step."""
        recipe = self.recipe
        metrics = self.trainer.step(self._groups, 0)
        norm, off = metrics["optim/grad_norm"], metrics.get("behaviour/engine_gap", math.nan)
        if metrics["optim/bad_steps_in_a_row"]:
            raise ValueError(f"the step's loss or gradient is not finite (gradient norm {norm})")
        words = f"{recipe.learner.objective.name} with {recipe.learner.optimizer.name} in {recipe.model.dtype}"
        return f"{words}: gradient norm {norm:.2g}, logprobs {off:.2g} off the engine's"

    def publish_trained(self) -> str:
        """Publish the trained weights over the existing group."""
        return self._publish(1)[0]

    def save_and_read(self) -> str:
        """Write a checkpoint of parameters and optimizer, set the trained parameters to zero, read the checkpoint, and
        compare. With adapters the checkpoint holds only these."""
        folder = Path(self.recipe.run.dir) / self.recipe.run.name / "checkpoints"
        folder.parent.mkdir(parents=True, exist_ok=True)  # a run's learner has its folder
        saver = Saver(folder, self.trainer, self.ranks, self.recipe, PATIENCE_S)
        before = self._sums()
        path = saver.save(1, {})
        saver.wait()
        saver.close()
        if saver.num_failed:
            raise ValueError(self._errors.text)
        policy = self.trainer.policy
        with torch.no_grad():
            for parameter in trained(policy, dict(policy.named_parameters())).values():
                parameter.zero_()
        load_checkpoint(path, self.trainer, self.ranks, self.recipe)
        if not torch.equal(before, self._sums()):
            raise ValueError(f"what is read from {path} is not what was written")
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return f"{size / 1e6:.1f} MB written, read back over zeros, and equal"

    # ------------------------------------------------------------------ what they are made of

    def _publish(self, version: int) -> tuple[str, float]:
        assert self._publisher is not None
        metrics = self._publisher.publish(version, self._urls)
        if self.ranks.is_main and not metrics["publish/engines"]:
            raise ValueError(self._warnings.text or "the engine did not take the weights")
        off, unproven = metrics.get("publish/canary_gap", math.nan), metrics.get("publish/unproven", 0.0)
        if unproven:
            raise ValueError(self._warnings.text)
        skipped = int(metrics.get("publish/checksum_skipped", 0.0))
        sums = f"no checksums of {skipped} parameters" if skipped else "checksums equal"
        words = f"{metrics['publish/bytes'] / 1e6:.1f} MB over {self._publisher.settings.backend}"
        return f"{words} in {metrics['publish/seconds']:.2f} s, canary {off:.2g} off, {sums}", off

    def _gap(self) -> float:
        """Return the gap between the engine's answer to the canary and the learner's; infinity on other ranks than
        0."""
        canary, own = self._canary, self._canary.expected_logprobs()
        if not self.ranks.is_main:
            return math.inf

        async def ask() -> list[float]:
            request = (canary.token_ids, canary.images, canary.watched, self.trainer.policy.banned_ids)
            async with EngineClient(self._urls[0], api_key=self._key) as client:
                return (await client.next_logprobs(*request, uuid.uuid4().hex, PATIENCE_S))[0]

        return gap(own, asyncio.run(ask()))

    async def _play(self) -> list[Group]:
        recipe = self.recipe
        tokenizer = PreTrainedTokenizerFast.from_pretrained(recipe.model.path)
        client = EngineClient(self._urls[0], timeout_s=PATIENCE_S, api_key=self._key)
        engines = EnginePool([client], turn_tries=1)
        players, processes = make_players(recipe, Renderer(tokenizer, self.trainer.policy.spec), engines)
        source, size = training_samples(recipe), recipe.learner.group_size
        sampling = Sampling(recipe.sampling.temperature, 1.0, -1, recipe.most_turn_tokens)
        groups = []
        try:
            for position in range(recipe.learner.groups_per_step):
                ticket = Ticket(f"doctor-{position}", source.sample(position), size, 0, sampling, PATIENCE_S)
                episodes = await asyncio.gather(*(players.play(ticket, index) for index in range(size)))
                check_played(episodes)
                groups.append(Group(ticket.id, "doctor", tuple(episodes)))
        finally:
            await engines.close()
            for each in processes:
                each.close()
        return groups

    def _sums(self) -> Tensor:
        """Return the sum over this rank's part of each parameter."""
        return torch.stack([own_part(p).detach().double().sum() for p in self.trainer.policy.parameters()])


def check_played(episodes: list[Trajectory]) -> None:
    """Raise ValueError, with the reason, if any of the episodes cannot be trained on."""
    bad = [episode for episode in episodes if not episode.trainable]
    if bad:
        reason = bad[0].error or f"it ended as {bad[0].ending}"
        raise ValueError(f"{len(bad)} of {len(episodes)} episodes cannot be trained on: {reason}")
