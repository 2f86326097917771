"""A run's alarms, on rank 0 of its learner: judged after each step and reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from learner.alarms.alarm_records import FILE, Alarm
from learner.alarms.alarm_replay import read_steps
from learner.alarms.judge import Judge
from learner.alarms.webhook import Webhook
from learner.metrics.metric_writer import MetricLogger
from shared.config.recipe import Recipe
from shared.log import get_logger
from shared.types import Group


class Alarms:
    """Reports each rule once when it is raised and once when it is cleared: in RUN/alarms.jsonl, in the log, as a
    TensorBoard text, and to the webhook. No failure of these fails a step."""

    def __init__(self, recipe: Recipe, metrics: MetricLogger, steps_done: int = 0) -> None:
        """Continue the alarms of a run. `steps_done`: number of steps of an earlier process; its metrics are judged
        again, but its alarms are not reported again."""
        folder = Path(recipe.run.dir) / recipe.run.name
        self._run, self._metrics, self._path = recipe.run.name, metrics, folder / FILE
        self._log = get_logger("alarms")
        self._unwritten = ""
        self._judge = Judge.of(recipe.model_dump(mode="json"))
        self._webhook = Webhook(recipe.alarms.webhook) if recipe.alarms.webhook else None
        if steps_done:
            for step, row in read_steps(folder / "metrics.jsonl", steps_done).items():
                self._judge.step(step, row)

    def step(self, step: int, row: Mapping[str, float], groups: Sequence[Group]) -> dict[str, float]:
        """Judge a step by its metrics, report the changes, and return the alarms' own metrics."""
        for change in self._judge.step(step, row):
            alarm = Alarm.of(change, groups)
            self._append(alarm)
            self._metrics.text(step, f"alarms/{alarm.rule}", alarm.markdown())
            if change.rule.logged:
                (self._log.warning if change.raised else self._log.info)("%s", alarm.line())
            if self._webhook is not None:
                self._webhook.post({"text": f"{self._run}: {alarm.line()}", "run": self._run, **asdict(alarm)})
        levels = [rule.level for rule in self._judge.raised]
        counts = {f"alarms/{level}": float(levels.count(level)) for level in ("warning", "critical")}
        return counts | ({"alarms/webhook_failed": float(self._webhook.failed)} if self._webhook else {})

    def close(self) -> None:
        if self._webhook is not None:
            self._webhook.close()

    def _append(self, alarm: Alarm) -> None:
        """Append an alarm to the file; if the disk refuses, it is written with a later one."""
        self._unwritten += alarm.encode()
        try:
            # a kill may have truncated the last line
            cut_off = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" * cut_off + self._unwritten)
            self._unwritten = ""
        except OSError as error:
            self._log.error("%s lacks the alarm %s until the disk accepts it: %s", FILE, alarm.rule, error)
