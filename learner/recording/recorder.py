"""Writes a run's recordings, on rank 0, in a thread of its own that no step waits for."""

from __future__ import annotations

import hashlib
import json
import math
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from learner.recording.disk import Disk
from learner.recording.episodes import Played, TokenTexts, record_of, worst_and_best
from learner.recording.names import column_names
from learner.tickets.records import EvaluationResult
from shared.config import Recipe
from shared.log import get_logger
from shared.recordings.reading import FOLDER, Place
from shared.recordings.records import Episode, StepHeader, StepImages
from shared.recordings.writing import StepWriter
from shared.types import Group, PolicyVersion, Ticket
from shared.vision import VisionSpec

if TYPE_CHECKING:
    from learner.recording.columns import Watched  # which needs torch

QUEUED = 4  # steps and evaluations, whose groups are kept in memory meanwhile
CLOSE_S = 5.0
Failed = tuple[Ticket, Group, str]


@dataclass(frozen=True, slots=True)
class _Recording:
    header: StepHeader
    episodes: list[Played]

    @property
    def place(self) -> Place:
        return Place(self.header.step, self.header.evaluation)

    def __str__(self) -> str:
        name = self.header.evaluation
        return f"evaluation {name}" if name else f"step {self.header.step}"


class Recorder:
    """What cannot be recorded, for want of time or of disk, is counted in `record/dropped`, and the log says why."""

    def __init__(self, recipe: Recipe, spec: VisionSpec) -> None:
        self._recipe, self._spec = recipe, spec
        self._folder = Path(recipe.run.dir) / recipe.run.name / FOLDER
        self._log = get_logger("recordings")
        self._queue: queue.Queue[_Recording | None] = queue.Queue(QUEUED)
        self._disk: Disk | None = None
        self._texts: TokenTexts | None = None
        self._episodes = self._dropped = self._bytes = 0  # written by one thread each, but for _dropped
        self._lock = threading.Lock()  # of _dropped
        self._told = ""  # what the log has said last
        self._spent_s = 0.0
        values = recipe.model_dump(mode="json")
        self._hash = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
        self._thread = threading.Thread(target=self._run, name="recordings", daemon=True)
        self._thread.start()

    def step(
        self,
        step: int,
        version: PolicyVersion,
        groups: Sequence[Group],
        tickets: Sequence[Ticket] = (),
        watched: Watched | None = None,
        failed: Sequence[Failed] = (),
    ) -> None:
        """Hands over what of a step is to be recorded. `version`: of the policy that it trained; `failed`: groups that
        were not trained on, and why. Returns at once."""
        episodes = self._chosen(groups, tickets, watched, failed)
        if episodes:
            self._hand_over(_Recording(self._header(step, version), episodes))

    def evaluation(self, name: str, step: int, result: EvaluationResult, metrics: Mapping[str, float]) -> None:
        """The same of an evaluation after `step`; `metrics` are those of all of its episodes."""
        groups = worst_and_best(result.groups, most) if (most := self._recipe.record.evaluations) else []
        if groups:
            ticket, _ = groups[0]
            header = structs.replace(
                self._header(step, ticket.version),
                evaluation=name,
                played=sum(len(group.trajectories) for _, group in result.groups),
                metrics={key: value for key, value in metrics.items() if math.isfinite(value)},
                temperature=ticket.sampling.temperature,
                columns=(),
            )
            episodes = [Played(group, i, ticket) for ticket, group in groups for i in range(len(group.trajectories))]
            self._hand_over(_Recording(header, episodes))

    def _hand_over(self, recording: _Recording) -> None:
        try:
            self._queue.put_nowait(recording)
        except queue.Full:
            self._drop(len(recording.episodes), f"the disk is slower than the steps: {recording} is not recorded")

    def metrics(self) -> dict[str, float]:
        """Since the process began."""
        counts = {"episodes": self._episodes, "dropped": self._dropped, "bytes": self._bytes}
        return {f"record/{name}": float(value) for name, value in counts.items()} | {"record/seconds": self._spent_s}

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Waits for what is being written, within `timeout_s`; the rest is lost."""
        deadline = time.monotonic() + timeout_s
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            self._log.error("recordings are not complete: the disk took nothing for %g s", timeout_s)
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._log.error("recordings are not complete: the disk is slow")

    # -------------------------------------------------------------- the learner's thread

    def _chosen(
        self, groups: Sequence[Group], tickets: Sequence[Ticket], watched: Watched | None, failed: Sequence[Failed]
    ) -> list[Played]:
        """The watched episodes, then failures as far as they may be recorded."""
        places = watched.places if watched is not None else frozenset()
        room, place, found, failures = self._recipe.record.failures, 0, list[Played](), list[Played]()
        for number, group in enumerate(groups):
            ticket = tickets[number] if tickets else None
            for index, trajectory in enumerate(group.trajectories):
                if place in places and watched is not None:
                    found.append(Played(group, index, ticket, watched.columns(place)))
                elif not trajectory.trainable:
                    failures.append(Played(group, index, ticket))
                place += 1
        for ticket, group, reason in failed:
            failures += [Played(group, i, ticket, refused=reason or "refused") for i in range(len(group.trajectories))]
        return found + failures[:room]

    def _header(self, step: int, version: PolicyVersion) -> StepHeader:
        recipe = self._recipe
        objective = recipe.learner.objective
        return StepHeader(
            step=step,
            version=version,
            time=time.time(),
            run=recipe.run.name[:4096],
            task=recipe.env.module[:4096],
            recipe_hash=self._hash,
            objective=objective.model_dump_json(),
            group_relative=objective.group_relative,
            model=recipe.model.path[:4096],
            dtype=recipe.model.dtype,
            min_pixels=recipe.model.min_pixels,
            max_pixels=recipe.model.max_pixels,
            temperature=recipe.sampling.temperature,
            columns=column_names(group_relative=objective.group_relative),
        )

    # -------------------------------------------------------------- the recorder's thread

    def _run(self) -> None:
        while (recording := self._queue.get()) is not None:
            began, before = time.thread_time(), self._episodes
            try:
                self._write(recording)
                self._told = ""
            except Exception as error:  # noqa: BLE001 - a recording that fails is told, and never ends a run
                lost = len(recording.episodes) - (self._episodes - before)
                self._drop(lost, f"{recording} is not recorded: {type(error).__name__}: {error}")
            self._spent_s += time.thread_time() - began

    def _write(self, recording: _Recording) -> None:
        if self._disk is None:
            self._disk = Disk(self._folder, int(self._recipe.record.max_gb * 1e9))
        if self._texts is None:
            self._texts = TokenTexts(self._recipe.model.path)
        header, played = recording.header, recording.episodes
        records = [record_of(p, self._texts, self._spec, group_relative=header.group_relative) for p in played]
        data = {image.content_hash: image.data for p in played for image in p.trajectory.images}
        images = {ref.file_name: data[ref.hash] for record in records for ref in record.images}
        self._disk.make_room(recording.place)
        self._bytes += self._disk.add_images(images, recording.place)
        writer = StepWriter(self._folder, header, StepImages(names=tuple(images)))
        try:
            for record in records:
                self._add(writer, record)
        finally:
            writer.close()
            self._disk.add(recording.place, writer.num_bytes)
            self._bytes += writer.num_bytes

    def _add(self, writer: StepWriter, record: Episode) -> None:
        writer.add(record)
        self._episodes += 1

    def _drop(self, count: int, why: str) -> None:
        """The log says it once, until something is recorded again."""
        with self._lock:
            self._dropped += count
            told, self._told = self._told, why
        if not told:
            self._log.error("%s; training goes on, record/dropped counts", why)
