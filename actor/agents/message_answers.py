"""Writes answers in the form of Anthropic's API: a message, its events for `stream`, and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from actor.agents.agent_session import ChatReply
from actor.agents.dialogues import MODEL, Refused

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


def message_error(refusal: Refused) -> dict[str, Any]:
    """Return the body of an answer with an error."""
    kind = ERRORS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(refusal), "code": refusal.code}}


def message_body(session: str, reply: ChatReply) -> dict[str, Any]:
    """Return the body of an answer that is not streamed. `session` is part of its id."""
    reason = "stop_sequence" if reply.stopped_by and not reply.answer.calls else REASONS[reply.finish_reason]
    return {
        "id": f"msg_{session}_{reply.number}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": _content(session, reply),
        "stop_reason": reason,
        "stop_sequence": reply.stopped_by if reason == "stop_sequence" else None,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": len(reply.answer.token_ids)},
    }


def events(session: str, reply: ChatReply) -> Iterator[dict[str, Any]]:
    """Yield the events of an answer that is streamed: each block comes as one, since it is known as a whole."""
    whole = message_body(session, reply)
    ends = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    begun = whole | {"content": [], **dict.fromkeys(ends), "usage": whole["usage"] | {"output_tokens": 0}}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": ends, "usage": whole["usage"]}
    yield {"type": "message_stop"}


def _content(session: str, reply: ChatReply) -> list[dict[str, Any]]:
    calls = [
        {
            "type": "tool_use",
            "id": f"toolu_{session}_{reply.number}_{number}",
            "name": call.name,
            "input": json.loads(call.arguments),
        }
        for number, call in enumerate(reply.answer.calls)
    ]
    text = [{"type": "text", "text": reply.answer.content}] if reply.answer.content or not calls else []
    return [*text, *calls]
