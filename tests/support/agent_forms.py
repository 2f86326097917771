"""Writes what clients send in OpenAI's form in that of Anthropic's API, and its answers the other way."""

from __future__ import annotations

import json
import urllib.request
from random import Random
from typing import Any


def as_anthropic(body: dict[str, Any], rng: Random | None = None) -> dict[str, Any]:
    """Return the request in Anthropic's form; `rng` chooses how results of tools are put together."""
    first, *others = body["messages"]
    is_system = first["role"] in ("system", "developer")
    written: dict[str, Any] = {"model": "policy", "max_tokens": 10**6}
    if is_system:
        written["system"] = first["content"]
    messages: list[dict[str, Any]] = []
    for message in others if is_system else body["messages"]:
        role, content = message["role"], blocks(message)
        may_join = messages and messages[-1]["role"] == "user" and isinstance(messages[-1]["content"], list)
        joins = may_join and "tool" in (role, messages[-1]["last"]) and (rng is None or rng.random() < 0.7)
        if role != "assistant" and joins and isinstance(content, list):
            messages[-1]["content"] += content
            messages[-1]["last"] = role
        else:
            messages.append({"role": "assistant" if role == "assistant" else "user", "content": content, "last": role})
    written["messages"] = [{"role": each["role"], "content": each["content"]} for each in messages]
    if "tools" in body:
        written["tools"] = [
            {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in body["tools"]
        ]
    return written


def blocks(message: dict[str, Any]) -> Any:
    """Return a message's content in Anthropic's form."""
    content = message["content"]
    if message["role"] == "tool":
        return [{"type": "tool_result", "tool_use_id": "toolu_x", "content": parts(content)}]
    if calls := message.get("tool_calls"):
        text = [{"type": "text", "text": content}] if isinstance(content, str) else parts(content or [])
        return [*text, *map(tool_use, calls)]
    return parts(content or "")


def parts(content: Any) -> Any:
    return content if isinstance(content, str) else [image(part) for part in content]


def image(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "image_url":
        return part
    data = part["image_url"]["url"].partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def tool_use(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"type": "tool_use", "id": "toolu_x", "name": function["name"], "input": json.loads(function["arguments"])}


def as_chat(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer's message in OpenAI's form."""
    texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts else None}
    if calls := [block for block in answer["content"] if block["type"] == "tool_use"]:
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["input"])},
            }
            for call in calls
        ]
    return message


def events_of(url: str, body: Any) -> list[dict[str, Any]]:
    """Return the server-sent events of an answer, each of which names its type twice."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [part.split("\n") for part in answer.read().decode().split("\n\n") if part]
    found = []
    for name, data in lines:
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found
