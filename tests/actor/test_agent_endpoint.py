"""Agents that play through an endpoint with OpenAI's API: their streams are those of the policy, token for token."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import re
import socket
import threading
import time
import urllib.request
from dataclasses import replace
from random import Random
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import pytest

from actor.agents import agent_endpoint, agent_session, agent_thread, api_forms
from actor.agents.agent_endpoint import AgentEndpoint
from actor.agents.agent_episode import AgentReward, Returned
from actor.engine_pool import EnginePool
from actor.env_threads import EnvThreads
from actor.episode import EpisodeLimits, Stream
from actor.model_judge import JudgeReward
from actor.render import Renderer
from actor.rewards import FunctionReward
from actor.rollout import Player
from actor.worker import make_players, make_reward
from envs import sokoban
from envs.base import Played
from envs.env_calls import messages_of
from launch.tiny_models.build import TOOLS_TEMPLATE, build_tokenizer
from shared.config.recipe import Recipe
from shared.engine.engine_api import EngineError
from shared.rgb_images import as_png
from shared.types import Completion, Ending, Image, Sample, VersionSpan
from shared.vision import VisionSpec
from tests.support.agent_conversations import Babbler, Speaker
from tests.support.agent_rig import ROOMY, as_openai, ask, image_part, play_agent, post, text
from tests.support.mixtures import LIMITS
from tests.support.rollout_rig import SYSTEM, Brief, Scripted, check, completion, threads, ticket
from tests.support.tiny import PHRASES, draw_image, png, running_engine

__all__ = ["threads"]  # a fixture


@pytest.fixture(scope="module")
def renderer(folder):
    return Renderer(build_tokenizer(PHRASES, 640, TOOLS_TEMPLATE), VisionSpec.load(folder))


def sampled(trajectory):
    """The tokens of each turn."""
    return [trajectory.token_ids[turn.start : turn.end].tolist() for turn in trajectory.turns]


# ---------------------------------------------------------------------- the tokens


def sokoban_agent(base_url, sample, args):
    """Play Sokoban by screenshots, as `envs.sokoban` does; return what that rewards."""
    env = sokoban.build_env(sample, BOARD)
    observation, _ = env.reset()
    messages = [*sample.prompt, *map(as_openai, messages_of(env, observation))]
    while True:
        answer = ask(base_url, messages)
        observation, done, _ = env.step(answer["content"])
        if done:
            return sokoban.episode_reward(env)
        messages += [
            {"role": "assistant", "content": answer["content"]},
            *map(as_openai, messages_of(env, observation)),
        ]


BOARD = {"pixels_per_cell": 16, "max_actions_per_step": 1, "min_solution": 4}


def sokoban_ticket(seed):
    prompt = ({"role": "system", "content": sokoban.system_prompt(BOARD)},)
    return {"sample": Sample("s", prompt, metadata={"seed": seed}), "seed": 7}


def solution(seed):
    """Answers of the solver's, each with a thought."""
    env = sokoban.build_env(sokoban_ticket(seed)["sample"], BOARD)
    answers, done = [], False
    while not done:
        answers.append(f"<think>step {len(answers)}</think>{env.best_response()}")
        _, done, _ = env.step(answers[-1])
    return answers


@pytest.mark.parametrize("seed", [3, 4])
def test_an_agent_that_plays_by_screenshots_has_the_tokens_of_the_environments_own_episode(renderer, threads, seed):
    answers, changes = solution(seed), sokoban_ticket(seed)
    own_engine = Scripted(answers)
    player = Player(lambda sample: sokoban.build_env(sample, BOARD), renderer, EnginePool([own_engine]), ROOMY, threads)
    own = asyncio.run(player.play(ticket(**changes)))
    trajectory, engine = play_agent(renderer, threads, sokoban_agent, answers, **changes)
    assert own.ending is trajectory.ending is Ending.COMPLETED and len(own.turns) == len(answers) >= 4
    assert trajectory.token_ids.tobytes() == own.token_ids.tobytes()
    assert trajectory.loss_mask.tobytes() == own.loss_mask.tobytes()
    assert trajectory.behaviour_logprobs.tobytes() == own.behaviour_logprobs.tobytes()
    assert trajectory.images == own.images and trajectory.segments == own.segments == ()
    assert engine.requests == own_engine.requests  # with the same seeds and bans, too
    assert [(turn.start, turn.end) for turn in trajectory.turns] == [(turn.start, turn.end) for turn in own.turns]
    assert trajectory.reward == trajectory.turns[-1].reward > 5


@pytest.mark.slow
def test_on_a_real_engine_too(renderer, threads, folder):
    with running_engine(folder, max_context=4096) as (url, _):

        async def main():
            async with Brief(url) as client:
                limits = EpisodeLimits(max_turns=4, max_context=4096)
                player = Player(lambda s: sokoban.build_env(s, BOARD), renderer, EnginePool([client]), limits, threads)
                return await player.play(ticket(**sokoban_ticket(3)))

        own = asyncio.run(main())
        limits = EpisodeLimits(max_turns=4, max_context=4096)
        trajectory, _ = play_agent(renderer, threads, sokoban_agent, Brief(url), limits, **sokoban_ticket(3))
    assert own.ending is trajectory.ending is Ending.MAX_TURNS and len(own.turns) == 4
    assert trajectory.token_ids.tobytes() == own.token_ids.tobytes()
    assert trajectory.policy_versions.tobytes() == own.policy_versions.tobytes()
    assert trajectory.images == own.images
    assert trajectory.reward == 0.0 and trajectory.trainable


