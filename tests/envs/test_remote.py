"""Environments behind HTTP: played as those of this process, no step made twice, one line for what fails."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from PIL import Image

from envs import check, serve
from envs.env_calls import close_env, make_env, messages_of, reset_env, reward_of, step_env
from envs.loader import load_module
from envs.remote import EnvServerError, build_env, episode_reward, system_prompt
from envs.remote_messages import decoded, encoded
from shared.engine.http_client import HttpFailure, JsonClient
from shared.types import Image as FileImage
from shared.types import Sample
from tests.support.env_servers import COUNTING, application_here, served_apart, served_here
from tests.support.machine import until

KEY = "k" * 32


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "counting.py").write_text(COUNTING)
    return str(tmp_path / "counting.py")


def made(url: str | list[str], seed: int = 1, **args: Any) -> Any:
    sample = Sample("s", metadata={"seed": seed})
    return make_env(build_env, sample=sample, args={"url": url, "max_turns": 4, **args})


def test_a_body_comes_back_as_it_was_sent():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8))
    value = {
        "a": [1, 0.5, None, True, "\r\n--x"],
        "b": {"image": image, "c": [image]},
        "d": np.float32(2),
        "e": object(),
    }
    kind, body = encoded(value)
    assert kind.startswith("multipart/form-data; boundary=")
    back = decoded(body)
    assert back | {"b": 0} == {"a": value["a"], "b": 0, "d": 2.0, "e": "(object)"}
    assert back["b"]["image"].tobytes() == back["b"]["c"][0].tobytes() == image.tobytes()
    assert encoded({"a": np.arange(3)}) == ("application/json", b'{"a": [0, 1, 2]}')


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"<html>", "no JSON: b'<html>'"),
        (b"", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"$file": 0}', "file 0 is missing"),
        (b'{"$file": "x"}', "file 'x' is missing"),
        (b"--b\r\n\r\n{}\r\n", "cut off"),
        (b'--b\r\n\r\n{"a": {"$file": 0}}\r\n--b\r\n\r\nGIF89a\r\n--b--', "file 0 is no image: a GIF"),
        (b"--b\r\n" + b"\r\n--b\r\n" * 80 + b"\r\n--b--", "more than 64 files"),
        (b"[" * 90 + b"]" * 90, "64 deep"),
    ],
)
def test_a_body_of_another_form_is_one_line(body, why):
    with pytest.raises(ValueError, match=why) as caught:
        decoded(body)
    assert "\n" not in str(caught.value)


def test_an_environment_is_played_over_http_as_it_is_here(path):
    with served_here(path, args={"shade": 7}) as url:
        assert system_prompt({"url": url}) == "Count to ten."
        here = make_env(load_module(path).build_env, sample=Sample("s", metadata={"seed": 1}), args={"shade": 9})
        there = made(url, args={"shade": 9})
        for env in (here, there):
            env.seen = []
            observation, info = reset_env(env)
            assert info["metrics"] == {"success": 0.0}
            env.seen += messages_of(env, observation)
            for answer in ("4", "5"):
                observation, done, info = step_env(env, answer)
                env.seen += messages_of(env, observation)
            assert done and info["reward"] == 1.0 and info["args"]["shade"] == 9
            for message in env.seen:
                message["content"][0]["image"] = message["content"][0]["image"].tobytes()
        assert here.seen == there.seen and info["args"]["max_turns"] == 4
        assert reward_of(episode_reward, there) == 1.0
        close_env(there)
        until(lambda: load_module(path).done[-1] == "close")


def test_the_check_passes(path, capsys):
    with served_here(path) as url:
        assert check.main(["envs.remote", "--env.args.url", url, "--env.args.args.shade", "3"]) == 0, (
            capsys.readouterr()
        )
        assert check.main(["envs.remote", "--env.args.url", url, "--env.args.args.shad", "3"]) == 1
        assert "has no setting 'shad'; did you mean 'shade'?" in capsys.readouterr().out


def test_a_sample_is_sent_with_its_images(path):
    with served_here(path) as url:
        file = FileImage.of(encoded({"i": Image.new("RGB", (3, 3), "red")})[1].partition(b"png\r\n\r\n")[2])
        sample = Sample("s", label="l", metadata={"seed": 0, "row": {"a": [1]}}, images=(file,))
        env = make_env(build_env, sample=sample, args={"url": url})
        built = []
        module = load_module(path)
        module.Counting.reset, reset = lambda self: built.append(self.sample) or reset(self), module.Counting.reset
        reset_env(env)
        close_env(env)
        assert (built[0].label, built[0].metadata) == ("l", {"seed": 0, "row": {"a": [1]}})
        assert built[0].images[0].data.startswith(b"\x89PNG")


def test_a_call_that_is_sent_again_is_not_made_again(path):
    async def twice(url: str) -> list[bytes]:
        async with JsonClient(url) as http:
            start = f"/sessions/{'0' * 32}/calls"

            async def ask(number: int, **body: Any) -> bytes:
                kind, content = encoded(body)
                return await http.post_for_content(f"{start}/{number}", content, kind, timeout_s=30)

            reset = {"call": "reset", "sample": {"metadata": {"seed": 0}}, "args": {"nap_s": 0.3}}
            answers = [await ask(0, **reset), await ask(0, **reset)]
            with pytest.raises(HttpFailure, match="no answer within"):  # it is made nevertheless
                kind, content = encoded({"call": "step", "text": "2"})
                await http.post_for_content(f"{start}/1", content, kind, timeout_s=0.1)
            answers += [await ask(1, call="step", text="2"), await ask(1, call="step", text="2")]
            answers += [await ask(2, call="step", text="9")]
            for number, words in ((1, "409"), (5, "409")):
                with pytest.raises(HttpFailure, match=words):
                    await ask(number, call="step", text="2")
            return answers

    with served_here(path) as url:
        first, again, step, step_again, last = asyncio.run(twice(url))
        assert (first, step) == (again, step_again)
        assert decoded(step)["observation"]["messages"][0]["content"][1]["text"] == "It is 2."
        assert decoded(last)["done"] and load_module(path).done == ["build", "2", "9"]


@pytest.mark.parametrize("lost", [(503, b"{}"), (200, None)])
def test_a_player_asks_again_when_an_answer_is_lost(lost):
    seen: list[str] = []

    async def call(request: web.Request) -> web.Response:
        seen.append(request.path[-1])
        if len(seen) % 2:
            if lost[1] is None:
                request.transport.abort()  # type: ignore[union-attr]
            return web.Response(status=lost[0], body=lost[1])
        answer = {"observation": {"messages": [{"role": "user", "content": "?"}]}, "info": {}, "done": False}
        return web.json_response(answer)

    app = web.Application()
    app.router.add_post("/sessions/{session}/calls/{number}", call)
    with application_here(app) as url:
        env = made(url)
        reset_env(env)
        step_env(env, "a")
        close_env(env)
    assert seen == ["0", "0", "1", "1"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("<html>", "no JSON: b'<html>'"),
        ("[1]", "an answer that is none: [1]"),
        ("{}", "its observation is None, not dict"),
        ('{"observation": {}}', "its info is None, not dict"),
        ('{"observation": 5, "info": {}, "done": true}', "its observation is 5, not dict"),
        ('{"observation": {"obs_str": "x"}, "info": {}, "done": true}', "without messages"),
        ('{"observation": {}, "info": {}, "done": false}', "no observation, and the episode is not done"),
        ('{"observation": {}, "info": {}, "done": "yes"}', "its done is 'yes', not bool"),
        ('{"observation": {"messages": [{"$file": 3}]}, "info": {}, "done": false}', "file 3 is missing"),
    ],
)
def test_nonsense_is_one_line_that_names_the_server(body, why):
    app = web.Application()

    async def call(_: web.Request) -> web.Response:
        return web.Response(text=body)

    app.router.add_post("/sessions/{session}/calls/{number}", call)
    with application_here(app) as url:
        env = made(url)
        with pytest.raises(EnvServerError) as caught:
            reset_env(env)
            step_env(env, "a")
        close_env(env)
    assert str(caught.value).startswith(url) and why in str(caught.value) and "\n" not in str(caught.value)


def test_what_an_environment_raises_there_has_its_name_and_place_here(path):
    with served_here(path) as url:
        env = made(url)
        reset_env(env)
        with pytest.raises(Exception, match="division by zero") as caught:
            step_env(env, "boom")
        assert type(caught.value).__name__ == "ZeroDivisionError"
        assert caught.value.place.startswith("counting.py:")
        close_env(env)


def test_a_call_that_overruns_its_limit_there_ends_its_session(path):
    with served_here(path, call_s=0.2) as url:
        env = made(url, args={"nap_s": 2.0})
        reset_env(env)
        with pytest.raises(Exception, match=r"no return within 0\.2 s"):
            step_env(env, "1")
        with pytest.raises(EnvServerError, match="404: no such session: it was closed, or this server was started"):
            step_env(env, "1")
        close_env(env)


def test_sessions_are_bounded_and_idle_ones_closed(path):
    with served_here(path, sessions=2, idle_s=0.5) as url:
        envs = [made(url, tries=1) for _ in range(3)]
        reset_env(envs[0])
        reset_env(envs[1])
        with pytest.raises(EnvServerError, match="503: all 2 sessions are open: raise --sessions"):
            reset_env(envs[2])
        until(lambda: load_module(path).done.count("close") == 2)
        envs.append(made(url))
        reset_env(envs[3])
        with pytest.raises(EnvServerError, match="no such session"):
            step_env(envs[0], "1")
        for env in envs:
            close_env(env)


def test_a_server_that_cannot_be_reached_is_passed_over_and_named_if_it_is_the_only_one(path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        gone = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with served_here(path) as url:
            for _ in range(4):
                env = made([gone, url], tries=1)
                reset_env(env)
                close_env(env)
        env = made(gone)
        with pytest.raises(EnvServerError, match=r"cannot connect: .*\(3 tries\)"):
            reset_env(env)
        close_env(env)


def test_off_loopback_both_sides_need_a_key(path, tmp_path, capsys):
    with pytest.raises(ValueError, match="is not loopback, and there is no API key: make one with"):
        build_env(None, {"url": "http://10.0.0.7:8100"})
    assert serve.main([path, "--host", "0.0.0.0"]) == 2
    assert "--host '0.0.0.0' is not loopback, and there is no API key" in capsys.readouterr().err
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    with served_here(path, api_key=KEY) as url:
        env = made(url, api_key_file=str(file))
        reset_env(env)
        close_env(env)
        env = made(url)
        with pytest.raises(EnvServerError, match="401: this server needs its API key: set api_key_file"):
            reset_env(env)
        close_env(env)


def test_without_a_key_what_a_web_page_sends_is_refused(path):

    import aiohttp

    async def statuses(url: str) -> list[int]:
        async with aiohttp.ClientSession() as http:
            found = []
            for headers in ({"origin": "http://evil"}, {"host": "evil.example"}, {}):
                async with http.post(f"{url}/task", data=b"{}", headers=headers) as answer:
                    found.append(answer.status)
            return found

    with served_here(path) as url:
        assert asyncio.run(statuses(url)) == [403, 403, 200]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["no_file.py"], "no file 'no_file.py'"),
        (["envs.sokoban", "--env.args.grid_sze", "6"], "--env.args: envs.sokoban has no setting 'grid_sze'; did you"),
        (["envs.colour", "--api-key-file", "nothing"], "nothing"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_line(options, line, capsys):
    assert serve.main(options) == 2
    error = capsys.readouterr().err
    assert line in error and error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.slow
def test_the_command_serves_says_that_a_port_is_taken_and_ends_at_ctrl_c(path):
    process, url = served_apart(path, "--env.args.shade", "5")
    try:
        env = made(url)
        reset_env(env)
        assert step_env(env, "1")[2]["args"]["shade"] == 5
        command = [sys.executable, "-m", "envs.serve", path, "--port", url.rpartition(":")[2]]
        second = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert second.returncode == 2
        assert second.stderr == f"error: port {command[-1]} on 127.0.0.1 is taken: choose another with --port\n"
        os.kill(process.pid, signal.SIGINT)
        out, error = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "ended with 1 open sessions\n"), error
        assert "Traceback" not in error
        with pytest.raises(EnvServerError, match="cannot connect"):
            step_env(env, "1")
        close_env(env)
    finally:
        process.kill()


def test_the_settings_say_what_is_wrong(capsys):
    for args, line in (
        ({}, "url is required"),
        ({"url": "ftp://x"}, "url 'ftp://x': write it as http://host:port"),
        ({"url": []}, "name a server"),
        ({"url": "http://127.0.0.1:1", "tries": 0}, "tries = 0"),
    ):
        assert check.main(["envs.remote", "--env.args", json.dumps(args)]) == 1
        printed = capsys.readouterr().out
        assert line in printed and printed.count("\n") == 1, printed
