"""Episodes that agents play through an actor's endpoint: on real sockets, with an engine of the test's choice."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.error
import urllib.request
from typing import Any

from PIL import Image as PILImage

from actor.agents.agent_endpoint import AgentEndpoint
from actor.agents.agent_episode import AgentReward
from actor.engine_pool import EnginePool
from actor.episode import EpisodeLimits
from actor.rollout import Player
from shared.types import Trajectory
from tests.support.rollout_rig import Counting, Scripted, check, ticket
from tests.support.tiny import png

ROOMY = EpisodeLimits(max_turns=64, max_tokens=100_000, turn_tokens=1024, max_context=100_000)


def text(words: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": words}


def image_part(image: PILImage.Image | bytes) -> dict[str, Any]:
    data = image if isinstance(image, bytes) else png(image)
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def as_openai(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of an environment as clients of OpenAI's API send it."""
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": [image_part(p["image"]) if p["type"] == "image" else p for p in content]}


def post(url: str, body: Any, method: str = "POST") -> tuple[int, Any]:
    """Send a request, a body of bytes as it is; return the status and the decoded answer."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def ask(base_url: str, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Return the message that the policy answers. Raise ValueError for an answer with an error."""
    status, answer = post(f"{base_url}/chat/completions", {"model": "policy", "messages": messages, **fields})
    if status != 200:
        raise ValueError(f"{status} {answer['error']['code']}: {answer['error']['message']}")
    return answer["choices"][0]["message"]


def play_agent(
    renderer: Any, threads: Any, run: Any, answers: Any, limits: EpisodeLimits = ROOMY, reward: Any = None,
    endpoint: AgentEndpoint | None = None, **changes: Any,
) -> tuple[Trajectory, Any]:  # fmt: skip
    """Play an episode; return it and the engine that `answers` are of, a client if it is one already."""
    engine = Scripted(answers) if isinstance(answers, list) else answers

    async def main() -> Trajectory:
        served = endpoint or AgentEndpoint()
        pool = EnginePool([engine])
        player = Player(
            Counting,
            renderer,
            pool,
            limits,
            threads,
            AgentReward(reward),
            agent=run,
            endpoint=served,
            env_args={"a": 1},
        )
        try:
            return await player.play(ticket(**changes))
        finally:
            await served.close()

    trajectory = asyncio.run(main())
    check(renderer, trajectory)
    return trajectory, engine