def test_what_extends_the_stream_goes_on_in_it_however_the_client_writes_it_down(renderer, threads):
    call = '<tool_call>\n{"name": "look", "arguments": {"at": [1, 2], "how": "close"}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    picture = draw_image(64, 64, 5)

    def run(base_url, sample, args):
        question = {"role": "user", "content": [image_part(picture), {"type": "text", "text": "Which move?"}]}
        messages = [{"role": "developer", "content": "Play. "}, question]
        first = ask(base_url, messages, tools=tools)
        assert first["content"] == "<think>far</think> I look." and first["tool_calls"][0]["type"] == "function"
        assert first["tool_calls"][0]["function"]["name"] == "look"
        again = {"id": "mine", "type": "function", "function": {"name": "look"}}
        again["function"]["arguments"] = '{"how":"close",  "at":[1,2]}'
        recoded = {"role": "user", "content": [image_part(recompressed(picture)), *split("Which move?")]}
        messages = [{"role": "system", "content": "Play."}, recoded]
        messages += [{"role": "assistant", "content": "I look.\n", "tool_calls": [again]}]
        messages += [{"role": "tool", "tool_call_id": "mine", "content": "a wall"}]
        other = [{"function": {"parameters": {"type": "object"}, "name": "look"}, "type": "function"}]
        second = ask(base_url, messages, tools=other)
        assert second["content"] == "<think>so</think>up"
        ask(
            base_url,
            [*messages, {"role": "assistant", "content": [{"type": "text", "text": "up"}]}, text("Done?")],
            tools=tools,
        )
        return 1

    trajectory, engine = play_agent(
        renderer, threads, run, [f"<think>far</think> I look.\n{call}", "<think>so</think>up", "end"]
    )
    assert trajectory.ending is Ending.COMPLETED, trajectory.error
    assert trajectory.segments == () and len(trajectory.turns) == 3 and len(trajectory.images) == 1
    for before, after, turn in zip(engine.requests, engine.requests[1:], sampled(trajectory), strict=False):
        assert after[0][: len(before[0]) + len(turn)] == [*before[0], *turn]
    assert renderer.decode(engine.requests[1][0]).count("<think>") == 1


def recompressed(image):
    buffer = io.BytesIO()
    image.convert("RGBA").save(buffer, "PNG", compress_level=9)
    return buffer.getvalue()


def split(words):
    return [{"type": "text", "text": words[:4]}, {"type": "text", "text": words[4:]}]


QUESTION = [SYSTEM, text("Which move?")]


@pytest.mark.parametrize(
    ("change", "segments"),
    [
        (lambda said: [SYSTEM, text("Another question?"), *said], 2),
        (lambda said: [text("Which move?"), *said], 2),
        (lambda said: [{**SYSTEM, "content": "Play well."}, *QUESTION[1:], *said], 2),
        (lambda said: [*QUESTION, {**said[0], "content": "<think>near</think>up"}, said[1]], 2),
        (lambda said: [*QUESTION, {**said[0], "content": "<think>\nf ar\n</think>\n\nup"}, said[1]], 2),
        (lambda said: [*QUESTION, {**said[0], "content": "<think>\nfar\n</think>\n\nup"}, said[1]], 1),
        (lambda said: [*QUESTION, {**said[0], "content": "down"}, said[1]], 2),
        (lambda said: [*QUESTION, said[1]], 2),
        (lambda said: QUESTION, 2),
        (lambda said: [*QUESTION, {"role": "user", "content": "up"}, said[1]], 2),
        (lambda said: [*QUESTION, *said], 1),
        (lambda said: [*QUESTION, said[0], said[1], text("down", "assistant"), text("And now?")], 1),
    ],
)
def test_what_differs_begins_a_segment_and_what_was_sampled_stays(renderer, threads, change, segments):
    def run(base_url, sample, args):
        first = ask(base_url, QUESTION)
        ask(base_url, change([{"role": "assistant", "content": first["content"]}, text("Next?")]))
        return 0.5

    trajectory, engine = play_agent(renderer, threads, run, ["<think>far</think>up", "end"])
    assert trajectory.ending is Ending.COMPLETED, trajectory.error
    assert len(trajectory.bounds) == segments == trajectory.metrics["agent_segments"]
    assert sampled(trajectory) == [list(completion(each).token_ids) for each in ("<think>far</think>up", "end")]
    stream = trajectory.token_ids[trajectory.bounds[-1][0] :].tolist()
    assert stream == [*engine.requests[1][0], *completion("end").token_ids]
    assert trajectory.reward == 0.5 and [turn.reward for turn in trajectory.turns] == [0.0, 0.5]


def test_a_segment_without_an_answer_of_the_policy_is_what_the_template_writes(renderer, threads):
    messages = [SYSTEM, text("a?"), text("b", "assistant"), text("c?"), text("d<|im_end|>", "assistant"), text("e?")]
    trajectory, engine = play_agent(renderer, threads, lambda url, *_: ask(url, messages) and 1, ["end"])
    assert engine.requests[0][0] == list(renderer.start(messages).token_ids)
    assert trajectory.loss_mask.sum() == len(completion("end").token_ids)


def test_an_edit_before_an_answer_keeps_the_very_tokens_of_the_answer_as_context(renderer, threads):
    merged = completion("<answer>up")
    letters = (renderer.tokenizer.encode(letter, add_special_tokens=False) for letter in "<answer>up")
    odd = (*(token for tokens in letters for token in tokens), renderer.end_id)
    assert odd != merged.token_ids and renderer.decode(odd) == renderer.decode(merged.token_ids)
    engine_answer = Completion(odd, (-0.5,) * len(odd), (VersionSpan(1, 0, len(odd)),), "stop")

    def run(base_url, sample, args):
        first = ask(base_url, QUESTION)["content"]
        assert first == "<answer>up"
        ask(base_url, [text("Other?"), text(first, "assistant"), text("Next?")])
        return 1

    trajectory, engine = play_agent(renderer, threads, run, [engine_answer, "end"])
    expected = [*renderer.start([text("Other?")]).token_ids, *odd, *renderer.observation(text("Next?")).token_ids]
    assert engine.requests[1][0] == expected
    assert trajectory.loss_mask.sum() == len(odd) + len(completion("end").token_ids)


def test_calls_at_once_share_a_prompt_and_each_has_a_segment(renderer, threads):
    class Slow(Scripted):
        async def generate(self, *args, **settings):
            await asyncio.sleep(0.05)
            return await super().generate(*args, **settings)

    async def run(base_url, sample, args):
        first = await asyncio.gather(*(asyncio.to_thread(ask, base_url, QUESTION) for _ in range(3)))
        said = {each["content"] for each in first}
        assert said == {"a", "b", "c"}
        nexts = [[*QUESTION, text(each, "assistant"), text("Next?")] for each in sorted(said)]
        await asyncio.gather(*(asyncio.to_thread(ask, base_url, each) for each in nexts))
        return 1

    trajectory, engine = play_agent(renderer, threads, run, Slow(["a", "b", "c", "d", "e", "f"]), seed=1)
    assert trajectory.ending is Ending.COMPLETED, trajectory.error
    assert len(trajectory.bounds) == 3 and len(trajectory.turns) == 6
    assert len({settings["seed"] for *_, settings in engine.requests}) == 6
    words = [renderer.decode(tokens) for tokens in sampled(trajectory)]
    assert sorted(words[::2]) == ["a", "b", "c"] and sorted(words[1::2]) == ["d", "e", "f"]


