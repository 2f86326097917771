"""The forms in which a model may be asked to answer, and the parts of an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Reasoning = Literal["none", "free", "world_model"]
Language = Literal["relations", "grid"]
TAGS: dict[str, tuple[str, ...]] = {
    "none": ("answer",),
    "free": ("think", "answer"),
    "world_model": ("observation", "think", "answer", "prediction"),
}
_PATTERNS = {
    reasoning: re.compile(r"\s*".join(rf"<{tag}>(?P<{tag}>.*?)</{tag}>" for tag in tags), re.DOTALL)
    for reasoning, tags in TAGS.items()
}
_RELATIONS = (
    "<observation> and <prediction> tell where each {kinds} is, seen from the player: one of above, below, same row, "
    "and one of left, right, same column."
)
_GRID = "<observation> and <prediction> are the board in symbols, one line for each row."
_ANY_TAG = re.compile(r"</?(?:observation|think|answer|prediction)>")


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an answer; "" where the form has no such part."""

    observation: str = ""
    think: str = ""
    answer: str = ""
    prediction: str = ""


def parts_of(text: str, reasoning: Reasoning) -> Parts | None:
    """Return the parts of an answer; None if it lacks one of its form, has one twice, or has them in another order.
    Text before, after and between the parts is allowed for; a template may have opened the thoughts already."""
    tags = TAGS[reasoning]
    if tags[0] == "think" and "<think>" not in text and "</think>" in text:
        text = f"<think>{text}"
    match = _PATTERNS[reasoning].search(text)
    if match is None or len(_ANY_TAG.findall(text)) != 2 * len(tags):
        return None
    return Parts(**{tag: match[tag].strip() for tag in tags})


def form_words(reasoning: Reasoning, language: Language, max_actions: int, kinds: Sequence[str]) -> str:
    """Return what a system prompt says of the form of answers; `kinds` are the things that relations are told of."""
    form = "".join(f"<{tag}>...</{tag}>" for tag in TAGS[reasoning])
    lines = [f"In each turn make up to {max_actions} moves, each up, down, left or right. Answer in this form:", form]
    if reasoning == "world_model":
        lines.append(
            "<observation> describes what you see, <think> how you decide, <answer> holds the moves, separated by "
            "commas, <prediction> describes what will be seen after them."
        )
        lines.append(_RELATIONS.format(kinds=" and each ".join(kinds)) if language == "relations" else _GRID)
    else:
        lines.append("<think> holds your thoughts, <answer> the moves, separated by commas.")
    if reasoning == "free" or language == "relations":
        lines.append(f"For example: {_example(reasoning, kinds)}")
    return "\n".join(lines)


def _example(reasoning: Reasoning, kinds: Sequence[str]) -> str:
    answer = "<think>I go right, to come nearer.</think><answer>right</answer>"
    if reasoning == "free":
        return answer
    seen = ", ".join(f"the {kind} is below and right of the player" for kind in kinds)
    then = ", ".join(f"the {kind} is below and same column of the player" for kind in kinds)
    return f"<observation>{seen}</observation>{answer}<prediction>{then}</prediction>"
