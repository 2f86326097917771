"""Pure functions that make the request bodies of the engines' API and read and check the answers.

Functions that read an answer raise ValueError for an invalid one; the message says what is missing or wrong.
"""

from __future__ import annotations

import re
import threading
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from shared.engine.nccl_versions import nccl_of_sglang
from shared.types import Completion, Image, PolicyVersion, Sampling, VersionSpan
from shared.util.lru_cache import LruCache

KEPT_URI_BYTES = 2**26
UNTRAINED = "none"
"""What an engine calls weights that are no version of any run, so that nothing sampled from them counts."""
CLAIM_ROUTE = "/claim_engine"
BAN = -100.0  # a logit bias; no token with this bias or a lower one is ever sampled


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
    """Make the body of /generate."""
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
    """The images used last, encoded as data URIs, by content hash; cached because each turn of an episode sends its
    images again."""

    def __init__(self) -> None:
        self._uris: LruCache[str, str] = LruCache(KEPT_URI_BYTES, lambda _, uri: len(uri))

    def of(self, image: Image) -> str:
        return self._uris.get(image.content_hash, lambda: "data:image/png;base64," + b64encode(image.data).decode())


_uris = _DataUris()


def data_uris(images: Sequence[Image]) -> list[str]:
    """Encode the images as every engine takes them."""
    return [_uris.of(image) for image in images]


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Logprob = Annotated[float, msgspec.Meta(ge=-1e30, le=1e-4)]  # finite also as float32


class Finish(msgspec.Struct):
    type: Literal["stop", "length", "abort"]


class WeightSpan(msgspec.Struct):
    version: str | int | None
    start: int
    end: int


class Meta(msgspec.Struct):
    finish_reason: Finish
    output_token_logprobs: list[tuple[Logprob, TokenId, Any]] | None = None
    completion_tokens: int | None = None
    prompt_tokens: int = 0
    weight_version: str | int | None = None
    weight_versions: list[WeightSpan] | None = None
    clock: Any = None  # of the embedded engine: (its clock's name, when the request came, had a slot, a token, all)


class Generated(msgspec.Struct):
    """The fields of /generate's answer that are read. Instead of generating, the embedded engine names the
    `unknown_images` that it does not have."""

    meta_info: Meta | None = None
    unknown_images: list[str] = []

    @property
    def meta(self) -> Meta:
        """The answer's meta_info; ValueError without any."""
        if self.meta_info is None:
            raise ValueError("the answer has no meta_info; does an engine serve there?")
        return self.meta_info


def completion_of(answer: Generated) -> Completion:
    """Read the completion in an answer of /generate, checked."""
    meta = answer.meta
    pairs, kind = meta.output_token_logprobs or [], meta.finish_reason.type
    if not pairs and kind != "abort":
        raise ValueError("the answer has no output_token_logprobs, without which nothing can be trained")
    if meta.completion_tokens not in (None, len(pairs)):
        raise ValueError(f"{len(pairs)} logprobs for {meta.completion_tokens} tokens")
    spans = _spans(meta, len(pairs)) if pairs else ()
    return Completion(tuple(pair[1] for pair in pairs), tuple(min(0.0, pair[0]) for pair in pairs), spans, kind)


def _spans(meta: Meta, num_tokens: int) -> tuple[VersionSpan, ...]:
    raw = meta.weight_versions or [WeightSpan(meta.weight_version, 0, num_tokens)]
    named = [(parse_weight_name(s.version), s) for s in raw if s.start < s.end]
    spans = tuple(VersionSpan(version, s.start, s.end, process) for (version, process), s in named)
    edges = [0, *(s.end for s in spans)]
    if [s.start for s in spans] != edges[:-1] or edges[-1] != num_tokens:
        raise ValueError(f"the weight_versions do not cover the {num_tokens} tokens: {str(raw)[:200]}")
    return spans


_NAME = re.compile(r"([0-9]{1,9})(?:-([0-9a-z]{1,32}))?")


def weight_name(version: PolicyVersion, process: str) -> str:
    """Return the name of the weights that a learner process publishes as `version`: a `shared.types.WeightName`."""
    return f"{version}-{process}" if process else str(version)


def parse_weight_name(name: Any) -> tuple[PolicyVersion, str]:
    """Return the version, and the learner process that published it ("" if the name has none). "default", SGLang's name
    of weights that nobody has updated, is version 0. Raise ValueError for any other text."""
    text = "0" if name == "default" else str(name)
    if (match := _NAME.fullmatch(text)) is None:
        raise ValueError(f"the weight version is {text[:80]!r}, not a number: no weights of this run yet")
    return int(match[1]), match[2] or ""


