"""Who the loop talks to for groups, evaluations and records: the same calls on every rank.

    ticket server ──groups──▶ next_groups()     evaluate() ──tickets──▶ ticket server ──groups──▶ finish_evaluations()

On rank 0 a `Coordinator` has the ticket server and the run folder; the other ranks have a `Follower`.
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
from typing import Any

from learner.alarms.alarms import Alarms
from learner.distributed import Ranks, broadcast_flag
from learner.metrics.episodes import RESULT, RunResult, held_out_metrics, middle_half, rollout_metrics
from learner.metrics.evaluation import evaluation_metrics, in_words
from learner.metrics.services import services_of
from learner.metrics.shown import show
from learner.metrics.writer import MetricLogger
from learner.parallel.delivery import broadcast_groups
from learner.recording.columns import Watched
from learner.recording.recorder import Recorder as StepRecorder
from learner.tickets.evaluations import Plan
from learner.tickets.ledger import Ledger
from learner.tickets.patience import result_in_time
from learner.tickets.records import number_of
from learner.tickets.server import Interrupted, TicketServer
from shared.config import Recipe
from shared.engine_messages import weight_name
from shared.log import get_logger
from shared.recordings.groups import Recorder
from shared.types import Group, PolicyVersion, Sample, Stop, Ticket

KEPT_BAD_BATCHES = 10


class Follower:
    """On ranks other than 0: gets what rank 0 broadcasts; nothing else needs to be done there."""

    process_id = ""  # what tells rank 0's process from all others of the run

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def wait_for_engines(self) -> frozenset[str]:
        return frozenset()

    def engines(self) -> frozenset[str]:
        return frozenset()

    def open(self, version: PolicyVersion) -> None: ...

    def set_version(self, version: PolicyVersion) -> None: ...

    def next_groups(self, engine_is_back: Event) -> Sequence[Group]:
        return broadcast_groups(None, self.ranks)

    def shutdown_requested(self) -> bool:
        return broadcast_flag(False, self.ranks)

    def out_of_time(self) -> bool:
        return broadcast_flag(False, self.ranks)

    def keep(self, step: int, version: PolicyVersion, groups: Sequence[Group], watched: Watched | None) -> None: ...

    def record(self, step: int, version: PolicyVersion, groups: Sequence[Group], values: dict[str, float]) -> None: ...

    def keep_bad_batch(self, step: int, groups: Sequence[Group]) -> None: ...

    def evaluate(self, name: str, *, greedy: bool = False) -> None: ...

    def finish_evaluations(self) -> bool:
        while broadcast_flag(False, self.ranks):
            pass
        return broadcast_flag(False, self.ranks)

    def value_of(self, name: str) -> float:
        return float("nan")

    def state(self) -> dict[str, Any]:
        return {}

    def result(self, steps: int, version: PolicyVersion) -> RunResult | None:
        return None

    def close(self, farewell: Stop | None) -> None: ...


class Coordinator(Follower):
    """On rank 0. Issues tickets from `open` on; `shutdown` ends its waits for groups and results."""

    def __init__(
        self,
        recipe: Recipe,
        ranks: Ranks,
        ticket_server: TicketServer,
        run_id: str,
        held_out: Sequence[Sample],
        state: Mapping[str, Any],
        shutdown: Event,
        recorder: StepRecorder,
        at: tuple[int, PolicyVersion] = (0, 0),
    ) -> None:
        """`state`: what a checkpoint holds of an earlier process; `at`: the steps that are done, and the version."""
        super().__init__(ranks)
        self.recipe, self.ticket_server, self.run_id = recipe, ticket_server, run_id
        self.held_out, self._shutdown, self._recorder = held_out, shutdown, recorder
        self._tickets: list[Ticket] = []  # of the groups that are in training
        self._kept = at  # the last step that was handed to the recorder, and its version
        self.process_id = ticket_server.process_id
        self.log = get_logger("learner")
        self.run_dir = Path(recipe.run.dir) / recipe.run.name
        writers = recipe.metrics.writers
        self.metrics = MetricLogger(self.run_dir, services_of(recipe, run_id), tensorboard="tensorboard" in writers)
        self.alarms = Alarms(recipe, self.metrics, at[0])
        self.ledger = Ledger(self.run_dir / "ledger.jsonl", state.get("ledger", ()))
        self.results: dict[str, dict[str, float]] = dict(state.get("results", {}))  # by the evaluation's name
        self._running: list[tuple[str, int]] = []  # evaluations, each with the step that it came after
        self._episodes = self._turns = 0
        self._idle_s = self._busy_s = 0.0
        self._actor_idle: list[float] = []
        self._explained: list[float] = []  # variance, by the critic
        self._started = self._last_step = time.monotonic()

    def wait_for_engines(self) -> frozenset[str]:
        """The engines that actors have announced; none when asked to shut down. TimeoutError when no actor with engines
        came."""
        address, timeout_s = self.ticket_server.address, self.recipe.learner.wait_timeout_s
        deadline = time.monotonic() + timeout_s
        while not (engines := self.engines()) and not self._shutdown.is_set():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no engine was named to {address} within {timeout_s:g} s: {self.ticket_server.describe_wait()}"
                )
            time.sleep(0.05)
        return engines

    def engines(self) -> frozenset[str]:
        return self.ticket_server.engines()

    def open(self, version: PolicyVersion) -> None:
        """Starts the clock of the run and issues tickets: the engines have the weights of `version`."""
        self._started = self._last_step = time.monotonic()
        self.ticket_server.open(version)

    def set_version(self, version: PolicyVersion) -> None:
        """The engines have the weights of `version`."""
        self.ticket_server.set_version(version)

    def next_groups(self, engine_is_back: Event) -> Sequence[Group]:
        """The groups of the next step, on every rank; none when asked to shut down, or when an engine is back without
        weights. TimeoutError names what it waited for."""
        started, learner, groups = time.monotonic(), self.recipe.learner, list[Group]()
        interrupts = (self._shutdown, engine_is_back)
        with suppress(Interrupted):  # then there are no groups
            batch = self.ticket_server.next_batch(learner.groups_per_step, learner.wait_timeout_s, *interrupts)
            self._tickets, groups = [ticket for ticket, _ in batch], [group for _, group in batch]
            self._idle_s += time.monotonic() - started
        return broadcast_groups(groups, self.ranks)

    def shutdown_requested(self) -> bool:
        return broadcast_flag(self._shutdown.is_set(), self.ranks)

    def out_of_time(self) -> bool:
        limit_s = 60 * self.recipe.learner.max_minutes
        return broadcast_flag(0 < limit_s < time.monotonic() - self._started, self.ranks)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of rank 0, as JSON values."""
        own = {"run_id": self.run_id, "ledger": self.ledger.state(), "results": self.results}
        return own | {"tickets": self.ticket_server.state_dict()}

    def keep(self, step: int, version: PolicyVersion, groups: Sequence[Group], watched: Watched | None) -> None:
        """Hands over what is to be recorded of the step, which trained the policy of `version`."""
        self._kept = (step, version)
        self._recorder.step(step, version, groups, self._tickets, watched, self.ticket_server.take_failed())

    def record(self, step: int, version: PolicyVersion, groups: Sequence[Group], values: dict[str, float]) -> None:
        """Closes a step: acknowledgments, the ledger, metrics; `values` are the trainer's and the publisher's."""
        now = time.monotonic()
        step_s, self._last_step = now - self._last_step, now
        numbers, weights = [number_of(group.ticket_id)[0] for group in groups], weight_name(version, self.process_id)
        self.ledger.enter(step, numbers, weights)
        self.ticket_server.commit()  # not before: what is acknowledged is forgotten
        turns = sum(len(t.turns) for group in groups for t in group.trajectories)
        self._episodes += sum(len(group.trajectories) for group in groups)
        self._turns += turns
        rows = rollout_metrics(groups) | values | self.ticket_server.metrics() | self._recorder.metrics()
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

    def keep_bad_batch(self, step: int, groups: Sequence[Group]) -> None:
        """Writes the groups of a step that could not be made; those of the last few steps are kept."""
        folder = self.run_dir / "bad_steps"
        try:
            recorder = Recorder(folder / f"step_{step:08d}")
            for group in groups:
                recorder.add(group)
            for old in sorted(folder.iterdir())[:-KEPT_BAD_BATCHES]:
                shutil.rmtree(old)
        except OSError as error:
            self.log.error("the batch of step %d is not kept: %s", step, error)
        self.log.warning("step %d has no finite loss and gradient and is skipped; its batch is in %s", step, folder)

    # -------------------------------------------------------------- evaluation

    def evaluate(self, name: str, *, greedy: bool = False) -> None:
        """Issues the held-out samples' tickets, with `greedy` those of a greedy evaluation too. The next publication
        waits for them."""
        if not self.held_out:
            return
        plans = {name: Plan.of(self.recipe)} | ({f"greedy_{name}": Plan.of(self.recipe, greedy=True)} if greedy else {})
        for each, plan in plans.items():
            self.ticket_server.start_evaluation(each, self.held_out, plan.sampling, plan.repeats)
            self._running.append((each, self._kept[0]))

    def finish_evaluations(self) -> bool:
        """Waits for all open evaluations; False when asked to shut down meanwhile. TimeoutError for one without
        progress. A collective: the other ranks hear now and then that it goes on, so that their limits do not pass."""
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
            result = result_in_time(self.ticket_server, name, limit_s, self._shutdown, on)
            self._running.pop(0)
            values = evaluation_metrics(result)
            self.results[name] = values
            self._recorder.evaluation(name, after, result, values)
            kind = "eval_greedy" if name.startswith("greedy") else "eval"
            self.metrics.scalars(after, {f"{kind}/{key}": value for key, value in values.items()})
            self.log.info("evaluation %s: %s", name, in_words(values, len(self.held_out)))

    def value_of(self, name: str) -> float:
        """The value of eval.best that an evaluation brought; NaN if there is none."""
        return self.results.get(name, {}).get(self.recipe.eval.best, float("nan"))

    def result(self, steps: int, version: PolicyVersion) -> RunResult:
        """Writes the run's summary to result.json."""
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

    def close(self, farewell: Stop | None) -> None:
        """Tells the actors that the run is over; None = they are to wait for the learner's return."""
        if farewell is None:
            self.ticket_server.go_silently()
        else:
            self.ticket_server.stop(farewell.reason, failed=farewell.failed)
        step, version = self._kept
        self._recorder.step(step + 1, version, (), failed=self.ticket_server.take_failed())  # why there was no step
        self._recorder.close()
        self.alarms.close()
        self.metrics.close()
