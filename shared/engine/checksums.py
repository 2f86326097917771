"""An engine server's names of parameters, the parts of a model, and the checksums that a server reports.

A server joins projections that read the same input: q, k and v into one `qkv_proj`, gate and up into one
`gate_up_proj`, of a delta net qkv and z into `in_proj_qkvz`, and b and a into `in_proj_ba`, each in this order, which
is also their order in the model's own list of parameters.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable

_RULES = (
    (re.compile(r"^model\.language_model\."), "model."),
    (re.compile(r"^model\.visual\."), "visual."),
    (re.compile(r"\.attn\.qkv\."), ".attn.qkv_proj."),
    (re.compile(r"\.self_attn\.[qkv]_proj\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.linear_attn\.in_proj_(qkv|z)\."), ".linear_attn.in_proj_qkvz."),
    (re.compile(r"\.linear_attn\.in_proj_(b|a)\."), ".linear_attn.in_proj_ba."),
    (re.compile(r"\.mlp\.(gate|up)_proj\."), ".mlp.gate_up_proj."),
    (re.compile(r"\.mlp\.shared_expert\.(gate|up)_proj\."), ".mlp.shared_expert.gate_up_proj."),
    (re.compile(r"\.mlp\.experts\.gate_up_proj$"), ".mlp.experts.w13_weight"),
    (re.compile(r"\.mlp\.experts\.down_proj$"), ".mlp.experts.w2_weight"),
)
_PART = re.compile(r"\b(layers|blocks)\.\d+\.")


def engine_name(name: str) -> str:
    """Return the server's name of the parameter with this Hugging Face name."""
    for pattern, replacement in _RULES:
        name = pattern.sub(replacement, name)
    return name


def part_of(name: str) -> str:
    """Return which part of the model a parameter belongs to: a decoder layer, a vision block, or (empty) the rest."""
    match = _PART.search(name)
    return match.group() if match else ""


def checksums(weights: Iterable[tuple[str, memoryview]]) -> dict[str, str]:
    """Compute the checksum of each of the server's parameters as its `/weights_checker` does, from Hugging Face names
    and raw bytes in the model's order."""
    hashers: dict[str, hashlib._Hash] = {}
    for name, data in weights:
        hashers.setdefault(engine_name(name), hashlib.sha256()).update(data)
    return {name: hasher.digest()[:8].hex() for name, hasher in hashers.items()}


def all_but(part: str, names: Collection[str]) -> list[str]:
    """Return the `skip_tensor_list` for `/weights_checker` that skips all parameters but those of `part`: fragments of
    the server's names."""
    others = {part_of(name) for name in names} - {part, ""}
    rest = {engine_name(name) for name in names if not part_of(name)} if part else set()
    return sorted(others | rest)
