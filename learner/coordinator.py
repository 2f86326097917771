"""The coordinator, from which the loop gets groups, evaluations and records: the same calls on every rank.

    ticket server ──groups──▶ next_groups()     evaluate() ──tickets──▶ ticket server ──groups──▶ finish_evaluations()

On rank 0 a `MainCoordinator` has the ticket server and the run folder; the other ranks have a `RemoteCoordinator`.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Protocol

from learner.alarms.alarms import Alarms
from learner.batch.delivery import broadcast_groups
from learner.distributed import Ranks, broadcast_flag
from learner.metrics.episode_metrics import RESULT, RunResult, held_out_metrics, middle_half, rollout_metrics
from learner.metrics.evaluation_metrics import evaluation_metrics, in_words
from learner.metrics.metric_services import services_of
from learner.metrics.metric_writer import MetricLogger
from learner.metrics.shown_episode import show
from learner.recording.recorded_columns import RecordedColumns
from learner.recording.recorder import Recorder
from learner.run_folder_watch import RunFolderWatch
from learner.tickets.evaluations import EvaluationPlan
from learner.tickets.ledger import Ledger
from learner.tickets.ticket_records import parse_ticket_id
from learner.tickets.ticket_server import Interrupted, TicketServer, wait_for_evaluation
from shared.config.recipe import Recipe
from shared.engine.engine_messages import weight_name
from shared.log import get_logger
from shared.metrics import ReportedMetrics
from shared.recordings.group_files import GroupWriter
from shared.run_status import TRAINING, StatusFile
from shared.types import Group, PolicyVersion, Sample, Stop, Ticket

KEPT_BAD_BATCHES = 10


class Coordinator(Protocol):
    """Gives the loop groups, evaluations and records. Every rank makes the same calls; many of them are collectives."""

    process_id: str  # distinguishes rank 0's process from the run's other processes; empty on other ranks
    # True if the groups are of earlier runs: there are no engines, and versions are not those of this run's policy.
    is_recorded: bool

    def wait_for_engines(self) -> frozenset[str]:
        """Return, on rank 0, the engines that actors have announced; none if asked to shut down."""
        ...

    def engines(self) -> frozenset[str]:
        """Return, on rank 0, the URLs of the engines that are connected now."""
        ...

    def open(self, version: PolicyVersion) -> None:
        """Begin the run: the engines have the weights of `version`."""
        ...

    def set_version(self, version: PolicyVersion) -> None:
        """Record that the engines have the weights of `version`."""
        ...

    def is_process(self, process: str) -> bool:
        """Tell, on rank 0, whether a process is an earlier one of this run, as far as its checkpoint knows them."""
        ...

    def refuse_engine(self, url: str, first: PolicyVersion, last: PolicyVersion) -> None:
        """Refuse what the engine at `url` may have sampled as versions `first` to `last`: its weights were wrong."""
        ...

    def next_groups(self, publication_due: Event) -> Sequence[Group]:
        """Return the groups of the next step, on every rank; none if asked to shut down or once `publication_due` is
        set."""
        ...

    def policy_version(self, groups: Sequence[Group], version: PolicyVersion) -> PolicyVersion:
        """Return the version of the policy that is trained on `groups`; `version` is the one that the engines have."""
        ...

    def shutdown_requested(self) -> bool:
        """Tell whether rank 0 was asked to shut down."""
        ...

    def out_of_time(self) -> bool:
        """Tell whether the run has trained for `learner.max_minutes`."""
        ...

    def keep(
        self, step: int, version: PolicyVersion, groups: Sequence[Group], recorded: RecordedColumns | None
    ) -> None:
        """Pass the step's data to the recorder. The step trained the policy of `version`."""
        ...

    def record(self, step: int, version: PolicyVersion, groups: Sequence[Group], values: dict[str, float]) -> None:
        """Finish a step: acknowledge its groups, write the ledger and metrics. `values`: metrics of trainer and
        publisher."""
        ...

    def keep_bad_batch(self, step: int, groups: Sequence[Group]) -> None:
        """Write the groups of a step that was skipped."""
        ...

    def evaluate(self, name: str, *, greedy: bool = False) -> None:
        """Start an evaluation on the held-out samples, with `greedy` also a greedy one."""
        ...

    def finish_evaluations(self) -> bool:
        """Wait for all open evaluations; return False if asked to shut down meanwhile."""
        ...

    def value_of(self, name: str) -> float:
        """Return the value of the metric `eval.best` in an evaluation's result; NaN if there is none."""
        ...

    def trace(self, *, new: bool, kept: bool) -> None:
        """Say, on rank 0, whether new tickets are traced, and whether spans that groups bring are kept."""
        ...

    def take_traces(self) -> list[tuple[str, bytes]]:
        """Return, on rank 0, (actor, spans) of the groups that have come since the last call."""
        ...

    def state(self) -> dict[str, Any]:
        """Return rank 0's part of a checkpoint, as JSON values."""
        ...

    def result(self, steps: int, version: PolicyVersion) -> RunResult | None:
        """Return the run's summary on rank 0, None on other ranks."""
        ...

    def close(self, message: Stop | None) -> None:
        """Tell the actors that the run is over; None = let them wait for the learner's return."""
        ...


