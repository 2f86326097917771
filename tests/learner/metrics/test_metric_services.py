"""W&B, Trackio, MLflow and SwanLab as optional writers: the same names, and never a step that waits for them or fails
with them.

Stand-ins with the same call signature take the place of the first two; one test wants the real packages, which
`pip install --group writers mlflow swanlab` brings.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from threading import Event

import pytest

from learner.metrics.metric_services import START, WAITING, Service, check_writers, services_of
from learner.metrics.metric_writer import MetricLogger
from shared.config.recipe import Recipe
from shared.config.sections import EnvConfig, MetricsConfig, ModelConfig, RunConfig
from shared.log import get_logger

WANDB = """
import json
class Settings:
    def __init__(self, *, console): assert console == "off"
class Run:
    def __init__(self, path): self.path = path
    def define_metric(self, name, *, step_metric): assert (name, step_metric) == ("*", "step")
    def log(self, data): self.path.open("a").write(json.dumps(data) + "\\n")
    def finish(self): self.path.open("a").write("finished\\n")
def init(*, project, name, id, resume, dir, config, settings):
    from pathlib import Path
    assert resume == "allow" and config["run"]["name"] == name and isinstance(settings, Settings)
    return Run(Path(dir) / f"wandb-{project}-{name}-{id}")
"""
TRACKIO = """
import json
from pathlib import Path
path = None
def init(project, *, name, config, resume, embed):
    global path
    assert resume == "allow" and embed is False
    path = Path(config["run"]["dir"]) / f"trackio-{project}-{name}"
def log(metrics, step=None): path.open("a").write(json.dumps({"step": step, **metrics}) + "\\n")
def finish(): path.open("a").write("finished\\n")
"""


def recipe_of(tmp_path: Path, *writers: str) -> Recipe:
    run, metrics = RunConfig(dir=str(tmp_path), name="run"), MetricsConfig(writers=writers)
    return Recipe(model=ModelConfig(path="m"), env=EnvConfig(module="e"), run=run, metrics=metrics)


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "wandb.py").write_text(WANDB)
    (tmp_path / "trackio.py").write_text(TRACKIO)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("wandb", "trackio")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in names:
        sys.modules.pop(name, None)


def without_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))


@pytest.mark.usefixtures("stand_ins")
def test_each_writer_gets_the_same_names(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "wandb", "trackio")
    logger = MetricLogger(tmp_path / "run", services_of(recipe, "0123456789"), tensorboard=False)
    logger.scalars(1, {"rollout/reward": 0.5})
    logger.scalars(2, {"rollout/reward": 1.0, "eval/success": 0.25})
    logger.close()
    assert logger.lost() == {"writers/wandb/lost": 0.0, "writers/trackio/lost": 0.0}
    assert not (tmp_path / "run" / "tensorboard").exists()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = [{name: value for name, value in row.items() if name != "time"} for row in rows]
    for path in (tmp_path / "run" / "wandb-pronk-run-0123456789", tmp_path / "trackio-pronk-run-01234567"):
        *lines, last = path.read_text().splitlines()
        assert [json.loads(line) for line in lines] == expected and last == "finished"


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow", "swanlab"])
def test_a_writer_that_is_not_installed_is_named_with_the_cure(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.metrics.metric_services.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=rf"names '{name}', which is not installed: pip install {name}"):
        check_writers(recipe_of(tmp_path, name))


@pytest.mark.usefixtures("stand_ins")
def test_wandb_without_a_key_is_refused_unless_it_is_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, "tensorboard", "wandb")
    without_keys(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match="there is no key: set WANDB_API_KEY, or WANDB_MODE=offline"):
        check_writers(recipe)
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_API_KEY", "secret")):
        without_keys(monkeypatch, tmp_path)
        monkeypatch.setenv(name, value)
        check_writers(recipe)
    without_keys(monkeypatch, tmp_path)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    check_writers(recipe)


def test_a_writer_that_fails_is_counted_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(get_logger("metrics"), "propagate", True)

    def start() -> None:
        raise RuntimeError("no network")

    service = Service("wandb", start)  # type: ignore[arg-type]
    for step in range(50):
        service.scalars(step, {"a": 1.0})
    service.close()
    assert service.lost == 50
    (line,) = {record.getMessage() for record in caplog.records}  # each names how many were lost
    assert line.endswith("1 rows so far; metrics.jsonl has them: RuntimeError: no network")


def test_a_writer_that_hangs_keeps_nobody_waiting() -> None:
    release = Event()
    service = Service("wandb", lambda: (lambda *_: release.wait(60), lambda: None), close_s=0.1)
    for step in range(WAITING + 100):
        service.scalars(step, {"a": 1.0})
    assert service.lost >= 99
    service.close()
    release.set()


REAL = """
import sys
from functools import partial
from learner.metrics.metric_services import START, Service, check_writers
from shared.config.recipe import Recipe
recipe, (name, step) = Recipe.model_validate_json(sys.argv[1]), sys.argv[2:]
check_writers(recipe)
start = partial(START[name], recipe, "0123456789abcdef")
service = Service(name, start, close_s=150.0)  # a busy machine takes long to import these
service.scalars(int(step), {"rollout/reward": 0.5, "a": float("nan")})
service.close()
assert service.lost == 0
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", list(START))
def test_the_real_writer_takes_rows_without_a_network_and_goes_on_after_a_restart(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec(name) is None:
        pytest.skip("pip install --group writers, and mlflow, swanlab")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", REAL, recipe_of(tmp_path, name).model_dump_json(), name]
    for step in ("1", "2"):
        done = subprocess.run([*command, step], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-2000:]
    written = {path.suffix for path in tmp_path.rglob("*")}
    assert {"wandb": ".wandb", "trackio": ".db", "mlflow": ".db", "swanlab": ".swanlab"}[name] in written
    if name == "mlflow":
        with sqlite3.connect(tmp_path / "run" / "mlflow.db") as store:
            rows = store.execute("select key, value, step from metrics order by step").fetchall()
            (runs,) = store.execute("select count(*) from runs").fetchone()
        assert list((tmp_path / "run" / "mlflow").rglob("recipe.json"))
        assert rows == [("rollout/reward", 0.5, 1), ("rollout/reward", 0.5, 2)] and runs == 1


@pytest.mark.usefixtures("stand_ins")
def test_swanlab_without_a_key_is_refused_unless_it_is_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "swanlab.py").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("SWANLAB_API_KEY", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    recipe = recipe_of(tmp_path, "swanlab")
    with pytest.raises(ValueError, match="there is no key: set SWANLAB_API_KEY, or SWANLAB_MODE=offline"):
        check_writers(recipe)
    for name, value in (("SWANLAB_MODE", "offline"), ("SWANLAB_API_KEY", "secret")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, value)
            check_writers(recipe)
