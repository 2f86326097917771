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
    runs = np.lib.stride_tricks.sliding_window_view(token_ids, RUN)
    distinct = len(np.unique(runs, axis=0))
    return 1.0 - distinct / len(runs), float(np.unique(token_ids, return_counts=True)[1].max()) / len(token_ids)
