"""SGLang servers that die or fall silent: named, left behind, taken back with the right weights."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
from dataclasses import replace

import pytest

from shared.engine_api import EngineError
from tests.support.engines import ask
from tests.support.episodes import gap
from tests.support.publishing import in_mid_update
from tests.support.sglang_rig import TOLERANCE, move, play, tickets, versions, with_player


def answers(url):
    try:
        ask(url, lambda client: client.health(5.0))
    except EngineError:
        return False
    return True


def play_one(recipe, url, version):
    return play(recipe, [url], 1, version)[0]


def publish_to_both(publisher, urls, version):
    """An engine that comes back may miss a publication: the group it was in is gone, or its last update still open."""
    for later in range(version, version + 4):
        if publisher.publish(later, urls)["publish/engines"] == 2:
            return later
    pytest.fail("the engine was not taken back")


def test_a_server_killed_in_mid_episode_is_named_and_comes_back(servers, recipe, policy, publisher, caplog):
    first, second = servers.urls
    publisher.publish(30, servers.urls)
    pid = servers.pid(1)

    async def use(player):
        games = [asyncio.create_task(player.play(ticket)) for ticket in tickets(recipe, 16, 30)]
        await asyncio.sleep(1.0)
        os.kill(pid, signal.SIGKILL)
        return await asyncio.gather(*games), await player.play(tickets(recipe, 1, 30)[0])

    episodes, later = asyncio.run(with_player(recipe, servers.urls, use))
    assert all(episode.trainable and gap(policy, episode) < TOLERANCE for episode in episodes)
    assert sum(episode.metrics["engine_retries"] for episode in episodes) > 0
    assert f"a turn is asked for again, of another engine if one is well: {second}" in caplog.text
    assert later.trainable  # new episodes go to the engine that is well
    servers.keep_until(lambda: answers(second))
    assert f"{servers.engines[1].spec.name} was ended by SIGKILL" in caplog.text
    assert servers.pid(1) != pid
    assert play_one(recipe, first, 30).trainable
    move(policy, 2)
    version = publish_to_both(publisher, servers.urls, 31)
    episode = play_one(recipe, second, version)
    assert versions(episode) == {version}
    assert gap(policy, episode) < TOLERANCE


def test_a_server_that_stops_answering_in_mid_update_is_left_behind_and_taken_back(
    servers, recipe, policy, publisher, monkeypatch, caplog
):
    first, second = servers.urls
    publisher.publish(40, servers.urls)
    group = os.getpgid(servers.pid(1))
    before = copy.deepcopy(policy)
    move(policy, 3)
    publisher.settings = replace(publisher.settings, bucket_bytes=200_000)
    try:
        with monkeypatch.context() as patched:
            in_mid_update(patched, lambda: os.killpg(group, signal.SIGSTOP))
            values = publisher.publish(41, servers.urls)
        assert (values["publish/engines"], values["publish/dropped"]) == (1, 1)
        assert any(second in record.getMessage() for record in caplog.records)
        episode = play_one(recipe, first, 41)
        assert versions(episode) == {41} and gap(policy, episode) < TOLERANCE
    finally:
        os.killpg(group, signal.SIGCONT)
    episode = play_one(recipe, second, 40)
    assert versions(episode) == {40} and gap(before, episode) < TOLERANCE  # half an update leaves no trace
    move(policy, 4)
    version = publish_to_both(publisher, servers.urls, 42)
    episode = play_one(recipe, second, version)
    assert versions(episode) == {version}
    assert gap(policy, episode) < TOLERANCE
