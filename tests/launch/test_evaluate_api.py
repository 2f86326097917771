"""`launch/evaluate.py --api`: a model behind OpenAI's API plays the samples of a run; here a small server that sees."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from envs.colour import COLOURS
from launch import evaluate
from shared.recordings.reader import episodes, recordings
from tests.support.machine import LocalServer, QuietHandler
from tests.support.runs import command, finished, places

KEY = "sk-test-0123456789abcdef"
Answer = tuple[int, Any]


def says(text: str | None, calls: list[dict[str, Any]] | None = None, reason: str = "stop") -> Answer:
    message = {"role": "assistant", "content": text, "refusal": None, **({"tool_calls": calls} if calls else {})}
    usage = {"prompt_tokens": 100, "completion_tokens": 7}
    return 200, {"choices": [{"index": 0, "message": message, "finish_reason": reason}], "usage": usage}


def refuses(status: int, message: str) -> Answer:
    return status, {"error": {"message": message, "type": "invalid_request_error"}}


class ChatServer(LocalServer):
    """Answers each request with what `policy` makes of its body."""

    def __init__(self, policy: Callable[[dict[str, Any]], Answer]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        outer, lock = self, threading.Lock()

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    outer.bodies.append(body)
                    outer.keys.add(self.headers.get("authorization"))
                status, answer = policy(body)
                self.reply(json.dumps(answer).encode(), status, {"retry-after": "0"} if status == 429 else None)

        super().__init__(Handler)
        self.url += "/v1"


def pictures(body: dict[str, Any]) -> list[Image.Image]:
    parts = [part for m in body["messages"] if isinstance(m["content"], list) for part in m["content"]]
    uris = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return [Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB") for uri in uris]


def sees_colours(body: dict[str, Any]) -> Answer:
    (picture,) = pictures(body)
    seen = picture.getpixel((picture.width // 2, picture.height // 2))
    return says(min(COLOURS, key=lambda name: sum(abs(a - b) for a, b in zip(COLOURS[name], seen, strict=True))))


@pytest.fixture
def serve() -> Iterator[Callable[..., ChatServer]]:
    with ExitStack() as servers:
        yield lambda policy: servers.enter_context(closing(ChatServer(policy)))


@pytest.fixture
def call(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Any]:
    """Call the command; return its exit code, its result ({} if it has none), and its stderr with the log."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr("actor.api_sampler.FIRST_PAUSE_S", 0.01)

    def run(server: ChatServer | str, *more: str, recipe: str = "colour_tiny") -> tuple[int, dict[str, Any], str]:
        url = server if isinstance(server, str) else server.url
        words = ["--config", recipe, "--api", url, "--api-model", "seer", "--run.dir", str(tmp_path), *more]
        try:
            code = evaluate.main(words)
        except SystemExit as ended:
            code = int(ended.code or 0)
        shown = capsys.readouterr()
        log = shown.err + caplog.text
        assert KEY not in shown.out + log
        lines = shown.out.splitlines()
        return code, json.loads(lines[-1]) if lines else {}, log

    return run


