"""Conversations as agents' clients send them, in whatever form of API: what they mean, and what is refused.

A request is refused in one line if it asks for what would change the answer and is not served here; what changes
nothing is ignored.
"""

from __future__ import annotations

import base64
import binascii
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import xxhash

from actor.agents.said import Call, ChatMessage, Part, Said
from shared.rgb_images import as_png, open_image
from shared.types import Image
from shared.util.lru_cache import LruCache
from shared.util.user_errors import in_words

Block = TypeVar("Block")
MODEL = "policy"  # the name of the one model that is served
MAX_MESSAGES, MAX_PARTS = 4096, 1024
MAX_STOPS, MAX_STOP_CHARACTERS = 4, 256
CACHED_IMAGE_BYTES = 256 << 20  # of one session, whose streams hold most of them anyway


class Refused(Exception):
    """A request that is answered with an error; `str(error)` is its one line."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def invalid(message: str, code: str = "invalid_value") -> Refused:
    """Return the refusal of a request that its sender has to change."""
    return Refused(400, code, message)


@dataclass(frozen=True, slots=True)
class Round:
    """An answer in what a client sends back, and the messages after it."""

    answer: ChatMessage
    after: tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation as a client sends it: the messages before the first answer, then rounds, the last of which ends
    with messages that the policy is to answer. `tools` are the schemas of which the model is told, `tools_key` the form
    in which they are compared."""

    opening: tuple[ChatMessage, ...]
    rounds: tuple[Round, ...]
    tools: tuple[dict[str, Any], ...]
    tools_key: str

    @classmethod
    def of(cls, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> Dialogue:
        """Return the conversation that messages make. Raise Refused if there is nothing in it to answer to."""
        answers = [number for number, message in enumerate(messages) if message.said.role == "assistant"]
        if answers[:1] == [0]:
            raise invalid("the first message is the assistant's: begin with one of the system or the user")
        if messages[-1].said.role == "assistant":
            raise invalid("the last message is the assistant's: an answer cannot be continued; end with another one")
        ends = [*answers[1:], len(messages)]
        rounds = [
            Round(messages[at], tuple(messages[at + 1 : end])) for at, end in zip(answers, ends, strict=bool(answers))
        ]
        opening = tuple(messages[: answers[0] if answers else len(messages)])
        return cls(opening, tuple(rounds), tuple(tools), json.dumps(tools, sort_keys=True))

    @property
    def messages(self) -> list[ChatMessage]:
        return [*self.opening, *(message for each in self.rounds for message in (each.answer, *each.after))]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for one answer. `most`: tokens of it at most, None if the client does not say."""

    dialogue: Dialogue
    stop: tuple[str, ...] = ()
    most: int | None = None
    stream: bool = False
    stream_usage: bool = False
    logprobs: bool = False


class SentImages:
    """The decoded images of one session, which clients send again with each request. Thread-safe."""

    def __init__(self) -> None:
        self._images: LruCache[bytes, Image] = LruCache(CACHED_IMAGE_BYTES, lambda _, image: len(image.data))
        self._lock = threading.Lock()

    def decoded(self, place: str, text: str) -> Image:
        """Return the image of a file in base64, as the file that stands for its pixels, however they were encoded.
        Raise Refused for a text or a file of another kind."""
        try:
            data = base64.b64decode(text, validate=True)
            with self._lock:
                return self._images.get(xxhash.xxh3_128_digest(data), lambda: _canonical(data))
        except (binascii.Error, ValueError) as error:
            raise invalid(f"{place}: {error}", "invalid_image") from None


def _canonical(data: bytes) -> Image:
    with open_image(data) as file:
        try:
            return Image.of(as_png(file))
        except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, struct.error and others
            words = " ".join(str(error).split())
            raise ValueError(words if isinstance(error, ValueError) else f"{type(error).__name__}: {words}") from error


ReadRequest = Callable[[bytes, SentImages], ChatRequest]
"""Reads the body of a request in one form of API. Raises Refused for one that cannot be served."""


def object_in(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Raise Refused for what is none."""
    try:
        given = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"the body is no JSON: {error}", "invalid_json") from None
    if not isinstance(given, dict):
        raise invalid("the body is no JSON object", "invalid_json")
    return given


