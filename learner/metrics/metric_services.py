"""Optional services that receive the metrics (Weights & Biases, Trackio, MLflow, SwanLab), each in a thread: none of
them stops training.

A package is imported only if `metrics.writers` names it. Rows that a service does not accept, because it fails or
hangs, are counted and reported once a minute; metrics.jsonl has them all the same.
"""

from __future__ import annotations

import contextlib
import math
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
    if "swanlab" in recipe.metrics.writers and not _swanlab_may_write():
        raise ValueError(
            "metrics.writers names 'swanlab', but there is no key: set SWANLAB_API_KEY, or SWANLAB_MODE=offline to "
            "write into the run's folder"
        )
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


def _swanlab_may_write() -> bool:
    without = os.environ.get("SWANLAB_MODE") in ("offline", "local", "disabled")
    return without or bool(os.environ.get("SWANLAB_API_KEY")) or (Path.home() / ".swanlab" / ".netrc").exists()


def services_of(recipe: Recipe, run_id: str) -> list[Service]:
    """Return the services that the recipe names. `run_id` identifies the run, also over restarts."""
    names = dict.fromkeys(recipe.metrics.writers)
    return [Service(name, partial(START[name], recipe, run_id)) for name in names if name in START]


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


def start_mlflow(recipe: Recipe, run_id: str) -> Started:
    """Start a run of MLflow, or go on with the one of this `run_id`: at MLFLOW_TRACKING_URI or, without it, in a
    database in the run's folder."""
    import mlflow

    folder, project = Path(recipe.run.dir).resolve() / recipe.run.name, recipe.metrics.project
    server = os.environ.get("MLFLOW_TRACKING_URI")
    uri, files = (server, None) if server else (f"sqlite:///{folder / 'mlflow.db'}", (folder / "mlflow").as_uri())
    mlflow.set_tracking_uri(uri)
    client = mlflow.MlflowClient(tracking_uri=uri)
    known = client.get_experiment_by_name(project)
    experiment = known.experiment_id if known else client.create_experiment(project, files)
    earlier = client.search_runs([experiment], f"tags.`pronk.run_id` = '{run_id}'")
    if earlier:
        number = earlier[0].info.run_id
    else:
        number = client.create_run(experiment, run_name=recipe.run.name, tags={"pronk.run_id": run_id}).info.run_id
        client.log_dict(number, recipe.model_dump(mode="json"), "recipe.json")

    def log(step: int, values: Mapping[str, float]) -> None:
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        mlflow.log_metrics(finite, step=step, run_id=number)

    return log, lambda: client.set_terminated(number)


def start_swanlab(recipe: Recipe, run_id: str) -> Started:
    """Start a run of SwanLab, which reads SWANLAB_API_KEY and SWANLAB_MODE itself."""
    import swanlab

    run = swanlab.init(
        project=recipe.metrics.project,
        name=recipe.run.name,
        id=run_id,
        resume="allow",
        log_dir=str(Path(recipe.run.dir) / recipe.run.name / "swanlab"),
        config=recipe.model_dump(mode="json"),
    )
    return lambda step, values: run.log(dict(values), step=step), run.finish


START = {"wandb": start_wandb, "trackio": start_trackio, "mlflow": start_mlflow, "swanlab": start_swanlab}


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
