"""The engines' HTTP API, which is SGLang's: every route that actors, publisher and probes use.

The embedded engine answers the same routes. Token ids travel as the compact stream: one placeholder per image.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from shared.clocks import clock_name
from shared.engine.engine_messages import (
    CLAIM_ROUTE,
    Generated,
    ServerInfo,
    checksums_of,
    completion_of,
    generate_body,
    incompatible_reason,
    parse_server_info,
    parse_weight_name,
    watched_logprobs,
)
from shared.engine.http_client import HttpFailure, JsonClient
from shared.engine.sent_images import EngineImages
from shared.spans import add_span, recording, span
from shared.types import Completion, Image, PolicyVersion, Sampling, VersionSpan

CONNECT_TRIES = 3
CALL_S = 30.0  # time limit of calls that generate nothing
TRIAL_S = 30.0  # time limit of the one token by which an engine shows that it is ready again
MAX_VOCAB = 2**31
# Publications that the learner may have made since it issued the newest ticket that an actor has.
MAX_AHEAD = 100
Key = TypeVar("Key")
Result = TypeVar("Result")


class EngineError(HttpFailure):
    """An engine refused, failed, did not answer, or gave an answer that no engine gives; one line that names the
    engine."""


@dataclass(slots=True)
class NewestVersion:
    """The newest weights that an actor knows of: the version at which the learner process `process` has issued a
    ticket. -1 = none yet."""

    version: PolicyVersion = -1
    process: str = ""

    def update(self, version: PolicyVersion, process: str) -> None:
        """Record that the learner process has issued a ticket at this version."""
        self.version = max(version, self.version) if process == self.process else version
        self.process = process

    def is_future(self, span: VersionSpan) -> bool:
        """Tell whether the learner cannot have published the weights that a span names yet."""
        is_same = self.version >= 0 and span.process in ("", self.process)
        return is_same and span.version > self.version + MAX_AHEAD


class EngineClient(JsonClient):
    """One engine. All methods raise EngineError for an engine that does not answer as it should."""

    failure = EngineError

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 300.0,
        connections: int = 512,
        api_key: str = "",
        vocab_size: int = MAX_VOCAB,
    ) -> None:
        """Prepare a client; `timeout_s` is the limit of a generation, `vocab_size` that of the token ids in answers."""
        super().__init__(url, connections=connections, api_key=api_key)
        self.timeout_s = timeout_s
        self.vocab_size = vocab_size
        self.num_open = 0  # number of episodes playing on this engine
        self.suspect = False  # the last request failed; cleared when the engine is ready again
        self.num_failures = 0  # how often it has become suspect since the last turn that it generated
        self.newest = NewestVersion()
        self._images = EngineImages(self)
        self.weights: tuple[PolicyVersion, str] = (-1, "")  # version and learner process of the last token it sampled

    async def post(self, path: str, body: Any, timeout_s: float = CALL_S) -> Any:
        """Post once and return the decoded answer. Raise EngineError also for an answer 200 whose body reports a
        failure, as some routes give it."""
        return self._checked(path, await self.request("POST", path, body, timeout_s=timeout_s))

    def _checked(self, path: str, answer: Any) -> Any:
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(self.url, f"{path} failed: {str(answer.get('message'))[:300]}", 400)
        return answer

    # ------------------------------------------------------------------ generation

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
        """Continue the stream and return the completion. An aborted request gives a Completion, not an error. Requests
        with the same `cache_key` share the engine's cache of their common prefix; others do not."""
        new_tokens = sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
        body = generate_body(token_ids, (), sampling, banned_ids, stop_ids, new_tokens, seed, cache_key)
        asked = time.monotonic()
        try:
            answer = await self._images.shown(
                images, lambda shown: self.ask("/generate", body | shown, self.timeout_s, Generated)
            )
            completion = self._completion(answer, new_tokens, banned_ids)
        except EngineError:
            self.mark_suspect()
            raise
        finally:
            answered = time.monotonic()
            add_span("engine call", asked, answered, note=self.url)
        if recording() is not None:
            add_engine_spans(self.url, answer.meta.clock, asked, answered)
        self.suspect, self.num_failures = False, 0
        if completion.spans:
            last = completion.spans[-1]
            held = self.weights[0] if self.weights[1] == last.process else -1
            self.weights = max(held, last.version), last.process
        return completion

    def mark_suspect(self) -> None:
        """Record that the engine has failed; several failures before it is ready again count once."""
        self.num_failures += not self.suspect
        self.suspect = True

    def _completion(self, answer: Generated, new_tokens: int, banned_ids: Sequence[int] = ()) -> Completion:
        """Return the completion in an answer. Raise EngineError unless a sound engine can have sampled it."""
        completion = self._read(completion_of, answer)
        tokens = completion.token_ids
        if len(tokens) > new_tokens:
            raise EngineError(self.url, f"sampled {len(tokens)} tokens, {new_tokens} were asked for")
        if tokens and max(tokens) >= self.vocab_size:
            raise EngineError(self.url, f"sampled token {max(tokens)}: token ids are from 0 to {self.vocab_size - 1}")
        if not set(banned_ids).isdisjoint(tokens):
            banned = min(set(banned_ids).intersection(tokens))
            raise EngineError(self.url, f"sampled token {banned}, which the request bans")
        if ahead := [span.version for span in completion.spans if self.newest.is_future(span)]:
            raise EngineError(self.url, f"claims weights of version {ahead[0]}; the learner's is {self.newest.version}")
        return completion

    async def warm_up(
        self, token_ids: Sequence[int], images: Sequence[Image], timeout_s: float, banned_ids: Sequence[int] = ()
    ) -> tuple[int, int]:
        """Wait for an answer with logprobs, whichever weights the engine holds; return the number of prompt tokens as
        the engine counts them, and the most likely next token."""
        body = generate_body(token_ids, images, Sampling(0.0), banned_ids, max_new_tokens=2)
        answer = await self.request("POST", "/generate", body, timeout_s=timeout_s, answer=Generated)
        meta = self._read(lambda answer: answer.meta, answer)
        if not meta.output_token_logprobs:
            raise EngineError(self.url, "the answer has no output_token_logprobs; does an engine serve there?")
        return meta.prompt_tokens, meta.output_token_logprobs[0][1]

    async def next_logprobs(
        self,
        token_ids: Sequence[int],
        images: Sequence[Image],
        watched: Sequence[int],
        banned_ids: Sequence[int],
        cache_key: str,
        timeout_s: float,
    ) -> tuple[list[float], str | None]:
        """Return the logprob that each of the `watched` tokens has as the next token, and the name of the engine's
        weights as it reports it."""
        body = generate_body(token_ids, images, Sampling(), banned_ids, max_new_tokens=1, cache_key=cache_key)
        body["token_ids_logprob"] = watched
        answer = await self.post("/generate", body, timeout_s)
        return self._read(lambda answer: watched_logprobs(answer, watched), answer)

    async def pause(self, mode: str, timeout_s: float = CALL_S) -> None:
        """Pause generation. `mode`: in_place keeps running requests with their cache, retract computes their cache
        anew."""
        await self.post("/pause_generation", {"mode": mode}, timeout_s)

    async def resume(self, timeout_s: float = CALL_S) -> None:
        await self.post("/continue_generation", {}, timeout_s)

    # ------------------------------------------------------------------ what it is, and whether it is well

    async def health(self, timeout_s: float = 10.0) -> None:
        # The answer is not decoded as JSON, since a router answers with plain text.
        await self._exchange("GET", "/health", None, timeout_s)

    async def wait_healthy(self, timeout_s: float) -> None:
        """Wait until the engine answers; EngineError after `timeout_s`."""
        await self._wait(self.health, timeout_s, f"not healthy within {timeout_s:g} s: is an engine running there?")

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the engine holds weights of a run and generates a token with them; EngineError after
        `timeout_s`."""
        await self._wait(self._try_out, timeout_s, f"not healthy, or without this run's weights, for {timeout_s:g} s")

    async def model_info(self, timeout_s: float = CALL_S) -> dict[str, Any]:
        info = await self.request("GET", "/model_info", timeout_s=timeout_s)
        if not isinstance(info, dict) or "model_path" not in info:
            raise EngineError(self.url, f"answers, but is no engine: /model_info says {str(info)[:80]!r}")
        return info

    async def weight_version(self, timeout_s: float = CALL_S) -> Any:
        """Return the engine's name of its weights. For weights that no run has published it may be any word, or
        None."""
        return (await self.model_info(timeout_s)).get("weight_version")

    async def _try_out(self) -> None:
        """Generate one token. Raise EngineError if the engine does not, or holds weights that no run has published."""
        self._read(parse_weight_name, await self.weight_version(10.0))
        body = generate_body([0], (), Sampling(), max_new_tokens=1)
        self._completion(await self.request("POST", "/generate", body, timeout_s=TRIAL_S, answer=Generated), 1)

    async def server_info(self, timeout_s: float = CALL_S) -> ServerInfo:
        """Return the engine's capabilities. Raise EngineError if it does not answer, refuses the API key, or cannot
        take new weights."""
        try:
            info = await self.request("GET", "/server_info", timeout_s=timeout_s)
        except EngineError as error:
            if error.status != 404:
                raise
            return ServerInfo()  # an older server
        if reason := incompatible_reason(info):
            raise EngineError(self.url, reason, 200)
        return parse_server_info(info)

    async def tokenize(self, text: str, timeout_s: float = CALL_S) -> tuple[int, ...] | None:
        """Return the token ids of a text as the engine computes them; None if the server has no such route."""
        try:
            answer = await self.post("/tokenize", {"prompt": text, "add_special_tokens": False}, timeout_s)
        except EngineError:
            return None
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        return tuple(tokens) if isinstance(tokens, list) else None

    # ------------------------------------------------------------------ weights

    async def claim(self, run: str, token: str, timeout_s: float = CALL_S, *, ends: bool = False) -> None:
        """Claim the engine for a run, or end its claim; `token` is the same for all processes of the run. Raise
        EngineError, which names the other run, if another learner publishes to the engine."""
        await self.post(CLAIM_ROUTE, {"run": run, "token": token, "ends": ends}, timeout_s)

    async def join_group(self, group: Mapping[str, Any], rank: int, timeout_s: float) -> None:
        """Tell the engine to join the weight group (given by name, address, size and backend); `rank` is the engine's
        first rank in it."""
        await self.post("/init_weights_update_group", {**group, "rank_offset": rank}, timeout_s)

    async def leave_group(self, name: str, timeout_s: float = CALL_S) -> None:
        await self.post("/destroy_weights_update_group", {"group_name": name}, timeout_s)

    async def begin_update(self, timeout_s: float = CALL_S, update: str = "") -> None:
        """Open an update, after ending one that an earlier publication has left open. For an engine whose /server_info
        has `names_updates`, `update` names it: the engine then accepts only buckets and an end with this name."""
        body = {"update": update} if update else {}
        try:
            await self.post("/begin_weight_update", body, timeout_s)
        except EngineError as error:
            if error.status == 404:  # an older server
                return
            if error.status != 400:
                raise
            await self.end_update(None, timeout_s, update)
            await self.post("/begin_weight_update", body, timeout_s)

    async def receive(self, bucket: bytes, timeout_s: float) -> None:
        """Let the engine take part in the broadcast of a flat bucket. `bucket` describes it as `bucket_content` encodes
        it: weights or, for an engine that `takes_adapters`, an adapter (`shared.engine.adapter_names`)."""
        path = "/update_weights_from_distributed"
        with span("receive weights", place=engine_place(self.url), track="weights"):
            self._checked(path, await self.post_content(path, bucket, timeout_s=timeout_s))

    async def end_update(self, name: str | None, timeout_s: float = CALL_S, update: str = "") -> None:
        """Install the received weights under this name; None discards them."""
        body: dict[str, Any] = {"discard": True} if name is None else {"weight_version": name}
        body |= {"update": update} if update else {}
        try:
            with span("install weights", place=engine_place(self.url), track="weights"):
                await self.post("/end_weight_update", body, timeout_s)
        except EngineError as error:
            if error.status != 404:  # an older server
                raise

    async def rename_weights(self, name: str, timeout_s: float = CALL_S) -> bool:
        """Change the engine's name of the weights that it holds. Return False if it cannot (an older server)."""
        try:
            await self.post("/update_weight_version", {"new_version": name, "abort_all_requests": False}, timeout_s)
        except EngineError as error:
            if error.status != 404:
                raise
            return False
        return True

    async def flush_cache(self, timeout_s: float = CALL_S) -> None:
        """Drop the KV cache of requests that have ended."""
        await self.post("/flush_cache", {}, timeout_s)

    async def checksums(self, skip: Sequence[str], timeout_s: float = CALL_S) -> tuple[dict[str, str], ...]:
        """Return, for each tensor-parallel rank, the checksums of the parameters that it holds, without those whose
        name contains a fragment in `skip`."""
        answer = await self.post("/weights_checker", {"action": "checksum", "skip_tensor_list": skip}, timeout_s)
        return self._read(checksums_of, answer)

    # ------------------------------------------------------------------ what these are made of

    async def ask(self, path: str, body: Any, timeout_s: float, answer: type | None = None) -> Any:
        """Post; retry only if the engine cannot have seen the request, or answers that it is full."""
        for attempt in range(CONNECT_TRIES):
            try:
                return await self.request("POST", path, body, timeout_s=timeout_s, answer=answer)
            except EngineError as error:
                if attempt == CONNECT_TRIES - 1 or (error.sent and error.status != 503):
                    raise
                await asyncio.sleep(0.1 * 4**attempt)
        raise AssertionError

    def _read(self, read: Callable[[Any], Result], answer: Any) -> Result:
        try:
            return read(answer)
        except ValueError as error:
            raise EngineError(self.url, str(error)) from None
        except Exception as error:  # noqa: BLE001 - any failure to read an answer is the engine's fault
            raise EngineError(self.url, f"the answer is wrong: {type(error).__name__}: {error}") from None

    async def _wait(self, check: Callable[[], Awaitable[object]], timeout_s: float, reason: str) -> None:
        last = ""  # the engine's last error
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        await check()
                        break
                    except EngineError as error:
                        last = f" ({error.reason})"
                    await asyncio.sleep(0.25)
        except TimeoutError:
            raise EngineError(self.url, reason + last) from None
        self.suspect = False


