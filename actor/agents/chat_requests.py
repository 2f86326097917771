"""Reads what clients of OpenAI's API post to `/chat/completions`.

A request is refused in one line if it asks for what would change the answer and is not served here; what changes
nothing is ignored.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from actor.agents.said import Call, ChatMessage, Part, Said, call_of, calls_in_words
from shared.rgb_images import as_png, open_image
from shared.types import Image
from shared.util.lru_cache import LruCache
from shared.util.user_errors import in_words

MODEL = "policy"  # the name of the one model that is served
MAX_MESSAGES, MAX_PARTS = 4096, 1024
MAX_STOPS, MAX_STOP_CHARACTERS = 4, 256
CACHED_IMAGE_BYTES = 256 << 20  # of one session, whose streams hold most of them anyway
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


class RequestReader:
    """Reads the requests of one session. It remembers decoded images, since clients send all of them again with each
    request. Thread-safe."""

    def __init__(self) -> None:
        self._images: LruCache[bytes, Image] = LruCache(CACHED_IMAGE_BYTES, lambda _, image: len(image.data))
        self._lock = threading.Lock()

    def read(self, body: bytes) -> ChatRequest:
        """Return the request in a body. Raise Refused for one that cannot be served."""
        try:
            given = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(f"the body is no JSON: {error}", "invalid_json") from None
        if not isinstance(given, dict):
            raise invalid("the body is no JSON object", "invalid_json")
        given = {name: value for name, value in given.items() if value is not None}
        check_fields(given)
        usage = given.pop("stream_options", {})
        if not isinstance(usage, dict):
            raise invalid(f"stream_options = {in_words(usage)}: write it as {{'include_usage': true}}")
        dialogue = self._dialogue(given.get("messages"), tools_in(given.get("tools", [])))
        return ChatRequest(
            dialogue,
            stops_in(given.get("stop", [])),
            most_tokens_in(given),
            flag_in(given, "stream"),
            flag_in(usage, "include_usage"),
            flag_in(given, "logprobs"),
        )

    def _dialogue(self, given: Any, tools: tuple[dict[str, Any], ...]) -> Dialogue:
        if not isinstance(given, list) or not given:
            raise invalid("'messages' is missing or empty: send a list of at least one message")
        if len(given) > MAX_MESSAGES:
            raise invalid(f"{len(given)} messages: at most {MAX_MESSAGES} are read")
        messages = [self._message(number, each) for number, each in enumerate(given)]
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
        return Dialogue(opening, tuple(rounds), tools, json.dumps(tools, sort_keys=True))

    def _message(self, number: int, given: Any) -> ChatMessage:
        place = f"messages[{number}]"
        if not isinstance(given, dict):
            raise invalid(f"{place} is {in_words(given)}, not an object with 'role' and 'content'")
        if unknown := sorted(set(given) - _OF_MESSAGES):
            raise invalid(f"{place} has {in_words(unknown[0])}, which is not served; leave it out", "unknown_field")
        if filled := [name for name in _EMPTY_IN_MESSAGES if given.get(name)]:
            raise invalid(f"{place} has {filled[0]!r}, which is not served; leave it out", "unknown_field")
        role = given.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise invalid(f"{place}.role = {in_words(role)}: the roles are {', '.join(ROLES)}")
        parts = self._parts(f"{place}.content", given.get("content"), may_be_empty=role == "assistant")
        calls = calls_in(f"{place}.tool_calls", given.get("tool_calls") or [], role)
        if role == "assistant":
            text = "".join(part for part in parts if isinstance(part, str))
            if any(isinstance(part, Image) for part in parts):
                raise invalid(f"{place} shows an image in an answer: a model's answer is text")
            whole = "\n".join(filter(None, (text, calls_in_words(calls))))
            return ChatMessage(Said.of(role, parts, calls), {"role": role, "content": whole})
        shown: list[dict[str, Any]] = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
            for part in parts
        ]
        is_plain = isinstance(given.get("content"), str)
        content = "".join(part for part in parts if isinstance(part, str)) if is_plain else shown
        return ChatMessage(Said.of(ROLES[role], parts), {"role": ROLES[role], "content": content})

    def _parts(self, place: str, content: Any, *, may_be_empty: bool) -> list[Part]:
        if isinstance(content, str):
            return [content]
        if content is None and may_be_empty:
            return []
        if not isinstance(content, list) or not (content or may_be_empty):
            raise invalid(f"{place} is {in_words(content)}, not a text or a list of parts")
        if len(content) > MAX_PARTS:
            raise invalid(f"{place} has {len(content)} parts: at most {MAX_PARTS} are read")
        return [self._part(f"{place}[{number}]", part) for number, part in enumerate(content)]

    def _part(self, place: str, part: Any) -> Part:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            return part["text"]
        if kind != "image_url":
            raise invalid(f"{place} is {in_words(part)}: the parts that are read are text and image_url")
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        if not isinstance(url, str) or not (head := _DATA_URI.match(url)):
            raise invalid(
                f"{place}.image_url is {in_words(url)}: send the image itself, as data:image/png;base64,…",
                "invalid_image_url",
            )
        try:
            return self._image(base64.b64decode(url[head.end() :], validate=True))
        except (binascii.Error, ValueError) as error:
            raise invalid(f"{place}.image_url: {error}", "invalid_image") from None

    def _image(self, data: bytes) -> Image:
        """Return a file's image as the file that stands for its pixels, however they were encoded. Raise ValueError for
        a file of another type."""
        with self._lock:
            return self._images.get(xxhash.xxh3_128_digest(data), lambda: _canonical(data))


def _canonical(data: bytes) -> Image:
    with open_image(data) as file:
        try:
            return Image.of(as_png(file))
        except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, struct.error and others
            words = " ".join(str(error).split())
            raise ValueError(words if isinstance(error, ValueError) else f"{type(error).__name__}: {words}") from error


def check_fields(given: Mapping[str, Any]) -> None:
    """Raise Refused for a field that would change the answer and is not served, and for another model."""
    if (model := given.get("model", MODEL)) != MODEL:
        raise Refused(404, "model_not_found", f"model {in_words(model)} is not served here; the one model is {MODEL!r}")
    for name, value in given.items():
        if name in NEUTRAL:
            if value not in NEUTRAL[name] or (isinstance(value, bool) and not isinstance(NEUTRAL[name][0], bool)):
                only = " or ".join(json.dumps(each) for each in NEUTRAL[name])
                raise invalid(f"{name} = {in_words(value)} is not served: leave it out, or set {only}", "unsupported")
        elif name not in (*READ, *OF_THE_RECIPE, *IGNORED, "stream_options"):
            raise invalid(f"the field {in_words(name)} is not served, and may change the answer; leave it out",
                          "unknown_field")  # fmt: skip


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


def stops_in(given: Any) -> tuple[str, ...]:
    """Return the texts before which an answer ends. Raise Refused for what is none."""
    stops: Sequence[Any] = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise invalid(f"stop = {in_words(given)}: send a text, or a list of texts")
    if len(stops) > MAX_STOPS or any(len(each) > MAX_STOP_CHARACTERS for each in stops):
        raise invalid(f"stop: at most {MAX_STOPS} texts of {MAX_STOP_CHARACTERS} characters are read")
    return tuple(stops)


def most_tokens_in(given: Mapping[str, Any]) -> int | None:
    """Return how long the client wants the answer to be at most. Raise Refused for what is no positive number."""
    limits = [(name, given[name]) for name in ("max_tokens", "max_completion_tokens") if name in given]
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
