"""Engines for tests: real ones as processes, servers that misbehave on purpose, and checks of sampled tokens."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actor.engine.weight_loader import broadcast, join_group, parse_entries
from launch.engines.host_engines import engine_specs
from launch.engines.network import free_port
from shared.config.recipe import load_recipe
from shared.engine.engine_api import EngineClient
from shared.types import Image, Sampling
from tests.support.machine import LocalServer, QuietHandler
from tests.support.paths import ROOT
from tests.support.tiny import draw_image, load_model, logprobs_under, png

Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]
SILENT_S = 600.0  # longer than any test may take


@dataclass(frozen=True, slots=True)
class EngineProcess:
    url: str
    process: subprocess.Popen[bytes]

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@contextmanager
def _running(url: str, command: Sequence[str], start_s: float, **options: Any) -> Iterator[EngineProcess]:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **(quiet | options))
    try:
        wait_healthy(url, start_s)
        yield EngineProcess(url, process)
    finally:
        process.kill()
        process.wait(60)


def engine_process(folder: Path, *more: str) -> AbstractContextManager[EngineProcess]:
    """Start the embedded engine as a separate process, on a free port."""
    port = free_port()
    command = [sys.executable, "-m", "actor.engine.server", "--model-path", str(folder), "--port", str(port), *more]
    return _running(f"http://127.0.0.1:{port}", command, 180.0, cwd=ROOT)


def sglang_process(folder: Path) -> AbstractContextManager[EngineProcess]:
    """Start SGLang's server as a separate process, on a free port, in the environment that `make sglang-env` builds."""
    fields = {"model.path": folder, "engine.kind": "sglang", "engine.port": free_port(), "engine.start_timeout_s": 300}
    arguments = [part for key, value in fields.items() for part in (f"--{key}", str(value))]
    (spec,) = engine_specs(load_recipe(str(ROOT / "launch/recipes/colour_tiny.toml"), arguments))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | spec.env
    return _running(spec.url, spec.command, 300.0, cwd=folder, env=environment)


def ask(url: str, use: Callable[[EngineClient], Awaitable[Any]], **options: Any) -> Any:
    """Return the result of `use`, called with an open client, for a test without an event loop."""

    async def main() -> Any:
        async with EngineClient(url, **options) as client:
            return await use(client)

    return asyncio.run(main())


def call(url: str, path: str, body: Any = None, timeout_s: float = 30.0) -> Any:
    """Post `body`, or GET if it is None; return the decoded answer."""
    if body is None:
        return ask(url, lambda client: client.request("GET", path, timeout_s=timeout_s))
    return ask(url, lambda client: client.post(path, body, timeout_s))


def wait_healthy(url: str, limit_s: float = 60.0) -> None:
    ask(url, lambda client: client.wait_healthy(limit_s))