def test_an_image_of_other_pixels_is_another(renderer, threads):
    picture = draw_image(64, 64, 5)
    jpeg = io.BytesIO()
    picture.save(jpeg, "JPEG")

    def run(base_url, sample, args):
        first, again = ([{"role": "user", "content": [image_part(each)]}] for each in (png(picture), jpeg.getvalue()))
        content = ask(base_url, first)["content"]
        ask(base_url, [*again, text(content, "assistant"), text("Next?")])
        return 1.0

    trajectory, _ = play_agent(renderer, threads, run, ["a", "b"])
    assert len(trajectory.bounds) == len(trajectory.images) == 2, trajectory.error


def test_a_copy_of_a_stream_grows_by_itself(renderer):
    stream = Stream()
    for number in range(2):
        stream.begin_segment()
        stream.observe(
            renderer.start([{"role": "user", "content": [{"type": "image", "image": draw_image(seed=number)}]}])
        )
        stream.sample(completion("a"))
    other = stream.copy()
    same = (other.segment_ids, other.segment_images, other.num_expanded, other.num_sampled, other.segments)
    assert same == (stream.segment_ids, stream.segment_images, stream.num_expanded, stream.num_sampled, stream.segments)
    other.begin_segment()
    other.sample(completion("b"))
    assert len(stream.segments) == 1 and len(other.segments) == 2 and other.num_sampled > stream.num_sampled


# ---------------------------------------------------------------------- limits and sampling


def test_calls_at_once_wait_for_what_others_leave_of_the_episodes_tokens(renderer, threads):
    class Slow(Scripted):
        async def generate(self, *args, **settings):
            await asyncio.sleep(0.2)
            return await super().generate(*args, **settings)

    async def run(base_url, sample, args):
        await asyncio.gather(*(asyncio.to_thread(ask, base_url, QUESTION) for _ in range(3)))
        return 1.0

    limits = EpisodeLimits(max_tokens=20, turn_tokens=10)
    used = len(completion("aaaa").token_ids)
    trajectory, engine = play_agent(renderer, threads, run, Slow(["aaaa"] * 3), limits)
    assert trajectory.ending is Ending.COMPLETED and len(trajectory.turns) == 3, trajectory.error
    assert used == 5 and [settings["max_new_tokens"] for *_, settings in engine.requests] == [10, 10, 10]


def test_the_last_turn_is_the_limits_and_an_agent_that_leaves_its_error_alone_has_no_reward(renderer, threads):
    def run(base_url, sample, args):
        messages = [*QUESTION]
        while True:
            messages += [text(ask(base_url, messages)["content"], "assistant"), text("Next?")]

    trajectory, engine = play_agent(renderer, threads, run, ["a"] * 9, EpisodeLimits(max_turns=3))
    assert trajectory.ending is Ending.MAX_TURNS and trajectory.trainable and trajectory.reward == 0.0
    assert len(trajectory.turns) == 3 and len(engine.requests) == 3
    trajectory, _ = play_agent(renderer, threads, run, ["a"] * 9, EpisodeLimits(max_context=60))
    assert trajectory.ending is Ending.CONTEXT_FULL and trajectory.trainable
    trajectory, engine = play_agent(renderer, threads, run, ["aaaa"] * 9, EpisodeLimits(max_tokens=12, turn_tokens=9))
    used = len(completion("aaaa").token_ids)
    assert [settings["max_new_tokens"] for *_, settings in engine.requests] == [
        min(9, 12 - used * n) for n in range(len(engine.requests))
    ]
    assert trajectory.ending is Ending.OUT_OF_TOKENS


def test_a_limits_error_says_which_and_an_agent_that_catches_it_gives_its_own_reward(renderer, threads):
    def run(base_url, sample, args):
        ask(base_url, QUESTION)
        status, answer = post(f"{base_url}/chat/completions", {"messages": QUESTION})
        assert status == 400 and answer["error"]["code"] == "max_turns"
        return 0.25

    trajectory, _ = play_agent(renderer, threads, run, ["a", "b"], EpisodeLimits(max_turns=1))
    assert trajectory.ending is Ending.MAX_TURNS and trajectory.reward == 0.25


def test_the_clients_own_limit_and_stop_cut_an_answer_and_what_is_kept_was_sampled(renderer, threads):
    def run(base_url, sample, args):
        cut = post(f"{base_url}/chat/completions", {"messages": QUESTION, "max_tokens": 3})[1]
        assert cut["choices"][0]["finish_reason"] == "length"
        stopped = post(f"{base_url}/chat/completions", {"messages": QUESTION, "stop": ["xx", "</a"]})[1]
        assert stopped["choices"][0]["finish_reason"] == "stop"
        content = stopped["choices"][0]["message"]["content"]
        assert content == "<answer>up"[: len(content)] and content.startswith("<answer>up")
        ask(base_url, [*QUESTION, text(content, "assistant"), text("Next?")])
        return 1

    whole = completion("<answer>up</answer> and more")
    cut = completion("abc", reason="length")
    trajectory, engine = play_agent(renderer, threads, run, [cut, whole, "end"])
    assert trajectory.ending is Ending.COMPLETED, trajectory.error
    assert engine.requests[0][2]["max_new_tokens"] == 3
    kept = sampled(trajectory)[1]
    assert (
        len(trajectory.bounds) == 2 and kept == list(whole.token_ids[: len(kept)]) and len(kept) < len(whole.token_ids)
    )
    assert "</a" in renderer.transcript(kept)
    follows = engine.requests[2][0][len(engine.requests[1][0]) + len(kept) :]
    assert follows[0] == renderer.end_id


def test_an_answer_that_the_episodes_limit_cut_off_is_its_ending_unless_another_follows(renderer, threads):
    cut = completion("abc", reason="length")
    once, _ = play_agent(renderer, threads, lambda url, *_: ask(url, QUESTION) and 1, [cut])
    assert once.ending is Ending.OUT_OF_TOKENS and once.reward == 1.0
    twice, _ = play_agent(renderer, threads, lambda url, *_: [ask(url, QUESTION) for _ in "ab"] and 1, [cut, "b"])
    assert twice.ending is Ending.COMPLETED


