"""Metrics of what the policy writes, by its tokens alone: text that repeats itself, or is one symbol."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.types import Trajectory

RUN = 4  # tokens in a row that are compared
SHORT = 16  # turns of fewer tokens say nothing about repeats


def text_metrics(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Return means over the turns of at least `SHORT` tokens: `text/repeated`, the share of runs of `RUN` tokens that
    the turn had before, and `text/one_token`, the share of its most frequent token. {} without such a turn."""
    turns = [e.token_ids[turn.start : turn.end] for e in episodes for turn in e.turns if turn.end - turn.start >= SHORT]
    if not turns:
        return {}
    repeated, one_token = zip(*map(_shares, turns), strict=True)
    return {"text/repeated": sum(repeated) / len(turns), "text/one_token": sum(one_token) / len(turns)}


def _shares(token_ids: np.ndarray) -> tuple[float, float]:
    distinct, words, counts = np.unique(token_ids, return_inverse=True, return_counts=True)
    # A run is one number in a base of the turn's distinct tokens, of which 64 bits hold 55,000.
    weights = len(distinct) ** np.arange(RUN, dtype=np.int64)
    runs = np.lib.stride_tricks.sliding_window_view(words.astype(np.int64), RUN) @ weights
    return 1.0 - len(np.unique(runs)) / len(runs), float(counts.max()) / len(token_ids)
