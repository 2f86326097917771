"""Messages to tokens: exactly the chat template's text, encoded once, and never what the model wrote.

A conversation's stream is `start(...)`, then for each turn the sampled tokens as they are, then `observation(...)`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import xxhash
from PIL import Image as PILImage

from shared.guards.png_files import check_chunks
from shared.types import Image
from shared.vision import IMAGE_FORMATS, MAX_IMAGE_PIXELS, VisionSpec

IMAGE_PAD = "<|image_pad|>"
END_OF_TURN = "<|im_end|>"
ANSWER = "(the model's answer)"  # stands for it where only what comes after is wanted
KEPT_TEXTS, KEPT_CHARACTERS = 512, 8192  # of the last texts, and of one that is kept
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fragment:
    """Tokens that no policy sampled: the compact ids, their images in order, and each image's visual tokens."""

    token_ids: tuple[int, ...]
    images: tuple[Image, ...] = ()
    image_tokens: tuple[int, ...] = ()

    @property
    def num_expanded(self) -> int:
        """Tokens that the engine computes: every placeholder counts as its image's visual tokens."""
        return len(self.token_ids) - len(self.images) + sum(self.image_tokens)

    @property
    def digest(self) -> bytes:
        """XXH3 (128 bits) of the tokens and the images' content hashes."""
        hasher = xxhash.xxh3_128(np.asarray(self.token_ids, np.int32).tobytes())
        for image in self.images:
            hasher.update(image.content_hash.encode())
        return hasher.digest()


def of_short(function: Callable[[str], T]) -> Callable[[str], T]:
    """The same, which keeps its last answers to short texts: at most some 50 MB of token ids."""
    kept = lru_cache(maxsize=KEPT_TEXTS)(function)
    return lambda text: kept(text) if len(text) <= KEPT_CHARACTERS else function(text)


class Renderer:
    """Renders with a tokenizer's own chat template. Thread-safe: it keeps nothing but caches.

    `banned_ids` are the ids that the policy must never sample, `end_id` the token that ends its turn.
    """

    def __init__(self, tokenizer: Any, spec: VisionSpec) -> None:
        self.tokenizer, self.spec = tokenizer, spec
        self.banned_ids = spec.banned_ids
        self.end_id = int(tokenizer.convert_tokens_to_ids(END_OF_TURN))
        self.image_id = spec.image_token_id
        if tokenizer.convert_ids_to_tokens(self.image_id) != IMAGE_PAD:
            raise ValueError(
                f"token {self.image_id} of the tokenizer is not {IMAGE_PAD}: is it this model's tokenizer?"
            )
        self._observation_text(json.dumps({"role": "user", "content": "?"}))  # the template can be continued
        self._encode = of_short(self._encode_text)
        self._shape = of_short(self._observation_text)

    def start(self, messages: Sequence[Mapping[str, Any]], images: Sequence[Image] = ()) -> Fragment:
        """The stream up to the model's first turn. `images` serve those image items that hold no image."""
        plain, drawn_images = _split(messages, iter(images))
        text = self._render(plain, generate=True)
        return self._fragment(text, drawn_images)

    def observation(self, message: Mapping[str, Any]) -> Fragment:
        """What follows a turn that ended with `<|im_end|>`: the newline owed, `message`, the generation prompt."""
        plain, images = _split([message], iter(()))
        return self._fragment(self._shape(json.dumps(plain[0])), images)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The model's words of one turn, without the token that ended it."""
        ids = list(token_ids)
        if ids and ids[-1] == self.end_id:
            ids.pop()
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def transcript(self, token_ids: Sequence[int]) -> str:
        """A whole stream as readable text."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def _fragment(self, text: str, images: Sequence[Image | PILImage.Image]) -> Fragment:
        token_ids = self._encode(text)
        if token_ids.count(self.image_id) != len(images):
            raise ValueError(f"{len(images)} images, but the rendered text has {token_ids.count(self.image_id)} places")
        encoded = [_encoded(source) for source in images]
        counts = (self.spec.num_tokens(self.spec.grid(*size)) for _, size in encoded)
        return Fragment(token_ids, tuple(image for image, _ in encoded), tuple(counts))

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _observation_text(self, message: str) -> str:
        """What the template writes after a model's turn that `message` answers: the newline owed, the message, and the
        generation prompt. Templates of thinking models leave out the thoughts of earlier turns; that is before it.
        ValueError if the template ends turns otherwise."""
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
        text = self._render([*turn, json.loads(message)], generate=True)
        _, found, after = text.partition(ANSWER + END_OF_TURN)
        if not found:
            raise ValueError(
                "the chat template does not end the model's turns with <|im_end|>, so that a conversation cannot be "
                "continued; give the model another in chat_template.jinja"
            )
        return after

    def _render(self, messages: Sequence[Mapping[str, Any]], *, generate: bool) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)


def _split(messages: Sequence[Mapping[str, Any]], spare: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages without their images, and the images in order. ValueError for content that is neither."""
    plain: list[dict[str, Any]] = []
    images: list[Any] = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            items = []
            for item in content:
                if item["type"] == "image":
                    image = item.get("image")
                    image = next(spare, None) if image is None else image
                    if image is None:
                        raise ValueError("a message shows more images than the sample has")
                    images.append(image)
                    items.append({"type": "image"})
                elif item["type"] == "text":
                    items.append({"type": "text", "text": item["text"]})
                else:
                    raise ValueError(f"message content of type {item['type']!r}: use text or image")
            content = items
        plain.append({"role": message["role"], "content": content})
    for message in plain:
        _check_text(message["content"])
    return plain, images


def _check_text(content: Any) -> None:
    """A text that spells a placeholder would count as an image."""
    texts = [content] if isinstance(content, str) else [item.get("text", "") for item in content]
    if any(IMAGE_PAD in text for text in texts):
        raise ValueError(f"a message's text holds {IMAGE_PAD}: give the image as an item of its own")


def as_png(picture: PILImage.Image) -> bytes:
    """The file that the engine is given of a picture that an environment drew."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _encoded(source: Any) -> tuple[Image, tuple[int, int]]:
    """The file that the engine is given, and the size (width, height). It is a PNG: servers decode other formats on a
    GPU, to other pixels than the learner sees. ValueError for one that cannot be decoded."""
    if isinstance(source, PILImage.Image):
        return Image.of(as_png(source)), source.size
    data = source.data if isinstance(source, Image) else bytes(source)
    try:
        with PILImage.open(io.BytesIO(data), formats=IMAGE_FORMATS) as opened:
            size, rgb = opened.size, None if opened.format == "PNG" else _rgb(opened)
        if rgb is None:
            check_chunks(data, pixels=True)
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, struct.error and others
        raise ValueError(f"an image cannot be decoded: {type(error).__name__}: {error}") from error
    if rgb is not None:
        return Image.of(as_png(rgb)), size
    image = source if isinstance(source, Image) and source.content_hash else Image.of(data)
    return image, size


def _rgb(opened: PILImage.Image) -> PILImage.Image:
    """The pixels that the learner would make of it."""
    width, height = opened.size
    if width * height > MAX_IMAGE_PIXELS:
        raise ValueError(f"{width}x{height} pixels are more than the {MAX_IMAGE_PIXELS} that are decoded")
    return opened.convert("RGB")
