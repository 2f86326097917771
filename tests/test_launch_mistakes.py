"""A user's mistakes with engines: one clear line, and an exit code, before any actor starts."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from actor.engine.http import HttpServer
from tests.support.machine import free_port
from tests.support.runs import RECIPE, places
from tests.support.tiny import running_engine, tiny_model_dir


def run(script, tmp_path, **fields):
    """(exit code, the line that begins with error:, all of stderr)"""
    command = [sys.executable, f"launch/{script}.py", "--config", RECIPE, *places(tmp_path, **fields)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr
    assert len(lines) == 1, done.stderr
    return done.returncode, lines[0], done.stderr


@contextmanager
def answering(answer):
    """A server that is healthy and says `answer` about its model."""
    ready, loops = threading.Event(), []

    async def serve():
        async def reply(_body):
            return answer

        server = HttpServer({"GET /health": reply, "GET /model_info": reply})
        loops.append((asyncio.get_running_loop(), await server.start("127.0.0.1", 0), stop := asyncio.Event()))
        ready.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(20)
    loop, port, stop = loops[0]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["actors", "local"])
def test_a_missing_sglang_environment_names_its_cure(tmp_path, script):
    code, line, _ = run(script, tmp_path, **{"engine.kind": "sglang", "engine.sglang_env": tmp_path})
    assert code == 2
    assert "make sglang-env" in line and str(tmp_path) in line


def test_a_server_that_dies_at_start_shows_its_last_lines(tmp_path):
    python = tmp_path / "env" / "bin" / "python"
    (tmp_path / "env/lib/python3.11/site-packages/sglang").mkdir(parents=True)
    (tmp_path / "env/lib/python3.11/site-packages/sglang/launch_server.py").touch()
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho there is no memory\nexit 3\n")
    python.chmod(0o755)
    code, line, everything = run("actors", tmp_path, **{"engine.kind": "sglang", "engine.sglang_env": tmp_path / "env"})
    assert code == 2
    assert "ended with exit code 3 while starting" in line
    assert "there is no memory" in everything


@pytest.mark.slow
def test_an_engine_that_does_not_answer_is_named(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    code, line, _ = run("actors", tmp_path, **{"engine.urls": json.dumps([url]), "engine.start_timeout_s": 1})
    assert code == 2
    assert url in line and "not healthy within 1 s" in line


@pytest.mark.slow
def test_an_engine_with_another_vocabulary_is_refused(tmp_path):
    with running_engine(tiny_model_dir(tmp_path)) as (url, _):
        code, line, _ = run("actors", tmp_path, **{"engine.urls": json.dumps([url])})
    assert code == 2
    assert f"{url}: serves another model" in line and "a vocabulary of 640 tokens" in line


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"hello": 1}, "is no engine"),
        ({"model_path": "other", "model_type": "llama"}, "serves another model (other)"),
    ],
)
def test_a_server_that_is_no_engine_of_this_model_is_refused(tmp_path, answer, words):
    with answering(answer) as url:
        code, line, _ = run("actors", tmp_path, **{"engine.urls": json.dumps([url])})
    assert code == 2
    assert url in line and words in line


def test_a_router_without_engines_behind_it_is_refused(tmp_path):
    code, line, _ = run("actors", tmp_path, **{"engine.router": "http://router:30000"})
    assert code == 2
    assert "engine.urls" in line
