"""SGLang servers that die or fall silent: named, left behind, taken back with the right weights."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace

import pytest
import torch

from learner.weights.weight_group import WeightGroup
from shared.engine.engine_api import EngineError
from tests.support.engines import ask, call
from tests.support.episodes import gap
from tests.support.hostile.memory import resident_bytes
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


class GivenUp:
    """A learner that breaks its group up in the middle of a message."""

    def __init__(self, url: str, num_bytes: int) -> None:
        self.url, self.tensor = url, torch.zeros(num_bytes, dtype=torch.uint8)
        self.group = WeightGroup("given up", 2, "gloo", 4.0)
        place = {"master_address": "127.0.0.1", "master_port": self.group.port}
        body = {**place, "world_size": 2, "group_name": "given up", "backend": "gloo"}
        joins = threading.Thread(target=ask, args=(url, lambda client: client.join_group(body, 1, 20.0)))
        joins.start()
        self.group.connect()
        joins.join()

    def bucket(self) -> dict[str, object]:
        entries = {"names": ["x"], "dtypes": ["uint8"], "shapes": [[self.tensor.numel()]]}
        return {**entries, "group_name": "given up", "load_format": "flattened_bucket", "weight_version": "99"}

    def send_half(self, server: int) -> None:
        """Breaks off when one process of the server's group has part of the message in its memory."""

        errors = []

        def send() -> None:
            try:
                self.group.broadcast(self.tensor)
            except RuntimeError as error:
                errors.append(error)

        found = subprocess.run(["pgrep", "-g", str(server)], capture_output=True, text=True, check=True)
        members, sending = found.stdout.split(), threading.Thread(target=send)
        before = [resident_bytes(pid) for pid in members]
        sending.start()
        deadline = time.monotonic() + 60
        while all(resident_bytes(p) - b < self.tensor.numel() / 32 for p, b in zip(members, before, strict=True)):
            assert time.monotonic() < deadline, "the message did not begin"
        os.killpg(server, signal.SIGSTOP)  # so that it does not get the rest meanwhile
        try:
            asyncio.run(self.group.abort())
        finally:
            os.killpg(server, signal.SIGCONT)
        sending.join()
        assert errors, "the message came through whole"


@pytest.mark.parametrize("index", [0, 1], ids=["paused", "beside"])
def test_a_message_that_breaks_off_in_the_middle_holds_no_server_up(servers, recipe, policy, publisher, index):
    url = servers.urls[index]
    learner = GivenUp(url, 1 << 30)
    call(url, "/begin_weight_update", {})
    answers = []

    def announce():
        for path, body in (("/update_weights_from_distributed", learner.bucket()), ("/end_weight_update", {})):
            try:
                answers.append(call(url, path, body)["message"])
            except EngineError as error:
                answers.append(str(error))

    announcing = threading.Thread(target=announce)
    announcing.start()
    learner.send_half(os.getpgid(servers.pid(index)))
    announcing.join(60.0)
    assert len(answers) == 2 and any("given up the group" in answer for answer in answers), answers
    version = 50 + index
    assert publisher.publish(version, [url])["publish/engines"] == 1
    episode = play_one(recipe, url, version)
    assert versions(episode) == {version} and gap(policy, episode) < TOLERANCE
