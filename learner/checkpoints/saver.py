"""Checkpoints of the learner: written beside, renamed when whole, the last few kept.

RUN/checkpoints/step_00000050/
    dcp/        parameters and optimizer, a reference that is refreshed, sharded (torch.distributed.checkpoint); of a
                policy with adapters no weights beneath, whose hash is `base` in meta.json
    hf/         the weights as a Hugging Face folder, where learner.checkpoint.export wants it
    rng/        random state of each rank
    meta.json   model fingerprint, recipe, state of trainer and coordinator (`intake`), step, version, and the size and
                SHA-256 of each other file, by which a damaged checkpoint is known
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from learner.checkpoints.best import Best, newest_good
from learner.checkpoints.folder import (
    EXPORT,
    checkpoint_name,
    list_checkpoints,
    partial_of,
    put,
    remove,
    step_of,
    sync_file,
)
from learner.checkpoints.state import copied, fingerprint, rng_state, schema_of, training_state
from learner.checkpoints.wholeness import Files, measured, with_digest
from learner.distributed import Ranks, barrier
from learner.export import export_stored
from learner.guards.finite import all_of_training, check_finite
from learner.trainer import Trainer
from shared.config import Recipe
from shared.log import get_logger
from shared.types import PolicyVersion

CLOSE_S = 30.0


class Saver:
    """Writes a run's checkpoints; a collective, also to make one. In the background where the recipe says so.

    Then `save` copies what it writes and returns; only one checkpoint is written at a time, so that it first waits for
    the one before. Each appears under its name when it is whole.
    """

    def __init__(self, folder: Path, trainer: Trainer, ranks: Ranks, recipe: Recipe, timeout_s: float = 600.0) -> None:
        self._folder, self._trainer, self._ranks, self._recipe = folder, trainer, ranks, recipe
        self._timeout_s = timeout_s
        self.best = Best.load(folder)
        self.best.good = newest_good(folder)
        self._group = torch.distributed.new_group(backend="gloo")  # the thread's own: collectives must not mix
        self._thread = ThreadPoolExecutor(1, "checkpoint") if recipe.learner.checkpoint.in_background else None
        if self._thread is not None:
            self._thread.submit(int)  # begins it now: an executor waits for ever for a thread that memory runs out for
        self._writing: Future[None] | None = None
        self._sealing_since: float | None = None  # what is written has all its bytes, and is synced and measured
        self.num_failed = self._failed_in_a_row = 0

    def save(self, version: PolicyVersion, coordinator: dict[str, Any]) -> Path:
        """Of the trainer's step, kept beside the last few. `coordinator`: the state of rank 0's, plain JSON values.

        ValueError, on every rank, if the weights or the optimizer's state are not finite: the last good one stays."""
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
            **({"base": trainer.policy.adapters.base} if trainer.policy.adapters else {}),
            "trainer": trainer.state(),
            "version": version,
            "intake": coordinator,
        }
        barrier(ranks, timeout_s=self._timeout_s)
        rng = rng_state(ranks)
        if self._thread is None:
            self._write(training_state(trainer), rng, partial, final, meta)
        else:
            state = copied(training_state(trainer))
            self._writing = self._thread.submit(self._write, state, rng, partial, final, meta)
        return final

    def _write(
        self, state: dict[str, Any], rng: dict[str, torch.Tensor], partial: Path, final: Path, meta: dict[str, Any]
    ) -> None:
        """A full or broken disk costs this checkpoint alone: it is reported, and the last good one stays."""
        own: Files = {}  # what this rank has written
        parts: tuple[Callable[[], object], ...] = (
            lambda: self._begin(partial),
            lambda: torch.save(rng, partial / "rng" / f"rank_{self._ranks.rank}.pt"),
            lambda: self._save(state, partial),
            lambda: self._export(partial),
            lambda: own.update(self._seal(partial)),
            lambda: self._finish(partial, final, meta, own),
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
                self.num_failed, self._failed_in_a_row = self.num_failed + 1, self._failed_in_a_row + 1
                if trouble is not None:
                    reason = " ".join(str(trouble).split())[-300:]
                    log = get_logger("learner")
                    log.error("checkpoint %s is not written, the last good one stays: %s", final.name, reason)
                if self._ranks.is_main:
                    shutil.rmtree(partial, ignore_errors=True)
                self.best.is_lost(step_of(final))
                break
        else:
            self._failed_in_a_row = 0
        self._sealing_since = None

    def _begin(self, partial: Path) -> None:
        if self._ranks.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "rng").mkdir(parents=True)

    def _save(self, state: dict[str, Any], partial: Path) -> None:
        writer = FileSystemWriter(str(partial / "dcp"), sync_files=False)  # `_seal` does
        dcp.save(state, storage_writer=writer, process_group=self._group)
        self._sealing_since = time.monotonic()

    def _export(self, partial: Path) -> None:
        """From what has just been written, so that it takes no collective and waits for no step. Where it fails the
        checkpoint stays, without it."""
        if not self._ranks.is_main or not self._recipe.learner.checkpoint.export:
            return
        model, out = self._recipe.model, partial / EXPORT
        try:
            lora = self._recipe.learner.lora
            export_stored(partial / "dcp", out, model_path=model.path, dtype=getattr(torch, model.dtype), lora=lora)
            for path in out.iterdir():
                sync_file(path)
        except (OSError, RuntimeError, ValueError, CheckpointException) as error:
            reason = " ".join(str(error).split())[-300:]
            get_logger("learner").error("%s has no export: %s", partial.name.strip(".").split(".")[0], reason)
            shutil.rmtree(out, ignore_errors=True)

    def _seal(self, partial: Path) -> Files:
        """Syncs this rank's files, and measures them."""
        rank, dcp_folder = self._ranks.rank, partial / "dcp"
        paths = [partial / "rng" / f"rank_{rank}.pt", *dcp_folder.glob(f"__{rank}_*")]
        if self._ranks.is_main:
            paths.append(dcp_folder / ".metadata")
        for path in paths:
            sync_file(path)
        return measured(partial, paths)

    def _finish(self, partial: Path, final: Path, meta: dict[str, Any], own: Files) -> None:
        of_ranks: list[Files] = [{} for _ in range(self._ranks.size)]
        torch.distributed.all_gather_object(of_ranks, own, self._group)
        if self._ranks.is_main:
            files = {name: known for each in of_ranks for name, known in each.items()}
            _write(partial / "meta.json", json.dumps(with_digest(meta | {"files": files}), indent=1))
            put(partial, final)

    def _keep(self, written: Path, *, good: bool) -> None:
        """On every rank. Only what is written takes the place of the last good one."""
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

    def metrics(self) -> dict[str, float]:
        counts = {"failed": self.num_failed, "failed_in_a_row": self._failed_in_a_row}
        return {f"checkpoint/{name}": float(count) for name, count in counts.items()}

    def written(self) -> tuple[int, float] | None:
        """What changes while a checkpoint is being written: its bytes and, when it has them all, the seconds that it is
        being synced and measured, at most the time limit. None = none is being written."""
        total = None
        for path in self._folder.glob(".*.partial/**/*"):
            with suppress(OSError):  # it is in its place by now
                total = (total or 0) + (path.stat().st_size if path.is_file() else 0)
        since = self._sealing_since
        seconds = 0.0 if since is None else min(time.monotonic() - since, self._timeout_s)
        return None if total is None else (total, seconds)

    def close(self) -> None:
        """After a failure too: gives what is being written a little time, and raises nothing."""
        if self._writing is not None:
            futures.wait([self._writing], CLOSE_S)
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
