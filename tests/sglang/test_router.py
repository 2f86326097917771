"""Several engines behind one address: episodes go through a proxy, weights to each engine."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import contextmanager
from itertools import cycle
from urllib.parse import urlsplit

import pytest

from launch.engines.engine_supervisor import check_router
from launch.engines.kinds.sglang_engine import STAND_INS, sglang_python
from launch.engines.network import free_port
from launch.engines.probe import ModelFacts
from launch.processes.children import cpu_env
from shared.engine.engine_api import EngineError
from tests.support.engines import wait_healthy
from tests.support.episodes import gap
from tests.support.sglang_rig import TOLERANCE, tickets, versions, vision_of, with_player


@contextmanager
def sglang_router(recipe, urls):
    port = free_port()
    command = [str(sglang_python(recipe)), "-P", "-m", "sglang_router.launch_router", "--worker-urls", *urls]
    command += ["--policy", "cache_aware", "--disable-retries", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port())]
    log = subprocess.DEVNULL
    process = subprocess.Popen(command, env=cpu_env(1) | {"PYTHONPATH": str(STAND_INS)}, stdout=log, stderr=log)
    try:
        wait_healthy(f"http://127.0.0.1:{port}", 60.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


async def balance(urls):
    """A proxy of connections, one engine after the other: (server, address)."""
    turns = cycle(urls)

    async def copy(reader, writer):
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def connect(reader, writer):
        engine = urlsplit(next(turns))
        there = await asyncio.open_connection(engine.hostname, engine.port)
        await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def test_episodes_play_through_a_proxy_on_the_weights_that_each_engine_was_given(servers, recipe, policy, publisher):
    assert publisher.publish(60, servers.urls)["publish/engines"] == 2

    async def use():
        server, url = await balance(servers.urls)
        async with server:
            return await with_player(
                recipe, [url], lambda player: asyncio.gather(*map(player.play, tickets(recipe, 8, 60)))
            )

    episodes = asyncio.run(use())
    assert all(episode.trainable for episode in episodes), [episode.error for episode in episodes]
    for episode in episodes:
        assert versions(episode) == {60}
        assert gap(policy, episode) < TOLERANCE


def test_a_router_that_loses_the_bans_of_a_request_is_refused(servers, recipe):
    """sglang-router 0.3.2 knows no logit_bias. When it passes it on, this fails, and the README may praise it."""
    facts = ModelFacts.load(recipe.model.path, vision_of(recipe))
    with sglang_router(recipe, servers.urls) as url, pytest.raises(EngineError, match="loses logit_bias"):
        check_router(url, facts, 60.0)
