"""Turns messages into tokens: exactly the chat template's text, each part encoded once. Text that the model wrote is
never encoded again.

What the chat template writes is control, what a message contains is text: a control token that is spelled in a message
(such as the end of a turn in a web page that a tool has read) is encoded as these letters. Control tokens are the
tokenizer's special tokens and the family's vision tokens. Marks that are no special tokens, such as those of calls and
thoughts, stay tokens wherever they are written: prompts explain tools with them, and they begin and end no turn.

A conversation's stream is `start(...)`, then for each turn the sampled tokens as they are, then `observation(...)`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np
import xxhash
from PIL import Image as PILImage

from envs.messages import split_images
from shared.rgb_images import as_png, plain_png, size_as_shown, to_rgb
from shared.types import Image
from shared.vision import VisionSpec

ANSWER = "(the model's answer)"  # placeholder for the answer when only the text after it is needed
SEAM = "\ufdd0"  # a code point that Unicode never assigns: it marks what is spelled like a control token, but is text
CACHED_TEXTS = 512
CACHED_CHARACTERS = 8192  # longer texts are not cached
PLAIN_TEXT = "plain text"  # the content of a message that is not a list of parts
Layout = tuple[tuple[str, tuple[str, ...]], ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fragment:
    """Tokens that no policy sampled: the compact ids, their images in order, and each image's visual tokens. `end_id`:
    of an observation, the token that ends the turn before it in the chat template. `hint_ids` are no part of it."""

    token_ids: tuple[int, ...]
    images: tuple[Image, ...] = ()
    image_tokens: tuple[int, ...] = ()
    end_id: int = -1
    hint_ids: tuple[int, ...] = ()  # tokens that a teacher alone reads
    hint_back: int = 0  # they stand before so many of the last tokens

    @property
    def num_expanded(self) -> int:
        """Number of tokens that the engine computes: each placeholder counts as its image's visual tokens."""
        return len(self.token_ids) - len(self.images) + sum(self.image_tokens)

    @property
    def digest(self) -> bytes:
        """XXH3 (128 bits) of the tokens and the images' content hashes."""
        hasher = xxhash.xxh3_128(np.asarray(self.token_ids, np.int32).tobytes())
        for image in self.images:
            hasher.update(image.content_hash.encode())
        return hasher.digest()


def cached_if_short(function: Callable[[str], T]) -> Callable[[str], T]:
    """Cache the function's last results for short texts: about 50 MB of token ids at most."""
    cached = lru_cache(maxsize=CACHED_TEXTS)(function)
    return lambda text: cached(text) if len(text) <= CACHED_CHARACTERS else function(text)


