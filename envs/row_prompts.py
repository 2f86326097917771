"""The prompt of a dataset's row: its texts and images as chat messages.

A problem is a text or a list of chat messages (also written as JSON, or in ShareGPT's form), whose content is a text
or a list of parts. Images go where the text has
a mark (<image>, <image1> …, or a part of type image); without marks they come first in the last question.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any

from envs.row_columns import is_empty
from shared.families.marks import CALL
from shared.types import Image

ROLES = ("system", "user", "assistant", "tool")
OTHER_ROLES = {
    "human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant",
    "developer": "system", "function": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
"""The names of roles in other layouts: ShareGPT's, OpenAI's."""
MARK = re.compile(
    r"<image>|<image[ _-]?(\d{1,3})>|<\|image\|>|(?:<\|vision_start\|>)?<\|image_pad\|>(?:<\|vision_end\|>)?",
    re.IGNORECASE,
)
_LABELLED = re.compile(r"\s*\(?([A-Za-z])[).:]\s*(.*)", re.DOTALL)
_WRITTEN_MESSAGES = re.compile(r"\s*\[\s*\{\s*['\"](?:role|from|content|value)['\"]\s*:")
_WRITTEN_CHOICES = re.compile(r"\s*[\[{]\s*['\"]")
_BROKEN_ESCAPES = (
    (re.compile("\x08(?=[a-z])"), r"\\b"),  # \boxed read as JSON's \b
    (re.compile("\x0c(?=[a-z])"), r"\\f"),  # \frac
    (re.compile("\t(?=ext\\{|imes|heta|an\\b|riangle)"), r"\\t"),  # \text, \times, …
)

Load = Callable[[Any], Image]


class BadImage(ValueError):
    """An image of a row cannot be read, or does not fit its marks."""


@dataclass(slots=True)
class RowPrompt:
    """A row's messages. `unused` names what the row says and the messages do not."""

    messages: list[dict[str, Any]]
    images: list[Image]
    repaired: bool = False
    unused: list[str] = field(default_factory=list)

    @property
    def question(self) -> str:
        """The texts of the user, without marks."""
        texts = (text for message in self.messages if message["role"] == "user" for text in _texts(message))
        return "\n".join(texts).strip()

    @property
    def explains(self) -> bool:
        """Tell whether the row itself says in which form to answer."""
        texts = [text for message in self.messages if message["role"] != "assistant" for text in _texts(message)]
        return any(CALL.opening in text or r"\boxed" in text for text in texts)


def repair(text: str) -> tuple[str, bool]:
    r"""Turn control characters back into the LaTeX commands that they came from (\b + oxed); return the text, and
    whether there were any."""
    repaired = text
    for pattern, replacement in _BROKEN_ESCAPES:
        repaired = pattern.sub(replacement, repaired)
    return repaired, repaired != text


def choices_of(value: Any) -> list[str]:
    """Return the texts of a row's choices, without the letters before them. Raise ValueError for what is no list."""
    if is_empty(value):
        return []
    value = _read_literal(value, _WRITTEN_CHOICES)
    if isinstance(value, str) and len(lines := [line.strip() for line in value.splitlines() if line.strip()]) > 1:
        value = lines if all(map(_LABELLED.fullmatch, lines)) else value
    if isinstance(value, Mapping):
        value = [value[key] for key in sorted(value) if value[key] is not None]
    if not isinstance(value, list | tuple) or len(value) > len(ascii_uppercase):
        raise ValueError(f"the choices are {value!r:.60}, not a list of texts")
    texts = [str(choice).strip() for choice in value]
    labelled = [_LABELLED.fullmatch(text) for text in texts]
    in_order = all(
        match and match[1].upper() == letter for match, letter in zip(labelled, ascii_uppercase, strict=False)
    )
    return [match[2].strip() for match in labelled if match] if in_order else texts


