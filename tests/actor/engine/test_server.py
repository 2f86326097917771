"""The engine as a process: start, bad arguments, stop, and the death of its parent."""

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from actor.engine.server import main
from actor.engine_pool import EnginePool
from launch.engines.network import free_port
from shared.engine.engine_api import EngineClient, EngineError
from shared.types import Sampling
from tests.support.engines import call, engine_process, wait_healthy
from tests.support.machine import is_there, until
from tests.support.paths import ROOT


@pytest.mark.slow
def test_an_engine_starts_serves_and_stops_on_sigterm(folder):
    with engine_process(folder) as engine:
        info = call(engine.url, "/model_info")
        assert info["weight_version"] == "0" and info["vocab_size"] == 640
        engine.signal(signal.SIGTERM)
        assert engine.process.wait(10) == 0


@pytest.mark.slow
def test_an_engine_dies_with_its_parent(folder):
    port = free_port()
    command = [sys.executable, "-m", "actor.engine.server", "--model-path", str(folder), "--port", str(port)]
    start = f"p = subprocess.Popen({command!r})"
    script = f"import subprocess, time; {start}; print(p.pid, flush=True); time.sleep(99)"
    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    pid = int(parent.stdout.readline())
    try:
        wait_healthy(f"http://127.0.0.1:{port}")
    finally:
        parent.kill()
        parent.communicate()
    until(lambda: not is_there(pid), 10.0)


def last_line(capsys):
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_an_occupied_port_is_one_clear_line(folder, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--model-path", str(folder), "--port", str(port)]) == 2
    line = last_line(capsys)
    assert str(port) in line and "in use" in line


@pytest.mark.parametrize(
    ("files", "options", "words"),
    [
        ({}, [], "no config.json"),
        (
            {"config.json": '{"model_type": "bert"}', "preprocessor_config.json": "{}"},
            [],
            "a model of the family 'bert', but those that run are qwen3_vl, qwen3_vl_moe, qwen2_5_vl",
        ),
        (None, ["--device", "cuda"], "use --device cpu"),
    ],
    ids=["a wrong path", "a model of another kind", "a missing GPU"],
)
def test_what_cannot_be_served_is_one_clear_line(folder, tmp_path, capsys, monkeypatch, files, options, words):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name, content in (files or {}).items():
        (tmp_path / name).write_text(content)
    assert main(["--model-path", str(folder if files is None else tmp_path), "--port", "0", *options]) == 2
    assert words in last_line(capsys)


def test_weights_that_are_cut_short_are_one_clear_line(folder, tmp_path, capsys):
    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:20_000])
    assert main(["--model-path", str(broken), "--port", "0"]) == 2
    assert f"the .safetensors files in {broken} cannot be read" in last_line(capsys)


def test_a_dead_engine_costs_patience_and_not_a_flood_of_failures():
    async def main():
        dead = EngineClient(f"http://127.0.0.1:{free_port()}")
        pool = EnginePool([dead], patience_s=0.5)
        with pytest.raises(EngineError):
            async with pool.lease() as client:
                await client.generate([1], [], Sampling())
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"not healthy, or without"):
            async with pool.lease():
                pass
        assert time.monotonic() - began >= 0.5 and dead.num_open == 0

    asyncio.run(main())
