"""The marks that models write around their thoughts and their tool calls: the tokenizers of all families know them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Marks:
    """The beginning and the end of a part of a model's turn."""

    opening: str
    closing: str

    def around(self, text: str) -> str:
        """Return a text between the marks."""
        return f"{self.opening}{text}{self.closing}"


THOUGHT = Marks("<think>", "</think>")
CALL = Marks("<tool_call>", "</tool_call>")