class RemoteCoordinator:
    """The coordinator on ranks other than 0: receives what rank 0 broadcasts and does nothing else."""

    process_id = ""
    is_recorded = False

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def wait_for_engines(self) -> frozenset[str]:
        return frozenset()

    def engines(self) -> frozenset[str]:
        return frozenset()

    def open(self, version: PolicyVersion) -> None: ...

    def set_version(self, version: PolicyVersion) -> None: ...

    def is_process(self, process: str) -> bool:
        return False

    def refuse_engine(self, url: str, first: PolicyVersion, last: PolicyVersion) -> None: ...

    def next_groups(self, publication_due: Event) -> Sequence[Group]:
        return broadcast_groups(None, self.ranks)

    def policy_version(self, groups: Sequence[Group], version: PolicyVersion) -> PolicyVersion:
        return version

    def shutdown_requested(self) -> bool:
        return broadcast_flag(False, self.ranks)

    def out_of_time(self) -> bool:
        return broadcast_flag(False, self.ranks)

    def keep(
        self, step: int, version: PolicyVersion, groups: Sequence[Group], recorded: RecordedColumns | None
    ) -> None: ...

    def record(self, step: int, version: PolicyVersion, groups: Sequence[Group], values: dict[str, float]) -> None: ...

    def keep_bad_batch(self, step: int, groups: Sequence[Group]) -> None: ...

    def evaluate(self, name: str, *, greedy: bool = False) -> None: ...

    def finish_evaluations(self) -> bool:
        while broadcast_flag(False, self.ranks):
            pass
        return broadcast_flag(False, self.ranks)

    def value_of(self, name: str) -> float:
        return float("nan")

    def trace(self, *, new: bool, kept: bool) -> None: ...

    def take_traces(self) -> list[tuple[str, bytes]]:
        return []

    def state(self) -> dict[str, Any]:
        return {}

    def result(self, steps: int, version: PolicyVersion) -> RunResult | None:
        return None

    def close(self, message: Stop | None) -> None: ...


