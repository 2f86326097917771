"""Checkpoints of the learner: written under another name, renamed when complete; only the last few are kept.

RUN/checkpoints/step_00000050/
    dcp/        parameters, optimizer and a refreshed reference, sharded (torch.distributed.checkpoint); of a policy
                with adapters not the weights beneath, whose hash is `base` in meta.json
    hf/         the weights as a Hugging Face folder, if learner.checkpoint.export is set
    rng/        random state of each rank
    meta.json   model fingerprint, recipe, digests of what it learns from (`contents`), state of trainer and coordinator
                (`intake`), step, version, and the size and
                SHA-256 of each other file, which reveal a damaged checkpoint
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from learner.checkpoints.best_checkpoint import Best, newest_good
from learner.checkpoints.checkpoint_folder import (
    EXPORT,
    checkpoint_name,
    list_checkpoints,
    partial_of,
    put,
    remove,
    step_of,
    sync_file,
)
from learner.checkpoints.hf_export import export_stored
from learner.checkpoints.trainer_state import copied, fingerprint, rng_state, schema_of, training_state
from learner.checkpoints.wholeness import Files, measured, with_digest
from learner.distributed import Ranks, barrier
from learner.model.finite import all_of_training, check_finite
from learner.training.trainer import Trainer
from shared.config.recipe import Recipe
from shared.log import get_logger
from shared.redaction import holds_secrets
from shared.spans import add_span
from shared.types import PolicyVersion

CLOSE_S = 30.0
FULL_BYTES = 1 << 20  # a disk with less room counts as full


class Saver:
    """Writes a run's checkpoints, in the background if the recipe says so. A collective, and so is its construction.

    In the background, `save` copies the state and returns. Only one checkpoint is written at a time, so `save` first
    waits for the previous one. Each checkpoint gets its name when it is complete.
    """

    def __init__(
        self,
        folder: Path,
        trainer: Trainer,
        ranks: Ranks,
        recipe: Recipe,
        timeout_s: float = 600.0,
        contents: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare to write into `folder`. `contents`: what the run learns from, on rank 0."""
        self._contents = contents or {}
        self._folder, self._trainer, self._ranks, self._recipe = folder, trainer, ranks, recipe
        self._timeout_s = timeout_s
        self.best = Best.load(folder)
        self.best.good = newest_good(folder)
        # for the writing thread only: collectives must not mix
        self._group = torch.distributed.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, "checkpoint") if recipe.learner.checkpoint.in_background else None
        if self._thread is not None:
            # Starts the thread now: if memory ran out at its start, a later submit would wait for it forever.
            self._thread.submit(int)
        self._writing: Future[None] | None = None
        self._saved_at = 0.0
        self._sealing_since: float | None = None  # since when all bytes are written and are being synced and measured
        self.num_failed = self._failed_in_a_row = 0
        self._last_failure = ""  # why the last checkpoint was not written; "" if it was

    def save(self, version: PolicyVersion, coordinator: dict[str, Any]) -> Path:
        """Save the state after the trainer's last step. `coordinator`: state of rank 0's coordinator, as plain JSON
        values.

        Raise ValueError, on every rank, if the weights or the optimizer's state are not finite: the last good
        checkpoint remains.
        """
        self.wait()
        trainer, ranks = self._trainer, self._ranks
        check_finite(all_of_training(trainer.policy, trainer.optimizer), ranks)
        final = self._folder / checkpoint_name(trainer.num_steps)
        partial = partial_of(final)
        meta = {
            "schema": schema_of(trainer.policy),
            "fingerprint": fingerprint(trainer.policy),
            "model_type": trainer.policy.vlm.config.model_type,
            "recipe": self._recipe.model_dump(mode="json"),
            **({"contents": dict(self._contents)} if self._contents else {}),
            **({"base": trainer.policy.adapters.base} if trainer.policy.adapters else {}),
            "trainer": trainer.state(),
            "version": version,
            "intake": coordinator,
        }
        barrier(ranks, timeout_s=self._timeout_s)
        rng = rng_state(ranks)
        self._saved_at = time.monotonic()
        if self._thread is None:
            self._write(training_state(trainer), rng, partial, final, meta)
        else:
            state = copied(training_state(trainer))
            self._writing = self._thread.submit(self._write, state, rng, partial, final, meta)
        return final

    def _write(
        self, state: dict[str, Any], rng: dict[str, torch.Tensor], partial: Path, final: Path, meta: dict[str, Any]
    ) -> None:
        """Write a checkpoint. A full or broken disk costs only this checkpoint: the error is logged, and the last good
        one remains."""
        try:
            self._write_parts(state, rng, partial, final, meta)
        finally:
            track = "checkpoint" if self._thread else ""
            add_span("write checkpoint", self._saved_at, time.monotonic(), track=track)

    def _write_parts(
        self, state: dict[str, Any], rng: dict[str, torch.Tensor], partial: Path, final: Path, meta: dict[str, Any]
    ) -> None:
        written: Files = {}  # files that this rank has written
        parts: tuple[Callable[[], object], ...] = (
            lambda: self._begin(partial),
            lambda: torch.save(rng, partial / "rng" / f"rank_{self._ranks.rank}.pt"),
            lambda: self._save(state, partial),
            lambda: self._export(partial),
            lambda: written.update(self._seal(partial)),
            lambda: self._finish(partial, final, meta, written),
            lambda: self._keep(final, good=meta["trainer"]["guard"]["good"]),
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
                self._failed_in_a_row += 1
                self._last_failure = reason_of(trouble, self._folder) if trouble else "another rank could not write it"
                if trouble is not None:
                    newest = self._newest()
                    stays = f"{newest} stays" if newest else "and there is no other one"
                    log = get_logger("learner")
                    log.error("checkpoint %s is not written, %s: %s", final.name, stays, self._last_failure)
                if self._ranks.is_main:
                    shutil.rmtree(partial, ignore_errors=True)
                self.best.forget(step_of(final))
                break
        else:
            self._failed_in_a_row = 0
            self._last_failure = ""
        self._sealing_since = None

    def _begin(self, partial: Path) -> None:
        if self._ranks.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            for folder in (self._folder, partial, partial / "rng"):  # not the run's folder, if that was moved away
                folder.mkdir(exist_ok=folder == self._folder)

    def _save(self, state: dict[str, Any], partial: Path) -> None:
        writer = FileSystemWriter(str(partial / "dcp"), sync_files=False)  # `_seal` syncs them
        writer.fs = _WithoutParents()
        dcp.save(state, storage_writer=writer, process_group=self._group)
        self._sealing_since = time.monotonic()

    def _export(self, partial: Path) -> None:
        """Export the files that have just been written, so that this needs no collective and delays no step. If it
        fails, the checkpoint remains, without an export."""
        if not self._ranks.is_main or not self._recipe.learner.checkpoint.export:
            return
        model, out = self._recipe.model, partial / EXPORT
        try:
            out.mkdir()
            lora = self._recipe.learner.lora
            export_stored(partial / "dcp", out, model_path=model.path, dtype=getattr(torch, model.dtype), lora=lora)
            for path in out.iterdir():
                sync_file(path)
        except (OSError, RuntimeError, ValueError, CheckpointException) as error:
            name, reason = partial.name.strip(".").split(".")[0], reason_of(error, partial)
            get_logger("learner").error("%s has no export: %s", name, reason)
            shutil.rmtree(out, ignore_errors=True)

    def _seal(self, partial: Path) -> Files:
        """Sync this rank's files; return their sizes and hashes."""
        rank, dcp_folder = self._ranks.rank, partial / "dcp"
        paths = [partial / "rng" / f"rank_{rank}.pt", *dcp_folder.glob(f"__{rank}_*")]
        if self._ranks.is_main:
            paths.append(dcp_folder / ".metadata")
        for path in paths:
            sync_file(path)
        return measured(partial, paths)

    def _finish(self, partial: Path, final: Path, meta: dict[str, Any], written: Files) -> None:
        of_ranks: list[Files] = [{} for _ in range(self._ranks.size)]
        torch.distributed.all_gather_object(of_ranks, written, self._group)
        if self._ranks.is_main:
            files = {name: digest for each in of_ranks for name, digest in each.items()}
            _write(partial / "meta.json", json.dumps(with_digest(meta | {"files": files}), indent=1))
            if holds_secrets(meta["recipe"]):
                (partial / "meta.json").chmod(0o600)
            put(partial, final)

    def _keep(self, written: Path, *, good: bool) -> None:
        """Record a written checkpoint and remove old ones, on every rank. Only a written checkpoint replaces the last
        good one."""
        if good:
            self.best.good = (step_of(written),)
        if self._ranks.is_main:
            self._remove_old()

    def _remove_old(self) -> None:
        for old in list_checkpoints(self._folder)[: -self._recipe.learner.checkpoint.keep]:
            if old.name not in self.best.kept():
                try:
                    remove(old)
                except OSError as error:
                    get_logger("learner").error("the old checkpoint %s is not removed: %s", old, error)

    def result_of_last(self, value: float) -> None:
        """Record the candidate's value on rank 0, when nothing is being saved any more; it may make another checkpoint
        the best."""
        self.wait()
        if self.best.result(value):
            self._remove_old()

    def wait(self) -> None:
        """Wait until the current writing is finished. Raise TimeoutError after the limit, or the error of the
        writing."""
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result(self._timeout_s)
            except TimeoutError:
                raise TimeoutError(
                    f"a checkpoint in {self._folder} is not written after {self._timeout_s:g} s"
                ) from None

    def _newest(self) -> str:
        """Return the name of the newest whole checkpoint; "" if there is none, or if the disk does not tell, which may
        just have refused a write."""
        with suppress(OSError):
            return next((path.name for path in reversed(list_checkpoints(self._folder))), "")
        return ""

    def how_to_go_on(self) -> str:
        """Return, in words, from which checkpoint the run goes on, and how."""
        newest = self._newest()
        if not newest:
            return "there is no checkpoint yet: the same command starts anew"
        return f"checkpoint {newest} is written: the same command with --learner.resume auto goes on from there"

    def check_last_written(self) -> None:
        """Raise ValueError if the last checkpoint could not be written, so that the run's final weights are nowhere."""
        if self._last_failure:
            newest = self._newest()
            stays = f"the last checkpoint is {newest}" if newest else "there is no checkpoint"
            raise ValueError(
                f"the run's steps are made, but its final weights are not written: {self._last_failure}; {stays}; make "
                "room, then make the missing steps again with --learner.resume auto"
            )

    def metrics(self) -> dict[str, float]:
        counts = {"failed": self.num_failed, "failed_in_a_row": self._failed_in_a_row}
        return {f"checkpoint/{name}": float(count) for name, count in counts.items()}

    def written(self) -> tuple[int, float] | None:
        """Return the progress of the current writing: its bytes and, once it has them all, the seconds of syncing and
        measuring so far, at most the time limit. None: nothing is being written."""
        total = None
        for path in self._folder.glob(".*.partial/**/*"):
            with suppress(OSError):  # it has been renamed meanwhile
                total = (total or 0) + (path.stat().st_size if path.is_file() else 0)
        since = self._sealing_since
        seconds = 0.0 if since is None else min(time.monotonic() - since, self._timeout_s)
        return None if total is None else (total, seconds)

    def close(self) -> None:
        """Give the current writing `CLOSE_S` to finish. Raises nothing, even after a failure."""
        if self._writing is not None:
            futures.wait([self._writing], CLOSE_S)
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


class _WithoutParents(FileSystem):
    """Makes a checkpoint's folder, but none above it: the run's folder may have been moved away meanwhile, and must not
    come back without its lock."""

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        Path(path).mkdir(exist_ok=True)


def reason_of(error: BaseException, folder: Path) -> str:
    """Return why something could not be written into a folder, in one line. A full disk is named, however the libraries
    between have wrapped its error."""
    causes: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in causes:
        causes.append(current)
        nested = list(getattr(current, "failures", {}).values())  # of a CheckpointException: (error, traceback) by rank
        current = current.__cause__ or current.__context__ or (nested[0][0] if nested else None)
    full = any(isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT) for cause in causes)
    with suppress(OSError):
        full = full or shutil.disk_usage(_existing(folder)).free < FULL_BYTES
    if full or "No space left" in str(error):
        return f"the disk of {folder} is full"
    named = next((cause for cause in causes if not isinstance(cause, CheckpointException)), error)
    return " ".join(str(named).split())[:300] or type(named).__name__


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