def test_a_model_that_sees_solves_the_task_and_its_tokens_and_cost_are_told(serve, call, tmp_path):
    server = serve(sees_colours)
    code, result, log = call(server, "--samples", "12", "--api-price", "2.5", "10")
    assert code == 0, log
    assert (result["success"], result["samples"], result["model"]) == (1.0, 12, f"seer at {server.url}")
    assert result["low"] < 1.0 == result["high"]
    dollars = 12 * (100 * 2.5 + 7 * 10) / 1e6
    assert result["api"] == {
        "api_requests": 12.0, "prompt_tokens": 1200.0, "answer_tokens": 84.0, "dollars": pytest.approx(dollars),
    }  # fmt: skip
    assert "1,200 tokens of prompts, 84 of answers: $0.0038" in log
    assert server.keys == {f"Bearer {KEY}"}
    first = server.bodies[0]
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("seer", 4, 1.0)
    assert first["messages"][0] == {"role": "system", "content": first["messages"][0]["content"]}
    assert all(KEY.encode() not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    folder = Path(result["folder"]) / "recordings"
    (place,) = recordings(folder)
    recorded = list(episodes(place.path(folder)))
    assert {episode.turns[0].answer.removesuffix("<|im_end|>") for episode in recorded} <= set(COLOURS)
    assert all(len(episode.images) == 1 for episode in recorded)


def test_it_plays_the_samples_that_an_engine_would_be_given_and_repeats_them(serve, call):
    server = serve(lambda body: says("red"))
    code, result, log = call(server, "--samples", "6", "--repeats", "2")
    assert code == 0, log
    assert (result["episodes"], len(server.bodies)) == (12, 12)
    assert set(result["metrics"]) >= {"pass@1", "pass@2"}
    assert len({body["seed"] for body in server.bodies}) == 12
    assert result["api"]["dollars"] is None


def test_several_turns_are_one_conversation_and_the_window_is_the_recipes(serve, call):
    server = serve(lambda body: says("I look. <answer>left</answer>"))
    words = ("--samples", "8", "--env.max_turns", "3", "--env.keep_images", "1")
    code, _, log = call(server, *words, recipe="frozen_lake_tiny")
    assert code == 0, log
    longest = max(server.bodies, key=lambda body: len(body["messages"]))
    roles = [message["role"] for message in longest["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert longest["messages"][-2]["content"] == "I look. <answer>left</answer>"
    assert {len(pictures(body)) for body in server.bodies} == {1}


def test_tools_are_called_by_the_api_and_their_results_and_images_come_back(serve, call):
    def looks(body: dict[str, Any]) -> Answer:
        if body["messages"][-1]["role"] == "user" and "tool" not in [m["role"] for m in body["messages"]]:
            name = body["tools"][0]["function"]["name"]
            arguments = json.dumps({"box": [0, 0, 500, 500]})
            return says(None, [{"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}])
        return says("<answer>7</answer>")

    server = serve(looks)
    code, result, log = call(server, "--samples", "2", recipe="scene_zoom_tiny")
    assert code == 0, log
    assert result["metrics"]["tool_executed"]["value"] == 1.0
    second = next(body for body in server.bodies if len(body["messages"]) > 3)
    assistant, tool = second["messages"][2], second["messages"][3]
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"] == "c1"
    assert isinstance(tool["content"], str)
    assert len(pictures(second)) == 2


def test_a_server_that_takes_no_images_is_one_line(serve, call):
    def blind(body: dict[str, Any]) -> Answer:
        return refuses(400, "content must be a string") if pictures(body) else says("?")

    code, result, log = call(serve(blind), "--samples", "5")
    (line,) = [line for line in log.splitlines() if line.startswith("error: ")]
    assert (code, result) == (2, {})
    assert "the model 'seer' takes no images, and this task shows some" in line
    assert "ApiRefused" not in log


def test_a_refused_key_is_one_line_without_the_key(serve, call):
    code, _, log = call(serve(lambda body: refuses(401, f"Incorrect API key provided: {KEY}")), "--samples", "2")
    (line,) = [line for line in log.splitlines() if line.startswith("error: ")]
    assert code == 2
    assert "Incorrect API key provided: (the API key)" in line and "--api-key-env" in line


def test_a_busy_server_is_asked_again_and_a_field_that_it_does_not_take_is_left_out(serve, call):
    seen: list[int] = []

    def picky(body: dict[str, Any]) -> Answer:
        seen.append(1)
        if len(seen) == 1:
            return refuses(429, "slow down")
        if "max_tokens" in body:
            return refuses(400, "Unsupported parameter: 'max_tokens': use 'max_completion_tokens' instead")
        assert body["max_completion_tokens"] == 4
        return sees_colours(body)

    code, result, log = call(serve(picky), "--samples", "3", "--api-concurrency", "1")
    assert code == 0, log
    assert result["success"] == 1.0
    assert "seer takes no max_tokens: it is left out" in log


def test_a_server_that_stays_broken_ends_the_evaluation_in_one_line(serve, call, monkeypatch):
    monkeypatch.setattr("actor.api_sampler.TRIES", 2)
    code, _, log = call(serve(lambda body: refuses(503, "no capacity")), "--samples", "2")
    (line,) = [line for line in log.splitlines() if line.startswith("error: ")]
    assert code == 2
    assert "2 of 2 episodes failed" in line and "no capacity" in line


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_a_checkpoint_plays_the_same_samples_beside_it(serve, tmp_path):
    server = serve(sees_colours)
    words = ["--api", server.url, "--api-model", "seer", "--against", "launch/models/colour_tiny", "--samples", "12"]
    ended = finished(command("evaluate", [*words, *places(tmp_path)]))
    result = json.loads(ended.stdout.splitlines()[-1])
    assert (result["success"], result["against"]["samples"], result["difference"]["pairs"]) == (1.0, 12, 12)
    assert result["difference"]["worse"] == 0 < result["difference"]["better"]
    assert "api" in result and "api" not in result["against"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--api-model", ""), "say with --api-model which of its models plays"),
        (("--model", "launch/models/colour_tiny"), "give the second one as --against"),
        (("--api", "https://me:secret@host/v1"), "leave secrets out of the address"),
        (("--api", "host"), "write it as http://host:port"),
        (("--api-concurrency", "0"), "--api-concurrency 0: at least 1"),
        (("--rollout.path", "tests.support.environments.play"), "rollout.path"),
    ],
)
def test_a_mistake_is_one_line_before_any_request(call, words, said):
    code, result, log = call("http://127.0.0.1:9/v1", *words)
    assert (code, result) == (2, {})
    assert said in log and "Traceback" not in log
