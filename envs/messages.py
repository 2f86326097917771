"""Chat messages: text, or a list of parts, each a text or an image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shared.util.user_errors import in_words


def split_images(messages: Sequence[Mapping[str, Any]], spare: Iterator[Any]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return copies of the messages without their images, and the images in order. A part {"type": "image"} without an
    image takes the next one of `spare`. Raise ValueError for content that is neither text nor image."""
    plain: list[dict[str, Any]] = []
    images: list[Any] = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str | list | tuple):
            raise ValueError(f"a message's content is {type(content).__name__}, not text or a list of parts")
        if not isinstance(content, str):
            items = []
            for item in content:
                if not isinstance(item, dict) or "type" not in item:
                    raise ValueError(f"a part of a message is {in_words(item)}, not a dict with a type, text or image")
                if item["type"] == "image":
                    image = item.get("image")
                    image = next(spare, None) if image is None else image
                    if image is None:
                        raise ValueError("a message shows more images than the sample has")
                    images.append(image)
                    items.append({"type": "image"})
                elif item["type"] == "text" and isinstance(item.get("text"), str):
                    items.append({"type": "text", "text": item["text"]})
                else:
                    raise ValueError(f"message content of type {item['type']!r}: use text or image")
            content = items
        plain.append({"role": message["role"], "content": content})
    return plain, images
