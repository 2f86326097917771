"""The forms of API in which the policy answers, by the path that a client posts to; all mean the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from actor.agents.agent_session import ChatReply
from actor.agents.chat_answers import chunks, completion_body, error_body
from actor.agents.chat_requests import read_chat
from actor.agents.dialogues import ChatRequest, ReadRequest, Refused
from actor.agents.message_answers import events, message_body, message_error
from actor.agents.message_requests import read_messages


@dataclass(frozen=True, slots=True)
class ApiForm:
    """How requests are read, and answers written: as a whole, as server-sent events, and for what is refused. `whole`
    and `streamed` get the session's name, the time at which it began, the request, and the answer."""

    read: ReadRequest
    whole: Callable[[str, int, ChatRequest, ChatReply], dict[str, Any]]
    streamed: Callable[[str, int, ChatRequest, ChatReply], Iterator[bytes]]
    error: Callable[[Refused], dict[str, Any]]


def _openai_events(session: str, created: int, request: ChatRequest, reply: ChatReply) -> Iterator[bytes]:
    for chunk in chunks(session, created, request, reply):
        yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
    yield b"data: [DONE]\n\n"


def _anthropic_events(session: str, created: int, request: ChatRequest, reply: ChatReply) -> Iterator[bytes]:
    for event in events(session, reply):
        yield b"event: " + event["type"].encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


def _message(session: str, created: int, request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    return message_body(session, reply)


OPENAI = ApiForm(read_chat, completion_body, _openai_events, error_body)
ANTHROPIC = ApiForm(read_messages, _message, _anthropic_events, message_error)
FORMS = {"/chat/completions": OPENAI, "/messages": ANTHROPIC}


def form_of(path: str) -> ApiForm:
    """Return the form in which a request for this path is answered, also with an error."""
    return next((form for route, form in FORMS.items() if path.endswith(route)), OPENAI)
