"""The writer of a run's recordings, on rank 0, in a separate thread that no step waits for."""

from __future__ import annotations

import hashlib
import json
import math
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from learner.recording.column_names import column_names
from learner.recording.episode_records import PlayedEpisode, TokenTexts, record_of, worst_and_best
from learner.recording.recording_disk import Disk
from learner.tickets.ticket_records import EvaluationResult
from shared.config.recipe import Recipe
from shared.log import get_logger
from shared.metrics import ReportedMetrics
from shared.recordings.episode_format import RecordedEpisode, StepHeader, StepImages
from shared.recordings.reader import FOLDER, RecordingId
from shared.recordings.writer import StepWriter
from shared.types import Group, PolicyVersion, Ticket
from shared.vision import VisionSpec

if TYPE_CHECKING:
    from learner.recording.recorded_columns import RecordedColumns  # imports torch

QUEUED = 4  # steps and evaluations in the queue; their groups are kept in memory meanwhile
CLOSE_S = 5.0
RECORDED_FAILURES = 8  # failed episodes that are recorded in any step, at most
RECORDED_EVALUATIONS = 32  # episodes that are recorded of each evaluation: the worst and a few of the best
Failed = tuple[Ticket, Group, str]


def task_of(ticket: Ticket | None) -> str:
    """Return the task of a ticket, "" if it is not known."""
    return ticket.sample.task if ticket is not None else ""


@dataclass(frozen=True, slots=True)
class _Recording:
    header: StepHeader
    episodes: list[PlayedEpisode]

    @property
    def id(self) -> RecordingId:
        return RecordingId(self.header.step, self.header.evaluation)

    def __str__(self) -> str:
        name = self.header.evaluation
        return f"evaluation {name}" if name else f"step {self.header.step}"


