"""The engine client: SGLang's HTTP API, spoken to SGLang and to the embedded engine alike."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import Any

from actor.http import HttpClient, HttpFailure
from shared.types import Completion, Image, Sampling, VersionSpan

FINISH_REASONS = ("stop", "length", "abort")
BAN = -100.0
CONNECT_TRIES = 3


class EngineError(Exception):
    """The engine's answer was missing, late or invalid; one line that names the engine."""


class EngineClient:
    """One engine. All methods raise EngineError for an engine that does not answer as it should."""

    def __init__(self, url: str, *, timeout_s: float = 300.0, connections: int = 512, api_key: str = "") -> None:
        self._http = HttpClient(url, connections=connections, api_key=api_key)
        self.url, self.timeout_s = self._http.url, timeout_s
        self.num_open = 0  # episodes that play on this engine
        self.suspect = False  # the last request failed; cleared by the next that does not

    async def generate(
        self,
        token_ids: Sequence[int],
        images: Sequence[Image],
        sampling: Sampling,
        *,
        banned_ids: Sequence[int] = (),
        stop_ids: Sequence[int] = (),
        max_new_tokens: int | None = None,
        seed: int | None = None,
        cache_key: str = "",
    ) -> Completion:
        """Continues the compact stream (one placeholder per image). An abort is a Completion, not an error. Requests of
        one `cache_key` share what the engine keeps of their common beginning, others do not."""
        new_tokens = sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
        body = request_body(token_ids, images, sampling, banned_ids, stop_ids, new_tokens, seed)
        if cache_key:
            body["extra_key"] = cache_key
        try:
            completion = parse_completion(await self._post("/generate", body), self.url)
        except EngineError:
            self.suspect = True
            raise
        self.suspect = False
        return completion

    async def warm_up(
        self, token_ids: Sequence[int], images: Sequence[Image], timeout_s: float, banned_ids: Sequence[int] = ()
    ) -> tuple[int, int]:
        """Waits for an answer with logprobs, whatever the weights are; returns the prompt's tokens as the engine
        counts them, and the likeliest next token."""
        body = request_body(token_ids, images, Sampling(temperature=0.0), banned_ids, (), 2, None)
        answer = await self._call("POST", "/generate", body, timeout_s)
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        if not isinstance(meta, dict) or not meta.get("output_token_logprobs"):
            raise EngineError(f"{self.url}: the answer has no output_token_logprobs; does an engine serve there?")
        return int(meta.get("prompt_tokens", 0)), int(meta["output_token_logprobs"][0][1])

    async def healthy(self, timeout_s: float = 10.0) -> bool:
        try:
            await self._http.request("GET", "/health", timeout_s=timeout_s)
        except HttpFailure as failure:
            return 200 <= failure.status < 300  # whatever it says: a router answers with plain text
        return True

    async def wait_healthy(self, timeout_s: float) -> None:
        """Returns as soon as the engine answers; EngineError after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.healthy():
                    await asyncio.sleep(0.25)
                self.suspect = False
        except TimeoutError:
            raise EngineError(f"{self.url}: not healthy within {timeout_s:g} s: is an engine running there?") from None

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns when the engine answers and holds weights of a run; EngineError after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._is_ready():
                    await asyncio.sleep(0.5)
        except TimeoutError:
            raise EngineError(f"{self.url}: not healthy, or without this run's weights, for {timeout_s:g} s") from None
        self.suspect = False

    async def _is_ready(self) -> bool:
        try:
            info = await self.model_info(timeout_s=10.0)
            parse_version(info.get("weight_version"), self.url)
        except (EngineError, AttributeError):
            return False
        return True

    async def model_info(self, timeout_s: float = 30.0) -> dict[str, Any]:
        return await self._call("GET", "/model_info", None, timeout_s)

    async def server_info(self, timeout_s: float = 30.0) -> dict[str, Any]:
        return await self._call("GET", "/server_info", None, timeout_s)

    async def call(self, path: str, body: Any, timeout_s: float = 30.0) -> Any:
        """Posts once; the decoded answer."""
        return await self._call("POST", path, body, timeout_s)

    async def abort_all(self, timeout_s: float = 30.0) -> None:
        await self._call("POST", "/abort_request", {"abort_all": True}, timeout_s)

    def close(self) -> None:
        self._http.close()

    async def _call(self, method: str, path: str, body: Any, timeout_s: float) -> Any:
        try:
            return await self._http.request(method, path, body, timeout_s=timeout_s)
        except HttpFailure as failure:
            raise EngineError(str(failure)) from failure

    async def _post(self, path: str, body: Any) -> Any:
        """Posts; tries again only when the engine cannot have seen the request, or says that it is full."""
        for attempt in range(CONNECT_TRIES):
            try:
                return await self._http.request("POST", path, body, timeout_s=self.timeout_s)
            except HttpFailure as failure:
                safe = not failure.sent or failure.status == 503
                if not safe or attempt == CONNECT_TRIES - 1:
                    raise EngineError(str(failure)) from failure
                await asyncio.sleep(0.1 * 4**attempt)
        raise AssertionError


class EnginePool:
    """Several engines: a new episode goes to the one with the fewest, and stays there for its prefix cache.

    An engine whose last request failed gets no new episode until it answers again with weights of this run; if no other
    is well, a new episode waits up to `patience_s` for it, so that a dead engine costs time and not a flood of failed
    episodes.
    """

    def __init__(self, clients: Sequence[EngineClient], *, patience_s: float = 30.0) -> None:
        if not clients:
            raise ValueError("no engine: give engine.urls or engine.count")
        self.clients, self._patience_s = tuple(clients), patience_s
        self._revivals: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[EngineClient]:
        """The engine for one episode. EngineError if it stays away."""
        for suspect in (client for client in self.clients if client.suspect):
            if suspect.url not in self._revivals:
                self._revivals[suspect.url] = asyncio.create_task(self._revive(suspect))
        client = min(self.clients, key=lambda c: (c.suspect, c.num_open))
        client.num_open += 1
        try:
            if client.suspect:
                await client.wait_ready(self._patience_s)
            yield client
        finally:
            client.num_open -= 1

    async def _revive(self, client: EngineClient) -> None:
        """Asks a suspect engine until it is ready again or `patience_s` is over; the next episode asks anew."""
        with suppress(EngineError):
            await client.wait_ready(self._patience_s)
        del self._revivals[client.url]

    def close(self) -> None:
        for task in self._revivals.values():
            task.cancel()
        for client in self.clients:
            client.close()


def request_body(
    token_ids: Sequence[int],
    images: Sequence[Image],
    sampling: Sampling,
    banned_ids: Sequence[int],
    stop_ids: Sequence[int],
    max_new_tokens: int,
    seed: int | None,
) -> dict[str, Any]:
    """The body of /generate."""
    settings: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": max_new_tokens,
        "stop_token_ids": list(stop_ids),
        "logit_bias": {str(token): BAN for token in banned_ids},
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if seed is not None:
        settings["sampling_seed"] = seed
    body: dict[str, Any] = {"input_ids": list(token_ids), "sampling_params": settings, "return_logprob": True}
    if images:
        body["image_data"] = [_data_uri(image.data) for image in images]
    return body


def parse_completion(answer: Any, url: str) -> Completion:
    """The checked completion in a /generate answer; EngineError names what is missing or wrong."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise EngineError(f"{url}: the answer has no meta_info")
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind not in FINISH_REASONS:
        raise EngineError(f"{url}: the finish reason is {kind!r}, not one of {', '.join(FINISH_REASONS)}")
    pairs = meta.get("output_token_logprobs")
    if pairs is None and kind == "abort":
        return Completion((), (), (), "abort")
    if not isinstance(pairs, list) or (not pairs and kind != "abort"):
        raise EngineError(f"{url}: the answer has no output_token_logprobs, without which nothing can be trained")
    try:
        logprobs = tuple(float(pair[0]) for pair in pairs)
        tokens = tuple(int(pair[1]) for pair in pairs)
    except (TypeError, ValueError, IndexError):
        raise EngineError(f"{url}: output_token_logprobs holds no pairs of logprob and token") from None
    if any(not math.isfinite(logprob) or logprob > 1e-4 for logprob in logprobs):
        raise EngineError(f"{url}: a logprob is not a finite number of at most 0")
    count = meta.get("completion_tokens", len(tokens))
    if count != len(tokens):
        raise EngineError(f"{url}: {len(tokens)} logprobs for {count} tokens")
    return Completion(tokens, tuple(min(0.0, p) for p in logprobs), _spans(meta, len(tokens), url), kind)


