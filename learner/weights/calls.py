"""Rank 0's side of the engines: HTTP calls with a time limit, and the process group that weights travel over."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

Result = TypeVar("Result")
MAX_ANSWER_BYTES = 64 << 20


class EngineError(Exception):
    """An engine refused, failed or was silent. `status` is 0 without an answer."""

    def __init__(self, url: str, reason: str, status: int = 0) -> None:
        super().__init__(f"{url}: {reason}")
        self.url, self.reason, self.status = url, reason, status


class _Stay(urllib.request.HTTPRedirectHandler):
    """An engine that points elsewhere has failed: neither calls nor the API key follow it."""

    def redirect_request(self, *_: object) -> None:
        return None


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay)


def send_api_key(api_key: str) -> None:
    """With every later call of this process; "" = none."""
    _DIRECT.addheaders = [("authorization", f"Bearer {api_key}")] if api_key else []


def call(url: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
    """POSTs `body` as JSON (GET for None) and returns the decoded answer. EngineError on any failure."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url.rstrip("/") + path, data=data, headers={"content-type": "application/json"})
    try:
        with _DIRECT.open(request, timeout=timeout_s) as response:
            content = response.read(MAX_ANSWER_BYTES)
    except urllib.error.HTTPError as error:
        text = " ".join(error.read().decode(errors="replace").split())
        raise EngineError(url, f"{path} answered HTTP {error.code}: {text[:300]}", error.code) from error
    except TimeoutError as error:
        raise EngineError(url, f"{path} gave no answer within {timeout_s:g} s") from error
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise EngineError(url, f"{path} failed: {error}") from error
    try:
        return json.loads(content) if content.strip() else None
    except ValueError:
        return None  # some routes answer with plain text


def start(function: Callable[..., Result], *args: Any) -> Future[Result]:
    """Runs it in a thread that does not keep the process alive."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # noqa: BLE001  whoever asks for the result gets it
            future.set_exception(error)

    threading.Thread(target=run, name="publisher", daemon=True).start()
    return future


def each(urls: Iterable[str], function: Callable[[str], Result], limit_s: float) -> dict[str, Result | EngineError]:
    """Every engine's result, or why there is none, from calls made at once; after `limit_s` the rest are silent."""
    started = {url: start(function, url) for url in urls}
    wait(started.values(), timeout=limit_s)
    results: dict[str, Result | EngineError] = {}
    for url, future in started.items():
        error = future.exception() if future.done() else EngineError(url, f"no whole answer within {limit_s:g} s")
        if error is not None and not isinstance(error, EngineError):
            raise error
        results[url] = future.result() if error is None else error
    return results


def failures(results: Mapping[str, object]) -> dict[str, str]:
    """The reasons of those that failed."""
    return {url: error.reason for url, error in results.items() if isinstance(error, EngineError)}


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What the publisher must know of a server; the defaults are those of one that does not tell."""

    num_ranks: int = 1  # of its tensor-parallel group: each is a rank of the weight group
    beside_generation: bool = False  # receives weights while it generates, and installs them at once
    tells_checksums: bool = False  # of raw bytes; on a GPU it computes another kind, in bfloat16 a CPU packs weights


def traits_of(url: str, timeout_s: float) -> EngineTraits:
    """EngineError if the engine is not healthy."""
    call(url, "/health", None, timeout_s)
    try:
        info = call(url, "/server_info", None, timeout_s)
    except EngineError as error:
        if error.status == 401:
            raise
        info = None  # an older server
    if not isinstance(info, dict):
        return EngineTraits()
    ranks = info.get("tp_size")
    return EngineTraits(
        num_ranks=ranks if isinstance(ranks, int) and ranks > 0 else 1,
        beside_generation=_beside_generation(info),
        tells_checksums=info.get("engine") == "embedded"
        or (info.get("device"), info.get("dtype")) == ("cpu", "float32"),
    )


def _beside_generation(info: dict[str, Any]) -> bool:
    """The embedded engine says so; of SGLang's server every model process does, where our plugin runs in it."""
    states = info.get("internal_states")
    told = [info] if not isinstance(states, list) or not states else states
    return all(isinstance(state, dict) and state.get("updates_beside_generation") is True for state in told)


def own_address(url: str) -> str:
    """The address of this machine that the engine at `url` can reach."""
    host = urlsplit(url).hostname or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect((socket.gethostbyname(host), 9))
        return str(probe.getsockname()[0])


class WeightGroup:
    """Rank 0 of a process group beside the default one; engines are ranks 1, 2, ...

    The store's keys are those that torch's own group constructor uses, so the other end may be built by that.
    """

    def __init__(self, name: str, world_size: int, backend: str, timeout_s: float) -> None:
        """Only opens the store; `connect` waits for the engines."""
        self.name, self.world_size, self.backend, self.timeout_s = name, world_size, backend, timeout_s
        timeout = timedelta(seconds=timeout_s)
        tcp = dist.TCPStore("0.0.0.0", 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        self.port = tcp.port
        self._tcp: Any = tcp
        self._group: Any = None

    def connect(self) -> None:
        """Returns when all engines have joined. RuntimeError after the time limit."""
        timeout = timedelta(seconds=self.timeout_s)
        device = {"gloo": "cpu", "nccl": "cuda"}[self.backend]
        inner = dist.PrefixStore(f"{self.name}/", dist.PrefixStore(self.name, self._tcp))
        store = dist.PrefixStore(f"{device}/", inner)
        store.set_timeout(timeout)
        try:
            if self.backend == "gloo":
                self._group = dist.ProcessGroupGloo(store, 0, self.world_size, timeout)
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group = dist.ProcessGroupNCCL(store, 0, self.world_size, options)
        finally:
            del store, inner  # a traceback must not keep the store open: engines wait on it

    def broadcast(self, tensor: Tensor) -> None:
        """To all engines. RuntimeError after the time limit, or when an engine is gone."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        work = self._group.broadcast([tensor], options)
        if not work.wait(timedelta(seconds=self.timeout_s)):
            raise RuntimeError(f"the broadcast took longer than {self.timeout_s:g} s")
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()

    def abort(self) -> None:
        """Breaks the connections and the store, so that nobody waits for what will not come."""
        self._tcp = None
        if self._group is not None:
            self._group.abort()