class MainCoordinator:
    """The coordinator on rank 0, with the ticket server and the run folder.

    It issues tickets from `open` on. The event `shutdown` ends its waits for groups and results.
    """

    is_recorded = False

    def __init__(
        self,
        recipe: Recipe,
        ranks: Ranks,
        ticket_server: TicketServer,
        run_id: str,
        held_out: Sequence[Sample],
        state: Mapping[str, Any],
        shutdown: Event,
        recorder: Recorder,
        at: tuple[int, PolicyVersion] = (0, 0),
    ) -> None:
        """Continue an earlier process, or start anew. `state`: its state in the checkpoint; `at`: the number of
        finished steps, and the version."""
        self.ranks = ranks
        self.recipe = recipe
        self.ticket_server = ticket_server
        ticket_server.on_evaluation = lambda name, done, total: self.status.enter(f"evaluation {name}", done, total)
        self.run_id = run_id
        self.held_out = held_out
        self._shutdown = shutdown
        self._recorder = recorder
        self._tickets: list[Ticket] = []  # tickets of the groups that are in training
        self._kept = at  # (last step that was passed to the recorder, its version)
        self.process_id = ticket_server.process_id
        self.log = get_logger("learner")
        self.run_dir = Path(recipe.run.dir) / recipe.run.name
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._folder_watch = RunFolderWatch(self.run_dir)
        self.status = StatusFile(self.run_dir)
        writers = recipe.metrics.writers
        self.metrics = MetricLogger(
            self.run_dir, services_of(recipe, run_id), tensorboard="tensorboard" in writers, steps_done=at[0]
        )
        self.alarms = Alarms(recipe, self.metrics, at[0])
        self.ledger = Ledger(self.run_dir / "ledger.jsonl", state.get("ledger", ()))
        self.results: dict[str, dict[str, float]] = dict(state.get("results", {}))  # by the name of the evaluation
        self._running: list[tuple[str, int]] = []  # (name, step after which it started) of each open evaluation
        self._episodes = self._turns = 0
        self._idle_s = self._busy_s = 0.0
        self._actor_idle: list[float] = []
        self._reported = ReportedMetrics()
        self._explained: list[float] = []  # the critic's explained variance at each step
        self._started = self._last_step = time.monotonic()

    def wait_for_engines(self) -> frozenset[str]:
        """Return the engines that actors have announced; none if asked to shut down. Raise TimeoutError if no actor
        with engines comes."""
        address, timeout_s = self.ticket_server.address, self.recipe.learner.wait_timeout_s
        deadline = time.monotonic() + timeout_s
        self.status.enter("waiting for engines")
        while not (engines := self.engines()) and not self._shutdown.is_set():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no engine was named to {address} within {timeout_s:g} s: {self.ticket_server.describe_wait()}"
                )
            time.sleep(0.05)
        self.status.enter("sending the weights to the engines")
        return engines

    def engines(self) -> frozenset[str]:
        return self.ticket_server.engines()

    def open(self, version: PolicyVersion) -> None:
        """Start the clock of the run and issue tickets: the engines have the weights of `version`."""
        self._started = self._last_step = time.monotonic()
        self.status.enter("waiting for the first groups")
        self.ticket_server.open(version)

    def set_version(self, version: PolicyVersion) -> None:
        """Record that the engines have the weights of `version`."""
        self.ticket_server.set_version(version)

    def is_process(self, process: str) -> bool:
        return self.ticket_server.is_process(process)

    def refuse_engine(self, url: str, first: PolicyVersion, last: PolicyVersion) -> None:
        self.ticket_server.refuse_engine(url, first, last)

    def next_groups(self, publication_due: Event) -> Sequence[Group]:
        """Return the groups of the next step, on every rank; none if asked to shut down, or if an engine is back
        without weights.

        Raise TimeoutError, which names the actors it waited for.
        """
        started, learner, groups = time.monotonic(), self.recipe.learner, list[Group]()
        interrupts = (self._shutdown, publication_due)
        with suppress(Interrupted):  # if interrupted, there are no groups
            batch = self.ticket_server.next_batch(learner.groups_per_step, learner.wait_timeout_s, *interrupts)
            self._tickets, groups = [ticket for ticket, _ in batch], [group for _, group in batch]
            self._idle_s += time.monotonic() - started
        return broadcast_groups(groups, self.ranks)

    def policy_version(self, groups: Sequence[Group], version: PolicyVersion) -> PolicyVersion:
        return version

    def shutdown_requested(self) -> bool:
        return broadcast_flag(self._shutdown.is_set(), self.ranks)

    def out_of_time(self) -> bool:
        limit_s = 60 * self.recipe.learner.max_minutes
        return broadcast_flag(0 < limit_s < time.monotonic() - self._started, self.ranks)

    def trace(self, *, new: bool, kept: bool) -> None:
        self.ticket_server.trace(new=new, kept=kept)

    def take_traces(self) -> list[tuple[str, bytes]]:
        return self.ticket_server.take_traces()

    def state(self) -> dict[str, Any]:
        """Return rank 0's part of a checkpoint, as JSON values."""
        self._folder_watch.check()
        state = {"run_id": self.run_id, "ledger": self.ledger.state(), "results": self.results}
        return state | {"tickets": self.ticket_server.state_dict()}

    def keep(
        self, step: int, version: PolicyVersion, groups: Sequence[Group], recorded: RecordedColumns | None
    ) -> None:
        """Pass the step's data to the recorder. The step trained the policy of `version`."""
        self._kept = (step, version)
        self._recorder.step(step, version, groups, self._tickets, recorded, self.ticket_server.take_failed())

    def record(self, step: int, version: PolicyVersion, groups: Sequence[Group], values: dict[str, float]) -> None:
        """Finish a step: acknowledge its groups, write the ledger and metrics. `values`: metrics of trainer and
        publisher."""
        self._folder_watch.check()
        now = time.monotonic()
        step_s, self._last_step = now - self._last_step, now
        self.status.enter(TRAINING)
        numbers = [parse_ticket_id(group.ticket_id)[0] for group in groups]
        weights = weight_name(version, self.process_id)
        self.ledger.enter(step, numbers, weights)
        self.ticket_server.commit()  # after the ledger: actors forget acknowledged groups
        turns = sum(len(t.turns) for group in groups for t in group.trajectories)
        self._episodes += sum(len(group.trajectories) for group in groups)
        self._turns += turns
        rows = (
            rollout_metrics(groups, self._reported, self._tasks())
            | values
            | self.ticket_server.metrics()
            | self._recorder.metrics()
        )
        rows |= {"time/step_s": step_s, "time/idle_s": self._idle_s - self._busy_s, "policy_version": float(version)}
        rows["learner/idle_frac"] = min(1.0, rows["time/idle_s"] / step_s)
        self._busy_s = self._idle_s
        rows |= {"speed/turns_per_s": turns / step_s, "progress/episodes": float(self._episodes)}
        rows["progress/minutes"] = (now - self._started) / 60
        self._actor_idle.append(rows.get("actors/idle_frac", 0.0))
        if "value/explained_variance" in rows:
            self._explained.append(rows["value/explained_variance"])
        rows |= self.alarms.step(step, rows, groups) | self.metrics.lost()
        self.metrics.scalars(step, rows)
        if step % 10 == 0 and groups[0].trajectories:
            show(self.metrics, step, groups[0].trajectories[0])
            self.metrics.text(step, "selection", self.ticket_server.selection_table())

    def _tasks(self) -> list[str]:
        """Return the task of each group that is in training; nothing in a run of one task."""
        return [ticket.sample.task for ticket in self._tickets] if self.recipe.tasks else []

    def keep_bad_batch(self, step: int, groups: Sequence[Group]) -> None:
        """Write the groups of a skipped step; only those of the last `KEPT_BAD_BATCHES` such steps remain on the
        disk."""
        folder = self.run_dir / "bad_steps"
        try:
            recorder = GroupWriter(folder / f"step_{step:08d}")
            for group in groups:
                recorder.add(group)
            for old in sorted(folder.iterdir())[:-KEPT_BAD_BATCHES]:
                shutil.rmtree(old)
        except OSError as error:
            self.log.error("the batch of step %d is not kept: %s", step, error)
        self.log.warning("step %d has no finite loss and gradient and is skipped; its batch is in %s", step, folder)

    # -------------------------------------------------------------- evaluation

    def evaluate(self, name: str, *, greedy: bool = False) -> None:
        """Issue tickets for the held-out samples, with `greedy` also those of a greedy evaluation. The next publication
        waits for them."""
        if not self.held_out:
            return
        plans = {name: EvaluationPlan.of(self.recipe)}
        if greedy:
            plans[f"greedy_{name}"] = EvaluationPlan.of(self.recipe, greedy=True)
        for each, plan in plans.items():
            self.ticket_server.start_evaluation(each, self.held_out, plan.sampling, plan.repeats)
            self._running.append((each, self._kept[0]))

    def finish_evaluations(self) -> bool:
        """Wait for all open evaluations; return False if asked to shut down meanwhile. A collective.

        Raise TimeoutError for an evaluation without progress. Meanwhile rank 0 sends the other ranks a sign of life
        from time to time, so that their collective does not time out.
        """
        try:
            self._finish_evaluations()
        except Interrupted:
            self.log.warning("cut off by the shutdown: evaluation %s", ", ".join(name for name, _ in self._running))
        broadcast_flag(False, self.ranks)
        return broadcast_flag(not self._running, self.ranks)

    def _finish_evaluations(self) -> None:
        while self._running:
            name, after = self._running[0]
            limit_s, on = self.recipe.learner.wait_timeout_s, partial(broadcast_flag, True, self.ranks)
            result = wait_for_evaluation(self.ticket_server, name, limit_s, self._shutdown, on)
            self._running.pop(0)
            values = evaluation_metrics(result, self._reported)
            self.results[name] = values
            self._recorder.evaluation(name, after, result, values)
            kind = "eval_greedy" if name.startswith("greedy") else "eval"
            self.metrics.scalars(after, {f"{kind}/{key}": value for key, value in values.items()})
            self.log.info("evaluation %s: %s", name, in_words(values, len(self.held_out)))

    def value_of(self, name: str) -> float:
        """Return the value of the metric `eval.best` in an evaluation's result; NaN if there is none."""
        return self.results.get(name, {}).get(self.recipe.eval.best, float("nan"))

    def result(self, steps: int, version: PolicyVersion) -> RunResult:
        """Write the run's summary to result.json and return it."""
        self.log.info("%d steps, %d versions", steps, version)
        seconds = max(self._last_step - self._started, 1e-9)
        success = {name: values.get("success") for name, values in self.results.items()}
        result = RunResult(
            success_before=success.get("before"),
            success_after=success.get("after"),
            minutes=seconds / 60,
            episodes=self._episodes,
            optimizer_steps=steps,
            policy_versions=version,
            max_staleness_seen=self.ticket_server.max_staleness_seen,
            turns_per_second=self._turns / seconds,
            learner_idle_frac=self._idle_s / seconds,
            actor_idle_frac=sum(self._actor_idle) / max(1, len(self._actor_idle)),
            greedy_success_before=success.get("greedy_before"),
            greedy_success_after=success.get("greedy_after"),
            explained_variance=middle_half(self._explained),
            held_out=held_out_metrics(self.results),
        )
        try:
            (self.run_dir / RESULT).write_text(json.dumps(result.as_dict()) + "\n")
        except OSError as error:
            self.log.error("result.json is not written: %s", error)
        return result

    def close(self, message: Stop | None) -> None:
        """Tell the actors that the run is over; None = let them wait for the learner's return."""
        if message is None:
            self.ticket_server.go_silently()
        else:
            self.ticket_server.stop(message.reason, failed=message.failed)
        step, version = self._kept
        # with the failed groups, which may explain why no further step was made
        self._recorder.step(step + 1, version, (), failed=self.ticket_server.take_failed())
        self._recorder.close()
        self.alarms.close()
        self.metrics.close()