def fields_in(body: bytes) -> dict[str, Any]:
    """Return the fields of a body that are not null. Raise Refused for a body of another form, and for another
    model."""
    given = object_in(body)
    if (model := given.get("model")) not in (None, MODEL):
        raise Refused(404, "model_not_found", f"model {in_words(model)} is not served here; the one model is {MODEL!r}")
    return {name: value for name, value in given.items() if value is not None}


def check_fields(given: Mapping[str, Any], served: Sequence[str], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise Refused for a field that is not `served` and would change the answer; those that are `neutral` have values
    that do not."""
    for name, value in given.items():
        if name in neutral:
            if value not in neutral[name] or (isinstance(value, bool) and not isinstance(neutral[name][0], bool)):
                only = " or ".join(json.dumps(each) for each in neutral[name])
                raise invalid(f"{name} = {in_words(value)} is not served: leave it out, or set {only}", "unsupported")
        elif name not in served:
            raise invalid(f"the field {in_words(name)} is not served, and may change the answer; leave it out",
                          "unknown_field")  # fmt: skip


def messages_in(given: Any) -> list[Any]:
    """Return the messages of a request as they were given. Raise Refused for none, or too many."""
    if not isinstance(given, list) or not given:
        raise invalid("'messages' is missing or empty: send a list of at least one message")
    if len(given) > MAX_MESSAGES:
        raise invalid(f"{len(given)} messages: at most {MAX_MESSAGES} are read")
    return given


def parts_in(place: str, content: Any, read: Callable[[str, Any], Block], *, may_be_empty: bool) -> list[Block | str]:
    """Return what a content says: a text, or a list of parts, each of which `read` reads. Raise Refused for another
    form."""
    if isinstance(content, str):
        return [content]
    if content is None and may_be_empty:
        return []
    if not isinstance(content, list) or not (content or may_be_empty):
        raise invalid(f"{place} is {in_words(content)}, not a text or a list of parts")
    if len(content) > MAX_PARTS:
        raise invalid(f"{place} has {len(content)} parts: at most {MAX_PARTS} are read")
    return [read(f"{place}[{number}]", part) for number, part in enumerate(content)]


def shown_message(role: str, parts: Sequence[Part], *, is_plain: bool) -> ChatMessage:
    """Return a message that the policy is shown; `is_plain`: its content is one text, not a list."""
    shown: list[dict[str, Any]] = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    content = "".join(part for part in parts if isinstance(part, str)) if is_plain else shown
    return ChatMessage(Said.of(role, parts), {"role": role, "content": content})


def answer_message(place: str, parts: Sequence[Part], calls: tuple[Call, ...]) -> ChatMessage:
    """Return an answer that a client sends back. Raise Refused for one with an image."""
    if any(isinstance(part, Image) for part in parts):
        raise invalid(f"{place} shows an image in an answer: a model's answer is text")
    text = "".join(part for part in parts if isinstance(part, str))
    return ChatMessage(Said.of("assistant", parts, calls), {"role": "assistant", "content": text})


def stops_in(name: str, given: Any) -> tuple[str, ...]:
    """Return the texts before which an answer ends. Raise Refused for what is none."""
    stops: Sequence[Any] = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise invalid(f"{name} = {in_words(given)}: send a text, or a list of texts")
    if len(stops) > MAX_STOPS or any(len(each) > MAX_STOP_CHARACTERS for each in stops):
        raise invalid(f"{name}: at most {MAX_STOPS} texts of {MAX_STOP_CHARACTERS} characters are read")
    return tuple(stops)


def most_tokens_in(given: Mapping[str, Any], *names: str) -> int | None:
    """Return how long the client wants the answer to be at most, by the fields of these names. Raise Refused for what
    is no positive number."""
    limits = [(name, given[name]) for name in names if name in given]
    for name, value in limits:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise invalid(f"{name} = {in_words(value)}: set a whole number above 0, or leave it out")
    return min((value for _, value in limits), default=None)


def flag_in(given: Mapping[str, Any], name: str) -> bool:
    """Return a field that is true or false. Raise Refused for another value."""
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise invalid(f"{name} = {in_words(value)}: set true or false")
    return value
