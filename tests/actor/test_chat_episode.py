"""A chat that is shown to the model has the tokens of a rollout in which the model said the same."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest

from actor.chat_episode import TooLong, chat_episode
from actor.render import Renderer
from envs.chat_rows import chat_of
from launch.tiny_models.build import TOOLS_TEMPLATE
from shared.vision import VisionSpec
from tests.support.tiny import draw_image, png, tiny_tokenizer

URI = "data:image/png;base64," + base64.b64encode(png(draw_image(64, 96))).decode()
IMAGE = {"type": "image", "image": URI}
CHAT = [
    {"role": "system", "content": "Play."},
    {"role": "user", "content": [IMAGE, {"type": "text", "text": "Valid last actions: up, left."}]},
    {"role": "assistant", "content": "<answer>up, left</answer>"},
    {"role": "user", "content": [{"type": "text", "text": "and now"}, IMAGE, IMAGE]},
    {"role": "assistant", "content": "<answer>down</answer>"},
]


@pytest.fixture(scope="module")
def renderer(spec) -> Renderer:
    return Renderer(tiny_tokenizer(), spec)


def episode(renderer, *messages, max_context=4096, **row):
    return chat_episode(chat_of({"messages": messages or CHAT, **row}, Path()), renderer, max_context)


def test_a_chat_is_the_templates_own_text_up_to_its_last_answer(renderer):
    shown = episode(renderer)
    plain = [{**m, "content": m["content"] if isinstance(m["content"], str) else
              [{"type": "image"} if "image" in p else p for p in m["content"]]} for m in CHAT]  # fmt: skip
    whole = renderer.tokenizer.apply_chat_template(plain, tokenize=False).removesuffix("\n")
    assert renderer.transcript(shown.token_ids.tolist()) == whole
    assert len(shown.images) == 3 and int(sum(shown.token_ids == renderer.image_id)) == 3


def test_the_mask_marks_the_answers_with_their_end_and_nothing_else(renderer):
    shown = episode(renderer)
    answers = [renderer.transcript(shown.token_ids[turn.start : turn.end].tolist()) for turn in shown.turns]
    assert answers == ["<answer>up, left</answer><|im_end|>", "<answer>down</answer><|im_end|>"]
    marked = np.zeros_like(shown.loss_mask)
    for turn in shown.turns:
        marked[turn.start : turn.end] = 1
    assert np.array_equal(marked, shown.loss_mask) and shown.trainable and not shown.behaviour_logprobs.any()


def test_an_answer_of_weight_0_is_read_and_not_learned(renderer):
    both, last = episode(renderer), episode(renderer, *CHAT[:2], {**CHAT[2], "weight": 0}, *CHAT[3:])
    assert np.array_equal(both.token_ids, last.token_ids) and last.turns == both.turns[1:]
    assert last.loss_mask.sum() == both.turns[1].end - both.turns[1].start


def test_tokens_that_a_model_sampled_are_taken_if_they_spell_the_text(renderer):
    by_letters = [*(renderer.tokenizer.encode(each)[0] for each in "down"), renderer.end_id]
    cut = by_letters[:2]
    ask = CHAT[1]
    for ids, text, taken in (
        (by_letters, "down", True),
        (cut, "do", True),  # a turn that a limit cut off has no end
        (by_letters, "up", False),  # of another tokenizer
        ([10**9], "down", False),
        ([renderer.image_id], "<|image_pad|>", False),
    ):
        shown = episode(renderer, ask, {"role": "assistant", "content": text, "token_ids": ids})
        answer = shown.token_ids[shown.turns[0].start :].tolist()
        assert answer == (ids if taken else [*renderer.foreign_answer(text).token_ids])
        assert renderer.image_id not in answer


def test_tool_calls_are_written_as_the_model_writes_them_and_tools_are_shown(spec):
    tokenizer = tiny_tokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "chat_template", TOOLS_TEMPLATE)
        renderer = Renderer(tokenizer, spec)
        call = {"id": "1", "type": "function", "function": {"name": "zoom", "arguments": '{"x": 1}'}}
        tool = {"type": "function", "function": {"name": "zoom"}}
        answer = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
        shown = episode(renderer, CHAT[1], answer, {"role": "tool", "content": "7"}, CHAT[4], tools=[tool])
        text = renderer.transcript(shown.token_ids.tolist())
    assert text.startswith("<|im_start|>system\nTools: zoom<|im_end|>")
    assert 'I look.\n<tool_call>\n{"name": "zoom", "arguments": {"x": 1}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>tool\n7<|im_end|>" in text


def test_a_call_without_a_name_is_refused(renderer):
    with pytest.raises(ValueError, match="without the name of its function"):
        episode(renderer, CHAT[1], {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]})


def test_a_chat_longer_than_the_context_is_refused_with_its_images_counted(renderer):
    shown = episode(renderer)
    visual = sum(renderer.spec.num_tokens(renderer.spec.grid(64, 96)) for _ in shown.images)
    length = len(shown.token_ids) - len(shown.images) + visual
    assert len(episode(renderer, max_context=length).token_ids)
    with pytest.raises(TooLong, match=f"{length} of {length - 1} tokens"):
        episode(renderer, max_context=length - 1)


def test_an_image_is_refused_for_a_model_of_text(tmp_path):
    spec = VisionSpec.load("launch/models/colour_text_tiny")
    from transformers import PreTrainedTokenizerFast

    renderer = Renderer(PreTrainedTokenizerFast.from_pretrained("launch/models/colour_text_tiny"), spec)
    with pytest.raises(ValueError, match="take text alone"):
        episode(renderer)
