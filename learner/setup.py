"""Construction of a learner's parts from a recipe: trainer, publisher, coordinator."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Event

import torch

from learner.batch.episodes import check_group, is_uninformative
from learner.checkpoints import lora_files
from learner.checkpoints.restoring import Restored
from learner.coordinator import Coordinator, MainCoordinator, RemoteCoordinator
from learner.distributed import Ranks
from learner.mesh_check import check_shared
from learner.model import attention_backend
from learner.model.lora_attach import attach, initialise
from learner.model.lora_base import base_hash
from learner.model.lora_reference import BasePolicy
from learner.model.policy import Policy, empty_policy, load_weights
from learner.model.sharding import parallelize
from learner.recording.recorder import RECORDED_FAILURES, Recorder
from learner.tickets.sources import SampleSource
from learner.tickets.ticket_book import BookSettings
from learner.tickets.ticket_server import TicketServer, TicketServerSettings
from learner.training.trainer import Trainer
from learner.weights.engine_claims import RunIdentity
from learner.weights.publisher import Publisher, PublishSettings
from learner.weights.verify import WeightVerifier
from shared.agreement import settings_of
from shared.config.learner_section import OptimizerConfig
from shared.config.lora_section import LoraConfig
from shared.config.objective_section import ObjectiveConfig
from shared.config.recipe import Recipe
from shared.engine.weight_group_names import backend_of
from shared.keys import learner_keys, read_api_key
from shared.log import get_logger
from shared.types import Group, Sample
from shared.util.refusals import Refusals
from shared.vision import VisionSpec
from shared.wire.codec import TokenRules
from shared.wire.endpoints import EndpointSettings


def build_trainer(recipe: Recipe, ranks: Ranks) -> Trainer:
    """Return the trainer: the policy on its device, sharded if there are several ranks, with its optimizer.

    Raise ValueError if the objective or the optimizer cannot be imported, before a weight is read, and if ranks that
    share microbatches or experts do not compute what one rank does.
    """
    recipe.learner.objective.spec.load_loss()
    recipe.learner.optimizer.spec.load_optimizer()
    attention_backend.activate(recipe.learner.parallel.attention, recipe.model.dtype, ranks.device)
    if why := attention_backend.activate_delta_rule(recipe.model.path, ranks.device):
        get_logger("learner").warning(why)
    slow = slow_dtype(recipe.model.dtype, ranks.device)
    if slow and ranks.is_main:
        get_logger("learner").warning("%s", slow)
    torch.manual_seed(recipe.run.seed)
    policy = build_policy(recipe, ranks, recipe.learner.objective.critic_width)
    reference: Policy | BasePolicy | None = None
    if recipe.learner.objective.has_reference:
        reference = BasePolicy(policy) if policy.adapters else build_policy(recipe, ranks).requires_grad_(False)
    temperature, teacher = recipe.sampling.temperature, build_teacher(recipe, ranks, policy)
    trainer = Trainer(policy, recipe.learner, ranks, temperature=temperature, reference=reference, teacher=teacher)
    rejected = Path(recipe.run.dir) / recipe.run.name / f"rejected_by_rank_{ranks.rank}"
    trainer.decoder.refusals = Refusals("an image", get_logger("learner"), rejected)
    if recipe.learner.parallel.check:
        check_shared(policy, ranks, min(recipe.learner.parallel.microbatch_tokens, recipe.model.max_context))
    return trainer


def slow_dtype(dtype: str, device: torch.device) -> str | None:
    """Return a warning if products in this dtype cannot use the GPU's fast units; None otherwise."""
    if device.type != "cuda" or dtype != "float32":
        return None
    return (
        "model.dtype = float32 on a GPU: its matrix products take about 14 times as long as in bfloat16; "
        "set model.dtype = bfloat16 unless float32 is meant"
    )


def build_policy(recipe: Recipe, ranks: Ranks, critic_width: int = 0) -> Policy:
    """Return the policy with the weights of `model.path`, also if a checkpoint will be loaded afterwards. No rank holds
    more than its shards."""
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
            lora_files.load(lora.adapter, policy.adapters)
    return policy


