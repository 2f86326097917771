"""Rows of demonstrations: whole chats, in the forms in which they are published."""

from __future__ import annotations

import base64
import json

import pytest

from envs.chat_rows import Answer, chat_of
from envs.row_prompts import BadImage
from tests.support.tiny import draw_image, png

PNG = png(draw_image(64, 64))
URI = "data:image/png;base64," + base64.b64encode(PNG).decode()
ASK, SAY = {"role": "user", "content": "what?"}, {"role": "assistant", "content": "this"}
TOOL = {"type": "function", "function": {"name": "zoom", "parameters": {"type": "object", "properties": {}}}}
CALL = {"function": {"name": "zoom", "arguments": "{}"}}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASK, SAY]},
        {"messages": json.dumps([ASK, SAY])},
        {"conversations": [{"from": "human", "value": "what?"}, {"from": "gpt", "value": "this"}]},
        {"prompt": [ASK], "completion": [SAY]},
        {"prompt": "what?", "completion": "this"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}]}, SAY], "images": None},
        {"messages": [ASK, SAY, {"role": "user", "content": "and nobody answers"}]},
    ],
)
def test_a_chat_is_read_in_every_form(row, tmp_path):
    (exchange,) = chat_of(row, tmp_path).exchanges
    assert exchange.messages == ({"role": "user", "content": "what?"},) and exchange.answer == Answer("this")


def test_only_the_completion_and_what_has_no_weight_of_0_is_learned(tmp_path):
    chat = chat_of({"prompt": [ASK, SAY, ASK], "completion": [SAY, ASK, {**SAY, "weight": 0}, ASK, SAY]}, tmp_path)
    assert [each.answer.is_learned for each in chat.exchanges] == [False, True, False, True]


@pytest.mark.parametrize("where", ["part", "url", "mark", "column_part", "file"])
def test_images_stand_in_parts_or_in_a_column(where, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    contents = {
        "part": [{"type": "image", "image": URI}, {"type": "text", "text": "what?"}],
        "url": [{"type": "image_url", "image_url": {"url": URI}}, {"type": "text", "text": "what?"}],
        "mark": "<image>what?",
        "column_part": [{"type": "image"}, {"type": "text", "text": "what?"}],
        "file": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what?"}],
    }
    images = {"images": [{"bytes": PNG}]} if where in ("mark", "column_part") else {}
    chat = chat_of({"messages": [{"role": "user", "content": contents[where]}, SAY], **images}, tmp_path)
    image, text = chat.exchanges[0].messages[0]["content"]
    assert bytes(image["image"].data) == PNG and text == {"type": "text", "text": "what?"}


def test_texts_are_left_as_they_are_written(tmp_path):
    """A problem's text is repaired and stripped, a demonstration is not: its tokens are what is learned."""
    text = " <image>\ttext, then \x08oxed \n"
    chat = chat_of({"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}, tmp_path)
    assert chat.exchanges[0].messages[0]["content"] == text and chat.exchanges[0].answer.text == text


def test_tools_and_calls_are_read(tmp_path):
    for tools in ([TOOL], json.dumps([TOOL])):
        chat = chat_of({"messages": [ASK, {"role": "assistant", "tool_calls": [CALL]}], "tools": tools}, tmp_path)
        assert chat.tools == (TOOL,) and chat.exchanges[0].answer.tool_calls == (CALL,)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"text": "hello"}, "it is no chat: it has none of messages"),
        ({"messages": "hello"}, "it is no chat: messages is a text"),
        ({"messages": {"role": "user"}}, "it is no chat: messages is dict"),
        ({"messages": [ASK]}, "no message of the assistant's is to be learned"),
        ({"messages": [ASK, {**SAY, "weight": 0}]}, "no message of the assistant's is to be learned"),
        ({"messages": [SAY]}, "message 0 is the assistant's, and nothing is shown before it"),
        ({"messages": [ASK, SAY, SAY]}, "message 2 is the assistant's, and nothing is shown before it"),
        ({"messages": [ASK, {"role": "assistant", "content": ""}]}, "message 1 is the assistant's and empty"),
        ({"messages": [ASK, {**SAY, "reasoning_content": "so"}]}, "message 1 has reasoning_content"),
        ({"messages": [ASK, {**SAY, "weight": 0.5}]}, "message 1 has weight 0.5"),
        ({"messages": [ASK, {**SAY, "token_ids": ["a"]}]}, "message 1 has token_ids that are no list of tokens"),
        ({"messages": [ASK, {**SAY, "content": [{"type": "image", "image": URI}]}]}, "shows an image"),
        ({"messages": [{"role": "person", "content": "?"}, SAY]}, "not a dict with a role"),
        ({"messages": [{**ASK, "content": [{"type": "video"}]}, SAY]}, "type 'video'"),
        ({"messages": [ASK, SAY], "tools": ["zoom"]}, "tools are to be schemas with a function"),
    ],
)
def test_a_row_that_teaches_nothing_is_refused_in_a_few_words(row, why, tmp_path):
    with pytest.raises(ValueError, match=why):
        chat_of(row, tmp_path)


@pytest.mark.parametrize("image", ["missing.png", "data:image/png;base64,AAAA", "http://host/a.png"])
def test_an_image_that_cannot_be_read_is_named(image, tmp_path):
    with pytest.raises(BadImage):
        chat_of({"messages": [{"role": "user", "content": [{"type": "image", "image": image}]}, SAY]}, tmp_path)


def test_images_and_their_places_are_as_many(tmp_path):
    with pytest.raises(BadImage, match="0 <image> marks, but 1 images"):
        chat_of({"messages": [ASK, SAY], "images": [URI]}, tmp_path)