@contextmanager
def false_engine(answers: Mapping[str, Answer]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Run a server that answers the paths in `answers` as given there, and all others with success; yield (url,
    requests received)."""
    seen: list[tuple[str, Any]] = []

    class Handler(QuietHandler):
        def answer(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
            seen.append((self.path, body))
            answers.get(self.path, says({"success": True}))(self, body)

        do_GET = do_POST = answer

    server = LocalServer(Handler)
    try:
        yield server.url, seen
    finally:
        server.close()


def says(content: Any, status: int = 200) -> Answer:
    def answer(request: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        request.send_response(status)
        request.send_header("content-length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    return answer


def redirects(path: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
        request.send_response(302)
        request.send_header("location", path)
        request.send_header("content-length", "0")
        request.end_headers()

    return answer


def refuses(request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    says({"success": False, "message": "as the test wants"}, 400)(request, body)


def hangs_up(request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    request.connection.shutdown(socket.SHUT_RDWR)


def is_silent(request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    time.sleep(SILENT_S)


def dribbles(request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """Send a byte now and then, so that no single read ever waits long."""
    request.send_response(200)
    request.send_header("content-length", "10000")
    request.end_headers()
    for _ in range(int(2 * SILENT_S)):
        try:
            request.wfile.write(b" ")
            request.wfile.flush()
        except OSError:
            return
        time.sleep(0.5)


def talks_nonsense(request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    request.wfile.write(b"\x00\xff garbage\r\n\r\n")


class JoiningEngine:
    """A false engine that really joins the weight group, with as many ranks as it announces."""

    def __init__(self, answers, num_ranks=1):
        self.received, self.num_ranks, self._groups = [], num_ranks, []
        own = {
            "/init_weights_update_group": self._join,
            "/update_weights_from_distributed": self._receive,
            "/server_info": says({"tp_size": num_ranks}),
        }
        self.routes = own | answers
        self._server = false_engine(self.routes)

    def __enter__(self):
        self.url, self.seen = self._server.__enter__()
        return self.url if self.num_ranks == 1 else self

    def __exit__(self, *exception):
        self._server.__exit__(*exception)

    def _join(self, request, body):
        names = {"address": "master_address", "port": "master_port", "world_size": "world_size"}
        common = {key: body[name] for key, name in names.items()}
        common |= {"name": body["group_name"], "backend": body["backend"], "timeout_s": 10}

        def join(place):
            with suppress(RuntimeError):  # the learner has broken up the group
                self._groups[place] = join_group(rank=body["rank_offset"] + place, **common)

        self._groups = [None] * self.num_ranks
        self._on_all_ranks(join)
        says({"success": True})(request, body)

    def _receive(self, request, body):
        self._take(body)
        says({"success": True})(request, body)

    def _take(self, body):
        entries = parse_entries(body["names"], body["dtypes"], body["shapes"])

        def receive(place):
            flat = torch.empty(sum(entry.nbytes for entry in entries), dtype=torch.uint8)
            with suppress(RuntimeError):  # the learner has broken up the group
                broadcast(self._groups[place], flat, 10)
                self.received.append((place, flat))

        self._on_all_ranks(receive)

    def _on_all_ranks(self, function):
        threads = [threading.Thread(target=function, args=(place,), daemon=True) for place in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)


def surprise_z(logprobs_KV: Tensor, token_ids_K: Tensor) -> float:
    """Measure whether tokens were sampled from the distribution of their logprobs. A sampler that narrows or sharpens
    it would bias every importance weight, and no comparison of logprobs would show it.

    Return the sum of the tokens' -log p minus the entropy, in standard deviations. It is approximately normal if each
    token was sampled from its row, also for tokens of one sequence (the terms are differences of a martingale).
    """
    p, logprobs = logprobs_KV.double().exp(), logprobs_KV.double().clamp(min=-1e4)
    own = logprobs.gather(1, token_ids_K[:, None])[:, 0]
    entropy = -(p * logprobs).sum(1)
    variance = (p * logprobs.square()).sum(1) - entropy.square()
    return float((-own - entropy).sum() / variance.sum().sqrt())


SIZES = [(64, 64), (96, 64), (64, 64), (128, 128)]


async def play(client, spec, seed, turns=3, temperature=1.0, pause_s=0.0, sizes=SIZES):
    """Play one episode with random observations; return (compact ids, [(turn start, completion)], images)."""
    rng = random.Random(seed)
    ids, drawn_images, sampled = [rng.randrange(20, 200) for _ in range(rng.randint(1, 30))], [], []
    for _ in range(turns):
        for _ in range(rng.randint(0, 2) if spec.takes_images else 0):
            drawn_images.append(draw_image(*rng.choice(sizes), seed=rng.randrange(6)))
            ids += [21, spec.image_token_id, 22]
        ids += [rng.randrange(20, 200) for _ in range(rng.randint(1, 20))]
        images = [Image.of(png(p)) for p in drawn_images]
        sampling = Sampling(temperature=temperature, max_new_tokens=rng.randint(1, 12))
        out = await client.generate(ids, images, sampling, banned_ids=spec.banned_ids, seed=rng.randrange(1000))
        sampled.append((len(ids), out))
        ids = ids + list(out.token_ids)
        await asyncio.sleep(pause_s * rng.random())
    return ids, sampled, drawn_images


def play_at_once(url, spec, seeds, **options):
    return ask(url, lambda client: asyncio.gather(*(play(client, spec, seed, **options) for seed in seeds)))


def check(folder, spec, episodes, temperature=1.0):
    """Check that each completion's logprobs are those of a plain forward."""
    model = load_model(folder)
    for ids, sampled, images in episodes:
        own = logprobs_under(model, spec, ids[:1], ids[1:], images, temperature=temperature)
        for start, out in sampled:
            expected = own[start - 1 : start - 1 + len(out.token_ids)]
            torch.testing.assert_close(torch.tensor(out.logprobs), expected, atol=1e-4, rtol=0)
