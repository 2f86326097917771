"""The embedded engine's model: modules of transformers, run over packed tokens with a slotted cache.

One call computes the new tokens of many sequences laid end to end: one token for a sequence that decodes, a whole
prompt for one that starts. All linear layers see one [N, hidden] matrix without padding; attention runs per segment.

Suffixes: N = new tokens of all sequences, R = sequences, D = head size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from actor.engine.delta_layers import make_layers
from actor.engine.layers import Batch, Cache, CpuLayer, Segment, norm_weight
from kernels.cpu.gelu import use_fast_gelu
from kernels.cpu.linear import padded, use_fast_linear, uses_onednn
from kernels.delta_rule import Piece, on_device, plan_scan
from shared.families.registry import family_named
from shared.vision import VisionSpec


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """The new tokens of one sequence: `token_ids` int64[n] and `positions` int64[3, n], after `past` tokens in `slot`.
    `visual` int64[m] are the indices of the visual tokens among the n; `features` are their embeddings (level 0), then
    one tensor per deepstack layer, each [m, hidden].
    """

    slot: int
    past: int
    token_ids: np.ndarray
    positions: np.ndarray
    visual: np.ndarray | None = None
    features: tuple[Tensor, ...] = ()


class Runner:
    """Owns the weights and the cache. Not thread-safe: one thread calls it. `is_recurrent`: a slot's content also has
    states, so that it can be continued but not cut."""

    def __init__(self, model: Any, spec: VisionSpec, *, num_slots: int, max_context: int) -> None:
        self.model = model.eval()
        use_fast_linear(model)
        use_fast_gelu(model)
        self.num_slots, self.max_context = num_slots, max_context
        text = model.config.get_text_config()
        family = family_named(model.config.model_type, "the engine")
        self.text, self.lm_head = family.decoder(model), model.lm_head
        self.is_recurrent, self._norm_offset = family.is_recurrent, family.norm_offset
        self.num_kv_heads = text.num_key_value_heads
        weight = self.text.embed_tokens.weight
        self.device, self.dtype, self.vocab_size = weight.device, weight.dtype, text.vocab_size
        visual = family.tower(model)
        self.tower = None if visual is None else family.engine_tower(visual, spec.mean, spec.std)
        self.rotary_positions = family.rotary_positions
        self.layers = make_layers(self.text, text, family.norm_offset, rotates_pairs=family.rotates_pairs)
        self.cache: list[Cache] = [layer.new_cache(num_slots, max_context) for layer in self.layers]
        self._pads = uses_onednn(weight)
        self._by_torch = not isinstance(self.layers[0], CpuLayer)
        self.weights_changed()

    def weights_changed(self) -> None:
        """Recompute all tensors derived from the parameters. Call it after writing to the parameters."""
        self._final_weight = norm_weight(self.text.norm, self._norm_offset)
        for layer in self.layers:
            layer.weights_changed()
        if self.tower is not None:
            self.tower.weights_changed()

    @torch.inference_mode()
    def encode(self, patches: Sequence[np.ndarray], grids: Sequence[tuple[int, int, int]]) -> list[tuple[Tensor, ...]]:
        """Return the features of each image: the embedding and the deepstack levels, each [tokens, hidden]."""
        return [] if self.tower is None else self.tower.encode(patches, grids)

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` KV entries of one slot to another; not of a recurrent model."""
        for keys, values in self.cache:
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Compute the rows' tokens and store their K and V; return float32 logits [R, V] after each row's last token.
        Rows of one token must come first, sorted by slot, so that neighbouring slots are computed together. Of a
        recurrent model, call `keep_states` once the result has been used.
        """
        counts = [len(row.token_ids) for row in rows]
        num_tokens = sum(counts)
        extra = self._rows(num_tokens) - num_tokens
        zeros = np.zeros(extra, dtype=np.int64)
        ids = self._tensor(np.concatenate([*(row.token_ids for row in rows), zeros]))
        axes = [*(row.positions for row in rows), np.broadcast_to(zeros, (3, extra))]
        positions = self._tensor(np.concatenate(axes, axis=1))
        ends = np.cumsum(counts)

        hidden = F.embedding(ids, self.text.embed_tokens.weight)
        visual, features = self._visual(rows, ends - counts)
        if visual is not None:
            hidden.index_copy_(0, visual, features[0])
        batch = self._batch(rows, counts, positions, hidden)
        for depth, (layer, cache) in enumerate(zip(self.layers, self.cache, strict=True)):
            hidden = layer.forward(hidden, cache, batch)
            if visual is not None and depth + 1 < len(features):
                hidden.index_add_(0, visual, features[depth + 1])
        last = np.full(self._rows(len(rows)), ends[-1] - 1)
        last[: len(rows)] = ends - 1
        hidden = self.layers[-1].add_norm(hidden[self._tensor(last)], None, self._final_weight)
        return self.lm_head(hidden)[: len(rows)].float()

    @torch.inference_mode()
    def keep_states(self) -> None:
        """Store the states after the last forward in its rows' slots. Until then the forward can be repeated."""
        for layer, cache in zip(self.layers, self.cache, strict=True):
            layer.keep(cache)

    def _batch(self, rows: Sequence[Row], counts: list[int], positions: Tensor, hidden: Tensor) -> Batch:
        num_tokens, num_singles = len(hidden), counts.count(1)
        first = np.array([row.slot * self.num_kv_heads * self.max_context for row in rows])
        past = np.array([row.past for row in rows])
        offsets = np.arange(sum(counts)) - np.repeat(np.cumsum(counts) - counts, counts)
        entry = np.full(num_tokens, -1)
        entry[: sum(counts)] = np.repeat(first + past, counts) + offsets
        cos, sin = self.text.rotary_emb(hidden, self.rotary_positions(positions[:, None]))
        return Batch(
            angles=(cos[0], sin[0]),
            entry=self._tensor(entry),
            stored=sum(counts),
            first=self._tensor(first[:num_singles]),
            length=self._tensor(past[:num_singles] + 1),
            singles=self._singles(rows[:num_singles]) if self._by_torch else (),
            longer=self._longer(rows[num_singles:], num_singles),
            **self._recurrence(rows, counts[num_singles:]),
        )

    def _recurrence(self, rows: Sequence[Row], longer: Sequence[int]) -> dict[str, Any]:
        """Return the fields of `Batch` for delta nets. `longer`: tokens of each row that has several."""
        if not self.is_recurrent:
            return {}
        starts = np.cumsum([0, *longer]).tolist()
        pieces = [Piece(start, count) for start, count in zip(starts, longer, strict=False)]
        return {
            "slots": self._tensor(np.array([row.slot for row in rows])),
            "begun": self._tensor(np.array([row.past > 0 for row in rows])),
            "scan": on_device(plan_scan(pieces), self.device) if pieces else None,
        }

    def _singles(self, rows: Sequence[Row]) -> list[Segment]:
        """Group rows of one token into segments of neighbouring slots."""
        segments: list[Segment] = []
        first = 0
        while first < len(rows):
            last = first + 1
            while last < len(rows) and rows[last].slot == rows[last - 1].slot + 1:
                last += 1
            segments.append(self._decode_segment(rows, first, last))
            first = last
        return segments

    def _longer(self, rows: Sequence[Row], start: int) -> list[Segment]:
        """Make a segment for each row of several tokens; the first row begins at token `start` of the batch."""
        segments = []
        for row in rows:
            n = len(row.token_ids)
            mask = self._causal_mask(row.past, n) if self._by_torch else None
            segments.append(Segment(start, start + n, row.slot, 1, row.past + n, mask))
            start += n
        return segments

    def _decode_segment(self, rows: Sequence[Row], first: int, last: int) -> Segment:
        lengths = [row.past + 1 for row in rows[first:last]]
        longest = max(lengths)
        mask = None
        if min(lengths) < longest:
            unseen = np.arange(longest)[None] >= np.asarray(lengths)[:, None]
            mask = self._tensor(np.where(unseen, np.float32(-np.inf), np.float32(0)))[:, None, None].to(self.dtype)
        return Segment(first, last, rows[first].slot, last - first, longest, mask)

    def _causal_mask(self, past: int, n: int) -> Tensor | None:
        """Return an additive mask [n, past + n], or None where no mask or a plain causal one is enough (no past tokens,
        or one new token)."""
        if past == 0 or n == 1:
            return None
        mask = torch.zeros((n, past + n), dtype=self.dtype, device=self.device)
        mask[:, past:] = torch.full((n, n), -torch.inf, dtype=self.dtype, device=self.device).triu_(1)
        return mask

    def _visual(self, rows: Sequence[Row], starts: np.ndarray) -> tuple[Tensor | None, list[Tensor]]:
        with_images = [
            (row, start) for row, start in zip(rows, starts, strict=True) if row.visual is not None and row.features
        ]
        if not with_images:
            return None, []
        index = np.concatenate([row.visual + start for row, start in with_images])
        levels = zip(*(row.features for row, _ in with_images), strict=True)
        return self._tensor(index), [torch.cat(level).to(self.dtype) for level in levels]

    def _rows(self, rows: int) -> int:
        """Return the number of rows to compute for `rows` rows: padded on a CPU with oneDNN; the real ones come
        first."""
        return padded(rows) if self._pads else rows

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
