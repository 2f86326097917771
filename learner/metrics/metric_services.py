"""Optional services that receive the metrics, Weights & Biases and Trackio, each in a thread: none of them stops
training.

A package is imported only if `metrics.writers` names it. Rows that a service does not accept, because it fails or
hangs, are counted and reported once a minute; metrics.jsonl has them all the same.
"""

from __future__ import annotations

import contextlib
import netrc
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shared.config.recipe import Recipe
from shared.log import get_logger

WAITING = 256  # rows in the queue; further ones are lost
CLOSE_S = 10.0
SAY_EVERY_S = 60.0
Log = Callable[[int, Mapping[str, float]], None]
Started = tuple[Log, Callable[[], Any]]  # (logs the values of a step, finishes the run)


def check_writers(recipe: Recipe) -> None:
    """Raise ValueError, in one line with the cure, for a configured writer that cannot work here."""
    for name in set(recipe.metrics.writers) - {"tensorboard"}:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a mere folder of that name is not a package
            raise ValueError(f"metrics.writers names {name!r}, which is not installed: pip install {name}")
    if "wandb" in recipe.metrics.writers and not _wandb_may_write():
        raise ValueError(
            "metrics.writers names 'wandb', but there is no key: set WANDB_API_KEY, or WANDB_MODE=offline to write "
            "into the run's folder"
        )


def _wandb_may_write() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return True
    try:  # `wandb login` stores the key there
        return netrc.netrc(os.environ.get("NETRC")).authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def services_of(recipe: Recipe, run_id: str) -> list[Service]:
    """Return the services that the recipe names. `run_id` identifies the run, also over restarts."""
    start = {"wandb": start_wandb, "trackio": start_trackio}
    names = dict.fromkeys(recipe.metrics.writers)
    return [Service(name, partial(start[name], recipe, run_id)) for name in names if name in start]


def start_wandb(recipe: Recipe, run_id: str) -> Started:
    """Start a run of wandb, which reads WANDB_API_KEY and WANDB_MODE itself."""
    import wandb

    run = wandb.init(
        project=recipe.metrics.project,
        name=recipe.run.name,
        id=run_id,
        resume="allow",
        dir=str(Path(recipe.run.dir) / recipe.run.name),
        config=recipe.model_dump(mode="json"),
        settings=wandb.Settings(console="off"),
    )
    run.define_metric("*", step_metric="step")  # wandb's own step count never goes back, as that of a resumed run does
    return lambda step, values: run.log({"step": step, **values}), run.finish


def start_trackio(recipe: Recipe, run_id: str) -> Started:
    import trackio

    name = f"{recipe.run.name}-{run_id[:8]}"
    trackio.init(
        project=recipe.metrics.project, name=name, config=recipe.model_dump(mode="json"), resume="allow", embed=False
    )
    return lambda step, values: trackio.log(dict(values), step=step), trackio.finish


class Service:
    """One service with its thread. `scalars` never waits and never raises."""

    def __init__(self, name: str, start: Callable[[], Started], close_s: float = CLOSE_S) -> None:
        self.name = name
        self.lost = 0
        self._start, self._close_s = start, close_s
        self._said_at = -SAY_EVERY_S
        self._waiting: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        try:
            self._waiting.put_nowait((step, values))
        except queue.Full:
            self._lose(f"it has taken nothing for {WAITING} rows")

    def close(self) -> None:
        """Wait up to the time limit until the queued rows are written."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            get_logger("metrics").warning("%s did not end within %g s; it is left alone", self.name, self._close_s)

    def _run(self) -> None:
        started: Started | None = None
        while (item := self._waiting.get()) is not None:
            try:
                started = started or self._start()
                started[0](*item)
            except Exception as error:  # noqa: BLE001 - training continues whatever third-party code raises
                self._lose(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        if started is not None:
            try:
                started[1]()
            except Exception as error:  # noqa: BLE001 - as above
                self._lose(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def _lose(self, reason: str) -> None:
        self.lost += 1
        if time.monotonic() - self._said_at >= SAY_EVERY_S:
            self._said_at = time.monotonic()
            get_logger("metrics").warning(
                "%s lacks some metrics, %d rows so far; metrics.jsonl has them: %s", self.name, self.lost, reason
            )