def add_engine_spans(url: str, clock: Any, asked: float, answered: float) -> None:
    """Record what an engine did between a request and its answer: `clock` of the answer, which may be anything. The
    times of another host are moved so that the waits for the network before and after are alike."""
    try:
        name, *times = msgspec.convert(clock, tuple[str, float, float, float, float])
    except msgspec.ValidationError:
        return
    came, admitted, begun, ended = times
    add_s = 0.0 if name == clock_name() else (asked - came + answered - ended) / 2
    if asked <= came + add_s and ended + add_s <= answered and came <= admitted <= begun <= ended:
        parts = ("queue", came, admitted), ("prefill", admitted, begun), ("decode", begun, ended)
        for part, begin, end in parts:
            add_span(part, begin + add_s, end + add_s, place=engine_place(url))


def engine_place(url: str) -> str:
    """Return the place of an engine's spans."""
    return f"engine {url}"


def bucket_content(bucket: Mapping[str, Any]) -> bytes:
    """Encode a bucket's description for `EngineClient.receive`: names, dtypes, shapes and group; `update` in a named
    update; and in the last bucket of an update the new version of the weights."""
    return msgspec.json.encode({**bucket, "load_format": "flattened_bucket"})


async def each(
    keys: Iterable[Key], call: Callable[[Key], Awaitable[Result]], *, at_once: int = 0
) -> dict[Key, Result | EngineError]:
    """Make all calls at once, or `at_once` of them; return the result of each, or its EngineError. Each call must limit
    its own time."""
    room = asyncio.Semaphore(at_once) if at_once else nullcontext()

    async def one(key: Key) -> Result | EngineError:
        try:
            async with room:
                return await call(key)
        except EngineError as error:
            return error

    keys = list(keys)
    return dict(zip(keys, await asyncio.gather(*map(one, keys)), strict=True))


def reasons(results: Mapping[Any, object]) -> dict[str, str]:
    """Return the reasons of the failed calls by engine URL."""
    return {error.url: error.reason for error in results.values() if isinstance(error, EngineError)}
