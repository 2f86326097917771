"""What a rank of a tensor-parallel SGLang server holds of a parameter, cut as SGLang's own loaders cut it.

Rows (a matrix's first dimension, its outputs) or columns are cut into equal parts, one for each rank. Of queries, keys
and values a part is whole heads; where there are fewer heads of keys than ranks, neighbouring ranks hold the same one.
What every rank needs, norms and the biases of what is added up over ranks, each holds whole. Where a size is no
multiple of what the server needs, zeros fill it up: the vocabulary, the hidden layer of Qwen2.5-VL's tower, and on a
CPU heads and hidden layers too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shared.weights.layout import Layout

VOCABULARY_UNIT = 64
TOWER_UNIT = 8  # of the hidden layer of Qwen2.5-VL's tower
CPU_UNIT = 32  # of every hidden layer, for each rank
EXPERTS = ".mlp.experts."


@dataclass(frozen=True, slots=True)
class Heads:
    """How many heads a model has, by which queries, keys and values are cut."""

    query: int
    key: int
    vision: int

    @staticmethod
    def of(config: Any) -> Heads:
        """From transformers' configuration of the whole model."""
        text, vision = config.text_config, config.vision_config
        return Heads(text.num_attention_heads, text.num_key_value_heads, vision.num_heads)

    def filled(self, ranks: int) -> Heads:
        """With heads of zeros, as a server on a CPU adds them until each rank has as many."""
        key = self.key if self.query % ranks == 0 == self.key % ranks else _up(self.key, ranks)
        return Heads(key * (self.query // self.key), key, _up(self.vision, ranks))


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of those that cut a parameter among them, of a server of this layout, and the model's heads."""

    layout: Layout
    own: Heads
    rank: int
    ranks: int

    @property
    def heads(self) -> Heads:
        return self.own.filled(self.layout.num_ranks) if self.layout.fills == "cpu" else self.own

    def cut(self, values: Tensor, dim: int, size: int) -> Tensor:
        """This rank's part of `dim`, which is filled up to `size`."""
        each = size // self.ranks
        return _between(values, dim, self.rank * each, each)


def held(name: str, values: Tensor, layout: Layout, heads: Heads, rank: int) -> Tensor | None:
    """Of the parameter with this published name and these `values`, shaped as engines hold them, that which the rank
    holds. None where that is not known, as of a name that stands in no rule."""
    if layout.num_ranks == 1 and not layout.fills:
        return values
    for pattern, cut in _RULES:
        if pattern.search(name):
            together = layout.whole_tower and "visual." in name
            place = Place(layout, heads, 0, 1) if together else Place(layout, heads, rank, layout.num_ranks)
            return cut(values, place)
    return None


def _between(values: Tensor, dim: int, begin: int, size: int) -> Tensor:
    """`size` entries of `dim` from `begin` on; zeros where there are none."""
    begin = min(begin, values.shape[dim])
    part = values.narrow(dim, begin, min(size, values.shape[dim] - begin))
    if missing := size - part.shape[dim]:
        zeros = list(part.shape)
        zeros[dim] = missing
        part = torch.cat([part, part.new_zeros(zeros)], dim)
    return part


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


# ------------------------------------------------------------------ kinds of parameters

Cut = Callable[[Tensor, Place], Tensor]


def _whole(values: Tensor, place: Place) -> Tensor:
    return values


def _vocabulary(values: Tensor, place: Place) -> Tensor:
    size = _up(len(values), VOCABULARY_UNIT) if place.layout.fills else len(values)
    if size % place.ranks:
        size = _up(len(values), VOCABULARY_UNIT * place.ranks)
    return place.cut(values, 0, size)


def _hidden(dim: int, unit: int = 1) -> Cut:
    """Of a hidden layer: rows of the matrix before it, or columns of the one behind it."""

    def cut(values: Tensor, place: Place) -> Tensor:
        units = {"": 1, "gpu": unit, "cpu": CPU_UNIT * place.layout.num_ranks}
        return place.cut(values, dim, _up(values.shape[dim], units[place.layout.fills]))

    return cut


def _heads(dim: int, kind: str) -> Cut:
    """As many rows or columns for each head of `kind`."""

    def cut(values: Tensor, place: Place) -> Tensor:
        each = values.shape[dim] // getattr(place.own, kind)
        return place.cut(values, dim, each * getattr(place.heads, kind))

    return cut


def _keys(values: Tensor, place: Place) -> Tensor:
    size, heads = len(values) // place.own.key, place.heads.key
    if place.ranks <= heads:
        return place.cut(values, 0, size * heads)
    return _between(values, 0, place.rank // (place.ranks // heads) * size, size)


def _joined_vision(values: Tensor, place: Place) -> Tensor:
    """Queries, keys and values in one matrix: each is cut."""
    return torch.cat([_heads(0, "vision")(part, place) for part in values.chunk(3)])


def _experts(dim: int, parts: int) -> Cut:
    """[experts, out, in]: groups of ranks share the experts, and a group cuts the hidden layer of its own. `parts`
    matrices stand behind each other in `dim`."""

    def cut(values: Tensor, place: Place) -> Tensor:
        ranks, each = place.ranks // place.layout.expert_groups, len(values) // place.layout.expert_groups
        group, rank = divmod(place.rank, ranks)
        within, mine = replace(place, rank=rank, ranks=ranks), values[group * each : (group + 1) * each]
        return torch.cat([_hidden(dim)(part, within) for part in mine.chunk(parts, dim)], dim)

    return cut


_RULES: tuple[tuple[re.Pattern[str], Cut], ...] = tuple(
    (re.compile(pattern), cut)
    for pattern, cut in (
        (r"\b(embed_tokens|lm_head|pos_embed)\.weight$", _vocabulary),
        (r"\.self_attn\.q_proj\.", _heads(0, "query")),
        (r"\.self_attn\.[kv]_proj\.", _keys),
        (r"\.self_attn\.o_proj\.weight$", _heads(1, "query")),
        (r"\.mlp\.experts\.gate_up_proj$", _experts(1, 2)),
        (r"\.mlp\.experts\.down_proj$", _experts(2, 1)),
        (r"\bvisual\.blocks\.\d+\.mlp\.(gate|up)_proj\.", _hidden(0, TOWER_UNIT)),
        (r"\bvisual\.blocks\.\d+\.mlp\.down_proj\.weight$", _hidden(1, TOWER_UNIT)),
        (r"\.mlp\.(gate_proj|up_proj)\.|\.blocks\.\d+\.mlp\.linear_fc1\.", _hidden(0)),
        (r"\.mlp\.down_proj\.weight$|\.blocks\.\d+\.mlp\.linear_fc2\.weight$", _hidden(1)),
        (r"\.attn\.qkv\.", _joined_vision),
        (r"\.attn\.proj\.weight$", _heads(1, "vision")),
        (r"merger(_list\.\d+)?\.(linear_fc1|mlp\.0)\.", _heads(0, "vision")),
        (r"merger(_list\.\d+)?\.(linear_fc2|mlp\.2)\.weight$", _heads(1, "vision")),
        (r"norm\d?\.|\.ln_q\.|\.mlp\.gate\.weight$|\.patch_embed\.proj\.", _whole),
        (r"\.(attn\.proj|o_proj|down_proj|linear_fc2|merger\.mlp\.2)\.bias$", _whole),
    )
)
"""The first that is found in a published name of any family holds."""
