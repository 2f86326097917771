"""The engines' HTTP API, which is SGLang's: every route that actors, publisher and probes use.

The embedded engine answers the same routes. Token ids travel as the compact stream: one placeholder per image.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from shared.engine_messages import (
    EngineTraits,
    Generated,
    checksums_of,
    completion_of,
    generate_body,
    parse_weight_name,
    traits_of,
    unfit,
    watched_logprobs,
)
from shared.engines.images import EngineImages
from shared.http_client import HttpFailure, JsonClient
from shared.types import Completion, Image, PolicyVersion, Sampling

CONNECT_TRIES = 3
CALL_S = 30.0  # for answers that need no generation
Key = TypeVar("Key")
Result = TypeVar("Result")


class EngineError(HttpFailure):
    """An engine refused, failed, was silent, or answered what no engine answers; one line that names it."""


class EngineClient(JsonClient):
    """One engine. All methods raise EngineError for an engine that does not answer as it should."""

    failure = EngineError

    def __init__(self, url: str, *, timeout_s: float = 300.0, connections: int = 512, api_key: str = "") -> None:
        """`timeout_s` is the limit of a generation."""
        super().__init__(url, connections=connections, api_key=api_key)
        self.timeout_s = timeout_s
        self.num_open = 0  # episodes that play on this engine
        self.suspect = False  # the last request failed; cleared by the next that does not
        self._images = EngineImages(self)
        self.weights: tuple[PolicyVersion, str] = (-1, "")  # version and learner process of the last token it sampled

    async def post(self, path: str, body: Any, timeout_s: float = CALL_S) -> Any:
        """Posts once; the decoded answer. Some routes answer 200 and say in the body that they failed."""
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
        """Continues the stream. An abort is a Completion, not an error. Requests of one `cache_key` share what the
        engine keeps of their common beginning, others do not."""
        new_tokens = sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
        body = generate_body(token_ids, (), sampling, banned_ids, stop_ids, new_tokens, seed, cache_key)
        try:
            answer = await self._images.shown(
                images, lambda shown: self.ask("/generate", body | shown, self.timeout_s, Generated)
            )
            completion = self._read(completion_of, answer)
            if len(completion.token_ids) > new_tokens:
                raise EngineError(self.url, f"sampled {len(completion.token_ids)} tokens, {new_tokens} were asked for")
        except EngineError:
            self.suspect = True
            raise
        self.suspect = False
        if completion.spans:
            last = completion.spans[-1]
            held = self.weights[0] if self.weights[1] == last.process else -1
            self.weights = max(held, last.version), last.process
        return completion

    async def warm_up(
        self, token_ids: Sequence[int], images: Sequence[Image], timeout_s: float, banned_ids: Sequence[int] = ()
    ) -> tuple[int, int]:
        """Waits for an answer with logprobs, whatever the weights are; returns the prompt's tokens as the engine
        counts them, and the likeliest next token."""
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
        """The logprobs of the `watched` tokens as the next one, and the version that the engine says it holds."""
        body = generate_body(token_ids, images, Sampling(), banned_ids, max_new_tokens=1, cache_key=cache_key)
        body["token_ids_logprob"] = watched
        answer = await self.post("/generate", body, timeout_s)
        return self._read(lambda answer: watched_logprobs(answer, watched), answer)

    async def pause(self, mode: str, timeout_s: float = CALL_S) -> None:
        """`mode`: in_place keeps running requests and what was computed of them, retract computes them anew."""
        await self.post("/pause_generation", {"mode": mode}, timeout_s)

    async def resume(self, timeout_s: float = CALL_S) -> None:
        await self.post("/continue_generation", {}, timeout_s)

    # ------------------------------------------------------------------ what it is, and whether it is well

    async def health(self, timeout_s: float = 10.0) -> None:
        await self._exchange("GET", "/health", None, timeout_s)  # a router answers with plain text

    async def wait_healthy(self, timeout_s: float) -> None:
        """Returns as soon as the engine answers; EngineError after `timeout_s`."""
        await self._wait(self.health, timeout_s, f"not healthy within {timeout_s:g} s: is an engine running there?")

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns when the engine answers and holds weights of a run; EngineError after `timeout_s`."""
        await self._wait(self._version, timeout_s, f"not healthy, or without this run's weights, for {timeout_s:g} s")

    async def model_info(self, timeout_s: float = CALL_S) -> dict[str, Any]:
        info = await self.request("GET", "/model_info", timeout_s=timeout_s)
        if not isinstance(info, dict) or "model_path" not in info:
            raise EngineError(self.url, f"answers, but is no engine: /model_info says {str(info)[:80]!r}")
        return info

    async def weight_version(self, timeout_s: float = CALL_S) -> Any:
        """As the engine says it: for weights that are no version of a run that may be any word, or None."""
        return (await self.model_info(timeout_s)).get("weight_version")

    async def _version(self) -> PolicyVersion:
        return self._read(parse_weight_name, await self.weight_version(10.0))[0]

    async def traits(self, timeout_s: float = CALL_S) -> EngineTraits:
        """EngineError if it does not answer, refuses the API key, or is of a kind that takes no new weights."""
        try:
            info = await self.request("GET", "/server_info", timeout_s=timeout_s)
        except EngineError as error:
            if error.status != 404:
                raise
            return EngineTraits()  # an older server
        if reason := unfit(info):
            raise EngineError(self.url, reason, 200)
        return traits_of(info)

    async def tokenize(self, text: str, timeout_s: float = CALL_S) -> tuple[int, ...] | None:
        """The engine's tokens of a text; None from a server that has no such route."""
        try:
            answer = await self.post("/tokenize", {"prompt": text, "add_special_tokens": False}, timeout_s)
        except EngineError:
            return None
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        return tuple(tokens) if isinstance(tokens, list) else None

    # ------------------------------------------------------------------ weights

    async def join_group(self, group: Mapping[str, Any], rank: int, timeout_s: float) -> None:
        """Joins the weight group (its name, address, size and backend) with this as its first rank."""
        await self.post("/init_weights_update_group", {**group, "rank_offset": rank}, timeout_s)

    async def leave_group(self, name: str, timeout_s: float = CALL_S) -> None:
        await self.post("/destroy_weights_update_group", {"group_name": name}, timeout_s)

    async def begin_update(self, timeout_s: float = CALL_S, update: str = "") -> None:
        """Opens an update; one that an earlier publication has left open is ended. To an engine whose traits say that
        it `names_updates`, `update` is its name: then only buckets and an end of this name are taken."""
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
        """Takes part in the broadcast of a flat bucket, which is told as `bucket_content` writes it. It holds weights,
        or, of an engine that `takes_adapters`, an adapter (`shared.weights.adapters`)."""
        path = "/update_weights_from_distributed"
        self._checked(path, await self.post_content(path, bucket, timeout_s=timeout_s))

    async def end_update(self, name: str | None, timeout_s: float = CALL_S, update: str = "") -> None:
        """Installs what was received under this name; None = forgets it."""
        body: dict[str, Any] = {"discard": True} if name is None else {"weight_version": name}
        body |= {"update": update} if update else {}
        try:
            await self.post("/end_weight_update", body, timeout_s)
        except EngineError as error:
            if error.status != 404:  # an older server
                raise

    async def rename_weights(self, name: str, timeout_s: float = CALL_S) -> bool:
        """Changes what the engine calls the weights that it holds; False from one that cannot: an older server."""
        try:
            await self.post("/update_weight_version", {"new_version": name, "abort_all_requests": False}, timeout_s)
        except EngineError as error:
            if error.status != 404:
                raise
            return False
        return True

    async def checksums(self, skip: Sequence[str], timeout_s: float = CALL_S) -> tuple[dict[str, str], ...]:
        """Of each parameter whose name holds no fragment in `skip`, and of what each tensor-parallel rank has of it."""
        answer = await self.post("/weights_checker", {"action": "checksum", "skip_tensor_list": skip}, timeout_s)
        return self._read(checksums_of, answer)

    # ------------------------------------------------------------------ what these are made of

    async def ask(self, path: str, body: Any, timeout_s: float, answer: type | None = None) -> Any:
        """Posts; again only when the engine cannot have seen the request, or says that it is full."""
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
        except Exception as error:  # noqa: BLE001 - whatever an answer does to its reader, it is the engine's fault
            raise EngineError(self.url, f"the answer is wrong: {type(error).__name__}: {error}") from None

    async def _wait(self, check: Callable[[], Awaitable[object]], timeout_s: float, reason: str) -> None:
        last = ""  # of its own words
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


def bucket_content(bucket: Mapping[str, Any]) -> bytes:
    """What `EngineClient.receive` sends: a bucket's names, dtypes, shapes and group; the last one of an update also
    says the version that the weights now are, and each the `update` that has a name."""
    return msgspec.json.encode({**bucket, "load_format": "flattened_bucket"})


async def each(keys: Iterable[Key], call: Callable[[Key], Awaitable[Result]]) -> dict[Key, Result | EngineError]:
    """The result of each call, or why there is none; all are made at once, and each limits its own time."""

    async def one(key: Key) -> Result | EngineError:
        try:
            return await call(key)
        except EngineError as error:
            return error

    keys = list(keys)
    return dict(zip(keys, await asyncio.gather(*map(one, keys)), strict=True))


def reasons(results: Mapping[Any, object]) -> dict[str, str]:
    """URL -> reason of those that failed."""
    return {error.url: error.reason for error in results.values() if isinstance(error, EngineError)}
