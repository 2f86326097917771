"""Bodies and answers of the engines' API as pure functions: what is asked of an engine, and what an answer must hold.

The readers raise ValueError for an answer that no engine gives; the message says what is missing or wrong.
"""

from __future__ import annotations

import re
import threading
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from shared.guards.kept import Kept
from shared.nccl.versions import nccl_of_sglang
from shared.types import Completion, Image, PolicyVersion, Sampling, VersionSpan
from shared.weights.layout import Layout, layout_of

KEPT_URI_BYTES = 2**26
NO_WEIGHTS = "none"
"""What an engine calls weights that are no version of any run, so that nothing sampled from them counts."""
BAN = -100.0  # a logit bias: no token with this or less is ever sampled


def generate_body(
    token_ids: Sequence[int],
    images: Sequence[Image],
    sampling: Sampling,
    banned_ids: Iterable[int] = (),
    stop_ids: Sequence[int] = (),
    max_new_tokens: int = 1,
    seed: int | None = None,
    cache_key: str = "",
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
        body["image_data"] = data_uris(images)
    if cache_key:
        body["extra_key"] = cache_key
    return body


class _DataUris(threading.local):
    """The last images as they are sent, by content hash: every turn of an episode sends its images again."""

    def __init__(self) -> None:
        self._uris: Kept[str, str] = Kept(KEPT_URI_BYTES, lambda _, uri: len(uri))

    def of(self, image: Image) -> str:
        return self._uris.get(image.content_hash, lambda: "data:image/png;base64," + b64encode(image.data).decode())


_uris = _DataUris()


def data_uris(images: Sequence[Image]) -> list[str]:
    """The images as every engine takes them."""
    return [_uris.of(image) for image in images]


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Logprob = Annotated[float, msgspec.Meta(le=1e-4)]


class Finish(msgspec.Struct):
    type: Literal["stop", "length", "abort"]


class Span(msgspec.Struct):
    version: str | int | None
    start: int
    end: int


class Meta(msgspec.Struct):
    finish_reason: Finish
    output_token_logprobs: list[tuple[Logprob, TokenId, Any]] | None = None
    completion_tokens: int | None = None
    prompt_tokens: int = 0
    weight_version: str | int | None = None
    weight_versions: list[Span] | None = None


class Generated(msgspec.Struct):
    """The answer of /generate, as far as it is read. The embedded engine only names the images that it has not got."""

    meta_info: Meta | None = None
    unknown_images: list[str] = []

    @property
    def meta(self) -> Meta:
        """ValueError without any."""
        if self.meta_info is None:
            raise ValueError("the answer has no meta_info; does an engine serve there?")
        return self.meta_info


def completion_of(answer: Generated) -> Completion:
    """The checked completion in an answer of /generate."""
    meta = answer.meta
    pairs, kind = meta.output_token_logprobs or [], meta.finish_reason.type
    if not pairs and kind != "abort":
        raise ValueError("the answer has no output_token_logprobs, without which nothing can be trained")
    if meta.completion_tokens not in (None, len(pairs)):
        raise ValueError(f"{len(pairs)} logprobs for {meta.completion_tokens} tokens")
    spans = _spans(meta, len(pairs)) if pairs else ()
    return Completion(tuple(pair[1] for pair in pairs), tuple(min(0.0, pair[0]) for pair in pairs), spans, kind)


def _spans(meta: Meta, num_tokens: int) -> tuple[VersionSpan, ...]:
    raw = meta.weight_versions or [Span(meta.weight_version, 0, num_tokens)]
    named = [(parse_weight_name(s.version), s) for s in raw if s.start < s.end]
    spans = tuple(VersionSpan(version, s.start, s.end, process) for (version, process), s in named)
    edges = [0, *(s.end for s in spans)]
    if [s.start for s in spans] != edges[:-1] or edges[-1] != num_tokens:
        raise ValueError(f"the weight_versions do not cover the {num_tokens} tokens: {str(raw)[:200]}")
    return spans


_NAME = re.compile(r"([0-9]{1,9})(?:-([0-9a-z]{1,32}))?")


def weight_name(version: PolicyVersion, process: str) -> str:
    """What a learner process calls the weights that it publishes: `shared.types.WeightName`."""
    return f"{version}-{process}" if process else str(version)


def parse_weight_name(name: Any) -> tuple[PolicyVersion, str]:
    """The version, and the learner process that published it; empty where the name has none. SGLang calls weights that
    nobody has updated "default": version 0."""
    text = "0" if name == "default" else str(name)
    if (found := _NAME.fullmatch(text)) is None:
        raise ValueError(f"the weight version is {text[:80]!r}, not a number: no weights of this run yet")
    return int(found[1]), found[2] or ""


def watched_logprobs(answer: Any, watched: Sequence[int]) -> tuple[list[float], str | None]:
    """The logprobs of the `watched` tokens as the first new one, and the version that the engine says it holds."""
    try:
        meta = answer["meta_info"]
        found = {int(token): float(logprob) for logprob, token, *_ in meta["output_token_ids_logprobs"][0]}
        version = meta.get("weight_version")
        return [found[token] for token in watched], None if version is None else str(version)
    except (TypeError, KeyError, IndexError, ValueError, OverflowError, AttributeError):
        raise ValueError("the answer has no output_token_ids_logprobs of the tokens asked for") from None


def checksums_of(answer: Any) -> tuple[dict[str, str], ...]:
    """From the answer of /weights_checker, of each tensor-parallel rank, in their order."""
    try:
        return tuple(dict(rank["checksums"]) for rank in answer["ranks"])
    except (TypeError, KeyError, ValueError):
        raise ValueError("the answer has no checksums") from None


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What the publisher must know of an engine; the defaults are those of one that does not tell."""

    num_ranks: int = 1  # of its tensor-parallel group: each is a rank of the weight group
    beside_generation: bool = False  # receives weights while it generates, and installs them at once
    names_updates: bool = False  # takes buckets and the end of an update only by its name
    takes_adapters: bool = False  # alone, and merges them
    num_refused: int = 0  # requests since it began
    layout: Layout = field(default_factory=Layout)
    nccl: str = ""  # the version that it has; empty where that is not known


def unfit(info: Any) -> str:
    """Why an engine with this answer of /server_info cannot be sent weights; empty if it can."""
    if not isinstance(info, dict):
        return ""
    for name, cure in (("pp_size", "tensor parallelism"), ("dp_size", "several engines")):
        if isinstance(info.get(name), int) and info[name] > 1:
            return f"has {name} = {info[name]}: weights cannot be sent to such an engine; start it with {cure} instead"
    if info.get("quantization"):
        return (
            f"is quantized ({str(info['quantization'])[:40]}): it would load new weights under the old scales; start "
            "it without"
        )
    return ""


def traits_of(info: Any) -> EngineTraits:
    """From the answer of /server_info. The embedded engine says itself that it receives beside generation; of SGLang's
    server every model process does, where our plugin runs in it."""
    if not isinstance(info, dict):
        return EngineTraits()
    ranks, states = info.get("tp_size"), info.get("internal_states")
    told = states if isinstance(states, list) and states else [info]
    refused = info.get("refused")
    counts = refused.values() if isinstance(refused, dict) else ()
    num_ranks = ranks if isinstance(ranks, int) and ranks > 0 else 1

    def all_say(trait: str) -> bool:
        return all(isinstance(state, dict) and state.get(trait) is True for state in told)

    return EngineTraits(
        num_ranks=num_ranks,
        beside_generation=all_say("updates_beside_generation"),
        takes_adapters=all_say("takes_adapters"),
        names_updates=info.get("names_updates") is True,
        num_refused=sum(count for count in counts if isinstance(count, int) and count > 0),
        layout=layout_of(info, num_ranks),
        nccl=_nccl(info, told[0]),
    )


def _nccl(info: dict[str, Any], state: Any) -> str:
    """The embedded engine's own word, or that of our plugin; else what comes with SGLang's version."""
    for said in (info, state if isinstance(state, dict) else {}):
        if isinstance(version := said.get("nccl"), str):
            return version
    return nccl_of_sglang(str(info.get("version", "")))
