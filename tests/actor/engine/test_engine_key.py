"""The engines' API key, with the real embedded engine as a process: who is answered, and what ps shows."""

from __future__ import annotations

import json
import socket
import stat
from pathlib import Path

import pytest

from actor.engine.server import main as engine_main
from launch.engines.engine_supervisor import EngineServer
from launch.engines.host_engines import engine_specs
from shared.config.recipe import ConfigError, load_recipe
from shared.config.sections import EngineConfig
from shared.engine.engine_api import EngineError
from shared.keys import main as keys_main
from shared.keys import read_api_key
from shared.types import Sampling
from tests.support.engines import EngineProcess, ask, engine_process

pytestmark = pytest.mark.slow


RECIPE = "launch/recipes/sokoban_tiny.toml"


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    assert keys_main([str(folder), "--engine"]) == 0
    return folder / "engine.key"


@pytest.fixture(scope="module")
def engine(folder: Path, key_file: Path):
    with engine_process(folder, "--host", "0.0.0.0", "--api-key-file", str(key_file)) as engine:
        yield engine


def generate(engine: EngineProcess, api_key: str):
    return ask(engine.url, lambda client: client.generate([30, 31], [], Sampling(max_new_tokens=3)), api_key=api_key)


@pytest.mark.slow
def test_an_actor_with_the_key_is_served_on_a_public_address(engine, key_file):
    assert 1 <= len(generate(engine, read_api_key(str(key_file))).token_ids) <= 3


@pytest.mark.parametrize("key", ["", "wrong-key-wrong-key", "k" * 43])
def test_an_actor_without_the_key_is_told_so_in_one_line(engine, key):
    with pytest.raises(EngineError, match=r"/generate: HTTP 401: no API key, or a wrong one.*api_key_file") as caught:
        generate(engine, key)
    assert "\n" not in str(caught.value) and not (key and key in str(caught.value))


def test_no_route_but_health_answers_a_stranger(engine):
    routes = ["GET /model_info", "GET /server_info", "POST /init_weights_update_group", "POST /abort_request"]
    routes += ["POST /update_weights_from_distributed", "POST /pause_generation", "POST /flush_cache", "GET /nothing"]

    for method, path in (route.split() for route in routes):
        with pytest.raises(EngineError) as caught:
            ask(engine.url, lambda client, method=method, path=path: client.request(method, path, {}, timeout_s=10))
        assert caught.value.status == 401, path
    ask(engine.url, lambda client: client.health())


def test_a_stranger_is_refused_before_the_body_is_read(engine):
    port = int(engine.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nhost: x\r\nauthorization: Basic x\r\ncontent-length: 60000000\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 401 Unauthorized")


def test_the_learner_is_told_when_its_key_is_wrong(engine, key_file):
    assert ask(engine.url, lambda client: client.server_info(), api_key=read_api_key(str(key_file))).beside_generation
    with pytest.raises(EngineError, match=r"HTTP 401.*wrong one"):
        ask(engine.url, lambda client: client.server_info(), api_key="another-key-another")


def test_the_key_is_in_no_command_line(engine, key_file):
    process = Path(f"/proc/{engine.process.pid}")
    shown = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
    assert b"--api-key-file" in shown and read_api_key(str(key_file)).encode() not in shown


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1"])
def test_an_engine_without_a_key_stays_on_loopback(folder, capsys, host):
    assert engine_main(["--model-path", str(folder), "--port", "0", "--host", host]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert repr(host) in line and "not loopback" in line and "--api-key-file" in line


@pytest.mark.parametrize(
    ("mode", "text", "words"),
    [(0o644, "k" * 40, "open to others"), (0o600, "short", "holds no key"), (0o600, "two words " * 4, "holds no key")],
)
def test_a_bad_key_file_stops_the_engine_before_the_model_is_loaded(tmp_path, capsys, mode, text, words):
    file = tmp_path / "engine.key"
    file.write_text(text)
    file.chmod(mode)
    arguments = ["--model-path", "nowhere", "--port", "0", "--api-key-file"]
    assert engine_main([*arguments, str(file)]) == 2
    assert engine_main([*arguments, str(tmp_path / "none")]) == 2
    first, second = capsys.readouterr().err.strip().splitlines()
    assert words in first and str(file) in first and "--api-key-file: cannot read" in second
    assert text.strip() not in first


# ------------------------------------------------------------------ engines that the recipe starts


def specs(*overrides: object):
    return engine_specs(load_recipe(RECIPE, [str(part) for part in overrides]))


def test_embedded_engines_are_started_with_the_recipes_key_file(key_file):
    (spec,) = specs("--engine.api_key_file", key_file)
    assert spec.command[-2:] == ("--api-key-file", str(key_file)) and spec.secret is None


@pytest.fixture
def sglang(tmp_path):
    """Options for SGLang in an environment that only looks like it: its interpreter exits at once."""
    for name in ("bin/python", "lib/python3.11/site-packages/sglang/launch_server.py"):
        (tmp_path / "env" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "env" / name).write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / "env" / name).chmod(0o755)
    return ("--engine.kind", "sglang", "--engine.sglang_env", tmp_path / "env", "--run.dir", tmp_path / "runs")


def test_sglang_reads_the_key_from_a_file_of_its_owners_alone(sglang, key_file):
    (spec,) = specs(*sglang, "--engine.api_key_file", key_file)
    key = read_api_key(str(key_file))
    assert key not in " ".join(spec.command) + str(spec.env) + repr(spec)
    path = Path(spec.command[spec.command.index("--config") + 1])
    for _ in range(2):  # a restart writes it anew
        engine = EngineServer(spec, EngineConfig())
        engine.start()
        assert engine.child is not None
        engine.child.kill()
        assert json.loads(path.read_text().removeprefix("api-key: ")) == key
        assert {stat.S_IMODE(file.stat().st_mode) for file in (path, spec.log)} == {0o600}


def test_sglang_is_not_bound_to_a_public_address_without_a_key(sglang, key_file):
    public = (*sglang, "--engine.flags", '{"host": "0.0.0.0"}')
    with pytest.raises(ConfigError, match=r"not loopback; set engine\.api_key_file"):
        specs(*public)
    assert specs(*public, "--engine.api_key_file", key_file)
    with pytest.raises(ConfigError, match="ps would show"):
        specs(*sglang, "--engine.flags", '{"api_key": "0123456789abcdef"}')
