"""Resuming a run from a checkpoint: the given one, or the newest undamaged one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_state_dict

from learner.checkpoints.checkpoint_folder import BEST, candidates, move_aside, rewind, step_of, step_of_best, tidy
from learner.checkpoints.contents import check_contents
from learner.checkpoints.trainer_state import SCHEMA, SCHEMA_OF_MIXTURES, fingerprint, schema_of, training_state
from learner.checkpoints.wholeness import DamagedCheckpoint, check_files, read_meta
from learner.distributed import Ranks
from learner.model.policy import Policy
from learner.training.trainer import Trainer
from shared.config.recipe import Recipe, dotted_values
from shared.log import get_logger
from shared.redaction import redact
from shared.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class Restored:
    """The parts of a checkpoint that the caller needs; the trainer's state is restored in place."""

    version: PolicyVersion = 0
    coordinator: dict[str, Any] = field(default_factory=dict)  # state of rank 0's coordinator


# Fields that must not change within a run: model, task and data, and what tickets and optimizer state depend on.
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
    *("tasks ", "tasks."),
)
_FREE_OF_TASKS = (".max_turns", ".max_tokens", ".turn_tokens", ".timeout_s", ".isolation")
"""The fields of a task that may change all the same."""


def check_recipe(path: Path, recipe: Recipe, of_checkpoint: dict[str, Any]) -> None:
    """Raise ValueError that names the fields that a resumed run must not change but did; log all other differences.

    Fields that the checkpoint or the recipe lacks are not compared, nor are secrets.
    """
    before, after = values_by_name(redact(of_checkpoint)), values_by_name(recipe.model_dump(mode="json"))
    differences = {name: (was, after[name]) for name, was in before.items() if name in after and was != after[name]}
    wrong = {name: values for name, values in differences.items() if is_fixed(name)}
    if wrong:
        listing = ", ".join(f"{name} (it: {was!r}, now: {now!r})" for name, (was, now) in wrong.items())
        raise ValueError(
            f"checkpoint {path} is of another recipe: {listing}; set them back, or learner.resume = 'never'"
        )
    for name, (was, now) in differences.items():
        get_logger("learner").info("resuming with %s = %r instead of %r", name, now, was)


def is_fixed(name: str) -> bool:
    return name.startswith(_FIXED) and not (name.startswith("tasks.") and name.endswith(_FREE_OF_TASKS))


def values_by_name(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's values by dotted name; those of tasks by the task's name, and the names in their order."""
    values = dotted_values(recipe)
    tasks = values.pop("tasks", ())
    values["tasks by name"] = [task["name"] for task in tasks]
    for task in tasks:
        fields = {**task, **{f"data.{key}": value for key, value in task["data"].items()}}
        values |= {f"tasks.{task['name']}.{key}": value for key, value in fields.items() if key != "data"}
    return values


def restore(
    folder: Path, trainer: Trainer, ranks: Ranks, recipe: Recipe, contents: Mapping[str, str] | None = None
) -> Restored:
    """Load the checkpoint that the recipe asks for and return its other state; without one the run starts anew. A
    collective.

    With `auto` a damaged checkpoint is moved to damaged/, which is logged, and the one before is tried. If the run goes
    back to an older step, later checkpoints are moved to undone/. `contents`: those of `contents_of` on rank 0, with
    which the checkpoint's are compared. Raise ValueError if the given checkpoint is damaged,
    if all are damaged, or if `load_checkpoint` refuses one.
    """
    damaged: list[tuple[Path, DamagedCheckpoint]] = []
    for path in _candidates(folder, recipe.learner.resume, ranks):
        try:
            restored = load_checkpoint(path, trainer, ranks, recipe, contents)
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
    """Return rank 0's candidates on every rank. Raise its ValueError on every rank too."""
    message: list[Any] = [None]
    if ranks.is_main:
        try:
            tidy(folder)
            message = [candidates(folder, resume)]
        except (OSError, ValueError) as error:
            message = [str(error)]
    if ranks.size > 1:
        dist.broadcast_object_list(message, src=0)
    if isinstance(message[0], str):
        raise ValueError(message[0])
    paths: list[Path] = message[0]
    return paths


def _move_damaged(folder: Path, damaged: list[tuple[Path, DamagedCheckpoint]], taken: Path) -> None:
    """Move damaged checkpoints aside, and best.json too if it names one of them: new results need not beat a lost
    checkpoint."""
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


def load_checkpoint(
    path: Path, trainer: Trainer, ranks: Ranks, recipe: Recipe, contents: Mapping[str, str] | None = None
) -> Restored:
    """Restore parameters, optimizer, counters and random state in place. A collective, on any number of ranks.

    Raise DamagedCheckpoint, before anything is changed, if it is damaged; ValueError if it is of another model, recipe
    or schema.
    """
    meta = read_meta(path, ranks)
    schema, readable = schema_of(trainer.policy), (SCHEMA, SCHEMA_OF_MIXTURES)
    same_kind = meta.get("model_type") == trainer.policy.vlm.config.model_type
    if meta["schema"] != schema and (same_kind or meta["schema"] not in readable):
        raise ValueError(f"checkpoint {path} has schema {meta['schema']}, this learner reads {schema}; start anew")
    check_recipe(path, recipe, meta["recipe"])
    layout = fingerprint(trainer.policy)
    if meta["fingerprint"] != layout:
        raise ValueError(
            f"checkpoint {path} is of another model ({meta['model_type']}, fingerprint {meta['fingerprint']}; "
            f"model.path has {trainer.policy.vlm.config.model_type}, {layout}); "
            "use its model or learner.resume = 'never'"
        )
    check_base(path, meta, trainer.policy, recipe.model.path)
    _check_contents(path, meta, ranks, contents or {})
    check_files(path, meta, ranks)
    settings = [{k: v for k, v in group.items() if k != "params"} for group in trainer.optimizer.param_groups]
    state = training_state(trainer)
    if not meta["trainer"].get("has_reference", False):
        state.pop("reference", None)  # the reference is still the initial policy
    dcp.load(state, checkpoint_id=str(path / "dcp"))  # in place
    model, optimizer = state["model"], state["optimizer"]
    # weights that adapters freeze come from the model's files
    options = StateDictOptions(strict=trainer.policy.adapters is None)
    set_state_dict(
        trainer.policy, trainer.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options
    )
    if "reference" in state:
        assert isinstance(trainer.reference, Policy)
        set_model_state_dict(trainer.reference, state["reference"])
    for group, own in zip(trainer.optimizer.param_groups, settings, strict=True):
        group.update(own)  # rates and decay come from the recipe, which may have changed
    trainer.load_state(meta["trainer"])
    rng = path / "rng" / f"rank_{ranks.rank}.pt"
    if rng.exists():
        _restore_rng(torch.load(rng, weights_only=True), ranks)
    return Restored(meta["version"], meta["intake"])


def _check_contents(path: Path, meta: dict[str, Any], ranks: Ranks, contents: Mapping[str, str]) -> None:
    """Compare what the run learns from on rank 0, and raise its ValueError on every rank."""
    message = [""]
    if ranks.is_main:
        try:
            check_contents(path, meta.get("contents"), contents)
        except ValueError as error:
            message = [str(error)]
    if ranks.size > 1:
        dist.broadcast_object_list(message, src=0)
    if message[0]:
        raise ValueError(message[0])


def check_base(path: Path, meta: dict[str, Any], policy: Policy, model_path: str) -> None:
    """Raise ValueError if the checkpoint's adapters were trained on other weights than the policy's."""
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
