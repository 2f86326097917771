"""A user's mistakes: one clear line, and exit code 2, before anything heavy starts."""

from __future__ import annotations

import json
import socket
import subprocess
from contextlib import closing

import pytest

from launch.engines.network import free_port
from learner.checkpoints.checkpoint_folder import candidates, check_resume
from tests.support.machine import LocalServer, QuietHandler
from tests.support.runs import command, places, refused
from tests.support.tiny import running_engine, tiny_model_dir


def run(script, tmp_path, **fields):
    return refused(command(script, places(tmp_path, **fields)))


def engine_that_says(answer):
    """A server that is healthy and says `answer` about its model."""

    class Handler(QuietHandler):
        def do_GET(self):
            self.reply(json.dumps(answer).encode())

    return closing(LocalServer(Handler))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
@pytest.mark.parametrize(
    ("script", "fields", "expected"),
    [
        ("learner", {"learner.lrr": 1}, "did you mean --learner.optimizer.lr?"),
        ("learner", {"env.module": "envs.nothing"}, "no module 'envs.nothing'"),
        ("learner", {"model.path": "envs"}, "config.json"),
        ("actors", {"env.module": "tests/conftest_missing.py"}, "no file 'tests/conftest_missing.py'"),
        ("actors", {"model.path": "nowhere"}, "nowhere"),
        ("actors", {"engine.router": "http://router:30000"}, "engine.urls"),
        ("local", {"learner.objective.name": "trpo"}, "learner.objective.name = 'trpo'"),
        ("local", {"learner.bind": "tcp://127.0.0.1:6000"}, "give both the same port"),
        ("local", {"learner.device": "cuda"}, "learner.device = 'cuda' with 1 ranks: torch sees 0 GPUs here"),
        ("local", {"engine.count": 0}, "engine.count = 0 is for one host of several"),
        ("evaluate", {"actor.groups": 0}, "actor.groups = 0 is for one host of several"),
    ],
)
def test_a_users_mistake_is_one_line(tmp_path, script, fields, expected):
    assert expected in run(script, tmp_path, **fields)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_a_learner_of_no_rank_is_refused(tmp_path):
    line, _ = refused([*command("local", places(tmp_path)), "--ranks", "0"])
    assert line == "error: --ranks 0: at least 1"


@pytest.mark.slow
@pytest.mark.parametrize("script", ["learner", "local"])
def test_a_mistyped_checkpoint_leaves_the_run_as_it_is(tmp_path, script):
    folder, wanted = tmp_path / "colour_tiny", str(tmp_path / "step_00000005")
    folder.mkdir()
    for name in ("result.json", "recipe.json", "software.json"):
        (folder / name).write_text("{}")
    line, _ = run(script, tmp_path, **{"learner.resume": wanted})
    with pytest.raises(ValueError, match=r"it has no meta\.json; give one like step_00000050") as said:
        candidates(folder, wanted)
    assert line == f"error: {said.value}"
    assert {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys(
        ("result.json", "recipe.json", "software.json"), "{}"
    )


def test_a_checkpoint_that_a_kill_left_half_replaced_may_be_resumed(tmp_path):
    """Whoever takes the folder puts it back."""
    (tmp_path / ".step_00000005.replaced").mkdir()
    (tmp_path / ".step_00000005.replaced" / "meta.json").write_text("{}")
    for resume in ("auto", "never", str(tmp_path / "step_00000005")):
        check_resume(resume)
    for resume in ("", "/", str(tmp_path)):
        with pytest.raises(ValueError, match="is no checkpoint"):
            check_resume(resume)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["learner", "local", "evaluate"])
def test_a_dataset_without_a_column_is_one_line_with_those_that_it_has(tmp_path, script):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"query": "1+1", "gold": "2"}) + "\n")
    fields = {"data.source": path, "data.eval_source": path, "eval.samples": 1}
    line, _ = refused(command(script, places(tmp_path, **fields), "launch/recipes/geo3k_tiny.toml"))
    assert "has no column problem and no column answer; it has: query, gold" in line


BROKEN_ENV = """
class Env:
    def reset(self):
        raise KeyError("board")

    def step(self, text): ...

def build_env(sample, args):
    return Env()

def random_response(rng):
    return ""
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", ["local", "evaluate"])
def test_held_out_samples_that_cannot_be_played_are_one_line(tmp_path, script):
    (tmp_path / "env.py").write_text(BROKEN_ENV)
    line, _ = run(script, tmp_path, **{"env.module": tmp_path / "env.py"})
    assert "cannot be played: KeyError: 'board' (env.py:" in line and "in reset" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "field", "value"), [("learner", "learner.bind", "tcp://127.0.0.1:{}"), ("actors", "engine.port", "{}")]
)
def test_an_occupied_port_is_named_before_anything_starts(tmp_path, monkeypatch, script, field, value):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        _, everything = run(script, tmp_path, **{field: value.format(port)})
    assert str(port) in everything.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["actors", "local"])
def test_a_missing_sglang_environment_names_its_cure(tmp_path, script):
    line, _ = run(script, tmp_path, **{"engine.kind": "sglang", "engine.sglang_env": tmp_path})
    assert "make sglang-env" in line and str(tmp_path) in line


@pytest.mark.slow
def test_a_server_that_dies_at_start_shows_its_last_lines(tmp_path):
    python = tmp_path / "env" / "bin" / "python"
    (tmp_path / "env/lib/python3.11/site-packages/sglang").mkdir(parents=True)
    (tmp_path / "env/lib/python3.11/site-packages/sglang/launch_server.py").touch()
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho there is no memory\nexit 3\n")
    python.chmod(0o755)
    line, everything = run("actors", tmp_path, **{"engine.kind": "sglang", "engine.sglang_env": tmp_path / "env"})
    assert "ended with exit code 3 while starting; its log is " in line
    assert "there is no memory" in everything


@pytest.mark.slow
def test_an_engine_that_does_not_answer_is_named(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    line, _ = run("actors", tmp_path, **{"engine.urls": json.dumps([url]), "engine.start_timeout_s": 1})
    assert url in line and "not healthy within 1 s" in line


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_an_engine_with_another_vocabulary_is_refused(tmp_path):
    with running_engine(tiny_model_dir(tmp_path)) as (url, _):
        line, _ = run("actors", tmp_path, **{"engine.urls": json.dumps([url])})
    assert f"{url}: serves another model" in line and "a vocabulary of 640 tokens" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"hello": 1}, "is no engine"),
        ({"model_path": "other", "model_type": "llama"}, "serves another model (other)"),
    ],
)
def test_a_server_that_is_no_engine_of_this_model_is_refused(tmp_path, answer, words):
    with engine_that_says(answer) as server:
        line, _ = run("actors", tmp_path, **{"engine.urls": json.dumps([server.url])})
    assert server.url in line and words in line


@pytest.mark.slow
def test_a_mistake_of_a_learner_that_starts_its_own_ranks_is_told_without_a_traceback(tmp_path):
    arguments = ["--ranks", "2", *places(tmp_path, **{"learner.groups_per_step": 16, "env.module": "envs.nothing"})]
    ended = subprocess.run(command("learner", arguments), capture_output=True, text=True, timeout=250)
    assert ended.returncode != 0 and "Traceback" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if "error: " in line]
    assert lines and all("no module 'envs.nothing'" in line for line in lines)
    assert len(ended.stderr.splitlines()) <= 6
