"""A model behind a server with OpenAI's API (/chat/completions) as the policy of an episode: it is sent the
conversation with its images and tools, and answers with a text.

Its answers are also put into tokens, by the tokenizer of the recipe's model, for records: nobody trains on them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actor.episode import EpisodeLimits, Stream, episode_seed
from actor.history import first_shown, without_images
from actor.render import Renderer, encoded_image
from actor.rewards import answered, image_uri
from actor.turn_sampler import EpisodeEnded
from envs.messages import split_images
from shared.engine.http_client import HttpFailure, JsonClient
from shared.types import Completion, Ending, Image, Ticket, VersionSpan
from shared.util.http_status import RETRY_STATUS
from shared.util.user_errors import in_words

log = logging.getLogger("actor")
TRIES = 6
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 120.0  # between tries, whatever the server asks for
UNKNOWN_FIELDS = ("seed", "temperature", "max_tokens")
"""What some models refuse: it is left out from then on, and `max_tokens` gets its other name."""
HIDDEN = "(the API key)"


class ApiRefused(Exception):
    """The server refuses such requests altogether; the message says why, in one line."""


@dataclass(slots=True)
class Usage:
    """What the answers of one episode have taken, as the server counts it."""

    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    retries: int = 0


@dataclass(slots=True)
class ApiModel:
    """A model by its name at a server. `max_tokens` is the most of one answer; `concurrency` that of open requests."""

    http: JsonClient
    name: str
    key: str
    max_tokens: int
    timeout_s: float
    concurrency: int
    _left_out: set[str] = field(init=False, default_factory=set)
    _places: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.concurrency)

    async def answer(self, body: dict[str, Any], usage: Usage) -> dict[str, Any]:
        """Return the first choice of the server's answer to a request. Raise ApiRefused if it refuses the key, the
        model or the form of the request, HttpFailure or TimeoutError if it stays busy, broken or silent."""

        def pause_s(attempt: int, failure: HttpFailure) -> float | None:
            pause = max(FIRST_PAUSE_S * 2**attempt, failure.retry_after_s)
            if pause > MAX_PAUSE_S:
                return None
            usage.retries += 1
            return pause

        async with self._places:
            try:
                return self._choice(await answered(lambda: self._adapting(body), TRIES, pause_s), usage)
            except HttpFailure as failure:
                if failure.status and failure.status not in RETRY_STATUS:
                    raise ApiRefused(await self._why(failure, body)) from None
                raise

    async def _adapting(self, body: Mapping[str, Any]) -> Any:
        """Send a request, again without each field that the server refuses and that can be left out."""
        while True:
            try:
                return await self._sent(body)
            except HttpFailure as failure:
                if not self._adapted(failure):
                    raise

    async def _sent(self, body: Mapping[str, Any]) -> Any:
        sent = {name: value for name, value in body.items() if name not in self._left_out}
        if "max_tokens" in self._left_out:
            sent["max_completion_tokens"] = body["max_tokens"]
        return await self.http.request("POST", "/chat/completions", sent, timeout_s=self.timeout_s)

    def _adapted(self, failure: HttpFailure) -> bool:
        """Tell whether the server has refused a field that can be left out, which is then left out."""
        if failure.status not in (400, 422):
            return False
        for name in UNKNOWN_FIELDS:
            if name in failure.reason and name not in self._left_out:
                self._left_out.add(name)
                log.warning("%s takes no %s: it is left out", self.name, name)
                return True
        return False

    async def _why(self, failure: HttpFailure, body: Mapping[str, Any]) -> str:
        """Return why a request is refused; whether it is for its images, the same without them tells."""
        words = self.hidden(str(failure))
        if failure.status in (401, 403):
            return f"{words}; is the API key in the environment variable that --api-key-env names?"
        if _has_images(body["messages"]):
            try:
                await self._sent({**body, "messages": [_text_alone(message) for message in body["messages"]]})
            except HttpFailure:
                return words
            return f"the model {self.name!r} takes no images, and this task shows some: {words}"
        return words

    def _choice(self, answer: Any, usage: Usage) -> dict[str, Any]:
        """Return the first choice of an answer, whose tokens are counted."""
        try:
            choice, counts = answer["choices"][0], answer.get("usage") or {}
            content = choice["message"].get("content")
            if content is not None and not isinstance(content, str):
                raise TypeError
            usage.prompt_tokens += int(counts.get("prompt_tokens") or 0)
            usage.answer_tokens += int(counts.get("completion_tokens") or 0)
            usage.requests += 1
            return dict(choice)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            words = self.hidden(in_words(answer, 200))
            raise ApiRefused(f"{self.http.url}: its answer is no chat completion: {words}") from None

    def hidden(self, text: str) -> str:
        """Return a text without the API key, which a server may repeat."""
        return text.replace(self.key, HIDDEN) if self.key else text


class ApiSampler:
    """Asks for the turns of one episode. Its methods raise `EpisodeEnded` when the episode is over."""

    def __init__(self, model: ApiModel, ticket: Ticket, index: int, renderer: Renderer, limits: EpisodeLimits) -> None:
        self.usage = Usage()
        self._model, self._ticket, self._index = model, ticket, index
        self._renderer, self._limits = renderer, limits
        self._observations: list[list[dict[str, Any]]] = []  # the first is after the prompt
        self._said: list[dict[str, Any]] = []
        self._prompt, _ = _filled(ticket.sample.prompt, ticket.sample.images)
        self._text = ""

    def shown(self, messages: Sequence[dict[str, Any]]) -> None:
        """Take in what the environment shows next."""
        self._observations.append(list(messages))

    def most_tokens(self, stream: Stream, num_sampled: int) -> int:
        """Return how many tokens the next turn may have; the model's own context is its server's business."""
        return self._model.max_tokens

    async def generate(self, stream: Stream, turn: int, most: int) -> Completion:
        """Return the model's answer to the conversation so far, with the tokens of the recipe's model."""
        body: dict[str, Any] = {
            "model": self._model.name,
            "messages": self._conversation(),
            "temperature": self._ticket.sampling.temperature,
            "max_tokens": most,
            "seed": episode_seed(self._ticket, self._index, turn) or 0,
        }
        if self._ticket.sample.tools:
            body["tools"] = list(self._ticket.sample.tools)
        try:
            choice = await self._model.answer(body, self.usage)
        except (HttpFailure, TimeoutError) as failure:
            raise EpisodeEnded(Ending.ENGINE_ERROR, self._model.hidden(str(failure))) from None
        message = choice["message"]
        self._said.append(_as_sent(message))
        self._text = self._renderer.called(*_text_and_calls(message))
        token_ids = self._renderer.foreign_answer(self._text).token_ids
        reason = "length" if choice.get("finish_reason") == "length" else "stop"
        return Completion(token_ids, (0.0,) * len(token_ids), (VersionSpan(0, 0, len(token_ids)),), reason)

    def text(self, completion: Completion) -> str:
        """Return the last answer's text; its calls of tools in the form in which the recipe's model writes them."""
        return self._text

    def check_finish(self, completion: Completion, stream: Stream) -> None:
        """Raise EpisodeEnded if the answer was cut off."""
        if completion.finish_reason == "length":
            raise EpisodeEnded(Ending.OUT_OF_TOKENS)

    def _conversation(self) -> list[dict[str, Any]]:
        """Return the messages that the model is sent, within the window of the recipe."""
        first, with_images = first_shown(self._limits.window, self._observations)
        sent = [_sent(message, {}) for message in self._prompt]
        ids: list[str] = []
        for number, messages in enumerate(self._observations[first:], first):
            visible = messages if number >= with_images else without_images(messages)
            sent += _observation(visible, ids)
            if number < len(self._said):
                sent.append(self._said[number])
                ids = [call["id"] for call in self._said[number].get("tool_calls", ())]
        return sent


def _observation(messages: Sequence[dict[str, Any]], ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return an observation's messages as they are sent. `ids` are those of the calls before it: each call is answered
    by one message of the role `tool`, in order, and the images of these follow as a message of the user's."""
    left, tools, others = list(ids), list[dict[str, Any]](), list[dict[str, Any]]()
    for message in messages:
        if message["role"] == "tool" and left:
            text, images = _parts(message)
            tools.append({"role": "tool", "tool_call_id": left.pop(0), "content": text})
            others += [{"role": "user", "content": images}] if images else []
        else:
            others.append(_sent(message, {"tool": "user"}))
    tools += [{"role": "tool", "tool_call_id": each, "content": "not run"} for each in left]
    return [*tools, *others]


