"""One request of the embedded engine: from the body of /generate to its answer, both in SGLang's form.

E = tokens of the expanded prompt.
"""

from __future__ import annotations

import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from actor.engine.request_images import RequestImage
from actor.engine.sampling import Sampler
from shared.clocks import clock_name
from shared.engine.engine_messages import BAN
from shared.vision import VisionSpec, expand, next_position

MIN_TEMPERATURE = 1e-6  # smallest temperature above 0; with a lower one float32 logits overflow
MAX_BIASES, MAX_STOPS = 16384, 1024  # entries of logit_bias and stop_token_ids in one request
MAX_WATCHED = 16384  # requested logprobs: number of watched tokens times number of new tokens
Token = Annotated[int, Meta(ge=0)]


class SamplingBody(Struct, frozen=True):
    """The `sampling_params` of a request. null means the default; unknown fields are ignored."""

    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Meta(ge=1e-6, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    sampling_seed: int | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[Token, Annotated[float, Meta(le=1e6)]], Meta(max_length=MAX_BIASES)] | None = None

    def sampler(self, watched: Sequence[int]) -> Sampler:
        """Return the request's sampler, which watches these tokens. Raise ValueError for a temperature that is almost
        0."""
        temperature = 1.0 if self.temperature is None else self.temperature
        if 0 < temperature < MIN_TEMPERATURE:
            raise ValueError(f"temperature is {temperature}: give 0 or at least {MIN_TEMPERATURE}")
        return Sampler(
            temperature=temperature,
            top_p=self.top_p or 1.0,
            top_k=-1 if self.top_k is None else self.top_k,
            bias=tuple(sorted((self.logit_bias or {}).items())),
            random=Random(self.sampling_seed),
            watched=tuple(watched),
        )


class GenerateBody(Struct, frozen=True):
    """The body of /generate."""

    input_ids: Annotated[list[Token], Meta(min_length=1)]
    sampling_params: SamplingBody | None = None
    image_data: list[str] | str | None = None
    rid: Annotated[str, Meta(max_length=256)] | None = None
    extra_key: str | None = None
    token_ids_logprob: list[Token] | None = None

    @property
    def images(self) -> list[str]:
        """The images: each a data URI, bare base64, or a name that POST /images has answered."""
        return [self.image_data] if isinstance(self.image_data, str) else self.image_data or []

    def check(self, vocab_size: int) -> None:
        """Raise ValueError for a token outside the vocabulary, or if nothing may be sampled."""
        bias = (self.sampling_params and self.sampling_params.logit_bias) or {}
        named = {"input_ids": self.input_ids, "logit_bias": bias, "token_ids_logprob": self.token_ids_logprob or ()}
        for name, ids in named.items():
            if max(ids, default=0) >= vocab_size:
                raise ValueError(f"{name} holds {max(ids)}: token ids are from 0 to {vocab_size - 1}")
        if len(bias) == vocab_size and max(bias.values()) <= BAN:
            raise ValueError(f"logit_bias bans all {vocab_size} tokens: leave at least one")