def prompt_of(problem: Any, choices: Sequence[str], items: Sequence[Any], load: Load) -> RowPrompt:
    """Return the prompt of a problem with its choices as lettered lines and its images (`items`, read by `load`). Raise
    BadImage for an image that cannot be read or has no place, ValueError for messages of another form."""
    prompt = RowPrompt([], [])
    messages = [_message_of(message, prompt) for message in messages_of(problem)]
    questions = [number for number, message in enumerate(messages) if message["role"] == "user"]
    if not questions:
        raise ValueError("no message is of the role user")
    if messages[-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's: the answer would stand in the prompt")
    _add_choices(messages[questions[-1]], choices)
    parts = [part for message in messages for part in message["content"]]
    if any("<video>" in part.get("text", "") for part in parts):
        prompt.unused.append("<video> mark")
    marks = [part for part in parts if part["type"] == "image" and "item" not in part]
    if items and not marks and any(part["type"] == "image" for part in parts):
        prompt.unused.append("images")
    elif items and not marks:
        first = [{"type": "image", "item": item} for item in items]
        messages[questions[-1]]["content"][:0] = first
    else:
        give_images(marks, items)
    for message in messages:
        for part in message["content"]:
            if part["type"] == "image":
                prompt.images.append(load_image(load, part.pop("item")))
        prompt.messages.append({"role": message["role"], "content": _tidied(message)})
    return prompt


def with_system_prompt(messages: Sequence[dict[str, Any]], system_prompt: str) -> tuple[dict[str, Any], ...]:
    """Return the messages after the environment's system prompt; a system message of the row's own follows it in the
    same message, since chat templates write one."""
    if not system_prompt:
        return tuple(messages)
    if messages[0]["role"] != "system":
        return ({"role": "system", "content": system_prompt}, *messages)
    content = messages[0]["content"]
    joined: Any = f"{system_prompt}\n\n{content}"
    if not isinstance(content, str):
        joined = [{"type": "text", "text": f"{system_prompt}\n\n"}, *content]
    return ({"role": "system", "content": joined}, *messages[1:])


def messages_of(problem: Any) -> list[Mapping[str, Any]]:
    """Return the messages that a row's value spells, each with a role of `ROLES`; of a text the user's only one. Raise
    ValueError for one of another form."""
    problem = _read_literal(problem, _WRITTEN_MESSAGES)
    if isinstance(problem, Mapping):
        problem = [problem]
    if isinstance(problem, list | tuple):
        messages = [*map(_with_usual_names, problem)]
        for message in messages:
            if not isinstance(message, Mapping) or message.get("role") not in ROLES:
                raise ValueError(f"a message is {message!r:.60}, not a dict with a role: {', '.join(ROLES)}")
        return messages
    return [{"role": "user", "content": "" if problem is None else str(problem)}]


def _with_usual_names(message: Any) -> Any:
    """Return a message with role and content, also one of ShareGPT's with from and value."""
    if not isinstance(message, Mapping):
        return message
    if "from" in message and "role" not in message:
        others = {key: value for key, value in message.items() if key not in ("from", "value")}
        message = {"role": message["from"], "content": message.get("value"), **others}
    role = message.get("role")
    return {**message, "role": OTHER_ROLES[role]} if isinstance(role, str) and role in OTHER_ROLES else message


def _read_literal(value: Any, form: re.Pattern[str]) -> Any:
    """Return the value that a text of this form spells, in JSON or as Python prints it; any other value unchanged."""
    if not isinstance(value, str) or not form.match(value):
        return value
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(Exception):  # it is a text then
            return read(value)
    return value


def _message_of(message: Mapping[str, Any], prompt: RowPrompt) -> dict[str, Any]:
    """Return a message with a list of parts, in which images are parts of their own."""
    prompt.unused += [f"message {key}" for key, value in message.items() if key not in ("role", "content") and value]
    content, role = message.get("content"), message["role"]
    items = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    items = [items] if isinstance(items, Mapping) else items
    if not isinstance(items, list | tuple):
        raise ValueError(f"a message's content is {type(content).__name__}, not a text or a list of parts")
    parts: list[dict[str, Any]] = []
    for item in items:
        kind, value = part_of(item)
        if kind == "image":
            parts.append({"type": "image", **value})
            continue
        text, repaired = repair(value)
        prompt.repaired |= repaired
        parts += text_and_marks(text) if role in ("user", "tool") else [{"type": "text", "text": text}]
    if role == "user" and isinstance(content, str):
        parts[-1]["text"] = parts[-1]["text"].strip()
    return {"role": role, "content": parts}


def part_of(item: Any) -> tuple[str, Any]:
    """Return ("text", its text) or ("image", {} or {"item": image}) of one part of a message. Raise ValueError for
    another."""
    if isinstance(item, str):
        return "text", item
    if not isinstance(item, Mapping):
        raise ValueError(f"a part of a message is {item!r:.60}, not a dict with a type")
    kind = item.get("type") or next((key for key in ("text", "image", "image_url") if item.get(key) is not None), None)
    if kind in ("text", "input_text") and isinstance(item.get("text"), str):
        return "text", item["text"]
    if kind in ("image", "image_url", "input_image"):
        keys = ("image", "image_url", "url", "path", "bytes", "base64")
        image = next((item[key] for key in keys if not is_empty(item.get(key))), None)
        return "image", {} if image is None else {"item": image}
    raise ValueError(f"a part of a message is of type {kind!r}: text and images are read")


def text_and_marks(text: str) -> Iterator[dict[str, Any]]:
    """Yield the texts and marks of a text, in their order."""
    start = 0
    for mark in MARK.finditer(text):
        yield {"type": "text", "text": text[start : mark.start()]}
        yield {"type": "image"} | ({"number": int(mark[1])} if mark[1] else {})
        start = mark.end()
    yield {"type": "text", "text": text[start:]}


def _add_choices(message: dict[str, Any], choices: Sequence[str]) -> None:
    """Append the choices, unless they are mere letters or the message has them already."""
    letters = ascii_uppercase[: len(choices)]
    lines = "\n".join(f"({letter}) {choice}" for letter, choice in zip(letters, choices, strict=True))
    text = "".join(_written(part) for part in message["content"])
    if not choices or lines in text or all(a == b for a, b in zip(choices, letters, strict=True)):
        return
    pieces = [*text_and_marks(f"\nChoices:\n{lines}")]
    if message["content"] and message["content"][-1]["type"] == "text":
        pieces[0]["text"] = message["content"].pop()["text"].rstrip() + pieces[0]["text"]
    message["content"] += pieces


def give_images(marks: Sequence[dict[str, Any]], items: Sequence[Any]) -> None:
    """Give each mark its image. Raise BadImage if marks and images do not fit."""
    numbers = [mark.pop("number", None) for mark in marks]
    if any(numbers):
        if None in numbers:
            raise BadImage("marks with and without a number")
        if wrong := [number for number in numbers if not 1 <= number <= len(items)]:
            raise BadImage(f"a mark <image{wrong[0]}>, but {len(items)} images")
        if unplaced := [number for number in range(1, len(items) + 1) if number not in numbers]:
            raise BadImage(f"image {unplaced[0]} of {len(items)} has no mark <image{unplaced[0]}>")
    elif len(marks) != len(items):
        raise BadImage(f"{len(marks)} <image> marks, but {len(items)} images")
    for index, (mark, number) in enumerate(zip(marks, numbers, strict=True)):
        mark["item"] = items[number - 1 if number else index]


def load_image(load: Load, item: Any) -> Image:
    try:
        return load(item)
    except Exception as error:
        raise BadImage(" ".join(str(error).split())) from error


def _tidied(message: dict[str, Any]) -> Any:
    """Return a message's content: parts for the user, a text alone for others without images."""
    parts = message["content"]
    if message["role"] != "user" and all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return [part for part in parts if part["type"] == "image" or part["text"].strip()]


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def _written(part: Mapping[str, Any]) -> str:
    """Return a part as it stands in a problem's text."""
    return part["text"] if part["type"] == "text" else f"<image{part.get('number', '')}>"