def test_a_failed_engine_is_an_error_that_may_be_asked_again_and_leaves_no_trace(renderer, threads):
    def run(base_url, sample, args):
        assert post(f"{base_url}/chat/completions", {"messages": QUESTION})[0] == 503
        ask(base_url, QUESTION)
        return 1

    failures = [EngineError("http://scripted:1", "no answer")] * 3
    trajectory, _ = play_agent(renderer, threads, run, [*failures, "a"])
    assert trajectory.ending is Ending.COMPLETED and len(trajectory.bounds) == 1 and len(trajectory.turns) == 1
    trajectory, _ = play_agent(
        renderer, threads, lambda url, *_: post(url + "/chat/completions", {"messages": QUESTION}) and 1, failures
    )
    assert trajectory.ending is Ending.ENGINE_ERROR and "no answer" in trajectory.error


def test_a_streamed_answer_is_the_same_in_parts(renderer, threads):
    def run(base_url, sample, args):
        body = {"messages": QUESTION, "stream": True, "logprobs": True, "stream_options": {"include_usage": True}}
        request = urllib.request.Request(base_url + "/chat/completions", json.dumps(body).encode())
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in answer.read().decode().split("\n\n") if line]
        assert lines.pop() == "data: [DONE]"
        parts = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert {part["object"] for part in parts} == {"chat.completion.chunk"} and len(
            {part["id"] for part in parts}
        ) == 1
        *chunks, usage = parts
        assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == "up"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        tokens = next(c for c in chunks if c["choices"][0]["logprobs"])["choices"][0]["logprobs"]["content"]
        assert [each["logprob"] for each in tokens] == [-0.5] * usage["usage"]["completion_tokens"]
        ask(base_url, [*QUESTION, text("up", "assistant"), text("Next?")])
        return 1

    trajectory, _ = play_agent(renderer, threads, run, ["up", "end"])
    assert trajectory.ending is Ending.COMPLETED, trajectory.error
    assert len(trajectory.bounds) == 1


def test_the_one_model_is_listed(renderer, threads):
    def run(base_url, sample, args):
        status, listed = post(f"{base_url}/models", None, "GET")
        assert status == 200 and [each["id"] for each in listed["data"]] == ["policy"]
        assert args == {"a": 1} and sample.id == "s"
        return bool(ask(base_url, QUESTION))

    trajectory, _ = play_agent(renderer, threads, run, ["a"])
    assert trajectory.ending is Ending.COMPLETED and trajectory.reward == 1.0, trajectory.error


# ---------------------------------------------------------------------- rewards and endings


def once(base_url, sample, args):
    ask(base_url, QUESTION)


async def at_once(base_url, sample, args):
    once(base_url, sample, args)
    return 0.5


def test_a_reward_is_what_run_returns_or_that_of_the_recipes_other_source(renderer, threads):
    assert play_agent(renderer, threads, at_once, ["a"])[0].reward == 0.5
    seen = []
    other = FunctionReward(lambda played: seen.append(played) or 0.75, threads, 5.0)
    trajectory, _ = play_agent(renderer, threads, once, ["a"], reward=other)
    assert trajectory.ending is Ending.COMPLETED and trajectory.reward == trajectory.turns[-1].reward == 0.75
    (played,) = seen
    assert played.answers == ("a",) and played.env is None and played.sample.id == "s"
    assert played.observations == ((SYSTEM, text("Which move?")),)
    assert play_agent(renderer, threads, at_once, ["a"], reward=other)[0].reward == 0.5 and len(seen) == 1


def test_a_reward_may_be_one_for_each_answer_in_the_order_in_which_they_were_asked_for(renderer, threads):
    first, second = text("One."), text("Two.")

    def two_conversations(base_url, sample, args):
        said = ask(base_url, [first])
        ask(base_url, [second])
        ask(base_url, [first, {"role": "assistant", "content": said["content"]}, text("Go on.")])
        return [0.5, -1.0, 2.0]

    trajectory, _ = play_agent(renderer, threads, two_conversations, ["a", "b", "c"])
    assert trajectory.ending is Ending.COMPLETED and trajectory.reward == 1.5, trajectory.error
    assert [renderer.transcript(each)[:1] for each in sampled(trajectory)] == ["a", "c", "b"]
    assert [turn.reward for turn in trajectory.turns] == [0.5, 2.0, -1.0]


@pytest.mark.parametrize(
    ("rewards", "told"),
    [
        ([1.0, 2.0], "for 3 answers: give one for each"),
        ([], "for 3 answers: give one for each"),
        ([1.0, math.nan, 0.0], "the reward is"),
        (["1", 2, 3], "the reward is"),
    ],
)
def test_rewards_that_are_not_one_for_each_answer_are_an_ending(renderer, threads, rewards, told):
    def run(base_url, sample, args):
        for _ in range(3):
            ask(base_url, QUESTION)
        return rewards

    trajectory, _ = play_agent(renderer, threads, run, ["a", "b", "c"])
    assert trajectory.ending is Ending.REWARD_ERROR and not trajectory.trainable
    assert told in trajectory.error


@pytest.mark.parametrize("value", ["0.5", math.nan, math.inf, {}])
def test_what_is_no_number_is_an_ending_that_shows_it(renderer, threads, value):
    trajectory, _ = play_agent(renderer, threads, lambda url, *_: once(url, *_) or value, ["a"])
    assert trajectory.ending is Ending.REWARD_ERROR and f"the reward is {value!r}" in trajectory.error
    assert len(trajectory.turns) == 1


def test_no_number_and_no_other_source_is_an_ending(renderer, threads):
    trajectory, _ = play_agent(renderer, threads, once, ["a"])
    assert trajectory.ending is Ending.REWARD_ERROR and "set env.reward" in trajectory.error


def test_an_agent_that_never_calls_is_an_ending_that_says_so(renderer, threads):
    trajectory, _ = play_agent(renderer, threads, lambda *_: 1.0, [])
    assert trajectory.ending is Ending.ENV_ERROR and "without an answer of the model's" in trajectory.error

    def refused(base_url, sample, args):
        post(f"{base_url}/chat/completions", {"messages": QUESTION, "n": 2})
        return 1.0

    trajectory, _ = play_agent(renderer, threads, refused, [])
    assert "n = 2 is not served" in trajectory.error and trajectory.metrics["agent_refused"] == 1.0


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_an_exception_of_the_agents_code_is_an_ending_with_file_and_line(renderer, threads, kind):
    def plain(base_url, sample, args):
        once(base_url, sample, args)
        return {}["board"]

    async def later(base_url, sample, args):
        return plain(base_url, sample, args)

    trajectory, _ = play_agent(renderer, threads, plain if kind == "plain" else later, ["a"])
    assert trajectory.ending is Ending.ENV_ERROR and not trajectory.trainable and len(trajectory.turns) == 1
    assert re.match(r"KeyError: 'board' \(tests/actor/test_agent_endpoint.py:\d+ in plain", trajectory.error)