def watched_logprobs(answer: Any, watched: Sequence[int]) -> tuple[list[float], str | None]:
    """Read the logprob that each of the `watched` tokens has as the first new token, and the name of the engine's
    weights."""
    try:
        meta = answer["meta_info"]
        logprobs = {int(token): float(logprob) for logprob, token, *_ in meta["output_token_ids_logprobs"][0]}
        version = meta.get("weight_version")
        return [logprobs[token] for token in watched], None if version is None else str(version)
    except (TypeError, KeyError, IndexError, ValueError, OverflowError, AttributeError):
        raise ValueError("the answer has no output_token_ids_logprobs of the tokens asked for") from None


def checksums_of(answer: Any) -> tuple[dict[str, str], ...]:
    """Read the answer of /weights_checker: the checksums of each tensor-parallel rank, in the order of the ranks."""
    try:
        return tuple(dict(rank["checksums"]) for rank in answer["ranks"])
    except (TypeError, KeyError, ValueError):
        raise ValueError("the answer has no checksums") from None


_DECIDE_LAYOUT = (
    *("version", "device", "dtype", "tp_size", "ep_size", "moe_runner_backend", "mm_enable_dp_encoder"),
    *("cpu_offload_gb", "offload_group_size", "torchao_config", "enable_lora", "enable_dp_attention", "attn_cp_size"),
    *("dcp_size", "moe_dense_tp_size", "moe_a2a_backend", "moe_dp_size", "ep_num_redundant_experts"),
    *("init_expert_location", "enable_eplb", "enable_paged_experts", "elastic_ep_backend", "kt_weight_path"),
    "dwdp_size",
)
"""Settings of SGLang's server that decide how it holds its weights."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the publisher must know about an engine; the defaults hold for an engine that does not report a field."""

    num_ranks: int = 1  # tensor-parallel ranks; each is one rank of the weight group
    beside_generation: bool = False  # receives weights while it generates, and installs them all at one moment
    names_updates: bool = False  # accepts buckets and the end of an update only with the update's name
    takes_claims: bool = False  # knows its learner, and refuses another while that one lives
    takes_adapters: bool = False  # accepts adapters without weights, and merges them itself
    num_refused: int = 0  # requests that it has refused since it started
    checksums_as_sent: bool = False  # its checksums are SHA-256 of the bytes as sent
    # Engines of the same kind that were sent the same weights hold the same bytes; "" = not known.
    kind: str = ""
    nccl: str = ""  # its version of NCCL; "" = not known


def incompatible_reason(info: Any) -> str:
    """Return why an engine with this answer of /server_info cannot be sent weights; empty if it can."""
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


def parse_server_info(info: Any) -> ServerInfo:
    """Read the answer of /server_info. The embedded engine reports its capabilities itself; for SGLang's server, every
    model process with our plugin reports them, and a capability counts only if all do."""
    if not isinstance(info, dict):
        return ServerInfo()
    ranks, states = info.get("tp_size"), info.get("internal_states")
    processes = states if isinstance(states, list) and states else [info]
    refused = info.get("refused")
    counts = refused.values() if isinstance(refused, dict) else ()
    num_ranks = ranks if isinstance(ranks, int) and ranks > 0 else 1

    def all_report(capability: str) -> bool:
        return all(isinstance(state, dict) and state.get(capability) is True for state in processes)

    return ServerInfo(
        num_ranks=num_ranks,
        beside_generation=all_report("updates_beside_generation"),
        takes_adapters=all_report("takes_adapters"),
        takes_claims=info.get("takes_claims") is True,
        names_updates=info.get("names_updates") is True,
        num_refused=sum(count for count in counts if isinstance(count, int) and count > 0),
        checksums_as_sent=info.get("engine") == "embedded",
        kind=_kind(info),
        nccl=_nccl(info, processes[0]),
    )


def _kind(info: dict[str, Any]) -> str:
    if info.get("engine") == "embedded":
        return "embedded"
    if not (isinstance(info.get("device"), str) and isinstance(info.get("dtype"), str)):
        return ""
    return ", ".join(f"{name} {info[name]}" for name in _DECIDE_LAYOUT if name in info)


def _nccl(info: dict[str, Any], state: Any) -> str:
    """Return the version of NCCL that the embedded engine or our plugin reports, else the one that comes with its
    version of SGLang."""
    for source in (info, state if isinstance(state, dict) else {}):
        if isinstance(version := source.get("nccl"), str):
            return version
    return nccl_of_sglang(str(info.get("version", "")))
