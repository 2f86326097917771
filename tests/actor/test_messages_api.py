"""Agents that play through the endpoint in the form of Anthropic's API: the same tokens as in OpenAI's form."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest

from actor.agents.dialogues import Refused, SentImages
from actor.agents.message_requests import read_messages
from actor.env_threads import EnvThreads
from actor.episode import EpisodeLimits
from actor.render import Renderer
from envs import sokoban
from envs.env_calls import messages_of
from launch.tiny_models.build import TOOLS_TEMPLATE, build_tokenizer
from shared.engine.engine_api import EngineError
from shared.types import Ending, Sample
from shared.vision import VisionSpec
from tests.support.agent_forms import as_anthropic, events_of
from tests.support.agent_rig import as_openai, ask, image_part, play_agent, post, text
from tests.support.rollout_rig import completion, threads
from tests.support.tiny import PHRASES, draw_image

__all__ = ["threads"]  # a fixture
QUESTION = [text("Which move?")]
BODY = {"model": "policy", "max_tokens": 100, "messages": QUESTION}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": [1, 2], "how": "close"}}\n</tool_call>'
TOOLS = [{"name": "look", "description": "Look there.", "input_schema": {"type": "object", "properties": {}}}]


@pytest.fixture(scope="module")
def renderer(folder):
    return Renderer(build_tokenizer(PHRASES, 640, TOOLS_TEMPLATE), VisionSpec.load(folder))


def message(base_url, **fields):
    status, answer = post(f"{base_url}/messages", {**BODY, **fields})
    assert status == 200, answer
    return answer


def picture(seed=5):
    (block,) = as_anthropic({"messages": [{"role": "user", "content": [image_part(draw_image(64, 64, seed))]}]})[
        "messages"
    ][0]["content"]
    return block


# ---------------------------------------------------------------------- the tokens


def test_a_game_by_screenshots_has_the_tokens_that_openais_form_gives_it(renderer, threads):
    board = {"pixels_per_cell": 16, "max_actions_per_step": 1, "min_solution": 4}
    system = sokoban.system_prompt(board)
    sample = Sample("s", metadata={"seed": 3})
    env = sokoban.build_env(sample, board)
    answers, done = [], False
    while not done:
        answers.append(f"<think>step {len(answers)}</think>{env.best_response()}")
        _, done, _ = env.step(answers[-1])

    def playing(ask_for):
        def run(base_url, sample, args):
            env = sokoban.build_env(sample, board)
            observation, _ = env.reset()
            messages = [*map(as_openai, messages_of(env, observation))]
            while True:
                answer = ask_for(base_url, messages)
                observation, done, _ = env.step(answer)
                if done:
                    return sokoban.episode_reward(env)
                messages += [text(answer, "assistant"), *map(as_openai, messages_of(env, observation))]

        return run

    def in_messages(base_url, messages):
        body = as_anthropic({"messages": messages})
        return message(base_url, system=system, messages=body["messages"])["content"][0]["text"]

    def in_chat(base_url, messages):
        return ask(base_url, [text(system, "system"), *messages])["content"]

    own, own_engine = play_agent(renderer, threads, playing(in_chat), answers, sample=sample, seed=7)
    other, engine = play_agent(renderer, threads, playing(in_messages), answers, sample=sample, seed=7)
    assert own.ending is other.ending is Ending.COMPLETED and len(own.turns) == len(answers) >= 4, other.error
    assert other.token_ids.tobytes() == own.token_ids.tobytes() and other.images == own.images
    assert other.loss_mask.tobytes() == own.loss_mask.tobytes() and other.segments == ()
    limits = [{**settings, "max_new_tokens": 0} for *_, settings in engine.requests]
    assert limits == [{**settings, "max_new_tokens": 0} for *_, settings in own_engine.requests]


def test_a_call_of_a_tool_and_its_result_with_an_image_go_on_in_the_very_tokens(renderer, threads):
    def run(base_url, sample, args):
        first = message(base_url, system=[{"type": "text", "text": "Play."}], messages=QUESTION, tools=TOOLS)
        said, call = first["content"]
        assert first["stop_reason"] == "tool_use" and first["stop_sequence"] is None
        assert said == {"type": "text", "text": "<think>far</think> I look."}
        assert call["type"] == "tool_use" and call["name"] == "look" and call["input"] == {"at": [1, 2], "how": "close"}
        result = {"type": "tool_result", "tool_use_id": call["id"]}
        shown = [{"type": "text", "text": "a wall"}, picture()]
        messages = [*QUESTION, {"role": "assistant", "content": first["content"]}]
        asked = {"role": "user", "content": [{**result, "content": shown}, {"type": "text", "text": "And now?"}]}
        second = message(base_url, system="Play.", messages=[*messages, asked], tools=TOOLS)
        assert second["content"] == [{"type": "text", "text": "up"}] and second["stop_reason"] == "end_turn"
        in_chat = [text("Play.", "system"), *QUESTION]  # the same conversation, gone on with in the other form
        words = {"name": "look", "arguments": '{"how": "close", "at": [1, 2]}'}
        function = {"name": "look", "description": "Look there.", "parameters": TOOLS[0]["input_schema"]}
        in_chat += [{**text(" I look.", "assistant"), "tool_calls": [{"type": "function", "function": words}]}]
        in_chat += [{"role": "tool", "content": [shown[0], image_part(draw_image(64, 64, 5))]}]
        in_chat += [text("And now?"), text("up", "assistant"), text("Done?")]
        ask(base_url, in_chat, tools=[{"type": "function", "function": function}])
        return 1

    trajectory, engine = play_agent(renderer, threads, run, [f"<think>far</think> I look.\n{CALL}", "up", "end"])
    assert trajectory.ending is Ending.COMPLETED, trajectory.error
    assert trajectory.segments == () and len(trajectory.turns) == 3 and len(trajectory.images) == 1
    for before, after, turn in zip(engine.requests, engine.requests[1:], trajectory.turns, strict=False):
        said = trajectory.token_ids[turn.start : turn.end].tolist()
        assert after[0][: len(before[0]) + len(said)] == [*before[0], *said]
    assert "Tools: look" in renderer.transcript(engine.requests[0][0])


def test_a_call_without_words_has_no_empty_text(renderer, threads):
    def run(base_url, sample, args):
        first = message(base_url, tools=TOOLS)
        assert [block["type"] for block in first["content"]] == ["tool_use"]
        result = {"type": "tool_result", "tool_use_id": "x", "is_error": True}
        again = [*QUESTION, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        assert message(base_url, messages=again, tools=TOOLS)["content"] == [{"type": "text", "text": ""}]
        return 1

    trajectory, _ = play_agent(renderer, threads, run, [CALL, completion("")])
    assert trajectory.ending is Ending.COMPLETED and trajectory.segments == (), trajectory.error


@pytest.mark.parametrize(
    ("change", "segments"),
    [
        (lambda said: [*QUESTION, said, text("Next?")], 1),
        (lambda said: [*QUESTION, {**said, "content": "down"}, text("Next?")], 2),
        (lambda said: [text("Another?"), said, text("Next?")], 2),
        (lambda said: QUESTION, 2),
    ],
)
def test_what_differs_begins_a_segment(renderer, threads, change, segments):
    def run(base_url, sample, args):
        first = message(base_url)
        message(base_url, messages=change({"role": "assistant", "content": first["content"]}))
        return 1

    trajectory, _ = play_agent(renderer, threads, run, ["<think>far</think>up", "end"])
    assert trajectory.ending is Ending.COMPLETED and len(trajectory.bounds) == segments, trajectory.error


# ---------------------------------------------------------------------- answers


def test_an_answer_says_why_it_ended_and_how_long_it_is(renderer, threads):
    def run(base_url, sample, args):
        cut = message(base_url, max_tokens=3)
        assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 3)
        assert re.fullmatch(r"msg_\w+_0", cut["id"]) and cut["role"] == "assistant" and cut["type"] == "message"
        stopped = message(base_url, stop_sequences=["xx", "</a"])
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "</a")
        assert stopped["content"] == [{"type": "text", "text": "<answer>up"}]
        assert stopped["usage"]["input_tokens"] == len(renderer.start(QUESTION).token_ids)
        return 1

    whole = completion("<answer>up</answer> and more")
    trajectory, engine = play_agent(renderer, threads, run, [completion("abc", reason="length"), whole])
    assert trajectory.ending is Ending.COMPLETED and len(trajectory.turns) == 2, trajectory.error
    assert engine.requests[0][2]["max_new_tokens"] == 3


def test_a_streamed_answer_is_the_same_in_events(renderer, threads):
    def run(base_url, sample, args):
        events = events_of(f"{base_url}/messages", {**BODY, "tools": TOOLS, "stream": True})
        begun, *_, ended, stop = events
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        kinds = [event["type"] for event in events]
        assert kinds == ["message_start", *block, *block, "message_delta", "message_stop"]
        assert begun["message"]["content"] == [] and begun["message"]["stop_reason"] is None
        assert begun["message"]["usage"]["input_tokens"] > 0 and stop == {"type": "message_stop"}
        assert events[1]["content_block"] == {"type": "text", "text": ""}
        assert events[2]["delta"] == {"type": "text_delta", "text": "I look."}
        assert events[4]["content_block"]["input"] == {} and events[4]["index"] == 1
        assert events[5]["delta"] == {"type": "input_json_delta", "partial_json": '{"at": [1, 2], "how": "close"}'}
        assert ended["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert ended["usage"]["output_tokens"] == len(completion(f"I look.\n{CALL}").token_ids)
        return 1

    trajectory, _ = play_agent(renderer, threads, run, [f"I look.\n{CALL}"])
    assert trajectory.ending is Ending.COMPLETED, trajectory.error


def test_a_call_with_text_that_cannot_be_sent_is_an_answer_in_both_forms(renderer, threads):
    odd = '<tool_call>{"name": "look", "arguments": {"at": "\\ud800"}}</tool_call>'

    def run(base_url, sample, args):
        (call,) = message(base_url, tools=TOOLS)["content"]
        assert call["input"] == {"at": "?"}
        again = [*QUESTION, {"role": "assistant", "content": [call]}, text("Next?")]
        message(base_url, messages=again, tools=TOOLS)
        tool = {"type": "function", "function": {"name": "look"}}
        (chat,) = ask(base_url, QUESTION, tools=[tool])["tool_calls"]
        assert chat["function"]["arguments"] == '{"at": "?"}'
        return 1

    trajectory, _ = play_agent(renderer, threads, run, [odd, "up", odd])
    assert trajectory.ending is Ending.COMPLETED and len(trajectory.bounds) == 2, trajectory.error


def test_both_spellings_of_the_base_url_are_served(renderer, threads):
    def run(base_url, sample, args):
        assert post(f"{base_url}/v1/messages", BODY)[0] == 200  # as Anthropic's client makes it of base_url
        assert post(f"{base_url}/messages?beta=true", BODY)[0] == 200
        return 1

    trajectory, _ = play_agent(renderer, threads, run, ["a", "b"])
    assert trajectory.ending is Ending.COMPLETED, trajectory.error


# ---------------------------------------------------------------------- limits and errors


def test_a_limit_and_a_failed_engine_are_errors_in_anthropics_form(renderer, threads):
    def run(base_url, sample, args):
        status, answer = post(f"{base_url}/messages", BODY)
        assert status == 503 and answer["error"]["type"] == "api_error" and answer["error"]["code"] == "engine_error"
        message(base_url)
        status, answer = post(f"{base_url}/messages", BODY)
        assert status == 400 and answer["type"] == "error"
        assert answer["error"]["type"] == "invalid_request_error" and answer["error"]["code"] == "max_turns"
        return 0.25

    failures = [EngineError("http://scripted:1", "no answer")] * 3
    trajectory, _ = play_agent(renderer, threads, run, [*failures, "a"], EpisodeLimits(max_turns=1))
    assert trajectory.ending is Ending.MAX_TURNS and trajectory.reward == 0.25, trajectory.error


def test_what_is_not_served_has_the_status_and_the_type_that_say_so(renderer, threads):
    found = {}

    def run(base_url, sample, args):
        def note(name, status, answer):
            assert answer["type"] == "error"
            found[name] = status, answer["error"]["type"], answer["error"]["code"]

        url = f"{base_url}/messages"
        note("model", *post(url, {**BODY, "model": "claude"}))
        note("session", *post(url.replace(urlsplit(url).path.split("/")[1], "nobody"), BODY))
        note("method", *post(url, None, "GET"))
        note("json", *post(url, b"{"))
        note("values", *post(url, b"[" + b"1," * 2**18 + b"1]"))
        message(base_url)
        return 1.0

    trajectory, _ = play_agent(renderer, threads, run, ["a"])
    assert trajectory.ending is Ending.COMPLETED, trajectory.error
    assert found == {
        "model": (404, "not_found_error", "model_not_found"),
        "session": (404, "not_found_error", "session_not_found"),
        "method": (405, "invalid_request_error", "method_not_allowed"),
        "json": (400, "invalid_request_error", "invalid_json"),
        "values": (413, "request_too_large", "too_large"),
    }


def of_user(*content):
    return {"messages": [{"role": "user", "content": list(content)}]}


def of_answer(*content):
    return {"messages": [*QUESTION, {"role": "assistant", "content": list(content)}, *QUESTION]}


def source(**fields):
    return of_user({"type": "image", "source": fields})


TEXT = {"type": "text", "text": "a"}
BAD = [
    ({"temprature": 0.5}, "the field 'temprature' is not served"),
    ({"tool_choice": {"type": "any"}}, "tool_choice = {'type': 'any'} is not served"),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice = "),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking = "),
    ({"mcp_servers": [{}]}, "mcp_servers = "),
    ({"stop": ["a"]}, "the field 'stop' is not served"),
    ({"stop_sequences": list("abcde")}, "stop_sequences: at most 4 texts"),
    ({"stop_sequences": [""]}, "stop_sequences = ['']"),
    ({"max_tokens": 0}, "max_tokens = 0: set a whole number above 0"),
    ({"max_tokens": 2.5}, "max_tokens = 2.5"),
    ({"stream": 1}, "stream = 1: set true or false"),
    ({"system": 3}, "system is 3"),
    ({"system": [{"type": "image"}]}, "system[0] is {'type': 'image'}: the blocks that are read here are text"),
    ({"tools": {}}, "tools = {}"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0] is {'type': 'bash_20250124'"),
    ({"tools": [{"name": "look"}]}, "tools[0] is {'name': 'look'}"),
    ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0] is "),
    ({"messages": None}, "'messages' is missing or empty"),
    ({"messages": "hello"}, "'messages' is missing"),
    ({"messages": [3]}, "messages[0] is 3"),
    ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role = 'system': the roles are user and"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role = ['user']"),
    ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0] has 'name'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is None"),
    ({"messages": [text("up", "assistant"), text("a")]}, "the first message is the assistant's"),
    ({"messages": [*QUESTION, text("up", "assistant")]}, "the last message is the assistant's"),
    (of_user(), "messages[0].content is []"),
    (of_user(3), "messages[0].content[0] is 3: the blocks that are read here are text, image and tool_result"),
    (of_user({"type": "text"}), "messages[0].content[0] is {'type': 'text'}"),
    (of_user({"type": "document"}), "the blocks that are read here are text, image and tool_result"),
    (of_user({"type": "tool_result", "content": [{"type": "tool_result"}]}), "content[0].content[0] is "),
    (of_user({"type": "tool_result", "content": 3}), "messages[0].content[0].content is 3"),
    (of_user({"type": "tool_use", "name": "a", "input": {}}), "messages[0].content[0] is "),
    (of_answer({"type": "thinking", "thinking": "a"}), "the blocks that are read here are text and tool_use"),
    (of_answer({"type": "tool_use", "name": 3, "input": {}}), "messages[1].content[0] is "),
    (of_answer({"type": "tool_use", "name": "a", "input": "{}"}), "messages[1].content[0] is "),
    (of_answer({"type": "tool_use", "name": "a", "input": {}}, TEXT), "messages[1].content: text after a tool_use"),
    (of_answer({"type": "image"}), "the blocks that are read here are text and tool_use"),
    (source(type="url", url="https://host/a.png"), "messages[0].content[0].source is {'type': 'url'"),
    (source(type="base64", data="&"), "messages[0].content[0].source: "),
    (source(type="base64", data=""), "an empty file"),
    (source(type="base64", data=3), "send the image itself"),
    (of_user({"type": "image"}), "messages[0].content[0].source is None"),
]


@pytest.fixture(scope="module")
def errors_of_bad_requests(renderer):
    """The answers to all bad requests, followed by a good one, in one episode; and that episode."""
    answers = []

    def run(base_url, sample, args):
        answers.extend(post(f"{base_url}/messages", {**BODY, **fields}) for fields, _ in BAD)
        message(base_url)
        return 1.0

    threads = EnvThreads(1)
    trajectory, engine = play_agent(renderer, threads, run, ["a"])
    threads.close()
    return answers, trajectory, engine


@pytest.mark.parametrize("number", range(len(BAD)), ids=lambda number: BAD[number][1][:50])
def test_a_bad_request_is_an_error_of_one_line(errors_of_bad_requests, number):
    status, answer = errors_of_bad_requests[0][number]
    assert status == 400 and set(answer) == {"type", "error"}, answer
    error = answer["error"]
    assert set(error) == {"type", "message", "code"} and error["type"] == "invalid_request_error"
    assert BAD[number][1] in error["message"] and "\n" not in error["message"]


def test_bad_requests_leave_no_trace_in_the_episode_but_their_number(errors_of_bad_requests):
    _, trajectory, engine = errors_of_bad_requests
    assert trajectory.ending is Ending.COMPLETED and len(engine.requests) == 1 and len(trajectory.turns) == 1
    assert trajectory.metrics["agent_refused"] == len(BAD)


def test_harmless_fields_are_ignored(renderer, threads):
    harmless = {
        **{"temperature": 0.1, "top_p": 0.2, "top_k": 5, "metadata": {"user_id": "a"}, "service_tier": "auto"},
        **{"tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}, "stop_sequences": [], "system": []},
    }
    cached = [{"type": "text", "text": "Which move?", "cache_control": {"type": "ephemeral"}, "citations": None}]

    def run(base_url, sample, args):
        message(base_url, messages=[{"role": "user", "content": cached}], **harmless)
        return 1

    trajectory, engine = play_agent(renderer, threads, run, ["a"], seed=3)
    plain, plain_engine = play_agent(renderer, threads, lambda url, *_: message(url) and 1, ["a"], seed=3)
    assert trajectory.token_ids.tolist() == plain.token_ids.tolist() and engine.requests == plain_engine.requests


def test_deep_values_are_read_or_refused():
    for depth in (10, 100, 400, 900, 5000):
        body = b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "a", "input_schema": {"a": '
        body += b"[" * depth + b"]" * depth + b"}}]}"
        try:
            assert read_messages(body, SentImages()).dialogue.tools
        except Refused as refusal:
            assert refusal.status == 400