class Recorder:
    """Records episodes of steps and evaluations. Episodes that cannot be recorded, for lack of time or disk space, are
    counted in `record/dropped`, and the log gives the reason."""

    def __init__(self, recipe: Recipe, spec: VisionSpec) -> None:
        self._recipe, self._spec = recipe, spec
        self._folder = Path(recipe.run.dir) / recipe.run.name / FOLDER
        with suppress(OSError):  # the error shows when something is recorded
            self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._log = get_logger("recordings")
        self._queue: queue.Queue[_Recording | None] = queue.Queue(QUEUED)
        self._disk: Disk | None = None
        self._texts: TokenTexts | None = None
        self._episodes = self._dropped = self._bytes = 0  # each written by only one thread, except _dropped
        self._lock = threading.Lock()  # guards _dropped
        self._last_message = ""  # last message in the log
        self._spent_s = 0.0
        values = recipe.model_dump(mode="json")
        self._hash = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
        self._reported = ReportedMetrics()
        self._thread = threading.Thread(target=self._run, name="recordings", daemon=True)
        self._thread.start()

    def step(
        self,
        step: int,
        version: PolicyVersion,
        groups: Sequence[Group],
        tickets: Sequence[Ticket] = (),
        watched: RecordedColumns | None = None,
        failed: Sequence[Failed] = (),
    ) -> None:
        """Queue the episodes of a step that are to be recorded; returns at once.

        `version`: of the policy that the step trained; `failed`: groups that were not trained on, with reasons.
        """
        episodes = self._chosen(groups, tickets, watched, failed)
        if episodes:
            self._hand_over(_Recording(self._header(step, version), episodes))

    def evaluation(self, name: str, step: int, result: EvaluationResult, metrics: Mapping[str, float]) -> None:
        """Queue episodes of an evaluation after `step` for recording. `metrics`: those of all its episodes."""
        for ticket, group in result.groups:
            self._reported.of(ticket.sample.task).include(group.trajectories)
        groups = []
        if self._recipe.record.every:
            groups = worst_and_best(result.groups, RECORDED_EVALUATIONS, self._reported)
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
            episodes = [
                PlayedEpisode(group, i, ticket, metrics=self._reported.of(ticket.sample.task).metrics_of(t))
                for ticket, group in groups
                for i, t in enumerate(group.trajectories)
            ]
            self._hand_over(_Recording(header, episodes))

    def _hand_over(self, recording: _Recording) -> None:
        try:
            self._queue.put_nowait(recording)
        except queue.Full:
            self._drop(len(recording.episodes), f"the disk is slower than the steps: {recording} is not recorded")

    def metrics(self) -> dict[str, float]:
        """Return the counts since the process started."""
        counts = {"episodes": self._episodes, "dropped": self._dropped, "bytes": self._bytes}
        return {f"record/{name}": float(value) for name, value in counts.items()} | {"record/seconds": self._spent_s}

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait for queued recordings for `timeout_s` at most; the rest is lost."""
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
        self,
        groups: Sequence[Group],
        tickets: Sequence[Ticket],
        watched: RecordedColumns | None,
        failed: Sequence[Failed],
    ) -> list[PlayedEpisode]:
        """Return the watched episodes, then failed ones, up to `RECORDED_FAILURES`."""
        for number, group in enumerate(groups):
            self._reported.of(task_of(tickets[number] if tickets else None)).include(group.trajectories)
        indices = watched.indices if watched is not None else frozenset()
        room = RECORDED_FAILURES if self._recipe.record.every else 0
        number_in_step, chosen, failures = 0, list[PlayedEpisode](), list[PlayedEpisode]()
        for number, group in enumerate(groups):
            ticket = tickets[number] if tickets else None
            reported = self._reported.of(task_of(ticket))
            for index, trajectory in enumerate(group.trajectories):
                if number_in_step in indices and watched is not None:
                    metrics = reported.metrics_of(trajectory)
                    columns = watched.columns(number_in_step)
                    chosen.append(PlayedEpisode(group, index, ticket, columns, metrics=metrics))
                elif not trajectory.trainable:
                    failures.append(PlayedEpisode(group, index, ticket))
                number_in_step += 1
        for ticket, group, reason in failed:
            failures += [
                PlayedEpisode(group, i, ticket, refused=reason or "refused") for i in range(len(group.trajectories))
            ]
        return chosen + failures[:room]

    def _header(self, step: int, version: PolicyVersion) -> StepHeader:
        recipe = self._recipe
        objective = recipe.learner.objective
        return StepHeader(
            step=step,
            version=version,
            time=time.time(),
            run=recipe.run.name[:4096],
            task=(recipe.env.module or ", ".join(task.module for task in recipe.tasks))[:4096],
            recipe_hash=self._hash,
            objective=objective.model_dump_json(),
            group_relative=objective.is_group_relative,
            model=recipe.model.path[:4096],
            dtype=recipe.model.dtype,
            min_pixels=recipe.model.min_pixels,
            max_pixels=recipe.model.max_pixels,
            temperature=recipe.sampling.temperature,
            columns=column_names(group_relative=objective.is_group_relative),
        )

    # -------------------------------------------------------------- the recorder's thread

    def _run(self) -> None:
        while (recording := self._queue.get()) is not None:
            began, before = time.thread_time(), self._episodes
            try:
                self._write(recording)
                self._last_message = ""
            except Exception as error:  # noqa: BLE001 - a failed recording is reported and never ends a run
                lost = len(recording.episodes) - (self._episodes - before)
                self._drop(lost, f"{recording} is not recorded: {type(error).__name__}: {error}")
            self._spent_s += time.thread_time() - began

    def _write(self, recording: _Recording) -> None:
        """Write a recording. If the folder was deleted meanwhile, it is made again, which is logged."""
        before = self._disk
        try:
            self._write_once(recording)
        except OSError as error:
            self._disk = None  # what it knew of the folder no longer holds
            if before is None or not isinstance(error, FileNotFoundError):
                raise
            self._log.warning("%s has lost files that were recorded; recording goes on there", self._folder)
            self._write_once(recording)

    def _write_once(self, recording: _Recording) -> None:
        if self._disk is None:
            self._disk = Disk(self._folder, int(self._recipe.record.max_gb * 1e9))
        if self._texts is None:
            self._texts = TokenTexts(self._recipe.model.path)
        header, played = recording.header, recording.episodes
        records = [record_of(p, self._texts, self._spec, group_relative=header.group_relative) for p in played]
        data = {image.content_hash: image.data for p in played for image in p.trajectory.images}
        images = {ref.file_name: data[ref.hash] for record in records for ref in record.images}
        self._disk.make_room(recording.id)
        self._bytes += self._disk.add_images(images, recording.id)
        writer = StepWriter(self._folder, header, StepImages(names=tuple(images)))
        try:
            for record in records:
                self._add(writer, record)
        finally:
            writer.close()
            self._disk.add(recording.id, writer.num_bytes)
            self._bytes += writer.num_bytes

    def _add(self, writer: StepWriter, record: RecordedEpisode) -> None:
        writer.add(record)
        self._episodes += 1

    def _drop(self, count: int, why: str) -> None:
        """Count episodes that are not recorded. The log reports only the first such case until a recording succeeds
        again."""
        with self._lock:
            self._dropped += count
            earlier, self._last_message = self._last_message, why
        if not earlier:
            self._log.error("%s; training goes on, record/dropped counts", why)
