"""The text that a small model writes about a drawn triangle before it answers: the numbers in the picture, and their
sums and differences. It does not say which of these is the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

_THOUGHT = re.compile(r"<think>([^<]*)</think>")


def reading(numbers: Sequence[int]) -> str:
    """Return the text for `<think>`: the ascending numbers; of two numbers also their difference; of one or two numbers
    also their sum (a single number is doubled) and 180 minus that sum."""
    parts = [",".join(map(str, numbers))]
    if len(numbers) == 2:
        parts.append(str(numbers[1] - numbers[0]))
    if len(numbers) < 3:
        total = sum(numbers) if len(numbers) == 2 else 2 * numbers[0]
        parts += [str(total), str(180 - total)]
    return ";".join(parts)


def read_accuracy(response: str, numbers: Sequence[int]) -> dict[str, bool]:
    """Return {"read_accuracy": whether the text in `<think>` equals `reading(numbers)`}; {} for a response without
    `<think>`."""
    thought = _THOUGHT.search(response)
    return {} if thought is None else {"read_accuracy": thought[1].strip() == reading(numbers)}
