"""Conversations of agents as a seeded generator makes them up: the same ones written in other ways, and others.

A `Talk` says what the policy has said and what it was shown, in the form in which all of it was first sent. A rewriting
changes how a talk is written down, in OpenAI's form or Anthropic's, and nothing that it says; an edit changes what it
says.
"""

from __future__ import annotations

import asyncio
import copy
import io
import json
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import aiohttp
import numpy as np
from PIL import Image as PILImage

from shared.engine.engine_api import EngineClient, EngineError
from shared.types import Completion, VersionSpan
from tests.support.agent_forms import as_anthropic, as_chat
from tests.support.agent_rig import image_part
from tests.support.tiny import tiny_tokenizer

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
WORDS = ["red", "green", "up", "down", "<answer>", "7", "wall\n", "box", "é", "🙂", "<|im_end|>", "of", "the"]
DOOMED = "doomed"  # a word that the engine does not answer to
Talk = list[dict[str, Any]]


def encode(words: str) -> list[int]:
    return tiny_tokenizer().encode(words, add_special_tokens=False)


@dataclass(frozen=True)
class Asked:
    """What an engine was asked, and what it answered."""

    token_ids: list[int]
    images: list[Any]
    completion: Completion


class Babbler(EngineClient):
    """An engine whose answers are made up from the seeds of the requests, each with a number of its own; `asked` holds
    them by their tokens."""

    def __init__(self) -> None:
        super().__init__("http://babbler:1")
        self.asked: dict[tuple[int, ...], Asked] = {}

    async def generate(self, token_ids: Any, images: Any, sampling: Any, **settings: Any) -> Completion:
        number = settings["seed"]
        rng = Random(number)
        await asyncio.sleep(rng.choice((0, 0, 0.001)))
        if DOOMED in tiny_tokenizer().decode(token_ids[-40:]):
            raise EngineError(self.url, "refused", 400)
        said = f"{rng.choice(('', ' '))}say {number} {rng.choice(WORDS[:9])}{rng.choice(('', ' ', chr(10)))}"
        if rng.random() < 0.4:
            said = f"<think>why {number}{rng.choice(('', chr(10)))}</think>{rng.choice(('', chr(10) * 2))}{said}"
        if rng.random() < 0.3:
            call = {"name": "look", "arguments": {"at": [number, 2], "how": rng.choice(WORDS[:4])}}
            said += f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        ids = encode(said)
        if rng.random() < 0.3:  # as no tokenizer would write it
            letters = [token for each in said for token in encode(each)]
            ids = letters if tiny_tokenizer().decode(letters) == said else ids
        reason = "length" if rng.random() < 0.1 else "stop"
        ids += [] if reason == "length" else [tiny_tokenizer().convert_tokens_to_ids("<|im_end|>")]
        spans = (VersionSpan(number % 5, 0, len(ids)),)
        completion = Completion(tuple(ids), tuple(-rng.random() for _ in ids), spans, reason)
        self.asked[completion.token_ids] = Asked(list(token_ids), list(images), completion)
        return completion


