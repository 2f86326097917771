"""A run goes on from a checkpoint: the one it is told, or the newest that is whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_state_dict

from learner.checkpoints.folder import BEST, candidates, move_aside, rewind, step_of, step_of_best, tidy
from learner.checkpoints.state import SCHEMA, SCHEMA_OF_MIXTURES, fingerprint, schema_of, training_state
from learner.checkpoints.wholeness import DamagedCheckpoint, check_files, read_meta
from learner.distributed import Ranks
from learner.model.policy import Policy
from learner.trainer import Trainer
from shared.config import Recipe, dotted_values
from shared.log import get_logger
from shared.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class Restored:
    """What a checkpoint holds besides the trainer, which is restored in place."""

    version: PolicyVersion = 0
    coordinator: dict[str, Any] = field(default_factory=dict)  # rank 0's


# What a run cannot change on its way: model, task and data, and what tickets and optimizer state are made of.
_FIXED = (
    *("run.seed", "model.min_pixels", "model.max_pixels", "env.module", "env.args", "env.reward", "data."),
    *(
        "learner.objective.name",
        "learner.objective.critic_width",
        "learner.group_size",
        "learner.groups_per_step",
        "learner.publish.every",
    ),
    *("learner.optimizer.name", "learner.optimizer.freeze", "learner.optimizer.freeze_layers"),
    *("learner.lora.rank", "learner.lora.alpha", "learner.lora.targets"),
)


def check_recipe(path: Path, recipe: Recipe, of_checkpoint: dict[str, Any]) -> None:
    """ValueError naming the fields in which a resumed run may not differ and does; other differences are logged.

    A field that the checkpoint or the recipe lacks does not differ.
    """
    before, after = dotted_values(of_checkpoint), dotted_values(recipe.model_dump(mode="json"))
    found = {name: (was, after[name]) for name, was in before.items() if name in after and was != after[name]}
    wrong = {name: values for name, values in found.items() if name.startswith(_FIXED)}
    if wrong:
        told = ", ".join(f"{name} (it: {was!r}, now: {now!r})" for name, (was, now) in wrong.items())
        raise ValueError(f"checkpoint {path} is of another recipe: {told}; set them back, or learner.resume = 'never'")
    for name, (was, now) in found.items():
        get_logger("learner").info("resuming with %s = %r instead of %r", name, now, was)


def restore(folder: Path, trainer: Trainer, ranks: Ranks, recipe: Recipe) -> Restored:
    """The checkpoint that the recipe asks for, loaded; without one the run begins anew. With `auto` a damaged one is
    moved to damaged/, in one line, and the one before is taken; a run that goes back to an older step moves later ones
    to undone/. A collective.

    ValueError: the one that is asked for is damaged, or none of them is whole, or what `load_checkpoint` refuses.
    """
    damaged: list[tuple[Path, DamagedCheckpoint]] = []
    for path in _candidates(folder, recipe.learner.resume, ranks):
        try:
            restored = load_checkpoint(path, trainer, ranks, recipe)
        except DamagedCheckpoint as error:
            damaged.append((path, error))
            continue
        if ranks.is_main:
            _move_damaged(folder, damaged, path)
            if recipe.learner.resume != "auto":
                _go_back(folder, trainer.num_steps, recipe.learner.resume)
        return restored
    if damaged:
        raise ValueError(f"{damaged[0][1]}; {_cure(recipe.learner.resume)}")
    return Restored()


def _candidates(folder: Path, resume: str, ranks: Ranks) -> list[Path]:
    """Rank 0's, on every rank. ValueError, likewise."""
    said: list[Any] = [None]
    if ranks.is_main:
        try:
            tidy(folder)
            said = [candidates(folder, resume)]
        except (OSError, ValueError) as error:
            said = [str(error)]
    if ranks.size > 1:
        dist.broadcast_object_list(said, src=0)
    if isinstance(said[0], str):
        raise ValueError(said[0])
    found: list[Path] = said[0]
    return found