def exits(base_url, sample, args):
    raise SystemExit(3)


async def cancels_itself(base_url, sample, args):
    asyncio.current_task().cancel()
    await asyncio.sleep(1)


def stops_iteration(base_url, sample, args):
    raise StopIteration


@pytest.mark.parametrize("run", [exits, cancels_itself, stops_iteration, lambda: None])
def test_whatever_the_agents_code_raises_costs_its_episode_alone(renderer, threads, run):
    trajectory, _ = play_agent(renderer, threads, run, [])
    assert trajectory.ending is Ending.ENV_ERROR and trajectory.error


@pytest.mark.parametrize("where", ["before a call", "after a call", "in a coroutine"])
def test_a_hung_agent_is_an_ending_and_its_thread_is_counted_until_it_returns(renderer, threads, monkeypatch, where):
    monkeypatch.setattr(agent_thread, "GRACE_S", 0.05)
    release, cancelled = threading.Event(), threading.Event()

    def hangs(base_url, sample, args):
        if where == "after a call":
            once(base_url, sample, args)
        release.wait(30)

    async def sleeps(base_url, sample, args):
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async def main():
        endpoint, limits = AgentEndpoint(), EpisodeLimits(env_timeout_s=0.3)
        run = sleeps if where == "in a coroutine" else hangs
        pool = EnginePool([Scripted(["a"])])
        player = Player(None, renderer, pool, limits, threads, AgentReward(None), agent=run, endpoint=endpoint)
        trajectory = await player.play(ticket())
        await asyncio.sleep(0.2)
        lost = threads.num_lost
        release.set()
        await endpoint.close()
        return trajectory, lost

    trajectory, lost = asyncio.run(main())
    assert trajectory.ending is Ending.ENV_TIMEOUT and "within 0.3 s" in trajectory.error
    assert lost == (0 if where == "in a coroutine" else 1)
    assert where != "in a coroutine" or cancelled.wait(5)
    until = time.monotonic() + 5
    while threads.num_lost and time.monotonic() < until:
        time.sleep(0.01)
    assert threads.num_lost == 0


def test_an_episode_has_a_time_limit_however_often_its_agent_calls(renderer, threads):
    def run(base_url, sample, args):
        while True:
            ask(base_url, QUESTION)

    class Endless(Scripted):
        async def generate(self, *args, **settings):
            await asyncio.sleep(0.05)
            return completion("a")

    limits = EpisodeLimits(max_turns=10_000, max_tokens=10**6, rollout_timeout_s=0.4)
    trajectory, _ = play_agent(renderer, threads, run, Endless([]), limits)
    assert trajectory.ending is Ending.ENV_TIMEOUT and "did not return within 0.4 s" in trajectory.error
    assert len(trajectory.turns) >= 2


def test_the_time_of_a_slow_engine_is_not_the_agents(renderer, threads):
    class Slow(Scripted):
        async def generate(self, *args, **settings):
            await asyncio.sleep(0.5)
            return await super().generate(*args, **settings)

    trajectory, _ = play_agent(renderer, threads, at_once, Slow(["a"]), EpisodeLimits(env_timeout_s=0.4))
    assert trajectory.ending is Ending.COMPLETED, trajectory.error


def test_a_cancelled_episode_ends_its_agent_and_its_calls(renderer, threads):
    begun, ended = threading.Event(), threading.Event()

    class Hanging(Scripted):
        async def generate(self, *args, **settings):
            begun.set()
            await asyncio.sleep(60)

    async def run(base_url, sample, args):
        try:
            async with aiohttp.ClientSession() as client, client.post(base_url + "/chat/completions", json=BODY) as got:
                return got.status
        finally:
            ended.set()

    async def main():
        endpoint, pool = AgentEndpoint(), EnginePool([Hanging([])])
        player = Player(None, renderer, pool, ROOMY, threads, AgentReward(None), agent=run, endpoint=endpoint)
        playing = asyncio.create_task(player.play(ticket()))
        await asyncio.to_thread(begun.wait, 10)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert await asyncio.to_thread(ended.wait, 10)
        assert pool.clients[0].num_open == 0
        await endpoint.close()

    asyncio.run(main())


# ---------------------------------------------------------------------- whatever a client does

BODY = {"model": "policy", "messages": QUESTION}


def bad_image(data, kind="image/png"):
    part = {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}}
    return {"messages": [{"role": "user", "content": [part]}]}


def gif():
    buffer = io.BytesIO()
    draw_image().save(buffer, "GIF")
    return buffer.getvalue()


def of_url(url):
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]}


def of_message(**message):
    return {"messages": [message]}


