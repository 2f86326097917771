"""Demonstrations as rows of a dataset: whole chats, of which a model is to learn the assistant's messages.

A row holds `messages` (or ShareGPT's `conversations`, or TRL's `prompt` and `completion`, of which only the completion
is learned), and may hold `images`, for the places `<image>` in the texts and the image parts without an image of their
own, and `tools`, the schemas of the tools that the model may call, as a list or as JSON. A message's content is a text
or a list of parts. Of the assistant's messages, `tool_calls` are read, `weight` 0 means that it is not learned, and
`token_ids` are the tokens that a model sampled for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.datasets import image_of
from envs.row_columns import IMAGES, is_empty
from envs.row_prompts import give_images, load_image, messages_of, part_of, text_and_marks
from shared.types import Image

FORMS = ("messages", "conversations", "prompt and completion")
ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Answer:
    """A message of the assistant's. `tool_calls` are as OpenAI writes them; `token_ids`, if any, are the tokens of a
    model that sampled it."""

    text: str
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    token_ids: tuple[int, ...] = ()
    is_learned: bool = True


@dataclass(frozen=True, slots=True)
class ShownAndSaid:
    """Messages that the model is shown, with their images, and its answer to them."""

    messages: tuple[dict[str, Any], ...]
    answer: Answer


@dataclass(frozen=True, slots=True)
class Chat:
    """A demonstration: what is shown and answered, one exchange after another."""

    exchanges: tuple[ShownAndSaid, ...]
    tools: tuple[dict[str, Any], ...] = field(default=())


def chat_of(row: Mapping[str, Any], folder: Path) -> Chat:
    """Return the chat of a row up to the last answer; images that are file names stand beside the dataset, in `folder`.

    Raise ValueError, in a few words, for a row that is no chat, has no answer to learn, or an image that cannot be
    read.
    """
    items: Any = next((row[name] for name in IMAGES if not is_empty(row.get(name))), [])
    items = [*items] if isinstance(items, list | tuple) else [items]
    messages = [_parts_of(message, marked=bool(items)) for message in _messages_in(row)]
    parts = [part for message in messages for part in message["parts"] if part["type"] == "image"]
    give_images([part for part in parts if "item" not in part], items)
    for part in parts:
        part["image"] = load_image(_reader(folder), part.pop("item"))
    exchanges, shown = list[ShownAndSaid](), list[dict[str, Any]]()
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            shown.append({"role": message["role"], "content": _content_of(message["parts"])})
        elif not shown:
            raise ValueError(f"message {number} is the assistant's, and nothing is shown before it")
        else:
            exchanges.append(ShownAndSaid(tuple(shown), _answer_of(message, number)))
            shown = []
    if not any(each.answer.is_learned for each in exchanges):
        raise ValueError("no message of the assistant's is to be learned")
    return Chat(tuple(exchanges), _tools_of(row.get("tools")))


def _reader(folder: Path) -> Callable[[Any], Image]:
    return lambda item: image_of(item, folder)


def _messages_in(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row's messages, those of a prompt with weight 0."""
    for name in ("messages", "conversations"):
        if not is_empty(row.get(name)):
            return [dict(message) for message in messages_of(_as_list(row[name], name))]
    if is_empty(row.get("prompt")) or is_empty(row.get("completion")):
        raise ValueError(f"it is no chat: it has none of {', '.join(FORMS)}")
    prompt = [{**message, "weight": 0} for message in messages_of(row["prompt"])]
    completion = row["completion"]
    if isinstance(completion, str):
        completion = [{"role": ASSISTANT, "content": completion}]
    return prompt + [dict(message) for message in messages_of(_as_list(completion, "completion"))]


def _as_list(value: Any, name: str) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(f"it is no chat: {name} is a text") from None
    if not isinstance(value, list | tuple):
        raise ValueError(f"it is no chat: {name} is {type(value).__name__}, not a list of messages")
    return value


def _parts_of(message: dict[str, Any], *, marked: bool) -> dict[str, Any]:
    """Return a message with its `parts`, texts as they are written. `marked`: `<image>` in the text of others than the
    assistant is the place of an image."""
    content = message.get("content")
    items = [content] if isinstance(content, str | Mapping) else content or []
    if not isinstance(items, list | tuple):
        raise ValueError(f"a message's content is {type(content).__name__}, not a text or a list of parts")
    parts: list[dict[str, Any]] = []
    for kind, value in map(part_of, items):
        if kind == "image":
            parts.append({"type": "image", **value})
        elif marked and message["role"] != ASSISTANT:
            parts += [part for part in text_and_marks(value) if part["type"] == "image" or part["text"]]
        else:
            parts.append({"type": "text", "text": value})
    return {**message, "parts": parts}


def _content_of(parts: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a message's content: a text if it shows no image, since templates of text models know no parts."""
    if any(part["type"] == "image" for part in parts):
        return [*parts]
    return "".join(part["text"] for part in parts)


def _answer_of(message: Mapping[str, Any], number: int) -> Answer:
    """Return the answer in a message of the assistant's. Raise ValueError for one that a model could not have given."""
    if any(part["type"] == "image" for part in message["parts"]):
        raise ValueError(f"message {number} is the assistant's and shows an image; models write text alone")
    if not is_empty(message.get("reasoning_content")):
        raise ValueError(f"message {number} has reasoning_content: write the thoughts into content, as the model does")
    text = "".join(part["text"] for part in message["parts"])
    calls, ids = message.get("tool_calls"), message.get("token_ids")
    calls = [] if is_empty(calls) else calls
    ids = [] if is_empty(ids) else ids
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"message {number} has tool_calls that are no list of calls")
    if not isinstance(ids, list | tuple) or not all(type(each) is int and each >= 0 for each in ids):
        raise ValueError(f"message {number} has token_ids that are no list of tokens")
    if not text and not calls and not ids:
        raise ValueError(f"message {number} is the assistant's and empty")
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise ValueError(f"message {number} has weight {weight!r:.40}: 1 is learned, 0 is not")
    return Answer(text, tuple(calls), tuple(ids), weight != 0)


def _tools_of(value: Any) -> tuple[dict[str, Any], ...]:
    """Return the schemas of a row's tools. Raise ValueError for what are none."""
    if is_empty(value):
        return ()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(f"tools are {value!r:.60}, not a list of schemas") from None
    found = [*value] if isinstance(value, list | tuple) else [value]
    if not all(isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping) for tool in found):
        raise ValueError("tools are to be schemas with a function: {'type': 'function', 'function': {'name': ...}}")
    return tuple(dict(tool) for tool in found)
