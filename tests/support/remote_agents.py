"""Agents elsewhere, as plain HTTP: what leases an episode, plays it and posts its result."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from actor.agents.agent_endpoint import AgentEndpoint
from actor.agents.agent_episode import AgentReward
from actor.agents.remote_agents import RemoteAgents
from actor.engine_pool import EnginePool
from actor.episode import EpisodeLimits
from actor.rollout import Player
from shared.types import Trajectory
from tests.support.agent_rig import ROOMY
from tests.support.rollout_rig import Scripted, ticket

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def call(url: str, body: Any, key: str = "", method: str = "POST", **headers: str) -> tuple[int, Any]:
    """Send a request, a body of bytes as it is; return the status and the decoded answer, None if it is empty."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    sent = {"content-type": "application/json", **headers} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        with OPENER.open(urllib.request.Request(url, data, sent, method=method), timeout=60) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def lease(url: str, wait_s: float = 20.0, key: str = "") -> dict[str, Any]:
    status, got = call(f"{url}/lease", {"wait_s": wait_s}, key)
    assert status == 200, (status, got)
    return dict(got)


def play_remotely(
    renderer: Any, threads: Any, agent: Callable[[str], Any], answers: Any, limits: EpisodeLimits = ROOMY,
    episodes: int = 1, reward: Any = None, key: str = "", **changes: Any,
) -> tuple[list[Trajectory], Any, AgentEndpoint]:  # fmt: skip
    """Play episodes while `agent` runs in a thread, which gets the address; return them, what `agent` returns, and the
    endpoint."""
    engine = Scripted(answers) if isinstance(answers, list) else answers
    endpoint = AgentEndpoint(api_key=key, remote=RemoteAgents())

    async def main() -> tuple[list[Trajectory], Any]:
        await endpoint.listen()
        assert endpoint._listener is not None
        port = endpoint._listener.sockets[0].getsockname()[1]
        player = Player(
            lambda _: None, renderer, EnginePool([engine]), limits, threads, AgentReward(reward),
            endpoint=endpoint, env_args={"a": 1},
        )  # fmt: skip
        agents = asyncio.create_task(asyncio.to_thread(agent, f"http://127.0.0.1:{port}"))
        try:
            played = await asyncio.gather(*(player.play(ticket(**changes), index) for index in range(episodes)))
            return list(played), await agents
        finally:
            await endpoint.close()

    played, returned = asyncio.run(main())
    return played, returned, endpoint