def _move_damaged(folder: Path, damaged: list[tuple[Path, DamagedCheckpoint]], taken: Path) -> None:
    """With best.json, if it names one of them: what is to come need not do better than a checkpoint that is lost."""
    best = step_of_best(folder)
    for path, error in damaged:
        aside = move_aside(path, "damaged")
        get_logger("learner").error("%s; it is now in %s, and the run goes on from %s", error, aside, taken)
        if step_of(path) == best:
            noted = move_aside(folder / BEST, "damaged")
            get_logger("learner").info("it was the best one: %s is now %s", folder / BEST, noted)


def _go_back(folder: Path, step: int, resume: str) -> None:
    moved = rewind(folder, step, resume)
    if moved:
        names = ", ".join(path.name for path in moved)
        get_logger("learner").info("back to step %d: what came later is now in %s: %s", step, moved[0].parent, names)


def _cure(resume: str) -> str:
    if resume == "auto":
        return "no other one is whole; start anew with --learner.resume never"
    return "give another one, or resume from the newest that is whole with --learner.resume auto"


def load_checkpoint(path: Path, trainer: Trainer, ranks: Ranks, recipe: Recipe) -> Restored:
    """Restores parameters, optimizer, counters and random state in place; a collective, on any number of ranks.

    DamagedCheckpoint, before anything is changed, if it is not whole; ValueError if it is of another model or recipe,
    or written by another schema.
    """
    meta = read_meta(path, ranks)
    schema, known = schema_of(trainer.policy), (SCHEMA, SCHEMA_OF_MIXTURES)
    same_kind = meta.get("model_type") == trainer.policy.vlm.config.model_type
    if meta["schema"] != schema and (same_kind or meta["schema"] not in known):
        raise ValueError(f"checkpoint {path} has schema {meta['schema']}, this learner reads {schema}; start anew")
    check_recipe(path, recipe, meta["recipe"])
    mine = fingerprint(trainer.policy)
    if meta["fingerprint"] != mine:
        raise ValueError(
            f"checkpoint {path} is of another model ({meta['model_type']}, fingerprint {meta['fingerprint']}; "
            f"model.path has {trainer.policy.vlm.config.model_type}, {mine}); use its model or learner.resume = 'never'"
        )
    check_base(path, meta, trainer.policy, recipe.model.path)
    check_files(path, meta, ranks)
    settings = [{k: v for k, v in group.items() if k != "params"} for group in trainer.optimizer.param_groups]
    state = training_state(trainer)
    if not meta["trainer"].get("has_reference", False):
        state.pop("reference", None)  # the reference is still the initial policy
    dcp.load(state, checkpoint_id=str(path / "dcp"))  # in place
    model, optimizer = state["model"], state["optimizer"]
    options = StateDictOptions(strict=trainer.policy.adapters is None)  # what adapters freeze is the model's own
    set_state_dict(
        trainer.policy, trainer.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options
    )
    if "reference" in state:
        assert isinstance(trainer.reference, Policy)
        set_model_state_dict(trainer.reference, state["reference"])
    for group, own in zip(trainer.optimizer.param_groups, settings, strict=True):
        group.update(own)  # rates and decay are the recipe's, also when it has changed
    trainer.load_state(meta["trainer"])
    rng = path / "rng" / f"rank_{ranks.rank}.pt"
    if rng.exists():
        _restore_rng(torch.load(rng, weights_only=True), ranks)
    return Restored(meta["version"], meta["intake"])


def check_base(path: Path, meta: dict[str, Any], policy: Policy, model_path: str) -> None:
    """ValueError if the checkpoint has adapters of other weights than the policy's."""
    if policy.adapters is None or meta.get("base", policy.adapters.base) == policy.adapters.base:
        return
    raise ValueError(
        f"checkpoint {path} has adapters of another base: its weights have the hash {meta['base']}, those of "
        f"model.path = {model_path!r} {policy.adapters.base}; use its base or learner.resume = 'never'"
    )


def _restore_rng(state: dict[str, torch.Tensor], ranks: Ranks) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and ranks.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], ranks.device)
