"""Reads what clients of Anthropic's API post to `/messages`.

A result of a tool is a message of its own for the policy, as in OpenAI's form: the blocks of one user's message before
and after it are others.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import groupby
from typing import Any

from actor.agents.dialogues import (
    ChatRequest,
    Dialogue,
    SentImages,
    answer_message,
    check_fields,
    fields_in,
    flag_in,
    invalid,
    messages_in,
    most_tokens_in,
    parts_in,
    shown_message,
    stops_in,
)
from actor.agents.said import Call, ChatMessage, Part, call_of
from shared.util.user_errors import in_words

READ = ("model", "messages", "system", "tools", "stop_sequences", "max_tokens", "stream")
OF_THE_RECIPE = ("temperature", "top_p", "top_k")
IGNORED = (
    *("metadata", "service_tier", "speed", "cache_control", "container", "inference_geo", "diagnostics"),
    *("user_profile_id", "workspace_id"),
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tool_choice": ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}),
    "thinking": ({"type": "disabled"},),
    "output_config": ({},),
    "mcp_servers": ([],),
}


def read_messages(body: bytes, images: SentImages) -> ChatRequest:
    """Return the request in a body. Raise Refused for one that cannot be served."""
    given = fields_in(body)
    check_fields(given, (*READ, *OF_THE_RECIPE, *IGNORED), NEUTRAL)
    tools = tools_in(given.get("tools", []))
    messages = [*_system(given.get("system", "")), *_messages(messages_in(given.get("messages")), images)]
    return ChatRequest(
        Dialogue.of(messages, tools),
        stops_in("stop_sequences", given.get("stop_sequences", [])),
        most_tokens_in(given, "max_tokens"),
        flag_in(given, "stream"),
    )


def tools_in(given: Any) -> tuple[dict[str, Any], ...]:
    """Return the tools of a request, in OpenAI's form, which chat templates read. Raise Refused for what is no tool of
    the client's own."""
    if not isinstance(given, list):
        raise invalid(f"tools = {in_words(given)}: send a list of tools")
    return tuple(_tool(f"tools[{number}]", tool) for number, tool in enumerate(given))


def _tool(place: str, tool: Any) -> dict[str, Any]:
    is_own = isinstance(tool, dict) and tool.get("type", "custom") in ("custom", None)
    name, schema = (tool.get("name"), tool.get("input_schema")) if is_own else (None, None)
    if not isinstance(name, str) or not name or not isinstance(schema, dict):
        raise invalid(f"{place} is {in_words(tool)}: send {{'name': …, 'input_schema': {{…}}}}")
    described = {"description": tool["description"]} if tool.get("description") is not None else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


def _system(given: Any) -> Iterator[ChatMessage]:
    parts = parts_in("system", given, _text, may_be_empty=True)
    if any(parts):
        yield shown_message("system", parts, is_plain=isinstance(given, str))


def _messages(given: list[Any], images: SentImages) -> Iterator[ChatMessage]:
    for number, message in enumerate(given):
        place = f"messages[{number}]"
        if not isinstance(message, dict):
            raise invalid(f"{place} is {in_words(message)}, not an object with 'role' and 'content'")
        if unknown := sorted(set(message) - {"role", "content"}):
            raise invalid(f"{place} has {in_words(unknown[0])}, which is not served; leave it out", "unknown_field")
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            yield _answer(f"{place}.content", content)
        elif role == "user":
            yield from _shown(f"{place}.content", content, images)
        else:
            raise invalid(f"{place}.role = {in_words(role)}: the roles are user and assistant")


def _answer(place: str, content: Any) -> ChatMessage:
    blocks = parts_in(place, content, _said, may_be_empty=True)
    kinds = [isinstance(block, Call) for block in blocks]
    if kinds != sorted(kinds):
        raise invalid(f"{place}: text after a tool_use; the policy's calls come after its text")
    calls = tuple(block for block in blocks if isinstance(block, Call))
    return answer_message(place, [block for block in blocks if not isinstance(block, Call)], calls)


def _said(place: str, block: Any) -> Part | Call:
    if not isinstance(block, dict) or block.get("type") != "tool_use":
        return _text(place, block, "text and tool_use")
    name, given = block.get("name"), block.get("input", {})
    if not isinstance(name, str) or not isinstance(given, dict):
        raise invalid(f"{place} is {in_words(block)}: send {{'type': 'tool_use', 'name': …, 'input': {{…}}}}")
    return call_of(name, given)


def _shown(place: str, content: Any, images: SentImages) -> Iterator[ChatMessage]:
    """Yield what a message of the user's shows: its results of tools, and what stands between them."""
    blocks = parts_in(place, content, partial(_block, images), may_be_empty=False)
    for is_result, group in groupby(blocks, lambda block: isinstance(block, ChatMessage)):
        if is_result:
            yield from (block for block in group if isinstance(block, ChatMessage))
        else:
            parts = [block for block in group if not isinstance(block, ChatMessage)]
            yield shown_message("user", parts, is_plain=isinstance(content, str))


def _block(images: SentImages, place: str, block: Any) -> Part | ChatMessage:
    if not isinstance(block, dict) or block.get("type") != "tool_result":
        return _part(images, "text, image and tool_result", place, block)
    content = block.get("content")
    read = partial(_part, images, "text and image")
    parts = parts_in(f"{place}.content", content, read, may_be_empty=True)
    return shown_message("tool", parts, is_plain=not isinstance(content, list))


def _part(images: SentImages, kinds: str, place: str, block: Any) -> Part:
    if not isinstance(block, dict) or block.get("type") != "image":
        return _text(place, block, kinds)
    source = block.get("source")
    data = source.get("data") if isinstance(source, dict) and source.get("type") == "base64" else None
    if not isinstance(data, str):
        words = "send the image itself, as {'type': 'base64', 'media_type': …, 'data': …}"
        raise invalid(f"{place}.source is {in_words(source)}: {words}", "invalid_image")
    return images.decoded(f"{place}.source", data)


def _text(place: str, block: Any, kinds: str = "text") -> str:
    if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise invalid(f"{place} is {in_words(block)}: the blocks that are read here are {kinds}")
    text: str = block["text"]
    return text
