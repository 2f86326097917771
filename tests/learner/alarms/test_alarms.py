"""Where alarms are said: in the run's folder, to a webhook, by the command over a recorded run."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from msgspec.structs import replace
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launch.engines.network import free_port
from learner.alarms.__main__ import main
from learner.alarms.alarm_records import Alarm
from learner.alarms.alarms import Alarms
from learner.alarms.rules import RULES
from learner.alarms.webhook import Webhook
from learner.metrics.metric_writer import MetricLogger
from shared.config.recipe import ConfigError, Recipe, load_recipe
from shared.config.sections import AlarmsConfig, EnvConfig, ModelConfig, RunConfig
from shared.log import get_logger
from shared.types import Ending, Group
from tests.support.small.runs import episode

RECIPE = "launch/recipes/sokoban_tiny.toml"
HEALTHY = Path("tests/data/alarms")  # a run's folder, of the metrics that rules look at
EPISODE = episode([16, 0], [0.0, -0.7], [(2, 1.0)], 1, 0)
BROKEN = replace(EPISODE, ending=Ending.ENV_ERROR, turns=(), error="of the test")


@contextmanager
def receiving(status: int) -> Iterator[tuple[str, list[Any]]]:
    """A server that answers every POST so; its URL, and the bodies that it got."""
    bodies: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(status)
            self.send_header("location", "/elsewhere")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def alarms_of(
    tmp_path: Path, steps_done: int = 0, *, tensorboard: bool = False, **alarms: str
) -> tuple[Alarms, MetricLogger]:
    run = RunConfig(dir=str(tmp_path), name="run")
    recipe = Recipe(model=ModelConfig(path="m"), env=EnvConfig(module="e"), run=run, alarms=AlarmsConfig(**alarms))
    metrics = MetricLogger(tmp_path / "run", tensorboard=tensorboard)
    return Alarms(recipe, metrics, steps_done), metrics


FAILING = {"rollout/reward": 1.0, "rollout/ending/env_error": 0.5}


def test_an_alarm_is_written_once_with_its_episodes_until_it_is_over(tmp_path: Path) -> None:
    alarms, metrics = alarms_of(tmp_path)
    group = Group("7-n", "a", (BROKEN, EPISODE))
    counts = [alarms.step(step, FAILING, [group])["alarms/critical"] for step in range(1, 31)]
    assert counts == [0.0] * 4 + [1.0] * 26
    assert [alarms.step(step, {"rollout/reward": 1.0}, [])["alarms/critical"] for step in (31, 32, 33, 34, 35)][-1] == 0
    alarms.close()
    metrics.close()
    first, second = [json.loads(line) for line in (tmp_path / "run" / "alarms.jsonl").read_text().splitlines()]
    assert (first["step"], first["rule"], first["level"]) == (5, "environment_failing", "critical")
    assert first["episodes"] == ["7-n/0"] and first["values"]["rollout/ending/env_error"] == 0.5
    assert first.keys() == {each.name for each in fields(Alarm)}
    assert (second["step"], second["rule"], second["level"]) == (35, "environment_failing", "cleared")


def test_tensorboard_has_an_alarm_as_text_with_its_cause_and_cure(tmp_path: Path) -> None:
    alarms, metrics = alarms_of(tmp_path, tensorboard=True)
    for step in range(1, 7):
        alarms.step(step, FAILING, [Group("7-n", "a", (BROKEN,))])
    metrics.close()
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    (text,) = events.Tensors("alarms/environment_failing/text_summary")
    (line,) = (tmp_path / "run/alarms.jsonl").read_text().splitlines()
    shown = text.tensor_proto.string_val[0].decode()
    assert text.step == 5 and all(json.loads(line)[name] in shown for name in ("message", "cause", "cure"))


def test_a_resumed_run_does_not_say_again_what_goes_on(tmp_path: Path) -> None:
    alarms, metrics = alarms_of(tmp_path)
    for step in range(1, 8):
        metrics.scalars(step, FAILING | alarms.step(step, FAILING, []))
    metrics.close()
    before = (tmp_path / "run" / "alarms.jsonl").read_text()
    resumed, metrics = alarms_of(tmp_path, steps_done=6)
    assert resumed.step(7, FAILING, [])["alarms/critical"] == 1.0
    metrics.close()
    assert (tmp_path / "run" / "alarms.jsonl").read_text() == before and before.count("\n") == 1


def test_a_disk_that_refuses_an_alarm_gets_it_later(tmp_path: Path) -> None:
    alarms, metrics = alarms_of(tmp_path)
    path = tmp_path / "run" / "alarms.jsonl"
    path.mkdir()  # a file cannot be opened there
    for step in range(1, 6):
        alarms.step(step, FAILING, [])
    path.rmdir()
    for step in range(6, 11):
        alarms.step(step, {"rollout/reward": 1.0}, [])
    metrics.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [5, 10]


def test_the_webhook_gets_each_alarm_and_one_that_fails_is_counted(tmp_path: Path) -> None:
    with receiving(status=200) as (url, bodies):
        alarms, metrics = alarms_of(tmp_path, webhook=f"{url}/secret-part")
        for step in range(1, 6):
            values = alarms.step(step, FAILING, [])
        alarms.close()
    (body,) = bodies
    assert values["alarms/webhook_failed"] == 0
    assert body["run"] == "run" and body["rule"] == "environment_failing" and body["text"].startswith("run: critical")
    metrics.close()


@pytest.mark.parametrize("status", [302, 500, None])
def test_a_webhook_that_fails_is_counted_and_its_secret_is_never_said(
    status: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(get_logger("alarms"), "propagate", True)
    with receiving(status or 200) as (url, _):
        webhook = Webhook(f"{url if status else f'http://127.0.0.1:{free_port()}'}/secret?token=secret")
        webhook.post({"rule": "truncation"})
        webhook.close()
    assert webhook.failed == 1
    assert "truncation" in caplog.text and "secret" not in caplog.text


def test_a_webhook_that_stands_still_keeps_nobody_waiting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        webhook = Webhook(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2)
        for _ in range(100):
            webhook.post({"rule": "truncation"})
        assert webhook.failed > 50
        webhook.close()


def test_the_secret_of_a_webhook_is_not_in_the_run_folder() -> None:
    recipe = load_recipe(RECIPE, ["--alarms.webhook", "https://hooks.example.com/services/secret"])
    assert recipe.alarms.webhook.endswith("/secret")
    assert recipe.model_dump(mode="json")["alarms"] == {"webhook": "https://hooks.example.com"}


def test_what_is_no_url_of_a_webhook_is_refused_without_being_shown() -> None:
    with pytest.raises(ConfigError, match=r"alarms\.webhook is no URL") as refused:
        load_recipe(RECIPE, ["--alarms.webhook", "hooks.example.com/secret"])
    assert "secret;" not in str(refused.value) and "example" not in str(refused.value)


# ------------------------------------------------------------------ the command


def test_the_command_replays_the_rules_over_a_recorded_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in (HEALTHY / "metrics.jsonl").read_text().splitlines()]
    (tmp_path / "recipe.json").write_text((HEALTHY / "recipe.json").read_text())
    lines = [json.dumps(row | {"rollout/ending/out_of_tokens": 0.4}) for row in rows]
    damaged = [
        "[]",
        '{"step": "x"}',
        "{" * 5000,
        '{"step": 3, "rollout/reward": 1, "behaviour/kl": {}}',
        '{"step": 4, "ro',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines[:20], *damaged, *lines[20:]]))
    assert main([str(tmp_path)]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("warning alarm truncation at step 10: more than a fifth")
    assert last == f"1 of {len(RULES)} alarms are raised at the end: truncation"
    assert main([str(HEALTHY)]) == 0
    assert capsys.readouterr().out == f"0 of {len(RULES)} alarms are raised at the end\n"


@pytest.mark.parametrize("files", [{}, {"metrics.jsonl": "{}"}, {"metrics.jsonl": '{"step": 1, "rollout/reward": 1}'}])
def test_the_command_refuses_a_folder_without_a_run_in_one_line(
    tmp_path: Path, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert main([str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path}")
