"""Agents that play through the clients of OpenAI and Anthropic, as these are published: make test-clients."""

from __future__ import annotations

import base64

import pytest

from actor.episode import EpisodeLimits
from actor.render import Renderer
from launch.tiny_models.build import TOOLS_TEMPLATE, build_tokenizer
from shared.engine.engine_api import EngineError
from shared.types import Ending
from shared.vision import VisionSpec
from tests.support.agent_rig import image_part, play_agent, text
from tests.support.rollout_rig import completion, threads
from tests.support.tiny import PHRASES, draw_image, png

openai = pytest.importorskip("openai", reason="make test-clients installs it")
anthropic = pytest.importorskip("anthropic", reason="make test-clients installs it")
__all__ = ["threads"]  # a fixture
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": [1, 2]}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"at": {"type": "array"}}}
PICTURE = png(draw_image(64, 64, 5))


@pytest.fixture(scope="module")
def renderer(folder):
    return Renderer(build_tokenizer(PHRASES, 640, TOOLS_TEMPLATE), VisionSpec.load(folder))


def with_openai(base_url, sample, args):
    tools = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    with openai.OpenAI(base_url=base_url, api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["policy"]
        parts = [image_part(PICTURE), {"type": "text", "text": "Which move?"}]
        messages = [text("Play.", "system"), {"role": "user", "content": parts}]
        first = client.chat.completions.create(model="policy", messages=messages, tools=tools, temperature=0)
        (call,) = first.choices[0].message.tool_calls
        assert call.function.name == "look" and first.choices[0].finish_reason == "tool_calls"
        messages += [first.choices[0].message]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "a wall"}]
        words = ""
        with client.chat.completions.stream(model="policy", messages=messages, tools=tools) as stream:
            for event in stream:
                words += event.delta if event.type == "content.delta" else ""
        assert words == "up"
    return 1.0


def with_anthropic(base_url, sample, args):
    data = base64.b64encode(PICTURE).decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    asked = {"model": "policy", "max_tokens": 256, "system": "Play."}
    asked |= {"tools": [{"name": "look", "input_schema": SCHEMA}]}
    with anthropic.Anthropic(base_url=base_url, api_key="none") as client:
        messages = [{"role": "user", "content": [image, {"type": "text", "text": "Which move?"}]}]
        first = client.messages.create(messages=messages, **asked)
        words, call = first.content
        assert (words.text, call.name, call.input) == ("I look.", "look", {"at": [1, 2]})
        assert first.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "a wall"}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        with client.messages.stream(messages=messages, **asked) as stream:
            assert "".join(stream.text_stream) == "up"
            final = stream.get_final_message()
        assert final.stop_reason == "end_turn" and final.usage.output_tokens > 0
    return 1.0


async def with_async_anthropic(base_url, sample, args):
    async with anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key="none") as client:
        question = [text("Which move?")]
        answer = await client.messages.create(model="policy", max_tokens=9, messages=question, stop_sequences=["</a"])
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "</a")
        with pytest.raises(anthropic.BadRequestError) as failure:
            await client.messages.create(model="policy", max_tokens=9, messages=question)
    assert failure.value.body["error"]["code"] == "max_turns"
    return 1.0


@pytest.mark.parametrize("run", [with_openai, with_anthropic])
def test_a_conversation_with_a_tool_and_an_image_is_one_segment(renderer, threads, run):
    trajectory, engine = play_agent(renderer, threads, run, [f"I look.\n{CALL}", "up"])
    assert trajectory.ending is Ending.COMPLETED, trajectory.error
    assert trajectory.segments == () and len(trajectory.turns) == 2 and len(trajectory.images) == 1
    assert trajectory.metrics["agent_refused"] == 0.0 and len(engine.requests) == 2


def test_both_give_the_policy_the_same_tokens(renderer, threads):
    streams = [
        play_agent(renderer, threads, run, [f"I look.\n{CALL}", "up"])[0] for run in (with_openai, with_anthropic)
    ]
    assert streams[0].token_ids.tobytes() == streams[1].token_ids.tobytes()


def test_a_stop_and_a_limit_are_told_in_the_clients_own_words(renderer, threads):
    answers = [completion("<answer>up</answer>"), "b"]
    trajectory, _ = play_agent(renderer, threads, with_async_anthropic, answers, EpisodeLimits(max_turns=1))
    assert trajectory.ending is Ending.MAX_TURNS and trajectory.reward == 1.0, trajectory.error


def test_a_failed_engine_is_asked_again_by_either_client(renderer, threads):
    failures = [EngineError("http://scripted:1", "no answer")] * 3

    def ask_openai(base_url, sample, args):
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=1) as client:
            client.chat.completions.create(model="policy", messages=[text("Which move?")])
        return 1.0

    def ask_anthropic(base_url, sample, args):
        with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=1) as client:
            client.messages.create(model="policy", max_tokens=9, messages=[text("Which move?")])
        return 1.0

    for run in (ask_openai, ask_anthropic):
        trajectory, _ = play_agent(renderer, threads, run, [*failures, "a"])
        assert trajectory.ending is Ending.COMPLETED and len(trajectory.turns) == 1, trajectory.error
        assert trajectory.metrics["agent_refused"] == 1.0