BAD = [
    ({"n": 2}, "n = 2 is not served: leave it out, or set 1"),
    ({"n": True}, "n = True is not served"),
    ({"temprature": 0.5}, "the field 'temprature' is not served, and may change the answer; leave it out"),
    ({"response_format": {"type": "json_object"}}, "response_format = "),
    ({"logit_bias": {"5": -100}}, "logit_bias = "),
    ({"presence_penalty": 0.5}, "presence_penalty = 0.5"),
    ({"frequency_penalty": 1}, "frequency_penalty = 1"),
    ({"top_logprobs": 5, "logprobs": True}, "top_logprobs = 5"),
    ({"tool_choice": "required"}, "tool_choice = 'required'"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls = False"),
    ({"functions": [{"name": "f"}]}, "functions = "),
    ({"guided_json": {}}, "the field 'guided_json'"),
    ({"reasoning_effort": "high"}, "the field 'reasoning_effort'"),
    ({"continue_final_message": True}, "continue_final_message = True"),
    ({"max_tokens": 0}, "max_tokens = 0: set a whole number above 0"),
    ({"max_completion_tokens": "9"}, "max_completion_tokens = '9'"),
    ({"stop": [""]}, "stop = ['']"),
    ({"stop": list("abcde")}, "at most 4 texts"),
    ({"stop": 3}, "stop = 3"),
    ({"stream": "yes"}, "stream = 'yes': set true or false"),
    ({"stream_options": []}, "stream_options = []"),
    ({"logprobs": 3}, "logprobs = 3"),
    ({"tools": {}}, "tools = {}"),
    ({"tools": [{"type": "web_search"}]}, "tools[0] is {'type': 'web_search'}"),
    ({"messages": None}, "'messages' is missing or empty"),
    ({"messages": []}, "'messages' is missing or empty"),
    ({"messages": "hello"}, "'messages' is missing"),
    ({"messages": [3]}, "messages[0] is 3"),
    ({"messages": [*QUESTION, text("up", "assistant")]}, "the last message is the assistant's"),
    ({"messages": [text("up", "assistant"), text("a")]}, "the first message is the assistant's"),
    (of_message(role="wizard", content="a"), "messages[0].role = 'wizard'"),
    (of_message(content="a"), "messages[0].role = None"),
    (of_message(role="user"), "messages[0].content is None"),
    (of_message(role="user", content=[]), "messages[0].content is []"),
    (of_message(role="user", content={}), "messages[0].content is {}"),
    (of_message(role="user", content=[3]), "messages[0].content[0] is 3"),
    (of_message(role="user", content=[{"type": "input_audio"}]), "the parts that are read are text and image_url"),
    (of_message(role="user", content=[{"type": "text", "text": 3}]), "the parts that are read are text and image_url"),
    (of_message(role="user", content="a", weight=1), "messages[0] has 'weight', which is not served"),
    (of_message(role="user", content="a", tool_calls=[{}]), "in a message of the assistant's"),
    ({"messages": [SYSTEM, {"role": "assistant", "tool_calls": [{}]}, text("a")]}, "messages[1].tool_calls[0] is {}"),
    ({"messages": [SYSTEM, {"role": "assistant", "content": [image_part(b"")]}, text("a")]}, "an empty file"),
    (
        {"messages": [SYSTEM, {"role": "assistant", "content": [image_part(png(draw_image()))]}, text("a")]},
        "shows an image in an answer",
    ),
    (bad_image(gif(), "image/gif"), "a GIF; PNG, JPEG and WebP are read"),
    (bad_image(b"<svg></svg>", "image/svg+xml"), "an SVG; PNG, JPEG and WebP are read"),
    (bad_image(b"hello"), "no image file"),
    (bad_image(png(draw_image())[:200]), "messages[0].content[0].image_url: "),
    (of_url("http://host/a.png"), "send the image itself"),
    (of_url({"url": "data:image/png;base64,&"}), "messages[0].content[0].image_url: "),
    (of_url(None), "send the image itself"),
]


@pytest.fixture(scope="module")
def errors_of_bad_requests(renderer):
    """The answers to all bad requests, each followed by a good one, in one episode; and that episode."""
    answers = []

    def run(base_url, sample, args):
        for fields, _ in BAD:
            answers.append(post(f"{base_url}/chat/completions", {**BODY, **fields}))
        ask(base_url, QUESTION)
        return 1.0

    threads = EnvThreads(1)
    trajectory, engine = play_agent(renderer, threads, run, ["a"])
    threads.close()
    return answers, trajectory, engine


@pytest.mark.parametrize("number", range(len(BAD)), ids=lambda number: BAD[number][1][:50])
def test_a_bad_request_is_an_error_of_one_line_in_openais_form(errors_of_bad_requests, number):
    status, answer = errors_of_bad_requests[0][number]
    assert status == 400 and set(answer) == {"error"}
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert BAD[number][1] in error["message"] and "\n" not in error["message"] and error["code"]


def test_bad_requests_leave_no_trace_in_the_episode_but_their_number(errors_of_bad_requests):
    _, trajectory, engine = errors_of_bad_requests
    assert trajectory.ending is Ending.COMPLETED and len(engine.requests) == 1 and len(trajectory.turns) == 1
    assert trajectory.metrics["agent_refused"] == len(BAD)


def test_harmless_fields_are_ignored(renderer, threads):
    harmless = {
        "user": "me",
        "temperature": 0.1,
        "top_p": 0.2,
        "seed": 5,
        "n": 1,
        "presence_penalty": 0.0,
        "stop": None,
    }
    harmless |= {"tool_choice": "auto", "response_format": {"type": "text"}, "metadata": {"a": "b"}, "store": False}

    def run(base_url, sample, args):
        named = [{**SYSTEM, "name": "sys"}, text("Which move?")]
        ask(base_url, named, **harmless)
        return 1.0

    trajectory, engine = play_agent(renderer, threads, run, ["a"], seed=3)
    plain, plain_engine = play_agent(renderer, threads, at_once, ["a"], seed=3)
    assert trajectory.token_ids.tolist() == plain.token_ids.tolist() and engine.requests == plain_engine.requests


def test_what_is_not_served_has_the_status_that_says_so(renderer, threads):
    found = {}

    def run(base_url, sample, args):
        def note(name, status, answer):
            found[name] = status, answer["error"]["code"]

        chat = f"{base_url}/chat/completions"
        note("model", *post(chat, {**BODY, "model": "gpt-4o"}))
        note("session", *post(chat.replace(base_url.split("/")[-2], "nobody"), BODY))
        note("url", *post(f"{base_url}/embeddings", BODY))
        note("root", *post(f"http://{urlsplit(base_url).netloc}/", None, "GET"))
        note("method", *post(chat, None, "GET"))
        note("json", *post(chat, b"{"))
        note("list", *post(chat, b"[]"))
        note("text", *post(chat, b"\xff\xfe"))
        note("deep", *post(chat, b"[" * 100_000))
        note("empty", *post(chat, b""))
        note("values", *post(chat, b"[" + b"1," * 2**18 + b"1]"))
        note("huge", *head_only(base_url, "content-length: 99999999999"))
        ask(base_url, QUESTION)
        return 1.0

    trajectory, _ = play_agent(renderer, threads, run, ["a"])
    assert trajectory.ending is Ending.COMPLETED, trajectory.error
    assert found == {
        "model": (404, "model_not_found"),
        "session": (404, "session_not_found"),
        "url": (404, "unknown_url"),
        "root": (404, "session_not_found"),
        "method": (405, "method_not_allowed"),
        "json": (400, "invalid_json"),
        "list": (400, "invalid_json"),
        "text": (400, "invalid_json"),
        "deep": (400, "invalid_json"),
        "empty": (400, "invalid_json"),
        "values": (413, "too_large"),
        "huge": (413, "too_large"),
    }


def head_only(base_url, header):
    """Send the head of a request alone; return status and answer."""
    parts = urlsplit(base_url)
    with socket.create_connection((parts.hostname, parts.port)) as link:
        link.sendall(f"POST {parts.path}/chat/completions HTTP/1.1\r\nhost: a\r\n{header}\r\n\r\n".encode())
        answer = b""
        while part := link.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def test_a_body_in_chunks_and_one_that_is_no_http_are_met(renderer, threads):
    def run(base_url, sample, args):
        parts = urlsplit(base_url)
        with socket.create_connection((parts.hostname, parts.port)) as link:
            link.sendall(b"\x00\x01 no HTTP\r\n\r\n")
            assert b" 400 " in link.recv(65536)
        body = json.dumps(BODY).encode()
        with socket.create_connection((parts.hostname, parts.port)) as link:
            head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
            chunks = b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in (body[:9], body[9:]))
            link.sendall(head.encode() + chunks + b"0\r\n\r\n")
            assert b"HTTP/1.1 200 OK" in link.recv(65536)
        return 1.0

    trajectory, _ = play_agent(renderer, threads, run, ["a"])
    assert trajectory.ending is Ending.COMPLETED and len(trajectory.turns) == 1, trajectory.error


