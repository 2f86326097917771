"""Rank 0's desk: the intake, the evaluations and the run folder. The other ranks have none.

intake ──groups──▶ batch()          evaluate_*() ──tickets──▶ intake ──groups──▶ finish_evaluations()
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

from learner.batch import is_uninformative
from learner.metrics.episodes import RunResult, evaluation_metrics, rollout_metrics
from learner.metrics.writer import MetricLogger
from learner.tickets.book import BookSettings
from learner.tickets.ledger import Ledger
from learner.tickets.records import number_of
from learner.tickets.server import Interrupted, TicketServer, TicketServerSettings
from learner.tickets.sources import SampleSource
from learner.trainer import episode_settings
from shared.codec import TokenRules
from shared.config import Recipe
from shared.keys import learner_security
from shared.learner_config import ObjectiveConfig
from shared.log import get_logger
from shared.recording import record
from shared.transport import SocketSettings
from shared.types import Group, PolicyVersion, Sample, Sampling, Stop

KEPT_BAD_BATCHES = 10


class Coordinator:
    """Opens the ticket socket at once; tickets are issued from `open` on. `state` is that of a checkpoint, or empty."""

    def __init__(
        self,
        recipe: Recipe,
        source: SampleSource,
        held_out: Sequence[Sample],
        rules: TokenRules,
        check: Callable[[Group], None],
        state: dict[str, Any],
    ) -> None:
        learner, env, sampling = recipe.learner, recipe.env, recipe.sampling
        self.recipe = recipe
        self.held_out = held_out
        self.log = get_logger("learner")
        self.run_dir = Path(recipe.run.dir) / recipe.run.name
        self.sampling = Sampling(sampling.temperature, sampling.top_p, sampling.top_k, env.turn_tokens)
        book = BookSettings(
            group_size=learner.group_size,
            groups_per_version=learner.groups_per_step * learner.publish.every,
            max_staleness=learner.max_staleness,
            sampling=self.sampling,
            lease_s=learner.lease_s,
            seed=recipe.run.seed,
            total_groups=learner.groups_per_step * learner.total_steps,
            refuse=refusal(learner.objective),
        )
        limits = SocketSettings(recipe.transport.max_message_bytes, recipe.transport.queue_messages)
        self.run_id = str(state.get("run_id") or uuid.uuid4().hex)
        settings = TicketServerSettings(
            learner.bind,
            self.run_dir,
            self.run_id,
            rules,
            learner.actor_timeout_s,
            sockets=limits,
            secure=learner_security(recipe.transport, learner.bind),
            check=check,
            max_failure_share=env.max_failure_share,
        )
        self.ticket_server = TicketServer(source, book, settings)
        if state:
            self.ticket_server.load_state(state["tickets"])
        self.metrics = MetricLogger(self.run_dir)
        self.results: dict[str, dict[str, float]] = {}
        self._running: list[str] = []
        self.ledger = Ledger(self.run_dir / "ledger.jsonl", state.get("ledger", ()))
        self._episodes = self._turns = 0
        self._idle_s = self._busy_s = 0.0
        self._actor_idle: list[float] = []
        self._started = self._last_step = time.monotonic()

    def wait_for_engines(self, timeout_s: float) -> frozenset[str]:
        """The engines that actors have announced. TimeoutError when nobody came."""
        deadline = time.monotonic() + timeout_s
        while not self.ticket_server.engines():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no actor came to {self.ticket_server.address} within {timeout_s:g} s; start "
                    f"launch/actors.py --actor.learner {self.ticket_server.address}"
                )
            time.sleep(0.05)
        return self.ticket_server.engines()

    def open(self, version: PolicyVersion) -> None:
        """Starts the clock of the run and issues tickets."""
        self._started = self._last_step = time.monotonic()
        self.ticket_server.open(version)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of rank 0, as JSON values."""
        return {"run_id": self.run_id, "tickets": self.ticket_server.state_dict(), "ledger": self.ledger.state()}

    def batch(self, *interrupts: Event) -> list[Group]:
        """The groups of the next step; none when one of `interrupts` is set. TimeoutError names whom it waited for."""
        started, learner = time.monotonic(), self.recipe.learner
        try:
            batch = self.ticket_server.next_batch(learner.groups_per_step, learner.wait_timeout_s, *interrupts)
        except Interrupted:
            return []
        self._idle_s += time.monotonic() - started
        return [group for _, group in batch]

    def out_of_time(self) -> bool:
        limit = self.recipe.learner.max_minutes
        return limit > 0 and time.monotonic() - self._started > 60 * limit

    def record(self, step: int, version: PolicyVersion, groups: Sequence[Group], values: dict[str, float]) -> None:
        """Closes a step: acknowledgments, the ledger, metrics; `values` are those of the trainer and the publisher."""
        now = time.monotonic()
        step_s, self._last_step = now - self._last_step, now
        self.ticket_server.commit()
        self.ledger.enter(step, [number_of(group.ticket_id)[0] for group in groups])
        turns = sum(len(t.turns) for group in groups for t in group.trajectories)
        self._episodes += sum(len(group.trajectories) for group in groups)
        self._turns += turns
        rows = rollout_metrics(groups) | values | self.ticket_server.metrics()
        rows |= {"time/step_s": step_s, "time/idle_s": self._idle_s - self._busy_s, "policy_version": float(version)}
        rows["learner/idle_frac"] = min(1.0, rows["time/idle_s"] / step_s)
        self._busy_s = self._idle_s
        rows |= {"speed/turns_per_s": turns / step_s, "progress/episodes": float(self._episodes)}
        rows["progress/minutes"] = (now - self._started) / 60
        self._actor_idle.append(rows.get("actors/idle_frac", 0.0))
        self.metrics.scalars(step, rows)
        if step % 10 == 0 and groups[0].trajectories:
            self._show(step, groups[0])
            self.metrics.text(step, "selection", self.ticket_server.selection_table())

    def keep_bad_batch(self, step: int, groups: Sequence[Group]) -> None:
        """Writes the groups of a step that could not be made; those of the last few steps are kept."""
        folder = self.run_dir / "bad_steps"
        record(folder / f"step_{step:08d}", groups)
        for old in sorted(folder.iterdir())[:-KEPT_BAD_BATCHES]:
            shutil.rmtree(old)
        self.log.warning("step %d has no finite loss and gradient and is skipped; its batch is in %s", step, folder)

    def _show(self, step: int, group: Group) -> None:
        """An episode to look at: its images and its transcript."""
        episode = group.trajectories[0]
        for number, image in enumerate(episode.images[:4]):
            self.metrics.image(step, f"episode/picture_{number}", bytes(image.data))
        transcript = "\n".join("    " + line for line in episode.text.splitlines())
        self.metrics.text(step, "episode/transcript", f"reward {episode.reward:.3f}, {episode.ending}\n\n{transcript}")

    # -------------------------------------------------------------- evaluation

    def evaluate(self, name: str, *, greedy: bool = False) -> None:
        """Issues the held-out samples' tickets; the next publication waits for them."""
        if not self.held_out:
            return
        temperature = 0.0 if greedy else self.sampling.temperature
        sampling = Sampling(temperature, 1.0, -1, self.sampling.max_new_tokens)
        self.ticket_server.start_evaluation(name, self.held_out, sampling, 1 if greedy else self.recipe.eval.repeats)
        self._running.append(name)

    def finish_evaluations(self, step: int, shutdown: Event) -> None:
        """Waits for all open evaluations, so that each result belongs to one version; not when asked to leave."""
        while self._running:
            name = self._running.pop(0)
            try:
                result = self.ticket_server.evaluation_result(name, self.recipe.learner.wait_timeout_s, shutdown)
            except Interrupted:
                return
            values = evaluation_metrics(result)
            self.results[name] = values
            kind = "eval_greedy" if name.startswith("greedy") else "eval"
            self.metrics.scalars(step, {f"{kind}/{key}": value for key, value in values.items()})
            numbers = "  ".join(f"{key} {values[key]:.3f}" for key in ("success", "reward", "turns") if key in values)
            lost = f", {values['lost']:.0f} lost" if values["lost"] else ""
            lost += f", {100 * values['failed']:.0f} % failed" if values.get("failed") else ""
            self.log.info("evaluation %s: %s (%d samples%s)", name, numbers, len(self.held_out), lost)

    def result_of_candidate(self, step: int, *, final: bool = False) -> float:
        """The value of eval.best that the evaluation at `step` brought; NaN if there is none."""
        values = self.results.get("after" if final else f"step_{step}", {})
        return values.get(self.recipe.eval.best, float("nan"))

    def result(self, steps: int, version: PolicyVersion) -> RunResult:
        """Writes the run's summary to result.json."""
        seconds = max(self._last_step - self._started, 1e-9)

        def success(name: str) -> float | None:
            return self.results.get(name, {}).get("success")

        result = RunResult(
            success_before=success("before"),
            success_after=success("after"),
            minutes=seconds / 60,
            episodes=self._episodes,
            optimizer_steps=steps,
            policy_versions=version,
            max_staleness_seen=self.ticket_server.max_staleness_seen,
            turns_per_second=self._turns / seconds,
            learner_idle_frac=self._idle_s / seconds,
            actor_idle_frac=sum(self._actor_idle) / max(1, len(self._actor_idle)),
            greedy_success_before=success("greedy_before"),
            greedy_success_after=success("greedy_after"),
        )
        (self.run_dir / "result.json").write_text(json.dumps(result.as_dict()) + "\n")
        return result

    def close(self, farewell: Stop | None) -> None:
        """Tells the actors that the run is over; None = they are to wait for the learner's return."""
        if farewell is None:
            self.ticket_server.go_silently()
        else:
            self.ticket_server.stop(farewell.reason, failed=farewell.failed)
        self.metrics.close()


def refusal(config: ObjectiveConfig) -> Callable[[Group], str] | None:
    """What names the reason why a group is replaced by a fresh one; None where every group is trained on."""
    if not config.dynamic_sampling:
        return None
    settings = episode_settings(config)
    return lambda group: "uninformative" if is_uninformative(group, settings) else ""
