"""From a recipe to the parts of a learner: trainer, publisher, coordinator."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Event

import torch

from learner.batch import is_uninformative
from learner.checkpoints.restoring import Restored
from learner.coordinator import Coordinator, Follower
from learner.distributed import Ranks
from learner.guards.bad_groups import check_group
from learner.lora import files
from learner.lora.attach import attach, initialise
from learner.lora.base import base_hash
from learner.lora.reference import BasePolicy
from learner.model import attention_backend
from learner.model.policy import Policy, empty_policy, load_weights
from learner.model.sharding import parallelize
from learner.parallel.check import check_shared
from learner.recording.recorder import Recorder
from learner.tickets.book import BookSettings
from learner.tickets.server import TicketServer, TicketServerSettings
from learner.tickets.sources import SampleSource
from learner.trainer import Trainer
from learner.weights.publisher import Publisher, PublishSettings
from learner.weights.verify import VerifierSettings, WeightVerifier
from shared.codec import TokenRules
from shared.config import Recipe
from shared.guards.refusals import Refusals
from shared.keys import learner_security, read_api_key
from shared.log import get_logger
from shared.settings.objective import ObjectiveConfig
from shared.transport import SocketSettings
from shared.types import Group, Sample
from shared.vision import VisionSpec
from shared.weights.group import backend_of


def build_trainer(recipe: Recipe, ranks: Ranks) -> Trainer:
    """The policy on its device, sharded where there are several ranks, with its optimizer. ValueError where ranks that
    share microbatches do not compute what one does."""
    attention_backend.activate(recipe.learner.parallel.attention, recipe.model.dtype, ranks.device)
    slow = slow_dtype(recipe.model.dtype, ranks.device)
    if slow and ranks.is_main:
        get_logger("learner").warning("%s", slow)
    torch.manual_seed(recipe.run.seed)
    policy = build_policy(recipe, ranks, recipe.learner.objective.critic_width)
    reference: Policy | BasePolicy | None = None
    if recipe.learner.objective.has_reference:
        reference = BasePolicy(policy) if policy.adapters else build_policy(recipe, ranks).requires_grad_(False)
    trainer = Trainer(policy, recipe.learner, ranks, temperature=recipe.sampling.temperature, reference=reference)
    rejected = Path(recipe.run.dir) / recipe.run.name / "rejected" / f"rank_{ranks.rank}"
    trainer.decoder.refusals = Refusals("an image", get_logger("learner"), rejected)
    if recipe.learner.parallel.check:
        trainer.router.counting = False
        check_shared(policy, ranks, min(recipe.learner.parallel.microbatch_tokens, recipe.model.max_context))
    return trainer


def slow_dtype(dtype: str, device: torch.device) -> str | None:
    """What to tell a user whose products a GPU's fast units cannot compute; None where all is well."""
    if device.type != "cuda" or dtype != "float32":
        return None
    return (
        "model.dtype = float32 on a GPU: its matrix products take about 14 times as long as in bfloat16; "
        "set model.dtype = bfloat16 unless float32 is meant"
    )


def build_policy(recipe: Recipe, ranks: Ranks, critic_width: int = 0) -> Policy:
    """The model of `model.path`, also where a checkpoint is to be resumed from. No rank holds more than its shards."""
    model = recipe.model
    spec = VisionSpec.load(model.path, min_pixels=model.min_pixels, max_pixels=model.max_pixels)
    policy, lora = empty_policy(model.path, spec, critic_width), recipe.learner.lora
    if lora.on:
        policy.adapters = attach(policy.vlm, lora, getattr(torch, model.dtype))
    parallelize(policy, ranks, recipe.learner, getattr(torch, model.dtype))
    load_weights(policy, model.path, ranks.device, offload=recipe.learner.parallel.offload)
    if policy.adapters:
        policy.adapters.base = base_hash(policy.vlm, model.path, (ranks.rank, ranks.size), ranks.on_cpu)
        initialise(policy.adapters, recipe.run.seed)
        if lora.adapter:
            files.load(lora.adapter, policy.adapters)
    return policy


def publish_settings(recipe: Recipe) -> PublishSettings:
    config = recipe.learner.publish
    return PublishSettings(
        backend_of(recipe.learner.device, recipe.engine.device, shared=recipe.engine.shares_gpu),
        config.bucket_bytes,
        config.timeout_s,
        pause_mode=config.pause_mode,
        give_up_s=recipe.learner.wait_timeout_s,
        senders=config.senders,
    )


def collective_limit_s(recipe: Recipe) -> float:
    """Longer than rank 0 may keep the other ranks waiting in a collective: for groups, or for engines at a publication,
    of which one that hangs is left out and must not end them."""
    return max(recipe.learner.wait_timeout_s, publish_settings(recipe).longest_s) + 600


def build_publisher(recipe: Recipe, trainer: Trainer, process_id: str) -> Publisher:
    """With what verifies the engines' weights at a publication, unless the recipe wants none."""
    config, policy, ranks = recipe.learner.publish, trainer.policy, trainer.ranks
    verifier = None
    if config.verify_every:
        limits = VerifierSettings(config.verify_every, config.canary_tolerance)
        verifier = WeightVerifier(policy, recipe.model.path, ranks, limits)
    api_key = read_api_key(recipe.engine.api_key_file) if ranks.is_main else ""
    return Publisher(policy, ranks, publish_settings(recipe), verifier, api_key, process_id)


def build_coordinator(
    recipe: Recipe,
    source: SampleSource,
    held_out: Sequence[Sample],
    trainer: Trainer,
    restored: Restored,
    shutdown: Event,
) -> Follower:
    """On rank 0 the coordinator, whose ticket socket is open at once."""
    ranks, learner, state = trainer.ranks, recipe.learner, restored.coordinator
    if not ranks.is_main:
        return Follower(ranks)
    run_id = str(state.get("run_id") or uuid.uuid4().hex)
    settings = TicketServerSettings(
        learner.bind,
        Path(recipe.run.dir) / recipe.run.name,
        run_id,
        token_rules(trainer),
        learner.actor_timeout_s,
        sockets=SocketSettings(recipe.transport.max_message_bytes, recipe.transport.queue_messages),
        secure=learner_security(recipe.transport, learner.bind),
        check=partial(check_group, decoder=trainer.decoder, max_context=recipe.model.max_context),
        max_failure_share=recipe.env.max_failure_share,
        keep_failed=recipe.record.failures,
    )
    ticket_server = TicketServer(source, BookSettings.of(recipe, refusal(learner.objective)), settings)
    if "tickets" in state:  # training on a recording has none
        ticket_server.load_state(state["tickets"])
    recorder, at = Recorder(recipe, trainer.decoder.spec), (trainer.num_steps, restored.version)
    return Coordinator(recipe, ranks, ticket_server, run_id, held_out, state, shutdown, recorder, at)


def refusal(config: ObjectiveConfig) -> Callable[[Group], str] | None:
    """What names the reason why a group is replaced by a fresh one; None where every group is trained on."""
    if not config.dynamic_sampling:
        return None
    return lambda group: "uninformative" if is_uninformative(group, config) else ""


def token_rules(trainer: Trainer) -> TokenRules:
    config = trainer.policy.vlm.config
    return TokenRules(config.image_token_id, trainer.policy.banned_ids, config.text_config.vocab_size)
