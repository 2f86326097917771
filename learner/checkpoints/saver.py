"""Checkpoints of the learner: written beside, renamed when whole, the last few kept.

RUN/checkpoints/step_00000050/
    dcp/        parameters and optimizer, a reference that is refreshed, sharded (torch.distributed.checkpoint)
    rng/        random state of each rank
    meta.json   model fingerprint, recipe, state of trainer and coordinator (`intake`), step, version
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from learner.checkpoints.best import PREFIX as _PREFIX
from learner.checkpoints.best import Best, checkpoint_name
from learner.distributed import Ranks, barrier
from learner.model.policy import Policy
from learner.trainer import Trainer
from shared.config import Recipe, dotted_values
from shared.log import get_logger
from shared.types import PolicyVersion

_SCHEMA = 2
CLOSE_S = 30.0


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
    *("learner.optimizer.name", "learner.optimizer.freeze"),
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


def fingerprint(policy: Policy) -> str:
    """Names and shapes of all parameters, as 16 hex digits: the same for any number of ranks and any values."""
    shapes = sorted(f"{name}{list(p.shape)}" for name, p in policy.named_parameters())
    return hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first; what an interrupted write left behind is not among them."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if p.name.startswith(_PREFIX) and p.name[len(_PREFIX) :].isdigit()]
    return sorted((p for p in found if (p / "meta.json").exists()), key=lambda p: p.name)


class Saver:
    """Writes a run's checkpoints; a collective, also to make one. In the background where the recipe says so.

    Then `save` copies what it writes and returns; only one checkpoint is written at a time, so that it first waits for
    the one before. Each appears under its name when it is whole.
    """

    def __init__(self, folder: Path, trainer: Trainer, ranks: Ranks, recipe: Recipe, timeout_s: float = 600.0) -> None:
        self._folder, self._trainer, self._ranks, self._recipe = folder, trainer, ranks, recipe
        self._timeout_s = timeout_s
        self.best = Best.load(folder)
        self.best.good = tuple(int(path.name[len(_PREFIX) :]) for path in list_checkpoints(folder)[-1:])
        self._group = torch.distributed.new_group(backend="gloo")  # the thread's own: collectives must not mix
        self._thread = ThreadPoolExecutor(1, "checkpoint") if recipe.learner.checkpoint.in_background else None
        self._writing: Future[None] | None = None
        self.num_failed = 0
        self.is_good = True  # whether what is saved now is worth going back to

    def save(self, version: PolicyVersion, coordinator: dict[str, Any]) -> Path:
        """Of the trainer's step, kept beside the last few. `coordinator`: the state of rank 0's, plain JSON values."""
        self.wait()
        trainer, ranks = self._trainer, self._ranks
        if self.is_good:
            self.best.good = (*self.best.good[-1:], trainer.num_steps)
        final = self._folder / checkpoint_name(trainer.num_steps)
        partial = self._folder / f".{final.name}.partial"
        meta = {
            "schema": _SCHEMA,
            "fingerprint": fingerprint(trainer.policy),
            "model_type": trainer.policy.vlm.config.model_type,
            "recipe": self._recipe.model_dump(mode="json"),
            "trainer": trainer.state(),
            "version": version,
            "intake": coordinator,
        }
        barrier(ranks, timeout_s=self._timeout_s)
        rng = _rng_state(ranks)
        if self._thread is None:
            self._write(_state(trainer), rng, partial, final, meta)
        else:
            self._writing = self._thread.submit(self._write, deepcopy(_state(trainer)), rng, partial, final, meta)
        return final

    def _write(
        self, state: dict[str, Any], rng: dict[str, torch.Tensor], partial: Path, final: Path, meta: dict[str, Any]
    ) -> None:
        """A full or broken disk costs this checkpoint alone: it is reported, and the last good one stays."""
        parts: tuple[Callable[[], object], ...] = (
            lambda: self._begin(partial),
            lambda: torch.save(rng, partial / "rng" / f"rank_{self._ranks.rank}.pt"),
            lambda: dcp.save(state, checkpoint_id=str(partial / "dcp"), process_group=self._group),
            lambda: self._finish(partial, final, meta),
        )
        for part in parts:
            trouble: BaseException | None = None
            try:
                part()
            except (OSError, RuntimeError, CheckpointException) as error:
                trouble = error
            failed = torch.tensor([trouble is not None], dtype=torch.int32)
            torch.distributed.all_reduce(failed, torch.distributed.ReduceOp.MAX, self._group)
            if failed:
                self.num_failed += 1
                if trouble is not None:
                    reason = " ".join(str(trouble).split())[-300:]
                    log = get_logger("learner")
                    log.error("checkpoint %s is not written, the last good one stays: %s", final.name, reason)
                if self._ranks.is_main:
                    shutil.rmtree(partial, ignore_errors=True)
                return

    def _begin(self, partial: Path) -> None:
        if self._ranks.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "rng").mkdir(parents=True)

    def _finish(self, partial: Path, final: Path, meta: dict[str, Any]) -> None:
        if self._ranks.is_main:
            _write(partial / "meta.json", json.dumps(meta, indent=1))
            if final.exists():
                shutil.rmtree(final)
            os.replace(partial, final)
            self._remove_old()

    def _remove_old(self) -> None:
        for old in list_checkpoints(self._folder)[: -self._recipe.learner.checkpoint.keep]:
            if old.name not in self.best.kept():
                try:
                    shutil.rmtree(old)
                except OSError as error:
                    get_logger("learner").error("the old checkpoint %s is not removed: %s", old, error)

    def result_of_last(self, value: float) -> None:
        """Rank 0 alone, when nothing is saved any more: the candidate's result, which may make another the best."""
        self.wait()
        if self.best.result(value):
            self._remove_old()

    def wait(self) -> None:
        """Until what is being written is whole. TimeoutError; whatever went wrong with it is raised here."""
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result(self._timeout_s)
            except TimeoutError:
                raise TimeoutError(
                    f"a checkpoint in {self._folder} is not written after {self._timeout_s:g} s"
                ) from None

    def close(self) -> None:
        """After a failure too: gives what is being written a little time, and raises nothing."""
        if self._writing is not None:
            futures.wait([self._writing], CLOSE_S)
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