def _sent(message: Mapping[str, Any], roles: Mapping[str, str]) -> dict[str, Any]:
    text, images = _parts(message)
    role = roles.get(message["role"], message["role"])
    return {"role": role, "content": [*images, *([{"type": "text", "text": text}] if text else [])] if images else text}


def _parts(message: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Return a message's text, and its images in the form of the API."""
    content = message["content"]
    if isinstance(content, str):
        return content, []
    texts = [part["text"] for part in content if part["type"] == "text"]
    uris = [image_uri(encoded_image(part["image"])[0]) for part in content if part["type"] == "image"]
    return "\n".join(texts), [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]


def _filled(messages: Sequence[dict[str, Any]], images: Sequence[Image]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return a prompt's messages with the sample's images in them."""
    plain, found = split_images(messages, iter(images))
    spare = iter(found)
    for message in plain:
        if not isinstance(message["content"], str):
            message["content"] = [
                {**part, "image": next(spare)} if part["type"] == "image" else part for part in message["content"]
            ]
    return plain, found


def _as_sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's message as it is sent back to it: without what only answers may have."""
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, dict) and call.get("id")]
    return {"role": "assistant", "content": message.get("content") or "", **({"tool_calls": calls} if calls else {})}


def _text_and_calls(message: Mapping[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (ValueError, TypeError):
            arguments = function.get("arguments")  # the environment says what is wrong with it
        calls.append((function.get("name") or "", json.dumps(arguments, ensure_ascii=False)))
    return message.get("content") or "", calls


def _has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(not isinstance(message["content"], str) for message in messages)


def _text_alone(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return dict(message)
    texts = [part["text"] for part in content if part["type"] == "text"]
    return {**message, "content": "\n".join(texts) or "?"}
