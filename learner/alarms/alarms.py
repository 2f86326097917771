"""The alarms of a run, on rank 0 of its learner: judged after each step, and said where people look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from learner.alarms.judge import Judge
from learner.alarms.records import FILE, Alarm
from learner.alarms.replay import read_steps
from learner.alarms.webhook import Webhook
from learner.metrics.writer import MetricLogger
from shared.config import Recipe
from shared.log import get_logger
from shared.types import Group


class Alarms:
    """Each rule is said once when it is raised and once when it is over: in RUN/alarms.jsonl, in the log, as
    TensorBoard's text, and to the webhook. None of them can fail a step."""

    def __init__(self, recipe: Recipe, metrics: MetricLogger, steps_done: int = 0) -> None:
        """`steps_done`: of an earlier process; its metrics count as this one's, and what it has said stays said."""
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
        """After each step, with its metrics; the alarms' own."""
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
        """Lines that the disk refuses are written with a later one."""
        self._unwritten += alarm.encode()
        try:
            cut_off = self._path.exists() and not self._path.read_bytes().endswith(b"\n")  # by a kill
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" * cut_off + self._unwritten)
            self._unwritten = ""
        except OSError as error:
            self._log.error("%s lacks the alarm %s until the disk accepts it: %s", FILE, alarm.rule, error)