def _state(trainer: Trainer) -> dict[str, Any]:
    on_gpu = trainer.ranks.device.type == "cuda"
    options = StateDictOptions(cpu_offload=on_gpu and trainer.config.checkpoint.in_background)
    model, optimizer = get_state_dict(trainer.policy, trainer.optimizer, options=options)
    state = {"model": model, "optimizer": optimizer}
    if trainer.config.objective.kl_reference_every:
        assert trainer.reference is not None
        state["reference"] = get_model_state_dict(trainer.reference, options=options)
    return state


def choose_checkpoint(folder: Path, resume: str) -> Path | None:
    """The checkpoint that `learner.resume` asks for: `never`, `auto` (the last whole one in `folder`) or a path."""
    if resume == "never":
        return None
    if resume == "auto":
        found = list_checkpoints(folder)
        return found[-1] if found else None
    path = Path(resume)
    if not (path / "meta.json").exists():
        raise ValueError(
            f"learner.resume = {resume!r} is no checkpoint: it has no meta.json; give one like step_00000050"
        )
    return path


def restore(folder: Path, trainer: Trainer, ranks: Ranks, recipe: Recipe) -> Restored:
    """The checkpoint that the recipe asks for, loaded; without one the run begins anew."""
    chosen = choose_checkpoint(folder, recipe.learner.resume)
    return load_checkpoint(chosen, trainer, ranks, recipe) if chosen else Restored()


def load_checkpoint(path: Path, trainer: Trainer, ranks: Ranks, recipe: Recipe) -> Restored:
    """Restores parameters, optimizer, counters and random state in place; a collective, on any number of ranks.

    ValueError if the checkpoint is of another model or recipe, or written by another schema.
    """
    meta = json.loads((path / "meta.json").read_text())
    if meta["schema"] != _SCHEMA:
        raise ValueError(f"checkpoint {path} has schema {meta['schema']}, this learner reads {_SCHEMA}; start anew")
    check_recipe(path, recipe, meta["recipe"])
    mine = fingerprint(trainer.policy)
    if meta["fingerprint"] != mine:
        raise ValueError(
            f"checkpoint {path} is of another model ({meta['model_type']}, fingerprint {meta['fingerprint']}; "
            f"model.path has {trainer.policy.vlm.config.model_type}, {mine}); use its model or learner.resume = 'never'"
        )
    settings = [{k: v for k, v in group.items() if k != "params"} for group in trainer.optimizer.param_groups]
    state = _state(trainer)
    if not meta["trainer"].get("has_reference", False):
        state.pop("reference", None)  # the reference is still the initial policy
    dcp.load(state, checkpoint_id=str(path / "dcp"))  # in place
    model, optimizer = state["model"], state["optimizer"]
    set_state_dict(trainer.policy, trainer.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    if "reference" in state:
        assert trainer.reference is not None
        set_model_state_dict(trainer.reference, state["reference"])
    for group, own in zip(trainer.optimizer.param_groups, settings, strict=True):
        group.update(own)  # rates and decay are the recipe's, also when it has changed
    trainer.load_state(meta["trainer"])
    rng = path / "rng" / f"rank_{ranks.rank}.pt"
    if rng.exists():
        _restore_rng(torch.load(rng, weights_only=True), ranks)
    return Restored(meta["version"], meta["intake"])


def _rng_state(ranks: Ranks) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(ranks.device)
    return state


def _restore_rng(state: dict[str, torch.Tensor], ranks: Ranks) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and ranks.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], ranks.device)


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