class Renderer:
    """Renders messages with a tokenizer's chat template. Thread-safe: its only state are caches.

    `banned_ids` are the ids that the policy must never sample, `end_ids` the tokens that end its turn in the chat
    template, `end_id` the usual one.
    """

    def __init__(self, tokenizer: Any, spec: VisionSpec) -> None:
        self.tokenizer, self.spec = tokenizer, spec
        self.banned_ids = spec.banned_ids
        self.end_ids = tuple(map(int, tokenizer.convert_tokens_to_ids(list(spec.family.ends_of_turn))))
        self.end_id = self.end_ids[0]
        self.image_id = spec.image_token_id
        image_ids = (self.image_id,) if spec.takes_images else ()
        if image_ids and tokenizer.convert_ids_to_tokens(self.image_id) != spec.family.image_placeholder:
            raise ValueError(
                f"token {self.image_id} of the tokenizer is not {spec.family.image_placeholder}: "
                "is it this model's tokenizer?"
            )
        self._controls = control_tokens(tokenizer, (*spec.banned_ids, *self.end_ids, *image_ids))
        self._spelled = spelling_of(self._controls)
        self._stop_ids = stop_ids(tokenizer, self.end_ids, spec.family.other_ends)
        self._starts = {control[:length] for control in self._controls for length in range(1, len(control))}
        self._lengths = range(1, max(map(len, self._controls)))
        self._check_layout = lru_cache(maxsize=CACHED_TEXTS)(self._check_words)
        self._check_tools = lru_cache(maxsize=CACHED_TEXTS)(self._check_names)
        self._shape = cached_if_short(self._observation_text)
        self._shape(json.dumps([{"role": "user", "content": "?"}]))  # checks that turns can follow
        self._encode = cached_if_short(self._encode_text)

    def start(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[Image] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Fragment:
        """Return the stream up to the model's first turn. `images` are used, in order, for image items that contain no
        image; `tools` are the schemas of the tools that the model may call. Raise ValueError for a chat template that
        leaves out tools."""
        plain, drawn_images = self._split(messages, iter(images))
        return self._fragment(self._start_text(plain, tools), drawn_images)

    def num_prompt_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[Image] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> int:
        """Return `num_expanded` of `start`; images are opened for their sizes alone. Raise ValueError as `start`
        does."""
        plain, drawn_images = self._split(messages, iter(images))
        token_ids = self._token_ids(self._start_text(plain, tools), len(drawn_images))
        sizes = [_size_of(image) for image in drawn_images]
        return len(token_ids) + sum(self.spec.num_tokens(self.spec.grid(*size)) - 1 for size in sizes)

    def observation(self, *messages: Mapping[str, Any]) -> Fragment:
        """Return what follows the token that ends a turn, which is the fragment's `end_id`: what the template writes
        between turns, the messages (several are the results of a turn's tool calls), and the generation prompt."""
        plain, images = self._split(messages, iter(()))
        end, after = self._shape(json.dumps(plain))
        return replace(self._fragment(after, images), end_id=self._controls[end])

    def with_hint(self, shown: Fragment, hinted: Fragment) -> Fragment:
        """Return what is shown with the tokens that `hinted`, the same with one more message, has in addition. Raise
        ValueError if the template does not write that message by itself."""
        plain, whole = shown.token_ids, hinted.token_ids
        count = len(whole) - len(plain)
        start = next((i for i, (a, b) in enumerate(zip(plain, whole, strict=False)) if a != b), len(plain))
        if count <= 0 or whole[start + count :] != plain[start:] or shown.images != hinted.images:
            raise ValueError(
                "the chat template does not write a hint as a message of its own, so that none can be given"
            )
        return replace(shown, hint_ids=whole[start : start + count], hint_back=len(plain) - start)

    def foreign_answer(self, text: str, end_id: int | None = None) -> Fragment:
        """Return a turn of the model's that somebody else wrote, with the token that ends it; None = the usual one."""
        return Fragment((*self._encode(self._seamed(text)), self.end_id if end_id is None else end_id))

    def called(self, text: str, calls: Iterable[tuple[str, str]]) -> str:
        """Return an answer of a text and tool calls, each its name and the JSON of its arguments, as the model writes
        them."""
        return "\n".join(filter(None, (text, *(self.spec.family.written_call(*call) for call in calls))))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the model's text of one turn, without the stop tokens that ended it; "" for a turn without tokens."""
        ids = list(token_ids)
        while ids and ids[-1] in self._stop_ids:
            ids.pop()
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def transcript(self, token_ids: Sequence[int]) -> str:
        """Return a whole stream as readable text."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def _fragment(self, text: str, images: Sequence[Image | PILImage.Image]) -> Fragment:
        token_ids = self._token_ids(text, len(images))
        made = [encoded_image(source) for source in images]
        counts = (self.spec.num_tokens(self.spec.grid(*size)) for _, size in made)
        return Fragment(token_ids, tuple(image for image, _ in made), tuple(counts))

    def _token_ids(self, text: str, num_images: int) -> tuple[int, ...]:
        token_ids = self._encode(text)
        if token_ids.count(self.image_id) != num_images:
            raise ValueError(f"{num_images} images, but the rendered text has {token_ids.count(self.image_id)} places")
        return token_ids

    def _encode_text(self, text: str) -> tuple[int, ...]:
        """Return the tokens of rendered text. A control token with `SEAM` in it is encoded as text."""
        if SEAM not in text:
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        ids: list[int] = []
        for piece in self._spelled.split(text):
            if piece in self._controls:
                ids.append(self._controls[piece])
            elif piece:
                ids += self._text_tokenizer.encode(piece.replace(SEAM, ""), add_special_tokens=False).ids
        return tuple(ids)

    @cached_property
    def _text_tokenizer(self) -> Any:
        """A copy of the tokenizer that knows no control tokens."""
        return text_tokenizer(self.tokenizer, self._controls)

    def _start_text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the template's text of a conversation that the model continues. Raise ValueError for a message or a
        tool that the template leaves out."""
        self._check_layout(_layout_of(messages), False)
        seamed = [self._seamed_all(tool) for tool in tools]
        if seamed:
            self._check_tools(json.dumps(seamed))
        return self._render(messages, generate=True, tools=seamed)

    def _check_names(self, tools: str) -> None:
        """Raise ValueError if the template leaves out tools (JSON), tried with a short conversation."""
        read = json.loads(tools)
        text = self._render([{"role": "user", "content": "?"}], generate=True, tools=read)
        if missing := [tool["function"]["name"] for tool in read if tool["function"]["name"] not in text]:
            raise ValueError(
                f"the model's chat template leaves out tools, here {missing[0]!r}: describe them in the system prompt "
                "(envs.tools.tool.tools_in_words) and leave out TOOLS in the module, or give the model another "
                "chat_template.jinja"
            )

    def _observation_text(self, messages: str) -> tuple[str, str]:
        """Return the token that ends a model's turn which is followed by `messages`, and the template's text after it.
        (Templates of thinking models leave out the thoughts of earlier turns, but these come before this text.) Raise
        ValueError if the template ends turns in another way, or leaves out a message."""
        last = json.loads(messages)
        self._check_layout(_layout_of(last), True)
        return self._after_turn(last)

    def _after_turn(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
        text = self._render([*turn, *messages], generate=True)
        after, ends = text.partition(ANSWER)[2], self.spec.family.ends_of_turn
        for end in ends:
            if after.startswith(end):
                return end, after.removeprefix(end)
        raise ValueError(
            f"the chat template does not end the model's turns with {' or '.join(ends)}, so that a conversation cannot "
            "be continued; give the model another in chat_template.jinja"
        )

    def _check_words(self, layout: Layout, after_turn: bool) -> None:
        """Raise ValueError if the template leaves out a text of messages of this layout, tried with other words."""
        words = iter(range(sum(len(parts) for _, parts in layout)))
        messages = [
            {"role": role, "content": f"(words {next(words)})" if parts == (PLAIN_TEXT,) else
             [{"type": part} | ({"text": f"(words {next(words)})"} if part == "text" else {}) for part in parts]}
            for role, parts in layout
        ]  # fmt: skip
        text = self._after_turn(messages)[1] if after_turn else self._render(messages, generate=True)
        for number, message in enumerate(messages):
            content: Any = message["content"]
            texts = [content] if isinstance(content, str) else [item["text"] for item in content if "text" in item]
            if any(each not in text for each in texts):
                what = "an observation" if after_turn else f"message {number} of a prompt"
                raise ValueError(
                    f"the model's chat template leaves out {what} of role {message['role']!r}: the policy would not "
                    "see its words; give it the role 'user', or the model another chat_template.jinja"
                )

    def _split(self, messages: Sequence[Mapping[str, Any]], spare: Any) -> tuple[list[dict[str, Any]], list[Any]]:
        """Return messages without their images and with `SEAM`s, and the images in order. Raise ValueError for content
        of another type, and for an image if the model takes none."""
        plain, images = split_images(messages, spare)
        if images and not self.spec.takes_images:
            raise ValueError(f"{len(images)} images, but {self.spec.family.title} models take text alone")
        for message in plain:
            content = message["content"]
            if isinstance(content, str):
                message["content"] = self._seamed(content)
            else:
                for item in content:
                    if "text" in item:
                        item["text"] = self._seamed(item["text"])
        return plain, images

    def _seamed(self, text: str) -> str:
        """Return a text with a `SEAM` in each control token that it spells, and at its end if it ends with the
        beginning of one, which the next part of the message could complete."""
        if not text.isascii():
            text = text.encode(errors="replace").decode().replace(SEAM, "")  # lone surrogates are no characters
        text = self._spelled.sub(lambda match: match[0][0] + SEAM + match[0][1:], text)
        return text + SEAM if any(text[-length:] in self._starts for length in self._lengths) else text

    def _seamed_all(self, value: Any) -> Any:
        """Return plain data whose texts have `SEAM`s."""
        if isinstance(value, str):
            return self._seamed(value)
        if isinstance(value, Mapping):
            return {self._seamed_all(key): self._seamed_all(each) for key, each in value.items()}
        return [*map(self._seamed_all, value)] if isinstance(value, list | tuple) else value

    def _render(
        self, messages: Sequence[Mapping[str, Any]], *, generate: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=generate
        )


def control_tokens(tokenizer: Any, ids: Iterable[int]) -> dict[str, int]:
    """Return the id of each control token by its spelling: of the tokenizer's special tokens, and of `ids`."""
    added = tokenizer.added_tokens_decoder
    controls = {token.content: number for number, token in added.items() if token.special}
    return controls | {tokenizer.convert_ids_to_tokens(number): number for number in ids}


def spelling_of(controls: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches every control token, longer ones first, as its one group."""
    return re.compile("(" + "|".join(map(re.escape, sorted(controls, key=len, reverse=True))) + ")")


def stop_ids(tokenizer: Any, end_ids: Iterable[int], other_ends: Iterable[str]) -> frozenset[int]:
    """Return the tokens that may end a turn: the family's, and those that end a text for the tokenizer."""
    others = (tokenizer.eos_token_id, tokenizer.pad_token_id, *map(tokenizer.convert_tokens_to_ids, other_ends))
    return frozenset({*end_ids, *(number for number in others if isinstance(number, int) and number >= 0)})


def text_tokenizer(tokenizer: Any, controls: Iterable[str]) -> Any:
    """Return a copy of a tokenizer (of the library `tokenizers`) that encodes the spelling of `controls` as text."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["special"] or token["content"] in set(controls)
    copy = type(tokenizer.backend_tokenizer).from_str(json.dumps(state))
    copy.encode_special_tokens = True
    return copy


def _layout_of(messages: Sequence[Mapping[str, Any]]) -> Layout:
    """Return each message's role and the types of its parts."""
    contents = [(message["role"], message["content"]) for message in messages]
    return tuple(
        (role, (PLAIN_TEXT,) if isinstance(content, str) else tuple(item["type"] for item in content))
        for role, content in contents
    )


def _size_of(source: Any) -> tuple[int, int]:
    """Return (width, height) of the image that `encoded_image` makes. Raise ValueError for a file that is no image."""
    if isinstance(source, PILImage.Image):
        return to_rgb(source).size
    return size_as_shown(_data_of(source))


def _data_of(source: Any) -> bytes | memoryview:
    """Return the bytes of an image file. Raise TypeError for another object, such as an array."""
    if isinstance(source, Image):
        return source.data
    if not isinstance(source, bytes | bytearray | memoryview):
        raise TypeError(f"it is {type(source).__name__}, not a PIL image: make it one, as with PIL.Image.fromarray")
    return bytes(source)


def encoded_image(source: Any) -> tuple[Image, tuple[int, int]]:
    """Return the file that the engine gets, always a plain PNG, and the image's size (width, height). Raise ValueError
    for an image that cannot be decoded."""
    try:
        if isinstance(source, PILImage.Image):
            rgb = to_rgb(source)
            return Image.of(as_png(rgb)), rgb.size
        data, size = plain_png(_data_of(source))
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, struct.error and others
        raise ValueError(f"an image cannot be decoded: {error}") from error
    same = isinstance(source, Image) and source.content_hash and data is source.data
    return source if same else Image.of(data), size