def test_a_call_after_the_end_is_told_so_and_one_that_is_open_then_ends(renderer, threads):
    left, status = [], []

    class Late(Scripted):
        async def generate(self, *args, **settings):
            if self.requests:
                self.requests.append(None)
                await asyncio.sleep(60)
            return await super().generate(*args, **settings)

    engine = Late(["a"])

    def run(base_url, sample, args):
        ask(base_url, QUESTION)
        left.append(base_url)
        threading.Thread(target=lambda: status.append(post(base_url + "/chat/completions", BODY))).start()
        while len(engine.requests) < 2:
            time.sleep(0.01)
        return 1.0

    async def main():
        endpoint = AgentEndpoint()
        player = Player(
            None, renderer, EnginePool([engine]), ROOMY, threads, AgentReward(None), agent=run, endpoint=endpoint
        )
        trajectory = await player.play(ticket())
        status.append(await asyncio.to_thread(post, left[0] + "/chat/completions", BODY))
        while len(status) < 2:
            await asyncio.sleep(0.01)
        await endpoint.close()
        return trajectory, dict(endpoint.refusals.counts)

    trajectory, counts = asyncio.run(main())
    assert trajectory.ending is Ending.COMPLETED and len(trajectory.turns) == 1
    assert [(code, answer["error"]["code"]) for code, answer in status] == [(410, "session_ended")] * 2
    assert counts == {"status_410": 2}


def test_open_calls_of_an_agent_are_bounded(renderer, threads, monkeypatch):
    monkeypatch.setattr(agent_session, "MAX_OPEN", 2)
    codes = []

    class Slow(Scripted):
        async def generate(self, *args, **settings):
            await asyncio.sleep(0.3)
            return completion("a")

    async def run(base_url, sample, args):
        async def one(client):
            async with client.post(base_url + "/chat/completions", json=BODY) as got:
                codes.append((got.status, (await got.json()).get("error", {}).get("code")))

        async with aiohttp.ClientSession() as client:
            await asyncio.gather(*(one(client) for _ in range(8)))
            await one(client)
        return 1.0

    trajectory, _ = play_agent(renderer, threads, run, Slow([]))
    assert trajectory.ending is Ending.COMPLETED, trajectory.error
    assert sorted(codes[:-1], key=str) == [(200, None)] * 2 + [(429, "too_many_calls")] * 6
    assert codes[-1] == (200, None) and trajectory.metrics["agent_refused"] == 6


def test_connections_of_an_agent_are_bounded(renderer, threads, monkeypatch):
    monkeypatch.setattr(agent_endpoint, "MAX_SESSION_CONNECTIONS", 4)

    def listed(link, parts):
        link.sendall(f"GET {parts.path}/models HTTP/1.1\r\nhost: a\r\n\r\n".encode())
        return link.recv(65536)

    def run(base_url, sample, args):
        parts = urlsplit(base_url)
        links = [socket.create_connection((parts.hostname, parts.port)) for _ in range(5)]
        answers = [listed(link, parts) for link in links]
        assert [b" 200 " in each for each in answers] == [True] * 4 + [False]
        assert b" 429 " in answers[4] and b"too_many_connections" in answers[4] + links[4].recv(65536)
        for link in links:
            link.close()
        time.sleep(0.1)
        ask(base_url, QUESTION)
        return 1.0

    trajectory, _ = play_agent(renderer, threads, run, ["a"])
    assert trajectory.ending is Ending.COMPLETED, trajectory.error


def test_a_fault_of_the_endpoint_itself_is_an_error_and_ends_nothing(renderer, threads, monkeypatch, caplog):
    def breaks(*_):
        raise RuntimeError("a bug")

    def run(base_url, sample, args):
        monkeypatch.setitem(api_forms.FORMS, "/chat/completions", replace(api_forms.OPENAI, whole=breaks))
        assert post(f"{base_url}/chat/completions", BODY)[0] == 500
        monkeypatch.undo()
        ask(base_url, QUESTION)
        return 1.0

    trajectory, _ = play_agent(renderer, threads, run, ["a", "b"])
    assert trajectory.ending is Ending.COMPLETED and "a bug" in caplog.text


def test_a_client_that_leaves_before_its_answer_leaves_no_trace(renderer, threads):
    class First(Scripted):
        async def generate(self, *args, **settings):
            if not self.requests:
                self.requests.append(None)
                await asyncio.sleep(60)
            return await super().generate(*args, **settings)

    async def run(base_url, sample, args):
        timeout = aiohttp.ClientTimeout(total=0.3)
        async with aiohttp.ClientSession(timeout=timeout) as client:
            with pytest.raises(TimeoutError):
                await client.post(f"{base_url}/chat/completions", json=BODY)
        return await at_once(base_url, sample, args)

    trajectory, engine = play_agent(renderer, threads, run, First(["a"]), EpisodeLimits(max_turns=1, max_tokens=300))
    assert trajectory.ending is Ending.COMPLETED and len(trajectory.turns) == 1, trajectory.error
    assert len(engine.requests) == 2


