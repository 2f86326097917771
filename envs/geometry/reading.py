"""What a small model writes about a drawn triangle before it answers: the numbers in the picture, and what they add up
to. Which of these answers the question is not said."""

from __future__ import annotations

import re
from collections.abc import Sequence

_THOUGHT = re.compile(r"<think>([^<]*)</think>")


def reading(numbers: Sequence[int]) -> str:
    """The text in `<think>`: the numbers, ascending; of two their difference, of one or two their sum (one counts
    twice) and what is left to 180."""
    parts = [",".join(map(str, numbers))]
    if len(numbers) == 2:
        parts.append(str(numbers[1] - numbers[0]))
    if len(numbers) < 3:
        total = sum(numbers) if len(numbers) == 2 else 2 * numbers[0]
        parts += [str(total), str(180 - total)]
    return ";".join(parts)


def read_accuracy(response: str, numbers: Sequence[int]) -> dict[str, bool]:
    """Whether `<think>` says what `reading` does; nothing of a response without it."""
    thought = _THOUGHT.search(response)
    return {} if thought is None else {"read_accuracy": thought[1].strip() == reading(numbers)}
