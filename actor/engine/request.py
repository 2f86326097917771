"""One request of the embedded engine: from its JSON to the JSON of its answer.

E = tokens of the expanded prompt.
"""

from __future__ import annotations

import time
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np

from actor.engine.images import ImageCache, ImagePatches
from actor.engine.sampling import Sampler
from shared.vision import VisionSpec, expand, mrope_positions, next_position

MAX_NEW_TOKENS_DEFAULT = 128


class Request:
    """Prompt, sampler and progress. Touched by the HTTP thread before, by the scheduler's thread after `submit`."""

    __slots__ = (
        "_image_starts",
        "arrived_s",
        "cached",
        "finish_reason",
        "ids",
        "images",
        "keys",
        "logprobs",
        "max_new_tokens",
        "next_position",
        "num_compact",
        "on_done",
        "positions",
        "rid",
        "sampler",
        "slot",
        "stop_ids",
        "tokens",
        "versions",
        "watched",
    )  # fmt: skip

    def __init__(self, token_ids: Sequence[int], images: Sequence[ImagePatches], spec: VisionSpec, rid: str) -> None:
        grids = [image.grid for image in images]
        self.ids, _ = expand(token_ids, grids, image_token_id=spec.image_token_id, merge_size=spec.merge_size)
        self.positions = mrope_positions(
            self.ids, grids, image_token_id=spec.image_token_id, merge_size=spec.merge_size
        )
        self.next_position = next_position(self.positions)
        self.keys = self.ids.copy()
        visual = np.flatnonzero(self.ids == spec.image_token_id)
        self._image_starts, at = [], 0
        for image in images:
            self.keys[visual[at : at + image.num_tokens]] = -1 - image.key
            self._image_starts.append(int(visual[at]))
            at += image.num_tokens
        self.rid, self.images, self.num_compact = rid, tuple(images), len(token_ids)
        self.sampler = Sampler(1.0, 1.0, -1, (), Random())
        self.max_new_tokens, self.stop_ids = MAX_NEW_TOKENS_DEFAULT, frozenset[int]()
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[str] = []
        self.watched: list[list[float]] = []
        self.slot, self.cached = -1, 0  # cached: expanded tokens whose K and V are in the slot
        self.finish_reason = ""
        self.arrived_s = time.monotonic()
        self.on_done: Callable[[Request], None] = lambda _: None

    def all_keys(self) -> np.ndarray:
        """int64: of the prompt and what was generated; a retracted request computes both again."""
        return np.concatenate([self.keys, np.asarray(self.tokens, dtype=np.int64)]) if self.tokens else self.keys

    def num_new(self) -> int:
        """Tokens whose K and V are not computed yet."""
        return len(self.ids) + len(self.tokens) - self.cached

    def new_keys(self) -> np.ndarray:
        return self.all_keys()[self.cached :] if self.cached < len(self.ids) else self._new_generated()

    @property
    def decoding(self) -> bool:
        """Only the last sampled token is not computed yet."""
        return self.cached >= len(self.ids) and self.num_new() == 1

    def new_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64[n], positions int64[3, n]) of what is not computed yet."""
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

    def new_images(self) -> list[ImagePatches]:
        """Images whose visual tokens are not computed yet."""
        if self.cached >= len(self.ids):
            return []
        return [p for p, start in zip(self.images, self._image_starts, strict=True) if start >= self.cached]

    def whole_images(self, length: int) -> int:
        """The longest prefix of at most `length` tokens that cuts no image."""
        for image, start in zip(self.images, self._image_starts, strict=True):
            if start < length < start + image.num_tokens:
                return start
        return length

    def keep_apart(self, extra_key: str) -> None:
        """Shares cached tokens only with requests of the same `extra_key`. The first token is no image's."""
        self.keys[0] += (1 + zlib.crc32(extra_key.encode())) << 30

    def advance(self, token: int, logprob: float, version: str, watched: list[float]) -> None:
        """All tokens so far are cached, and `token` follows them."""
        self.cached = len(self.ids) + len(self.tokens)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.watched.append(watched)

    def end(self, reason: str) -> None:
        self.finish_reason = reason
        self.on_done(self)

    def answer(self) -> dict[str, Any]:
        """The response in SGLang's form (without text)."""
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
            "e2e_latency": time.monotonic() - self.arrived_s,
        }
        if ids := self.sampler.watched:
            rows = [[[p, i, None] for p, i in zip(row, ids, strict=True)] for row in self.watched]
            meta["output_token_ids_logprobs"] = rows
        return {"text": "", "output_ids": self.tokens, "meta_info": meta}


def finished(request: Request) -> str:
    """The finish reason after the last sampled token, or an empty string."""
    if request.tokens[-1] in request.stop_ids:
        return "stop"
    return "length" if len(request.tokens) >= request.max_new_tokens else ""


def parse_request(
    body: Mapping[str, Any],
    images: ImageCache,
    spec: VisionSpec,
    *,
    vocab_size: int,
    max_context: int,
    eos_ids: frozenset[int],
) -> Request:
    """A request from SGLang's JSON. ValueError names what is wrong with it."""
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise ValueError(f"input_ids must be a list of token ids from 0 to {vocab_size - 1}")
    uris = body.get("image_data") or []
    uris = [uris] if isinstance(uris, str) else uris
    if not isinstance(uris, list) or not all(isinstance(uri, str) for uri in uris):
        raise ValueError("image_data must be a list of data URIs")
    request = Request(ids, [images.get(uri) for uri in uris], spec, str(body.get("rid") or uuid.uuid4().hex))
    room = max_context - len(request.ids)
    if room < 1:
        raise ValueError(f"the prompt has {len(request.ids)} tokens with its images; the context is {max_context}")
    settings = body.get("sampling_params") or {}
    if not isinstance(settings, dict):
        raise ValueError("sampling_params must be an object")
    request.max_new_tokens = min(room, _number(settings, "max_new_tokens", MAX_NEW_TOKENS_DEFAULT, int, 1))
    stop = settings.get("stop_token_ids") or []
    request.stop_ids = frozenset(stop) | (frozenset() if settings.get("ignore_eos") else eos_ids)
    seed = settings.get("sampling_seed")
    bias = {int(token): float(value) for token, value in (settings.get("logit_bias") or {}).items()}
    if any(not 0 <= token < vocab_size for token in bias):
        raise ValueError(f"logit_bias names a token outside 0 to {vocab_size - 1}")
    watched = body.get("token_ids_logprob") or []
    if not isinstance(watched, list) or not all(type(i) is int and 0 <= i < vocab_size for i in watched):
        raise ValueError(f"token_ids_logprob must be a list of token ids from 0 to {vocab_size - 1}")
    if body.get("extra_key") and request.keys[0] >= 0:
        request.keep_apart(str(body["extra_key"]))
    request.sampler = Sampler(
        temperature=_number(settings, "temperature", 1.0, float, 0),
        top_p=_number(settings, "top_p", 1.0, float, 0),
        top_k=_number(settings, "top_k", -1, int, -1),
        bias=tuple(sorted(bias.items())),
        random=Random(seed),
        watched=tuple(watched),
    )
    return request


def _number(settings: Mapping[str, Any], name: str, default: Any, kind: type, low: float) -> Any:
    value = settings.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < low:
        raise ValueError(f"{name} is {value!r}: it must be a number of at least {low}")
    return kind(value)