class GenerateRequest:
    """One request: prompt, sampler and progress. Only the HTTP thread uses it before `submit`, only the scheduler's
    thread afterwards. The constructor raises ValueError if the prompt does not fit into the context, or does not match
    its images.
    """

    def __init__(
        self,
        body: GenerateBody,
        images: Sequence[RequestImage],
        spec: VisionSpec,
        *,
        max_context: int,
        eos_ids: frozenset[int],
    ) -> None:
        self.images = tuple(images)
        grids = [image.grid for image in self.images]
        self.ids, _ = expand(body.input_ids, grids, spec)
        room = max_context - len(self.ids)
        if room < 1:
            raise ValueError(f"the prompt has {len(self.ids)} tokens with its images; the context is {max_context}")
        self.positions = spec.position_ids(self.ids, grids)
        self.next_position = next_position(self.positions)
        self.keys = self.ids.copy()
        visual = np.flatnonzero(self.ids == spec.image_token_id)
        self._image_starts, at = [], 0
        for image in self.images:
            self.keys[visual[at : at + image.num_tokens]] = -1 - image.key
            self._image_starts.append(int(visual[at]))
            at += image.num_tokens
        if body.extra_key and self.keys[0] >= 0:  # cached tokens are shared only between requests with the same key
            self.keys[0] += (1 + zlib.crc32(body.extra_key.encode())) << 30
        sampling = body.sampling_params or SamplingBody()
        self.max_new_tokens = min(room, sampling.max_new_tokens or 128)
        watched = body.token_ids_logprob or ()
        if len(watched) * self.max_new_tokens > MAX_WATCHED:
            raise ValueError(
                f"the logprobs of {len(watched)} tokens at {self.max_new_tokens} places: ask for {MAX_WATCHED} at most"
            )
        self.sampler = sampling.sampler(watched)
        self.stop_ids = frozenset(sampling.stop_token_ids or ()) | (frozenset() if sampling.ignore_eos else eos_ids)
        self.rid = body.rid or uuid.uuid4().hex
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[str] = []
        self.watched: list[list[float]] = []
        self.slot, self.cached = -1, 0  # `cached`: number of expanded tokens whose K and V are in the slot
        self.finish_reason = ""
        self.arrived_s = time.monotonic()
        self.admitted_s = self.begun_s = 0.0  # when it had a slot, and its first token
        self.on_done: Callable[[], object] = lambda: None

    def all_keys(self) -> np.ndarray:
        """Return the keys int64 of the prompt and the generated tokens; a retracted request computes all of them
        again."""
        return np.concatenate([self.keys, np.asarray(self.tokens, dtype=np.int64)]) if self.tokens else self.keys

    def num_new(self) -> int:
        """Return the number of tokens whose K and V are not computed yet."""
        return len(self.ids) + len(self.tokens) - self.cached

    def new_keys(self) -> np.ndarray:
        return self.all_keys()[self.cached :] if self.cached < len(self.ids) else self._new_generated()

    @property
    def decoding(self) -> bool:
        """True if only the last sampled token is still to be computed."""
        return self.cached >= len(self.ids) and self.num_new() == 1

    def new_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids int64[n], positions int64[3, n]) of the tokens that are not computed yet."""
        if self.decoding:
            return np.array(self.tokens[-1:]), np.full((3, 1), self.next_position + len(self.tokens) - 1)
        prompt = len(self.ids)
        start = max(self.cached, prompt) - prompt + self.next_position
        generated = np.arange(start, self.next_position + len(self.tokens))
        if self.cached >= prompt:
            return self._new_generated(), np.broadcast_to(generated, (3, len(generated)))
        ids = np.concatenate([self.ids[self.cached :], np.asarray(self.tokens, dtype=np.int64)])
        head = self.positions[:, self.cached :]
        return ids, np.concatenate([head, np.broadcast_to(generated, (3, len(generated)))], axis=1)

    def _new_generated(self) -> np.ndarray:
        return np.asarray(self.tokens[self.cached - len(self.ids) :], dtype=np.int64)

    def new_images(self) -> list[RequestImage]:
        """Return the images whose visual tokens are not computed yet."""
        if self.cached >= len(self.ids):
            return []
        return [p for p, start in zip(self.images, self._image_starts, strict=True) if start >= self.cached]

    def whole_images(self, length: int) -> int:
        """Return the length of the longest prefix of at most `length` tokens that does not end inside an image."""
        for image, start in zip(self.images, self._image_starts, strict=True):
            if start < length < start + image.num_tokens:
                return start
        return length

    def advance(self, token: int, logprob: float, version: str, watched: list[float]) -> None:
        """Record that all tokens so far are cached, and that `token` follows them."""
        self.cached = len(self.ids) + len(self.tokens)
        self.begun_s = self.begun_s or time.monotonic()
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.watched.append(watched)

    def end(self, reason: str) -> None:
        self.finish_reason = reason
        self.on_done()

    def answer(self) -> dict[str, Any]:
        """Return the response in SGLang's form (without text)."""
        reason: dict[str, Any] = {"type": self.finish_reason.partition(":")[0]}
        if reason["type"] == "stop":
            reason["matched"] = self.tokens[-1]
        elif reason["type"] == "length":
            reason["length"] = len(self.tokens)
        else:
            reason["message"] = self.finish_reason
        spans: list[dict[str, Any]] = []
        for at, version in enumerate(self.versions):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": at, "end": at})
            spans[-1]["end"] = at + 1
        pairs = zip(self.logprobs, self.tokens, strict=True)
        meta = {
            "id": self.rid,
            "finish_reason": reason,
            "prompt_tokens": len(self.ids),
            "completion_tokens": len(self.tokens),
            "weight_version": self.versions[-1] if self.versions else None,
            "weight_versions": spans,
            "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
            "e2e_latency": (ended := time.monotonic()) - self.arrived_s,
            "clock": [clock_name(), self.arrived_s, self.admitted_s or ended, self.begun_s or ended, ended],
        }
        if ids := self.sampler.watched:
            rows = [[[p, i, None] for p, i in zip(row, ids, strict=True)] for row in self.watched]
            meta["output_token_ids_logprobs"] = rows
        return {"text": "", "output_ids": self.tokens, "meta_info": meta}


def finished(request: GenerateRequest) -> str:
    """Return the finish reason after the last sampled token; "" if the request goes on."""
    if request.tokens[-1] in request.stop_ids:
        return "stop"
    return "length" if len(request.tokens) >= request.max_new_tokens else ""