def test_a_proxy_that_the_host_names_is_not_asked_for_the_endpoint(renderer, threads, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "elsewhere")
    monkeypatch.setenv("NO_PROXY", "elsewhere")

    def run(base_url, sample, args):
        with urllib.request.urlopen(f"{base_url}/models", timeout=10) as answer:
            assert answer.status == 200
        return at_once_plain(base_url)

    trajectory, _ = play_agent(renderer, threads, run, ["a"])
    assert trajectory.ending is Ending.COMPLETED, trajectory.error


def at_once_plain(base_url):
    ask(base_url, QUESTION)
    return 1.0


# ---------------------------------------------------------------------- the recipe

AGENT = """

from tests.support.agent_rig import ask

def run(base_url, sample, args):
    ask(base_url, [{"role": "user", "content": args["word"]}])
    return {"none": None}.get(args["word"], len(args["word"]))

def score(played):
    return 10.0 + len(played.answers)
"""


def test_each_task_of_a_recipe_has_its_agent_with_its_arguments_and_its_other_reward(renderer, tmp_path):
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    one = {"name": "one", "module": "envs.sokoban", "args": {"word": "hello"}}
    two = {"name": "two", "module": "envs.no_env", "args": {"word": "none"}, "reward": f"{agent}:score"}
    values = {"model": {"path": "m"}, "rollout": {"agent": f"{agent}:run"}, "tasks": [one, two], "env": LIMITS}

    async def main():
        engine = Scripted(["ok"] * 2)
        players, _ = make_players(Recipe.model_validate(values), renderer, EnginePool([engine]))
        played = [await players.play(ticket(sample=Sample("s", task=name))) for name in ("one", "two")]
        port = players._endpoint._port
        await players.close(1.0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        return played

    first, second = asyncio.run(main())
    assert (first.ending, first.reward) == (Ending.COMPLETED, 5.0), first.error  # not what envs.sokoban rewards
    assert (second.ending, second.reward) == (Ending.COMPLETED, 11.0), second.error


def test_a_judge_grades_what_an_agent_leaves_open(threads):
    reward = AgentReward(None, is_judged=True)
    played = Played(Sample("s"), None, ("a",), (), Returned())
    assert asyncio.run(reward(played)) == 0.0
    judged = {"url": "http://h/v1", "model": "m", "rubric": "r"}
    values = {"model": {"path": "m"}, "rollout": {"agent": "a.b"}, "reward": {"judge": judged}}
    made = make_reward(Recipe.model_validate(values), threads)
    assert isinstance(made, JudgeReward) and isinstance(made._base, AgentReward) and made._base._is_judged


# ---------------------------------------------------------------------- made-up conversations

CONVERSATIONS = 1000
AT_ONCE = 8


@pytest.mark.slow
def test_a_thousand_conversations_go_on_in_their_very_tokens_or_begin_a_segment(renderer):
    threads = EnvThreads(1)
    speakers, engines = dict[int, Speaker](), {seed: Babbler() for seed in range(CONVERSATIONS)}

    async def run(base_url, sample, args):
        seed = sample.metadata["seed"]
        speakers[seed] = Speaker(Random(seed), base_url)
        await speakers[seed].speak(1 + seed % 7)
        return 1.0

    async def main():
        endpoint, places = AgentEndpoint(), asyncio.Semaphore(AT_ONCE)

        async def play(seed):
            pool, reward = EnginePool([engines[seed]]), AgentReward(None)
            player = Player(None, renderer, pool, ROOMY, threads, reward, agent=run, endpoint=endpoint)
            async with places:
                return await player.play(ticket(sample=Sample("s", metadata={"seed": seed}), seed=seed + 1))

        played = await asyncio.gather(*map(play, range(CONVERSATIONS)))
        await endpoint.close()
        return played

    played = asyncio.run(main())
    threads.close()
    for seed, trajectory in enumerate(played):
        assert trajectory.ending in (Ending.COMPLETED, Ending.OUT_OF_TOKENS), (seed, trajectory.error)
        check(renderer, trajectory)
        assert len(trajectory.bounds) == speakers[seed].segments, seed
        check_streams(renderer, trajectory, speakers[seed], engines[seed])
    assert sum(len(trajectory.turns) for trajectory in played) > 3 * CONVERSATIONS
    assert sum(len(trajectory.segments) for trajectory in played) > CONVERSATIONS


def check_streams(renderer, trajectory, speaker, engine):
    """Check that what has mask 1 are the engine's answers, each once, after what the engine was asked for it; and that
    this shows all that the client had sent, in its order."""
    said = {}
    for turn in trajectory.turns:
        tokens = tuple(trajectory.token_ids[turn.start : turn.end].tolist())
        asked = engine.asked[tokens]
        (start,) = [start for start, end in trajectory.bounds if start <= turn.start < end]
        assert trajectory.token_ids[start : turn.start].tolist() == asked.token_ids
        before = np.count_nonzero(trajectory.token_ids[:start] == renderer.image_id)
        assert list(trajectory.images[before : before + len(asked.images)]) == asked.images
        logprobs = np.asarray(asked.completion.logprobs, np.float32)
        assert trajectory.behaviour_logprobs[turn.start : turn.end].tobytes() == logprobs.tobytes()
        assert set(trajectory.policy_versions[turn.start : turn.end]) == {asked.completion.spans[0].version}
        said[re.search(r"say (\d+)", renderer.decode(tokens))[1]] = asked
    assert len(said) == len(trajectory.turns) == len(speaker.sent) == len(engine.asked)
    for talk, answer in speaker.sent:
        asked = said[re.search(r"say (\d+)", answer["content"])[1]]
        transcript, at = renderer.transcript(asked.token_ids), 0
        for words in texts_of(talk):
            found = transcript.find(words, at)
            assert found >= 0, (words, transcript)
            at = found + len(words)
        parts = [part for each in talk if isinstance(each["content"], list) for part in each["content"]]
        assert asked.images == [Image.of(as_png(part["image"])) for part in parts if part["type"] == "image"]


def texts_of(talk):
    """What a talk says in words; of answers what comes after their thoughts."""
    for message in talk:
        if message["role"] == "assistant":
            yield (message["content"] or "").rpartition("</think>")[2].strip()
        elif isinstance(message["content"], str):
            yield message["content"]
        else:
            yield from (part["text"] for part in message["content"] if part["type"] == "text")