def _spans(meta: dict[str, Any], num_tokens: int, url: str) -> tuple[VersionSpan, ...]:
    if not num_tokens:
        return ()
    raw = meta.get("weight_versions")
    if not raw:
        raw = [{"version": meta.get("weight_version"), "start": 0, "end": num_tokens}]
    spans = tuple(VersionSpan(parse_version(s["version"], url), int(s["start"]), int(s["end"])) for s in raw)
    spans = tuple(s for s in spans if s.start < s.end)
    edges = [0, *(s.end for s in spans)]
    if [s.start for s in spans] != edges[:-1] or edges[-1] != num_tokens:
        raise EngineError(f"{url}: the weight_versions do not cover the {num_tokens} tokens: {raw}")
    return spans


def parse_version(version: Any, url: str) -> int:
    """A policy version as number; SGLang calls weights that nobody has updated "default": version 0."""
    if version == "default":
        return 0
    try:
        number = int(version)
    except (TypeError, ValueError):
        number = -1
    if number < 0:
        raise EngineError(f"{url}: the weight version is {version!r}, not a number: no weights of this run yet")
    return number


@lru_cache(maxsize=2048)
def _data_uri(data: bytes | memoryview) -> str:
    """Every turn of an episode sends its images again."""
    return "data:image/png;base64," + base64.b64encode(data).decode()
