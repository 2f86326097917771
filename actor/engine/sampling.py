"""Sampling tokens from logits. Suffixes: R = sequences, V = vocabulary.

The logprob of a token is that of softmax((logits + bias) / temperature) over the whole vocabulary; top-p and top-k
narrow the choice, but the logprob is not renormalised to it. A bias of -100 or less bans the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from shared.engine.engine_messages import BAN


@dataclass(slots=True, eq=False)
class Sampler:
    """How one request samples. `temperature` 0 is greedy; the logprobs are then those of temperature 1."""

    temperature: float
    top_p: float
    top_k: int
    bias: tuple[tuple[int, float], ...]
    random: Random
    watched: tuple[int, ...] = ()  # ids whose logprobs are returned at every position

    @property
    def narrowed(self) -> bool:
        return self.top_p < 1 or self.top_k > 0


class BiasCache:
    """A cache of dense bias vectors float32[V] by their sparse form; nearly all requests ban the same ids."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._vectors: dict[tuple[tuple[int, float], ...], Tensor] = {}

    def vector(self, bias: tuple[tuple[int, float], ...]) -> Tensor:
        vector = self._vectors.get(bias)
        if vector is None:
            if len(self._vectors) >= 64:
                self._vectors.clear()
            vector = torch.zeros(self._vocab_size, device=self._device)
            for token, value in bias:
                vector[token] = -torch.inf if value <= BAN else value
            self._vectors[bias] = vector
        return vector


@torch.inference_mode()
def sample(
    logits: Tensor, samplers: Sequence[Sampler], biases: BiasCache
) -> tuple[list[int], list[float], list[list[float]]]:
    """Sample one token per row of float32[R, V] `logits`; return the tokens, their logprobs, and each row's logprobs of
    its watched ids. Each row uses its own random generator.
    """
    device = logits.device
    first = samplers[0].bias
    if all(s.bias == first for s in samplers):
        if first:
            logits = logits + biases.vector(first)
    else:
        logits = logits + torch.stack([biases.vector(s.bias) for s in samplers])
    if any(s.temperature not in (0.0, 1.0) for s in samplers):
        scale = torch.tensor([s.temperature or 1.0 for s in samplers], device=device)
        logits = logits / scale[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    probs = logprobs.exp()
    narrowed = [row for row, s in enumerate(samplers) if s.narrowed and s.temperature > 0]
    if narrowed:
        rows = torch.tensor(narrowed, device=device)
        probs[rows] = _narrow(probs[rows], [samplers[row] for row in narrowed])
    draws = torch.tensor([s.random.random() for s in samplers], dtype=torch.float64, device=device)
    mass = probs.cumsum(dim=-1, dtype=torch.float64)
    tokens = torch.searchsorted(mass, draws[:, None] * mass[:, -1:], right=True)[:, 0]
    greedy = [row for row, s in enumerate(samplers) if s.temperature == 0]
    if greedy:
        rows = torch.tensor(greedy, device=device)
        tokens[rows] = logits[rows].argmax(dim=-1)
    tokens = tokens.clamp_(max=logprobs.shape[-1] - 1)  # a row of NaN has no valid token; its logprob is NaN
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    watched = [logprobs[row, list(s.watched)].tolist() if s.watched else [] for row, s in enumerate(samplers)]
    return tokens.tolist(), chosen.tolist(), watched


def _narrow(probs: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """Set the probabilities to 0 outside the top k and outside the smallest set of most likely tokens whose mass
    reaches top_p."""
    ranked, order = probs.sort(dim=-1, descending=True)
    top_p = torch.tensor([s.top_p for s in samplers], device=probs.device)[:, None]
    top_k = torch.tensor([s.top_k if s.top_k > 0 else probs.shape[-1] for s in samplers], device=probs.device)[:, None]
    before = ranked.cumsum(dim=-1) - ranked
    rank = torch.arange(probs.shape[-1], device=probs.device)[None]
    ranked = ranked.masked_fill((before >= top_p) | (rank >= top_k), 0.0)
    return torch.zeros_like(probs).scatter_(1, order, ranked)