def build_teacher(recipe: Recipe, ranks: Ranks, policy: Policy) -> Policy | None:
    """Return the frozen teacher, sharded as the policy is, or the policy as its own; None without one."""
    learner, model = recipe.learner, recipe.model
    path = learner.objective.teacher_folder
    if not path:
        return policy if learner.objective.teaches_itself else None
    frozen = OptimizerConfig(name=learner.optimizer.name)  # of the policy's frozen parts it may have fewer
    taught = recipe.model_copy(
        update={
            "model": model.model_copy(update={"path": path}),
            "learner": learner.model_copy(update={"lora": LoraConfig(), "optimizer": frozen}),
        }
    )
    return build_policy(taught, ranks).requires_grad_(False)


def publish_settings(recipe: Recipe) -> PublishSettings:
    return PublishSettings(
        config=recipe.learner.publish,
        backend=backend_of(recipe.learner.device, recipe.engine.device, shared=recipe.engine.shares_gpu),
        give_up_s=recipe.learner.wait_timeout_s,
    )


def collective_limit_s(recipe: Recipe) -> float:
    """Return a time limit in seconds for collectives, longer than rank 0 can keep the other ranks waiting.

    Rank 0 waits for groups, and for engines at a publication; an engine that hangs is left out and must not end the
    run.
    """
    return max(recipe.learner.wait_timeout_s, publish_settings(recipe).longest_s) + 600


def build_publisher(
    recipe: Recipe,
    trainer: Trainer,
    process_id: str,
    refuse: Callable[[str, int, int], None] = lambda *_: None,
    is_process: Callable[[str], bool] = lambda _: False,
) -> Publisher:
    """Return the publisher, with a verifier of the engines' weights unless the recipe turns it off. `refuse`: what is
    to be done with the tokens of an engine with wrong weights, see Publisher. `is_process`: tells whether a process is
    an earlier one of this run."""
    config, policy, ranks = recipe.learner.publish, trainer.policy, trainer.ranks
    verifier = None
    if config.verify_every:
        verifier = WeightVerifier(policy, recipe.model.path, ranks, config)
    api_key = read_api_key(recipe.engine.api_key_file) if ranks.is_main else ""
    folder = Path(recipe.run.dir) / recipe.run.name
    identity = RunIdentity.of(folder, lambda process: process == process_id or is_process(process))
    return Publisher(policy, ranks, publish_settings(recipe), verifier, api_key, process_id, refuse, identity)


def build_coordinator(
    recipe: Recipe,
    source: SampleSource,
    held_out: Sequence[Sample],
    trainer: Trainer,
    restored: Restored,
    shutdown: Event,
) -> Coordinator:
    """Return this rank's coordinator. That of rank 0 opens its ticket socket at once."""
    ranks, learner, state = trainer.ranks, recipe.learner, restored.coordinator
    if not ranks.is_main:
        return RemoteCoordinator(ranks)
    run_id = str(state.get("run_id") or uuid.uuid4().hex)
    settings = TicketServerSettings(
        learner.bind,
        Path(recipe.run.dir) / recipe.run.name,
        run_id,
        token_rules(trainer),
        endpoint=EndpointSettings(recipe.transport.max_message_bytes),
        keys=learner_keys(recipe.transport, learner.bind),
        check=partial(check_group, decoder=trainer.decoder, max_context=recipe.model.max_context),
        max_failure_share=recipe.env.max_failure_share,
        keep_failed=RECORDED_FAILURES if recipe.record.every else 0,
        agreed=settings_of(recipe),
    )
    ticket_server = TicketServer(source, BookSettings.of(recipe, refusal(learner.objective)), settings)
    if "tickets" in state:  # a run that trained on a recording has no tickets
        ticket_server.load_state(state["tickets"])
    recorder, at = Recorder(recipe, trainer.decoder.spec), (trainer.num_steps, restored.version)
    return MainCoordinator(recipe, ranks, ticket_server, run_id, held_out, state, shutdown, recorder, at)


def refusal(config: ObjectiveConfig) -> Callable[[Group], str] | None:
    """Return a function that gives the reason to replace a group by a fresh one; None if every group is trained on."""
    if not config.dynamic_sampling:
        return None
    return lambda group: "uninformative" if is_uninformative(group, config) else ""


def token_rules(trainer: Trainer) -> TokenRules:
    policy = trainer.policy
    vocab_size = policy.vlm.config.get_text_config().vocab_size
    return TokenRules(policy.spec.image_token_id, policy.banned_ids, vocab_size)
