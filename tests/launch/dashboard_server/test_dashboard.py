"""The dashboard reads run folders as they are, damaged ones too, and writes reports."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import stat
import time
from pathlib import Path

import msgspec
import pytest

from launch.dashboard import main
from launch.dashboard_server.api import answer
from launch.dashboard_server.catalogue import bounds
from launch.dashboard_server.metric_columns import MetricsFile
from launch.dashboard_server.runs import Runs
from shared.config.recipe import load_recipe
from shared.recordings.reader import RecordingError, read_step
from shared.run_status import StatusFile
from tests.support.dashboard.asked import asked
from tests.support.dashboard.folders import own, whole
from tests.support.dashboard.recorded_run import HOSTILE, make_run
from tests.support.dashboard.report import held, scripts

__all__ = ["own", "whole"]  # fixtures
EPISODE = "runs/sokoban/steps/10/10-0/1"


def test_a_run_is_told_in_a_line_with_its_alarms_and_recordings(whole: Path) -> None:
    (run,) = answer(Runs([whole]), "runs", {})["runs"]
    assert (run["name"], run["step"], run["total_steps"], run["recorded_last"], run["damaged"]) == (
        "sokoban", 20, 20, 10, 0,
    )  # fmt: skip
    assert [(alarm["rule"], alarm["over"]) for alarm in run["alarms"]] == [("truncated", None)]
    assert run["alarm_count"] == 1 and abs(sum(run["endings"].values()) - 1) < 1e-6


def test_an_alarm_that_was_cleared_is_over(own: Path) -> None:
    with (own / "sokoban/alarms.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": 12, "rule": "truncated", "level": "cleared"}) + "\n")
    (run,) = answer(Runs([own]), "runs", {})["runs"]
    assert run["alarm_count"] == 0 and run["alarms"][0]["over"] == 12


def test_a_rule_that_is_cleared_leaves_the_alarms_of_others(own: Path) -> None:
    with (own / "sokoban/alarms.jsonl").open("a") as lines:
        for step, rule, level in ((11, "entropy", "warning"), (12, "truncated", "cleared")):
            lines.write(json.dumps({"step": step, "rule": rule, "level": level}) + "\n")
    (run,) = answer(Runs([own]), "runs", {})["runs"]
    assert [(alarm["rule"], alarm["over"]) for alarm in run["alarms"]] == [("truncated", 12), ("entropy", None)]


def test_metrics_are_followed_as_they_are_written(own: Path) -> None:
    runs, path = Runs([own]), own / "sokoban/metrics.jsonl"
    row = {"step": 6, "time": 1.0, "rollout/reward": 0.25, "new/name": 3.0, "not/finite": None}
    with path.open("a") as lines:
        lines.write(json.dumps(row)[:-1])
    assert answer(runs, "runs", {})["runs"][0]["step"] == 5
    with path.open("a") as lines:
        lines.write("}\n")
    values = answer(runs, "runs/sokoban/series", {"names": "rollout/reward,new/name,not/finite"})["values"]
    assert values["rollout/reward"][-1] == 0.25
    assert values["new/name"] == [None] * 5 + [3.0] and values["not/finite"] == [None] * 6


def test_a_run_whose_log_goes_on_is_running_however_long_an_evaluation_takes(own: Path) -> None:
    before, run = time.time() - 3600, own / "sokoban"
    (run / "result.json").unlink(missing_ok=True)
    os.utime(run / "metrics.jsonl", (before, before))
    assert answer(Runs([own]), "runs", {})["runs"][0]["state"] == "stopped"
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs/learner.log").write_text("no result of evaluation 'before' since 600 s")
    assert answer(Runs([own]), "runs", {})["runs"][0]["state"] == "running"


def test_a_run_of_slow_steps_is_running_for_ten_of_them(own: Path) -> None:
    run, now = own / "sokoban", time.time()
    (run / "result.json").unlink(missing_ok=True)
    with (run / "metrics.jsonl").open("a") as lines:
        for step in range(6, 20):
            lines.write(json.dumps({"step": step, "rollout/reward": 0.5, "time/step_s": 100.0}) + "\n")
    for quiet_s, state in ((900, "running"), (1100, "stopped")):
        for path in (run / "metrics.jsonl", *run.glob("logs/*.log")):
            os.utime(path, (now - quiet_s, now - quiet_s))
        assert answer(Runs([own]), "runs", {})["runs"][0]["state"] == state


def test_steps_that_a_restart_made_again_stand_there_once_and_episodes_go_on(own: Path) -> None:
    again = {"step": 4, "time": 9.0, "rollout/reward": 0.5, "progress/episodes": 64.0, "progress/minutes": 0.5}
    with (own / "sokoban/metrics.jsonl").open("a") as lines:
        lines.write(json.dumps(again) + "\n")
    said = answer(Runs([own]), "runs/sokoban/series", {"names": "rollout/reward"})
    assert said["axes"]["step"] == [1, 2, 3, 4] and said["axes"]["progress/episodes"] == [64, 128, 192, 384]
    assert {"step": 4, "kind": "resumed", "text": "the learner was started again"} in said["events"]


def test_evaluations_of_one_step_stand_beside_each_other_and_a_restart_undoes_later_ones(own: Path) -> None:
    def after(*rows: tuple[int, str, float]) -> dict[str, list[float | None]]:
        with (own / "sokoban/metrics.jsonl").open("a") as lines:
            for step, kind, value in rows:
                lines.write(json.dumps({"step": step, "time": 1.0, f"{kind}/success": value}) + "\n")
        said = answer(Runs([own]), "runs/sokoban/series", {"names": "eval/success,eval_greedy/success"})
        return {"step": said["evaluation_axes"]["step"], **said["evaluations"]}

    found = after((5, "eval", 0.5), (5, "eval_greedy", 0.25), (9, "eval", 0.75))
    assert found == {"step": [5, 9], "eval/success": [0.5, 0.75], "eval_greedy/success": [0.25, None]}
    found = after((5, "eval", 0.625))
    assert found == {"step": [5], "eval/success": [0.625], "eval_greedy/success": [None]}
    assert answer(Runs([own]), "runs", {})["runs"][0]["held_out"] == 0.625


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"step": "x"}', '{"step": null}', '{"time": 1}', "\xff", '{"step": 1e99}']
)
def test_a_damaged_line_of_metrics_or_alarms_is_counted_and_the_rest_works(own: Path, line: str) -> None:
    for name in ("metrics", "alarms"):
        path = own / f"sokoban/{name}.jsonl"
        path.write_bytes(line.encode("latin-1") + b"\n" + path.read_bytes())
    (run,) = answer(Runs([own]), "runs", {})["runs"]
    assert run["step"] == 5 and run["damaged"] in (1, 2)


@pytest.mark.parametrize("value", ["9" * 400, "[" * 100_000, '"\\ud800"', "NaN"])
def test_what_cannot_be_answered_with_is_damaged_and_the_pages_work(own: Path, value: str) -> None:
    run = own / "sokoban"
    for name in ("alarms.jsonl", "recipe.json", "result.json", "metrics.jsonl"):
        (run / name).write_text(f'{{"step": 3, "rule": {value}, "run": {value}}}\n')
    (own / os.fsdecode(b"\xff")).mkdir()
    (own / os.fsdecode(b"\xff") / "metrics.jsonl").touch()
    (run / os.fsdecode(b"\xff.log")).touch()
    for path in ("runs", "runs/sokoban/health", "runs/sokoban/metrics", "runs/sokoban/series"):
        status, _, body = asked(own, f"/api/{path}")
        assert status == 200 and isinstance(json.loads(body), dict), path


def test_a_run_folder_that_is_replaced_is_read_anew(own: Path) -> None:
    runs = Runs([own])
    assert answer(runs, "runs", {})["runs"][0]["step"] == 5
    (own / "sokoban").rename(own / "sokoban.1")
    make_run(own / "sokoban", steps=3, recorded=())
    assert {run["name"]: run["step"] for run in answer(runs, "runs", {})["runs"]} == {"sokoban": 3, "sokoban.1": 5}


def test_what_lets_somebody_in_is_not_shown_of_a_recipe(own: Path) -> None:
    recipe = {
        "alarms": {"webhook": "https://example.org/s3cret"},
        "engine": {"flags": {"api-key": "s3cret"}, "max_tokens": 4, "urls": ["http://me:s3cret@host:1"]},
        "reward": {"url": "http://host/grade?token=s3cret"},
        "env": {"args": {"API_KEY": "s3cret", "headers": [{"Authorization": "Bearer s3cret"}]}},
    }
    (own / "sokoban/recipe.json").write_text(json.dumps(recipe))
    (own / "sokoban/logs").mkdir(exist_ok=True)
    (own / "sokoban/logs/learner.log").write_text("judge http://me:s3cret@host/x?y=s3cret has failed, API_KEY=s3cret\n")
    health = answer(Runs([own]), "runs/sokoban/health", {})
    assert "s3cret" not in json.dumps(health) and health["recipe"]["engine"]["max_tokens"] == 4
    assert "http://***@host/x?*** has failed" in json.dumps(health["logs"])


def test_every_metric_is_described_and_those_split_by_lag_stand_with_their_whole(whole: Path) -> None:
    metrics = {m["name"]: m for m in answer(Runs([whole]), "runs/sokoban/metrics", {})["metrics"]}
    assert metrics["policy/entropy"]["lags"] == ["policy/entropy/lag_0", "policy/entropy/lag_1"]
    assert all(metric["meaning"] for metric in metrics.values())
    assert "policy/entropy/lag_0" not in metrics


def test_health_counts_the_ranks_of_the_newest_checkpoint(own: Path) -> None:
    assert answer(Runs([own]), "runs/sokoban/health", {})["ranks"] is None
    for rank in range(2):
        path = own / f"sokoban/checkpoints/step_00000020/rng/rank_{rank}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert answer(Runs([own]), "runs/sokoban/health", {})["ranks"] == 2


def test_health_shows_logs_without_what_a_terminal_would_obey(own: Path) -> None:
    (own / "sokoban/logs").mkdir(exist_ok=True)
    (own / "sokoban/logs/odd.log").write_text("\x1b[2Jgone\x07\n" + "x" * 5000 + "\n")
    logs = answer(Runs([own]), "runs/sokoban/health", {})["logs"]
    (shown,) = [log["lines"] for log in logs if log["name"].endswith("odd.log")]
    assert shown == ["\N{REPLACEMENT CHARACTER}[2Jgone\N{REPLACEMENT CHARACTER}", "x" * 2000]


def test_bounds_are_read_from_plain_words_alone() -> None:
    assert bounds("below 0.2") == {"high": 0.2} and bounds("above 0.3") == {"low": 0.3}
    assert bounds("0.5 to 2, near 1") == {"low": 0.5, "high": 2.0}
    assert bounds("lag 0: below 1e-4 in float32, below 0.03 in bfloat16") == {} and bounds("rises") == {}


def test_an_episode_has_each_column_at_its_token_and_its_group(whole: Path) -> None:
    said = answer(Runs([whole]), EPISODE, {})
    sampled = [i for i, m in enumerate(said["mask"]) if m]
    for name in ("logprob", "gap", "ratio", "entropy", "advantage", "version", "engine_logprob"):
        column = said["tokens"][name]
        assert [i for i, value in enumerate(column) if value is not None] == sampled, name
    assert [e["index"] for e in said["group"]] == [0, 1, 2, 3]
    assert said["turns"][0]["info"]["note"] == HOSTILE


def test_a_damaged_recording_is_named_and_the_rest_is_shown(own: Path) -> None:
    runs, path = Runs([own]), own / "sokoban/recordings/step_00000010.rec"
    offset = read_step(path).summaries[1].offset
    data = bytearray(path.read_bytes())
    data[offset + 10] ^= 255
    path.write_bytes(data)
    os.utime(path, (1, 1))
    with pytest.raises(RecordingError, match="damaged"):
        answer(runs, EPISODE, {})
    assert answer(runs, EPISODE[:-1] + "2", {})["id"] == "10-0/2"
    path.with_suffix(".idx").unlink()
    said = answer(runs, "runs/sokoban/steps/10", {})
    assert len(said["episodes"]) == 7 and len(said["damages"]) == 1
    path.write_bytes(b"no recording")
    assert asked(own, "/api/runs/sokoban/steps/10")[0] == 422


@pytest.mark.slow
def test_episodes_of_an_evaluation_are_listed_and_shown_beside_those_of_steps(own: Path, tmp_path_factory) -> None:
    make_run(own / "evaluated", steps=5, recorded=(5,), groups=2, evaluated=(5,))
    runs, base = Runs([own]), "runs/evaluated/steps"
    run = next(run for run in answer(runs, "runs", {})["runs"] if run["name"] == "evaluated")
    assert (run["recorded"], run["evaluations"], run["evaluation_last"]) == (1, 1, "5-step_5")
    assert answer(runs, base, {}) == {"steps": [5], "evaluations": ["5-step_5"]}
    page = answer(runs, f"{base}/5-step_5", {})
    assert (page["header"]["evaluation"], page["header"]["played"], len(page["episodes"])) == ("step_5", 16, 8)
    shown = answer(runs, f"{base}/5-step_5/step_5/5-0/1", {})
    assert shown["id"] == "step_5/5-0/1" and len(shown["group"]) == 4
    assert "advantage" not in shown["tokens"] and "engine_logprob" in shown["tokens"]
    for path in ("5-step_6", "5-../5", "5-step_5/5-0/1", "5-step_5/1"):
        assert asked(own, f"/api/{base}/{path}")[0] == 404, path
    out = tmp_path_factory.mktemp("reports") / "report.html"
    assert main([str(own / "evaluated"), "--export", str(out)]) == 0
    places = [path.split("/")[3] for path in held(out)["answers"] if path.startswith(base) and path.count("/") > 4]
    assert places.count("5") == places.count("5-step_5") == 5
    assert main([str(own / "evaluated"), "--export", str(out), "--episode", "step_5/5-0/1"]) == 0
    assert held(out)["start"] == "#/episode/evaluated/5-step_5/step_5/5-0/1"


def test_a_report_stands_alone_and_no_text_of_a_run_is_markup_in_it(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert main([str(whole), "--export", str(out)]) == 0
    text = out.read_text()
    assert HOSTILE not in text and "<img" not in text and text.count("<script") == 3
    assert not re.findall(r'(?:src|href)="[^"]', text) and "default-src 'none'" in text
    data = held(out)
    assert HOSTILE in json.dumps(data, ensure_ascii=False)
    episodes = [path for path in data["answers"] if re.fullmatch(r"runs/sokoban/steps/10/[^/]+/\d", path)]
    assert len(episodes) == 8
    shown = {f"sokoban/{image['file']}" for path in episodes for image in data["answers"][path]["images"]}
    assert shown == data["images"].keys()
    assert all(base64.b64decode(uri.partition(",")[2])[:4] == b"\x89PNG" for uri in data["images"].values())
    assert len(data["answers"]["runs/sokoban/series"]["axes"]["step"]) == 20


def test_a_report_has_a_runs_answers_where_its_pages_look_for_them(own: Path, tmp_path: Path) -> None:
    """As encodeURIComponent writes it, which leaves brackets as they are."""
    (own / "sokoban").rename(own / "it's (a copy) ä")
    assert main([str(own), "--export", str(tmp_path / "report.html")]) == 0
    assert "runs/it's%20(a%20copy)%20%C3%A4/steps" in held(tmp_path / "report.html")["answers"]


@pytest.mark.parametrize("episode", ["", "10-1/2"])
def test_a_report_has_each_script_that_its_pages_import(whole: Path, tmp_path: Path, episode: str) -> None:
    out = tmp_path / "report.html"
    assert main([str(whole), "--export", str(out), *(["--episode", episode] if episode else [])]) == 0
    texts, pages = scripts(out), held(out)["pages"]
    imported = {name for text in texts.values() for name in re.findall(r'(?:from|import) "([^"]+)"', text)}
    loaded = set(re.findall(r'import\("([^"]+)"\)', texts["pronk/app.js"]))
    assert {f"pronk/{page}.js" for page in pages} == loaded & texts.keys()
    assert texts.keys() == imported | {"pronk/app.js"} | (loaded & texts.keys())
    assert len(loaded) == 6 and ("pronk/uplot/uPlot.esm.js" in texts) == (not episode)


def test_a_report_of_one_episode_holds_it_alone(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "report.html"
    assert main([str(whole), "--export", str(out), "--episode", "10-1/2"]) == 0
    data, runs = held(out), Runs([whole])
    assert [path for path in data["answers"] if path.count("/") == 5] == ["runs/sokoban/steps/10/10-1/2"]
    assert data["start"] == "#/episode/sokoban/10/10-1/2"
    for path in ("runs/sokoban/steps/10/10-1/2", "runs/sokoban/steps/10"):
        assert data["answers"][path] == json.loads(msgspec.json.encode(answer(runs, path, {}))), "as the server says it"
    shown = data["answers"]["runs/sokoban/steps/10/10-1/2"]["images"]
    assert data["images"].keys() == {f"sokoban/{image['file']}" for image in shown} and shown
    assert str(whole) not in json.dumps(data) and len(out.read_bytes()) < 150_000
    assert main([str(whole), "--export", str(tmp_path / "none.html"), "--episode", "no/1"]) == 2
    assert "TICKET/INDEX" in capsys.readouterr().err and not (tmp_path / "none.html").exists()


def test_a_mistake_gets_one_line(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, words in (
            ([str(tmp_path / "none")], "is no folder"),
            ([str(tmp_path)], "holds no run"),
            ([str(whole), "--port", port], "is in use"),
            ([str(whole), "--port", "70000"], "0 to 65535"),
            ([str(whole), "--host", "192.0.2.1"], "cannot listen"),
            ([str(whole), "--episode", "1/1"], "--export"),
            ([str(whole), "--token-file", str(tmp_path / "none")], "No such file"),
            ([str(whole), "--export", str(tmp_path / "none/report.html")], "is no folder; make it first"),
            ([str(whole), "--export", str(tmp_path)], f"--export {tmp_path}: it is a folder; name a file, such as"),
            ([str(whole), "--export", str(tmp_path / ("x" * 250))], "cannot be written: File name too long"),
        ):
            assert main(arguments) == 2
            lines = capsys.readouterr().err.splitlines()
            assert len(lines) == 1 and lines[0].startswith("error: ") and words in lines[0]
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}*")) and not list(tmp_path.iterdir())
    monkeypatch.setenv("PRONK_DASHBOARD_TOKEN", "short")
    assert main([str(whole)]) == 2
    assert "PRONK_DASHBOARD_TOKEN" in capsys.readouterr().err


def test_reading_changes_no_file_of_a_run(own: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        files = [path for path in own.rglob("*") if stat.S_ISREG(path.stat().st_mode)]
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}

    before, runs = state(), Runs([own])
    for path in ("runs", "runs/sokoban/metrics", "runs/sokoban/health", "runs/sokoban/steps/10", EPISODE):
        answer(runs, path, {})
    assert state() == before


def test_a_small_file_of_metrics_takes_little_memory(tmp_path: Path) -> None:
    many = {f"m{i}": 1.0 for i in range(4000)}
    rows = [{"rollout/reward": 1.0} | (many if step in (0, 8000) else {}) for step in range(8001)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows)))
    metrics = MetricsFile(path)
    metrics.refresh()
    cells = sum(len(column) for column in metrics.steps.columns.values())
    assert 8 * cells < 100 * path.stat().st_size and len(metrics.steps) == 8001
    assert metrics.steps.last("rollout/reward") == 1.0


def test_evaluations_after_the_step_to_which_a_run_went_back_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = [{"step": step, "rollout/reward": 1.0} for step in (1, 2, 3, 4)]
    evaluations = [{"step": step, "eval/success": 0.5} for step in (2, 4)]
    rows = [*steps, *evaluations, {"step": 3, "rollout/reward": 2.0}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = MetricsFile(path)
    metrics.refresh()
    assert list(metrics.steps.columns["step"]) == [1, 2, 3] and list(metrics.evaluations.columns["step"]) == [2]


ENDS = [
    ("complete", "", "finished", ""),
    ("stopped", "asked to shut down after step 3", "stopped", "asked to shut down after step 3"),
    ("failed", "engine http://me:pw@host is gone", "failed", "engine http://***@host is gone"),
]


@pytest.mark.parametrize(("ended", "reason", "state", "words"), ENDS)
def test_how_a_run_ended_is_said_with_its_reason(own: Path, ended: str, reason: str, state: str, words: str) -> None:
    status = StatusFile(own / "sokoban")
    status.enter("training")
    status.end(ended, reason)
    (run,) = answer(Runs([own]), "runs", {})["runs"]
    health = answer(Runs([own]), "runs/sokoban/health", {})
    assert (run["state"], run["words"]) == (health["state"], health["words"]) == (state, words)


def test_what_a_run_does_before_its_first_step_is_said_and_nothing_is_claimed(tmp_path: Path) -> None:
    run = tmp_path / "waits"
    run.mkdir()
    (run / "recipe.json").write_text("{}")
    StatusFile(run).enter("evaluation before", 213, 800)
    (shown,) = answer(Runs([tmp_path]), "runs", {})["runs"]
    assert (shown["state"], shown["words"]) == ("running", "evaluation before: 213 of 800")
    assert answer(Runs([tmp_path]), "runs/waits/health", {})["steps"] == 0
    old = time.time() - 1000
    for path in run.iterdir():
        os.utime(path, (old, old))
    (shown,) = answer(Runs([tmp_path]), "runs", {})["runs"]
    assert (shown["state"], shown["words"]) == ("stopped", "")


@pytest.mark.parametrize("text", ["", "[]", "null", '{"phase": 1e999}', "[" * 100_000])
def test_a_status_that_cannot_be_read_costs_nothing(own: Path, text: str) -> None:
    (own / "sokoban/status.json").write_text(text)
    (run,) = answer(Runs([own]), "runs", {})["runs"]
    assert run["state"] in ("running", "stopped") and run["words"] == ""


def test_runs_that_were_moved_aside_and_empty_ones_are_marked(own: Path) -> None:
    make_run(own / "sokoban.1", steps=3, recorded=())
    make_run(own / "other.2", steps=3, recorded=())  # there is no run "other"
    (own / "empty").mkdir()
    (own / "empty/recipe.json").write_text("{}")
    runs = {run["name"]: (run["is_aside"], run["is_empty"]) for run in answer(Runs([own]), "runs", {})["runs"]}
    assert runs == {
        "sokoban": (False, False),
        "sokoban.1": (True, False),
        "other.2": (False, False),
        "empty": (False, True),
    }


def test_the_fields_that_were_set_are_told_from_the_defaults(own: Path) -> None:
    recipe = load_recipe("launch/recipes/colour_tiny.toml", ["--learner.optimizer.lr", "0.5"])
    (own / "sokoban/recipe.json").write_text(recipe.model_dump_json())
    fields = answer(Runs([own]), "runs/sokoban/health", {})["set_fields"]
    assert {"learner.optimizer.lr", "model.path", "env.module"} <= set(fields)
    assert "learner.optimizer.schedule" not in fields and len(fields) < 60


def test_a_run_of_several_tasks_is_told_by_task_and_held_out_set(own: Path) -> None:
    with (own / "sokoban/metrics.jsonl").open("a") as lines:
        of_task = {"reward": 1.5, "success": 0.5, "turns": 2.0, "share": 0.25, "without_variance": 0.75}
        row = {"step": 6, "time": 1.0, "rollout/reward": 0.25} | {f"tasks/lake/{k}": v for k, v in of_task.items()}
        lines.write(json.dumps(row) + "\n")
        lines.write(json.dumps({"step": 6, "eval/success": 0.5, "eval/sets/lake/success": 0.7}) + "\n")
    (run,) = answer(Runs([own]), "runs", {})["runs"]
    assert run["tasks"] == [{"name": "lake", "spark": [0.5], "held_out": 0.7, **of_task}]
    assert run["sets"] == [{"name": "lake", "success": 0.7}]


def test_recipes_of_several_tasks_differ_field_by_field(tmp_path: Path) -> None:
    for name, weight in (("a", 1.0), ("b", 2.0)):
        folder = make_run(tmp_path / name, steps=1, recorded=())
        tasks = [{"name": "lake", "weight": weight}, {"name": "maze", "weight": 1.0}]
        (folder / "recipe.json").write_text(json.dumps({"run": {"name": "run"}, "tasks": tasks}))
    rows = answer(Runs([tmp_path]), "runs", {})["recipes"]
    assert [(row["field"], row["values"]) for row in rows] == [("tasks.lake.weight", {"a": 1.0, "b": 2.0})]
