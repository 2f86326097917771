"""Reads what clients of OpenAI's API post to `/chat/completions`."""

from __future__ import annotations

import re
from functools import partial
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

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
OF_THE_RECIPE = ("temperature", "top_p", "top_k", "seed")
"""Fields of sampling that the recipe decides on, for training and for evaluation."""
IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    "prompt_cache_retention",
)
"""Fields that change no answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "echo": (False,),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "skip_special_tokens": (False,),
    "chat_template_kwargs": ({},),
}
"""Fields that are served with these values alone, which are those of an answer as the policy gives it."""
READ = ("model", "messages", "tools", "stop", "max_tokens", "max_completion_tokens", "stream", "logprobs")
_OF_MESSAGES = {
    *("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "audio", "function_call", "annotations"),
    *("reasoning", "reasoning_content", "cache_control"),
}
_EMPTY_IN_MESSAGES = ("audio", "function_call")
_DATA_URI = re.compile(r"data:[\w.+/-]*(?:;[\w.+=-]+)*;base64,", re.IGNORECASE)


def read_chat(body: bytes, images: SentImages) -> ChatRequest:
    """Return the request in a body. Raise Refused for one that cannot be served."""
    given = fields_in(body)
    check_fields(given, (*READ, *OF_THE_RECIPE, *IGNORED, "stream_options"), NEUTRAL)
    usage = given.pop("stream_options", {})
    if not isinstance(usage, dict):
        raise invalid(f"stream_options = {in_words(usage)}: write it as {{'include_usage': true}}")
    tools = tools_in(given.get("tools", []))
    messages = [_message(number, each, images) for number, each in enumerate(messages_in(given.get("messages")))]
    return ChatRequest(
        Dialogue.of(messages, tools),
        stops_in("stop", given.get("stop", [])),
        most_tokens_in(given, "max_tokens", "max_completion_tokens"),
        flag_in(given, "stream"),
        flag_in(usage, "include_usage"),
        flag_in(given, "logprobs"),
    )


def _message(number: int, given: Any, images: SentImages) -> ChatMessage:
    place = f"messages[{number}]"
    if not isinstance(given, dict):
        raise invalid(f"{place} is {in_words(given)}, not an object with 'role' and 'content'")
    if unknown := sorted(set(given) - _OF_MESSAGES):
        raise invalid(f"{place} has {in_words(unknown[0])}, which is not served; leave it out", "unknown_field")
    if filled := [name for name in _EMPTY_IN_MESSAGES if given.get(name)]:
        raise invalid(f"{place} has {filled[0]!r}, which is not served; leave it out", "unknown_field")
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{place}.role = {in_words(role)}: the roles are {', '.join(ROLES)}")
    parts = parts_in(f"{place}.content", content, partial(_part, images), may_be_empty=role == "assistant")
    calls = calls_in(f"{place}.tool_calls", given.get("tool_calls") or [], role)
    if role == "assistant":
        return answer_message(place, parts, calls)
    return shown_message(ROLES[role], parts, is_plain=isinstance(content, str))


def _part(images: SentImages, place: str, part: Any) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    if kind != "image_url":
        raise invalid(f"{place} is {in_words(part)}: the parts that are read are text and image_url")
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, dict) else url
    if not isinstance(url, str) or not (head := _DATA_URI.match(url)):
        raise invalid(
            f"{place}.image_url is {in_words(url)}: send the image itself, as data:image/png;base64,…",
            "invalid_image_url",
        )
    return images.decoded(f"{place}.image_url", url[head.end() :])


def tools_in(given: Any) -> tuple[dict[str, Any], ...]:
    """Return the tools of a request. Raise Refused for what is no function with a name."""
    if not isinstance(given, list):
        raise invalid(f"tools = {in_words(given)}: send a list of functions")
    for number, tool in enumerate(given):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise invalid(
                f"tools[{number}] is {in_words(tool)}: send {{'type': 'function', 'function': {{'name': …}}}}"
            )
    return tuple(given)


def calls_in(place: str, given: Any, role: str) -> tuple[Call, ...]:
    """Return the tool calls of an answer. Raise Refused for what is none."""
    if not isinstance(given, list) or (given and role != "assistant"):
        raise invalid(f"{place} is to be a list, in a message of the assistant's")
    found = []
    for number, each in enumerate(given):
        function = each.get("function") if isinstance(each, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            raise invalid(f"{place}[{number}] is {in_words(each)}: send {{'function': {{'name': …, 'arguments': …}}}}")
        found.append(call_of(name, function.get("arguments", "{}")))
    return tuple(found)