@dataclass
class Speaker:
    """Makes up one conversation, or several at once, with the policy behind a base URL. `segments`: how many streams
    they are; `sent`: what each request said, with the answer's content and calls."""

    rng: Random
    base_url: str
    segments: int = 0
    talks: list[Talk] = field(default_factory=list)
    sent: list[tuple[Talk, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._numbers, self._tools = count(), self.rng.random() < 0.5

    async def speak(self, turns: int) -> None:
        """Make `turns` moves, each of one or several calls."""
        async with aiohttp.ClientSession() as self._client:
            for _ in range(turns):
                moves = (*[self._goes_on] * 3, self._edits, self._at_once, self._begins)
                move = self.rng.choice(moves)
                await (move() if self.talks else self._begins())

    async def _begins(self) -> None:
        opening = [{"role": "system", "content": self._words()}] if self.rng.random() < 0.7 else []
        self.segments += 1
        await self._ask([*opening, *self._shown()])

    async def _goes_on(self) -> None:
        talk = self.talks.pop(self.rng.randrange(len(self.talks)))
        if self.rng.random() < 0.2:
            doomed = [*self._more(), {"role": "user", "content": DOOMED}]
            status, _ = await self._post([*talk, *doomed])
            assert status == 503
        await self._ask([*talk, *self._more()])

    async def _at_once(self) -> None:
        """Go on with one talk in several ways at once, of which one goes on in its stream, and with another."""
        self.rng.shuffle(self.talks)
        talk, ways = self.talks.pop(), self.rng.randint(2, 3)
        asked = [self._ask([*talk, *self._more()]) for _ in range(ways)]
        self.segments += ways - 1
        if self.talks:
            asked.append(self._ask([*self.talks.pop(), *self._more()]))
        await asyncio.gather(*asked)

    async def _edits(self) -> None:
        talk = copy.deepcopy(self.rng.choice(self.talks))
        for message in talk:  # where the start is another, an answer without its thoughts is no longer the policy's
            message["whole"] = True
        self._edit(talk)
        self.segments += 1
        await self._ask([*talk, *self._more()])

    def _edit(self, talk: Talk) -> None:
        rng, answers = self.rng, [number for number, each in enumerate(talk) if each["role"] == "assistant"]
        at = rng.choice(answers)
        answer, first = talk[at], talk[answers[0] - 1]
        kind = rng.choice(("text", "answer", "thought", "call", "image", "drop", "again", "role"))
        if kind == "answer":
            answer["content"] = f"{answer['content'] or ''} no"
        elif kind == "thought":
            visible = (answer["content"] or "").rpartition("</think>")[2]
            answer["content"] = f"<think>another {next(self._numbers)}</think>{visible}"
        elif kind == "call" and answer.get("tool_calls"):
            answer["tool_calls"][0]["function"]["arguments"] = '{"at": 0}'
        elif kind == "image" and (parts := self._image_parts(talk)):
            rng.choice(parts)["image"] = self._image()
        elif kind == "drop" and len(answers) > 1:
            del talk[1 : answers[0] + 1]
            if talk[0]["role"] == "assistant" or talk[1]["role"] == "assistant":
                talk.insert(0, {"role": "user", "content": self._words()})
        elif kind == "again":
            del talk[at:]
            talk.append({"role": "user", "content": self._words()})
        elif kind == "role" and first["role"] == "user":
            first["role"] = "tool"
        else:
            said = talk[rng.randrange(answers[0])]
            content = said["content"]
            if isinstance(content, str):
                said["content"] = content + "!"
            else:
                content.append({"type": "text", "text": self._words()})

    def _image_parts(self, talk: Talk) -> list[dict[str, Any]]:
        """Return the parts with images that stand before the last answer."""
        last = max(number for number, each in enumerate(talk) if each["role"] == "assistant")
        contents = [each["content"] for each in talk[:last] if isinstance(each["content"], list)]
        return [part for content in contents for part in content if part["type"] == "image"]

    def _more(self) -> Talk:
        """Return what the policy is shown next; sometimes with an answer of somebody else's before it."""
        foreign = [*self._shown(), {"role": "assistant", "content": f"foreign {self._words()}"}]
        return [*(foreign if self.rng.random() < 0.1 else []), *self._shown()]

    def _shown(self) -> Talk:
        """Return messages of the user and results of tools."""
        messages: Talk = []
        for _ in range(self.rng.choice((1, 1, 1, 2))):
            role = self.rng.choice(("user", "user", "tool"))
            if self.rng.random() < 0.4:
                parts: list[dict[str, Any]] = [{"type": "image", "image": self._image()}]
                parts += [{"type": "text", "text": self._words()}]
                self.rng.shuffle(parts)
                messages.append({"role": role, "content": parts})
            else:
                messages.append({"role": role, "content": self._words()})
        return messages

    def _words(self) -> str:
        return f"note {next(self._numbers)} {' '.join(self.rng.choices(WORDS, k=self.rng.randint(0, 3)))}.".strip()

    def _image(self) -> PILImage.Image:
        pixels = np.random.default_rng(self.rng.getrandbits(32)).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        return PILImage.fromarray(pixels)

    async def _post(self, talk: Talk) -> tuple[int, Any]:
        body: dict[str, Any] = {"model": "policy", "messages": [self._rewritten(each) for each in talk]}
        if self._tools:
            body["tools"] = [shuffled(self.rng, each) for each in TOOLS]
        in_messages = self.rng.random() < 0.4
        path = "messages" if in_messages else "chat/completions"
        written = as_anthropic(body, self.rng) if in_messages else body
        async with self._client.post(f"{self.base_url}/{path}", json=written) as got:
            answer = await got.json()
        return got.status, answer if got.status != 200 else as_chat(answer) if in_messages else message_of(answer)

    async def _ask(self, talk: Talk) -> None:
        status, message = await self._post(talk)
        assert status == 200, message
        self.sent.append((talk, message))
        self.talks.append([*talk, message])

    def _rewritten(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message, written in another way."""
        rng, content = self.rng, message["content"]
        if message["role"] == "assistant":
            return self._rewritten_answer(message)
        role = rng.choice(("system", "developer")) if message["role"] == "system" else message["role"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        written = [part for each in parts for part in self._rewritten_part(each)]
        for end, blank in ((0, rng.choice(("", "", " "))), (-1, rng.choice(("", "", "\n ")))):
            if written[end]["type"] == "text":
                words = written[end]["text"]
                written[end] = {"type": "text", "text": blank + words if end == 0 else words + blank}
        if len(written) == 1 and written[0]["type"] == "text" and rng.random() < 0.7:
            return {"role": role, "content": written[0]["text"]}
        named = {"tool_call_id": f"id{rng.random()}"} if role == "tool" else {}
        return {"role": role, "content": written, **named}

    def _rewritten_part(self, part: dict[str, Any]) -> list[dict[str, Any]]:
        if part["type"] == "image":
            return [image_part(encoded(self.rng, part["image"]))]
        words, at = part["text"], self.rng.randint(0, len(part["text"]))
        cut = [words[:at], words[at:]] if self.rng.random() < 0.3 else [words]
        return [{"type": "text", "text": each} for each in cut]

    def _rewritten_answer(self, message: dict[str, Any]) -> dict[str, Any]:
        rng, content = self.rng, message["content"] or ""
        if "</think>" in content and not message.get("whole") and rng.random() < 0.6:
            content = content.rpartition("</think>")[2]
        content = rng.choice((content, content.strip(), f" {content}\n"))
        written: dict[str, Any] = {"role": "assistant", "content": content}
        if rng.random() < 0.2 and content.strip():
            written["content"] = [{"type": "text", "text": content}]
        if calls := message.get("tool_calls"):
            written["tool_calls"] = [rewritten_call(rng, call) for call in calls]
            written["content"] = None if not content.strip() and rng.random() < 0.5 else written["content"]
        return written


def message_of(answer: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message


def rewritten_call(rng: Random, call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = shuffled(rng, json.loads(function["arguments"]))
    words = json.dumps(arguments, indent=rng.choice((None, 2)), ensure_ascii=rng.random() < 0.5)
    named = {"name": function["name"], "arguments": words}
    return {"id": f"call_{rng.random()}", "type": "function", "function": named}


def shuffled(rng: Random, value: Any) -> Any:
    """Return plain data with the keys of its objects in another order."""
    if not isinstance(value, dict):
        return value
    names = list(value)
    rng.shuffle(names)
    return {name: shuffled(rng, value[name]) for name in names}


def encoded(rng: Random, image: PILImage.Image) -> bytes:
    """Return a file with the image's pixels, of one kind or another."""
    buffer = io.BytesIO()
    match rng.randrange(4):
        case 0:
            image.save(buffer, "PNG", compress_level=9)
        case 1:
            image.convert("RGBA").save(buffer, "PNG")
        case 2:
            image.save(buffer, "WEBP", lossless=True)
        case _:
            image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
