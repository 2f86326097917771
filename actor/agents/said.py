"""What counts as the same in a conversation that a client sends back: messages, compared by what they say.

| of a message | the same |
|---|---|
| role | `developer` and `system` |
| texts | without the blanks at both ends of the message; one text, or the parts that it was cut into |
| images | of the same pixels, however encoded |
| an answer | with other blanks inside and outside of its tags of thoughts |
| an answer of the policy | also without its thoughts; with its tool calls as text, or in `tool_calls` |
| tool calls | of the same names and arguments, whatever their order of keys, blanks and identifiers |
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from envs.tools.tool_call import ToolCall, parse_tool_calls
from shared.families.marks import CALL, THOUGHT
from shared.types import Image

MAX_CALLS = 32  # of one answer
Part = str | Image
_THOUGHTS = re.compile(f"{THOUGHT.opening}.*?{THOUGHT.closing}", re.DOTALL)
_TAGS = re.compile(f"({THOUGHT.opening}|{THOUGHT.closing})")


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call: its name, and its arguments as JSON with sorted keys; as they were given, if that is no JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Said:
    """What a message says, without what makes no difference. `parts`: texts, and the names of images."""

    role: str
    parts: tuple[tuple[str, str], ...]
    calls: tuple[Call, ...] = ()

    @classmethod
    def of(cls, role: str, parts: Iterable[Part], calls: tuple[Call, ...] = ()) -> Said:
        """Return what a message of these parts says."""
        joined: list[tuple[str, str]] = []
        for part in parts:
            if isinstance(part, Image):
                joined.append(("image", part.name))
            elif joined and joined[-1][0] == "text":
                joined[-1] = ("text", joined[-1][1] + part)
            else:
                joined.append(("text", part))
        if role == "assistant":
            joined = [(kind, _thoughts_without_blanks(text) if kind == "text" else text) for kind, text in joined]
        if joined and joined[0][0] == "text":
            joined[0] = ("text", joined[0][1].lstrip())
        if joined and joined[-1][0] == "text":
            joined[-1] = ("text", joined[-1][1].rstrip())
        return cls(role, tuple(pair for pair in joined if pair != ("text", "")), calls)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message of a request: what it says, and what the renderer is given."""

    said: Said
    shown: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Spoken:
    """An answer of the policy: its tokens as they were sampled, its text, and the ways in which a client may send it
    back. `content` and `calls` are what the client was given."""

    token_ids: tuple[int, ...]
    text: str
    content: str
    calls: tuple[Call, ...]
    forms: frozenset[Said]

    @property
    def whole(self) -> Said:
        """The answer with nothing left out."""
        return Said.of("assistant", [self.text])

    @property
    def given(self) -> Said:
        """The answer as the client was given it."""
        return Said.of("assistant", [self.content], self.calls)


def spoken(token_ids: Sequence[int], text: str, shown: str, *, with_tools: bool) -> Spoken:
    """Return an answer. `shown` is its text as the client sees it, which a `stop` may have cut."""
    calls = tool_calls_in(shown) if with_tools else ()
    content = _without_calls(shown) if calls else shown
    texts = [(each, ()) for each in (text, shown)] + [(content, calls)]
    forms = {
        Said.of("assistant", [form], its_calls) for said, its_calls in texts for form in (said, *without_thoughts(said))
    }
    return Spoken(tuple(token_ids), text, content, calls, frozenset(forms))


def without_thoughts(text: str) -> tuple[str, ...]:
    """Return the ways in which clients drop the thoughts of an answer; () if it has none. A thought that was not
    closed is none: what follows it would be unknown."""
    if THOUGHT.closing not in text:
        return ()
    return text.rpartition(THOUGHT.closing)[2], text.partition(THOUGHT.closing)[2], _THOUGHTS.sub("", text)


def tool_calls_in(text: str) -> tuple[Call, ...]:
    """Return the tool calls in an answer; () if there is none, or one that cannot be read."""
    found = parse_tool_calls(text, MAX_CALLS)
    calls = [call_of(each.name, each.arguments) for each in found if isinstance(each, ToolCall)]
    return tuple(calls) if len(calls) == len(found) else ()


def call_of(name: str, arguments: Any) -> Call:
    """Return a call with its arguments in the one form in which calls are compared."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        written = json.dumps(value, sort_keys=True, ensure_ascii=False)
        return Call(name, written.encode(errors="replace").decode())  # a lone surrogate cannot be sent
    except (ValueError, RecursionError):
        return Call(name, str(arguments))


def _thoughts_without_blanks(text: str) -> str:
    """Return an answer without the blanks inside and outside of its thoughts' tags."""
    first, *rest = _TAGS.split(text)
    return "".join((first.rstrip(), *(part.strip() for part in rest[:-1]), rest[-1].lstrip())) if rest else text


def _without_calls(text: str) -> str:
    """Return an answer's text before its first call after the thoughts."""
    thoughts = text.rfind(THOUGHT.closing) + 1
    at = text.find(CALL.opening, thoughts)
    return text[:at].rstrip() if at >= 0 else text
