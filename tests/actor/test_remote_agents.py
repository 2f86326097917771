"""Agents elsewhere: an episode is leased once, and ends with its first valid result, or when its lease runs out."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest

from actor.agents import agent_endpoint
from actor.agents.agent_endpoint import AgentEndpoint
from actor.agents.remote_agents import RemoteAgents, sample_as_json
from actor.episode import EpisodeLimits
from actor.render import Renderer
from actor.rewards import FunctionReward
from launch.tiny_models.build import TOOLS_TEMPLATE, build_tokenizer
from shared.rgb_images import as_png
from shared.types import TRAINABLE_ENDINGS, Ending, Image, Sample
from shared.vision import VisionSpec
from tests.support.agent_rig import ask, image_part, text
from tests.support.remote_agents import call, lease, play_remotely
from tests.support.rollout_rig import SYSTEM, check, threads, ticket
from tests.support.tiny import PHRASES, draw_image

__all__ = ["threads"]  # a fixture
QUESTION = [SYSTEM, text("Which move?")]
KEY = "a-key-of-twenty-or-so"
SHORT = EpisodeLimits(max_turns=64, max_tokens=100_000, max_context=100_000, env_timeout_s=0.6)


@pytest.fixture(scope="module")
def renderer(folder):
    return Renderer(build_tokenizer(PHRASES, 640, TOOLS_TEMPLATE), VisionSpec.load(folder))


def test_an_agent_leases_an_episode_plays_it_and_its_reward_is_the_episodes(renderer, threads):
    picture = Image.of(as_png(draw_image(64, 64, 5)))
    prompt = (SYSTEM, {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which move?"}]})
    sample = Sample("s", prompt, (picture,), label="up", metadata={"seed": 3})

    def agent(url):
        leased = lease(url)
        assert leased["sample"]["label"] == "up" and leased["sample"]["metadata"] == {"seed": 3}
        assert leased["args"] == {"a": 1} and leased["lease_s"] == 30.0 and leased["timeout_s"] == 600.0
        assert leased["sample"]["prompt"] == [
            SYSTEM,
            {"role": "user", "content": [image_part(bytes(picture.data)), prompt[1]["content"][1]]},
        ]
        said = ask(leased["base_url"], leased["sample"]["prompt"])["content"]
        result = {"reward": 0.75, "metrics": {"moves": 2, "turns": 9}, "success": True}
        assert call(f"{leased['base_url']}/result", result) == (200, {"taken": True})
        return said

    (trajectory,), said, _ = play_remotely(renderer, threads, agent, ["up"], sample=sample)
    check(renderer, trajectory)
    assert said == "up" and trajectory.ending is Ending.COMPLETED, trajectory.error
    assert trajectory.reward == trajectory.turns[-1].reward == 0.75 and trajectory.images == (picture,)
    assert trajectory.metrics["moves"] == 2.0 and trajectory.metrics["success"] == 1.0
    assert trajectory.metrics["turns"] == 1.0  # what Pronk counts itself is not overwritten


def test_each_episode_is_leased_once_and_a_lease_waits_for_one(renderer, threads):
    def agent(url):
        found = [lease(url) for _ in range(3)]
        assert len({each["base_url"] for each in found}) == 3
        assert call(f"{url}/lease", {"wait_s": 0.05}) == (204, None)
        for number, each in enumerate(found):
            ask(each["base_url"], QUESTION)
            call(f"{each['base_url']}/result", {"reward": number})

    played, _, _ = play_remotely(renderer, threads, agent, ["a"] * 3, episodes=3)
    assert sorted(each.reward for each in played) == [0.0, 1.0, 2.0]


def test_a_result_twice_late_unknown_or_of_another_form_is_an_error_and_is_never_trained_on(renderer, threads):
    def agent(url):
        first = lease(url)
        ask(first["base_url"], QUESTION)
        result = f"{first['base_url']}/result"
        found = [call(result, {"reward": value}) for value in ("1", ["1"], {}, 10**400)]
        found += [call(result, body) for body in ({}, [], {"reward": 1, "metric": {}}, {"reward": 1, "metrics": 3})]
        found += [call(result, {"reward": 1, "success": 1}), call(result, {"error": ""}), call(result, b"{")]
        found += [call(result, b'{"reward": NaN}'), call(result, {"reward": 1, "error": "both"})]
        assert {status for status, _ in found} == {400}, found
        assert all(set(answer["error"]) == {"message", "type", "param", "code"} for _, answer in found)
        unknown = call(result.replace(urlsplit(result).path.split("/")[1], "nobody"), {"reward": 1})
        taken, again = call(result, {"reward": 0.5}), call(result, {"reward": 100})
        time.sleep(0.2)
        late = call(result, {"reward": 100})
        return unknown[0], taken[0], again[0], late[0], late[1]["error"]["code"]

    (trajectory,), found, endpoint = play_remotely(renderer, threads, agent, ["a"])
    assert found == (404, 200, 410, 410, "session_ended")
    assert trajectory.reward == 0.5 and trajectory.ending is Ending.COMPLETED
    assert endpoint.refusals.counts == {"status_400": 13, "status_404": 1, "status_410": 2}


def test_two_results_at_once_count_once(renderer, threads):
    def agent(url):
        leased, statuses = lease(url), []
        ask(leased["base_url"], QUESTION)
        posts = [
            threading.Thread(target=lambda n=n: statuses.append(call(f"{leased['base_url']}/result", {"reward": n})[0]))
            for n in range(8)
        ]
        for each in posts:
            each.start()
        for each in posts:
            each.join()
        return statuses

    (trajectory,), statuses, _ = play_remotely(renderer, threads, agent, ["a"])
    assert sorted(statuses) == [200] + [410] * 7 and trajectory.ending is Ending.COMPLETED


def test_a_lease_that_no_call_renews_is_an_ending_that_is_not_trained_on(renderer, threads):
    def agent(url):
        leased = lease(url)
        ask(leased["base_url"], QUESTION)
        for _ in range(3):  # any call renews it
            time.sleep(0.3)
            assert call(f"{leased['base_url']}/models", None, method="GET")[0] == 200
        time.sleep(1.2)
        return call(f"{leased['base_url']}/result", {"reward": 1.0})

    (trajectory,), late, _ = play_remotely(renderer, threads, agent, ["a"], SHORT)
    assert late[0] == 410 and late[1]["error"]["code"] == "session_ended"
    assert trajectory.ending is Ending.AGENT_GONE and trajectory.ending not in TRAINABLE_ENDINGS
    assert "its lease ran out" in trajectory.error and not trajectory.trainable and len(trajectory.turns) == 1


def test_an_episode_that_nobody_leases_says_whom_it_waited_for(renderer, threads):
    limits = EpisodeLimits(rollout_timeout_s=0.3)
    (trajectory,), _, _ = play_remotely(renderer, threads, lambda url: None, [], limits)
    assert trajectory.ending is Ending.AGENT_GONE and "no agent elsewhere asked" in trajectory.error


def test_the_time_before_a_lease_is_not_the_agents(renderer, threads):
    def agent(url):
        time.sleep(1.0)
        leased = lease(url)
        ask(leased["base_url"], QUESTION)
        call(f"{leased['base_url']}/result", {"reward": 1.0})

    (trajectory,), _, _ = play_remotely(renderer, threads, agent, ["a"], SHORT)
    assert trajectory.ending is Ending.COMPLETED, trajectory.error


def test_a_failure_that_is_posted_is_the_episodes_and_so_is_a_limit_before_it(renderer, threads):
    def fails(url):
        leased = lease(url)
        ask(leased["base_url"], QUESTION)
        assert call(f"{leased['base_url']}/chat/completions", {"messages": QUESTION})[0] in (200, 400)
        assert call(f"{leased['base_url']}/result", {"error": "the browser\ncrashed"})[0] == 200

    (trajectory,), _, _ = play_remotely(renderer, threads, fails, ["a", "b"])
    assert trajectory.ending is Ending.ENV_ERROR and trajectory.error == "the agent reports: the browser crashed"
    limits = EpisodeLimits(max_turns=1)
    (trajectory,), _, _ = play_remotely(renderer, threads, fails, ["a", "b"], limits)
    assert trajectory.ending is Ending.MAX_TURNS and trajectory.reward == 0.0


def test_no_reward_is_that_of_the_recipes_other_source(renderer, threads):
    def agent(url):
        leased = lease(url)
        ask(leased["base_url"], QUESTION)
        call(f"{leased['base_url']}/result", {"reward": None})

    other = FunctionReward(lambda played: 0.25, threads, 5.0)
    (trajectory,), _, _ = play_remotely(renderer, threads, agent, ["a"], reward=other)
    assert trajectory.reward == 0.25
    (trajectory,), _, _ = play_remotely(renderer, threads, agent, ["a"])
    assert trajectory.ending is Ending.REWARD_ERROR and "set env.reward" in trajectory.error


def test_an_agent_that_leaves_while_it_waits_takes_no_episode():
    async def main():
        agents = RemoteAgents()
        endpoint = AgentEndpoint(remote=agents)
        await endpoint.listen()
        host, port = endpoint._listener.sockets[0].getsockname()
        _, link = await asyncio.open_connection(host, port)
        link.write(b"POST /lease HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 0\r\n\r\n")
        while not agents._waiting._getters:
            await asyncio.sleep(0.01)
        link.close()
        while agents._waiting._getters:
            await asyncio.sleep(0.01)
        offered = agents.offer("secret", ticket(), {})
        assert await agents.lease(5.0) is offered
        offered.give_up()
        assert await agents.lease(0.05) is None
        await endpoint.close()

    asyncio.run(asyncio.wait_for(main(), 30))


# ---------------------------------------------------------------------- who may ask


def test_a_lease_needs_the_key_where_there_is_one(renderer, threads):
    def agent(url):
        found = [call(f"{url}/lease", {}, key)[0] for key in ("", KEY + "x", KEY[:-1], "é" * 20)]
        found.append(call(f"{url}/lease", b"x" * 2**20, "wrong")[0])
        leased = lease(url, key=KEY)  # the episode's own address is secret
        ask(leased["base_url"], QUESTION)
        call(f"{leased['base_url']}/result", {"reward": 1.0})
        return found

    (trajectory,), found, _ = play_remotely(renderer, threads, agent, ["a"], key=KEY)
    assert found == [401] * 5 and trajectory.reward == 1.0


def test_without_a_key_what_a_web_page_may_send_is_refused(renderer, threads):
    def agent(url):
        found = [call(f"{url}/lease", {}, origin="http://evil.example")[0]]
        found.append(call(f"{url}/lease", {}, host="evil.example")[0])
        leased = lease(url)
        ask(leased["base_url"], QUESTION)
        call(f"{leased['base_url']}/result", {"reward": 1.0})
        return found

    _, found, _ = play_remotely(renderer, threads, agent, ["a"])
    assert found == [403, 403]


def test_a_bad_request_for_a_lease_is_an_error_and_takes_no_episode(renderer, threads):
    def agent(url):
        bodies = [{"wait_s": -1}, {"wait_s": 10**9}, {"wait_s": "1"}, {"wait_s": True}, {"wait": 1}, [], b"{", b"\xff"]
        found = [call(f"{url}/lease", body) for body in bodies]
        assert {status for status, _ in found} == {400}, found
        assert call(f"{url}/lease", None, method="GET")[0] == 405
        leased = lease(url)
        ask(leased["base_url"], QUESTION)
        call(f"{leased['base_url']}/result", {"reward": 1.0})

    (trajectory,), _, _ = play_remotely(renderer, threads, agent, ["a"])
    assert trajectory.ending is Ending.COMPLETED


def test_a_sample_says_what_is_no_json_in_another_way():
    sample = Sample("s", metadata={"data": b"\x00\xff", "nan": math.nan})
    encoded = agent_endpoint._json(sample_as_json(sample)).body
    assert json.loads(encoded)["metadata"] == {"data": base64.b64encode(b"\x00\xff").decode(), "nan": None}


def test_a_port_that_is_taken_is_said_in_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = AgentEndpoint("127.0.0.1", taken.getsockname()[1], remote=RemoteAgents())
        with pytest.raises(ValueError, match=r"rollout.listen: cannot listen on 127.0.0.1 port \d+"):
            asyncio.run(endpoint.listen())
