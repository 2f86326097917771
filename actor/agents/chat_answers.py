"""Writes answers in the form of OpenAI's API: a completion, its chunks for `stream`, the models, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from actor.agents.agent_session import ChatReply
from actor.agents.dialogues import MODEL, ChatRequest, Refused

OWNER = "pronk"


def models(created: int) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": created, "owned_by": OWNER}]}


def error_body(refusal: Refused) -> dict[str, Any]:
    """Return the body of an answer with an error."""
    kinds = {404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error")
    return {"error": {"message": str(refusal), "type": kind, "param": None, "code": refusal.code}}


def completion_body(session: str, created: int, request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    """Return the body of an answer that is not streamed. `session` is part of its id."""
    message: dict[str, Any] = {"role": "assistant", "content": _content(reply)}
    if reply.answer.calls:
        message["tool_calls"] = _calls(session, reply)
    choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason, "logprobs": None}
    if request.logprobs:
        choice["logprobs"] = _logprobs(reply)
    return _head("chat.completion", session, created, reply) | {"choices": [choice], "usage": _usage(reply)}


def chunks(session: str, created: int, request: ChatRequest, reply: ChatReply) -> Iterator[dict[str, Any]]:
    """Yield the parts of an answer that is streamed: its text comes as one, since it is known as a whole."""
    head = _head("chat.completion.chunk", session, created, reply)

    def chunk(delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return head | {"choices": [choice]}

    yield chunk({"role": "assistant", "content": ""})
    if content := _content(reply):
        yield chunk({"content": content}, None, _logprobs(reply) if request.logprobs else None)
    for index, call in enumerate(_calls(session, reply)):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, reply.finish_reason)
    if request.stream_usage:
        yield head | {"choices": [], "usage": _usage(reply)}


def _head(kind: str, session: str, created: int, reply: ChatReply) -> dict[str, Any]:
    return {"id": f"chatcmpl-{session}-{reply.number}", "object": kind, "created": created, "model": MODEL}


def _content(reply: ChatReply) -> str | None:
    return reply.answer.content if reply.answer.content or not reply.answer.calls else None


def _calls(session: str, reply: ChatReply) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{session}_{reply.number}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(reply.answer.calls)
    ]


def _usage(reply: ChatReply) -> dict[str, Any]:
    completion = len(reply.answer.token_ids)
    total = reply.prompt_tokens + completion
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": completion, "total_tokens": total}


def _logprobs(reply: ChatReply) -> dict[str, Any]:
    return {
        "content": [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in reply.tokens
        ]
    }
