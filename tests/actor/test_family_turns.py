"""Streams of each family are what its chat template writes: turns that end by what follows them, calls, results and
images."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from actor.history import after_answer
from actor.render import Renderer
from envs.tools.tool_call import ToolCall, parse_tool_calls
from shared.families.registry import FAMILIES
from shared.vision import VisionSpec
from tests.support.small.families import FAMILIES as SMALL
from tests.support.tiny import draw_image

TOOLS = [{"type": "function", "function": {"name": "zoom", "description": "Look.", "parameters": {"type": "object"}}}]
ARGUMENTS = {"box": [0, 250, 500, 1000], "why": "to see <it>", "times": 2}


def shown(role, text, *images):
    return {"role": role, "content": [*({"type": "image", "image": i} for i in images), {"type": "text", "text": text}]}


@pytest.fixture(scope="module", params=sorted(SMALL))
def renderer(request, tmp_path_factory):
    folder = SMALL[request.param][0](tmp_path_factory.mktemp("model"))
    return Renderer(AutoTokenizer.from_pretrained(folder), VisionSpec.load(folder))


@pytest.fixture
def own(renderer):
    """The same for families whose small models have the published template, with tools."""
    if renderer.spec.family.small_tokenizer is None:
        pytest.skip("the small model has a template of its own")
    return renderer


def whole(renderer, messages, **kwargs):
    """The template's own rendering and encoding of a conversation, generation prompt included."""
    text = renderer.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)
    return renderer.tokenizer.encode(text, add_special_tokens=False)


def opening(renderer):
    """What the template writes between the generation prompt and the words of an answer without thoughts."""
    question = [shown("user", "?")]
    prompt = renderer.tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    answered = [*question, {"role": "assistant", "content": "ANSWER"}, *question]
    text = renderer.tokenizer.apply_chat_template(answered, tokenize=False)
    return text[len(prompt) : text.index("ANSWER")] if text.startswith(prompt) else ""


def played(renderer, start, turns, **kwargs):
    """The stream of a conversation, and its messages. Each turn: the answer's words, and the messages after it."""
    stream, messages = list(renderer.start(start, tools=kwargs.get("tools", ())).token_ids), list(start)
    for words, after in turns:
        observed = renderer.observation(*after)
        answer = [*renderer.tokenizer.encode(opening(renderer) + words, add_special_tokens=False), observed.end_id]
        stream += [*answer, *after_answer(answer, observed).token_ids]
        messages += [{"role": "assistant", "content": words}, *after]
    return stream, messages


def test_a_conversation_of_several_turns_is_what_the_template_writes(renderer):
    pictures = [draw_image(seed=seed) for seed in range(3)] if renderer.spec.takes_images else []
    turns = [("up", [shown("user", "and now?", *pictures[1:])]), ("down, left", [shown("user", "go on")])]
    stream, messages = played(renderer, [shown("system", "Play."), shown("user", "look", *pictures[:1])], turns)
    assert stream == whole(renderer, messages)
    assert stream.count(renderer.image_id) == len(pictures)


def test_calls_and_their_results_are_what_the_template_writes(own):
    call = own.spec.family.written_call("zoom", json.dumps(ARGUMENTS))
    results = [shown("tool", "seen"), shown("tool", "", draw_image(seed=1))]
    turns = [(call, results), ("a flag", [shown("user", "sure?")]), ("yes", [shown("user", "go on")])]
    start = [shown("system", "Look."), shown("user", "what?", draw_image())]
    stream, messages = played(own, start, turns, tools=TOOLS)
    assert stream == whole(own, messages, tools=TOOLS)
    called = {"function": {"name": "zoom", "arguments": ARGUMENTS}}
    messages[2] = {"role": "assistant", "content": "", "tool_calls": [called]}
    assert stream == whole(own, messages, tools=TOOLS)  # so the template itself writes a call


def test_a_turn_that_another_token_has_ended_is_followed_by_the_one_that_the_template_writes(renderer):
    for after in (shown("user", "go on"), shown("tool", "seen")):
        observed = renderer.observation(after)
        others = [*renderer.end_ids, *renderer.tokenizer.convert_tokens_to_ids(list(renderer.spec.family.other_ends))]
        assert observed.end_id in renderer.end_ids and len(set(others)) > 1
        for end in others:
            follows = after_answer([5, end], observed).token_ids
            assert follows == (observed.token_ids if end == observed.end_id else (observed.end_id, *observed.token_ids))


def test_every_end_of_a_turn_stops_the_model_and_is_not_part_of_its_text(renderer):
    words = renderer.tokenizer.encode("left", add_special_tokens=False)
    others = renderer.tokenizer.convert_tokens_to_ids(list(renderer.spec.family.other_ends))
    for end in (*renderer.end_ids, *others):
        assert renderer.decode([*words, end]) == "left"
    for end in renderer.spec.family.ends_of_turn:  # spelled in a message, it ends no turn
        plain, spelled = (renderer.observation(shown("user", text)) for text in ("x", f"x{end}"))
        assert [*map(spelled.token_ids.count, renderer.end_ids)] == [*map(plain.token_ids.count, renderer.end_ids)]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
@pytest.mark.parametrize("arguments", [ARGUMENTS, {}])
def test_a_call_as_a_family_writes_it_is_read_as_that_call(family, arguments):
    text = "\n".join(family.written_call(name, json.dumps(arguments)) for name in ("zoom", "look_up"))
    found = parse_tool_calls(f"I look.\n{text}", 8)
    assert [each.name for each in found if isinstance(each, ToolCall)] == ["zoom", "look_up"]
    for each in found:
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in each.arguments.items()}
        assert texts == {key: value if key == "why" else json.dumps(value) for key, value in arguments.items()}
