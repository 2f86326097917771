"""Text that repeats itself, or is one symbol, is seen by its tokens."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from learner.metrics.text_metrics import SHORT, text_metrics
from shared.types import Trajectory, Turn
from tests.support.episodes import random_trajectory


def writing(spec, *turns: list[int]) -> Trajectory:
    """Return an episode whose turns are these tokens."""
    ids = np.concatenate([[1, 2], *turns]).astype(np.int32)
    ends = (2 + np.cumsum([0, *map(len, turns)])).tolist()
    spans = tuple(Turn(start, end, 0.0) for start, end in pairwise(ends))
    return replace(random_trajectory(spec, 0), token_ids=ids, turns=spans)


def test_different_tokens_repeat_nothing(spec):
    assert text_metrics([writing(spec, list(range(100)))]) == {"text/repeated": 0.0, "text/one_token": 0.01}


def test_one_symbol_is_all_of_it(spec):
    found = text_metrics([writing(spec, [7] * 100)])
    assert found["text/one_token"] == 1.0 and found["text/repeated"] == pytest.approx(96 / 97)


def test_a_loop_of_words_repeats_itself(spec):
    found = text_metrics([writing(spec, [1, 2, 3, 4, 5] * 20)])
    assert found["text/one_token"] == 0.2 and found["text/repeated"] == pytest.approx(92 / 97)


def test_turns_count_by_themselves_and_short_ones_say_nothing(spec):
    sentence = list(range(SHORT))
    assert text_metrics([writing(spec, sentence, sentence)])["text/repeated"] == 0.0
    assert text_metrics([writing(spec, [7] * (SHORT - 1))]) == {}
