"""An agent of the chaos run: it leases episodes of the colour task and plays them, several at once, until it is killed.

python -m tests.chaos.agent http://HOST:PORT
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from typing import Any

from actor.rewards import image_uri
from envs import colour
from envs.env_calls import messages_of
from shared.rgb_images import as_png
from shared.types import Image, Sample

AT_ONCE = 6
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with OPENER.open(request, timeout=60) as answer:
        return json.loads(answer.read() or b"null")


def as_openai(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of the environment as clients of OpenAI's API send it."""

    def sent(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] != "image":
            return part
        return {"type": "image_url", "image_url": {"url": image_uri(Image.of(as_png(part["image"])))}}

    content = message["content"]
    return message if isinstance(content, str) else {**message, "content": [sent(part) for part in content]}


def play(base_url: str, sample: dict[str, Any], step_s: float) -> None:
    env = colour.build_env(Sample(sample["id"], metadata=sample["metadata"]))
    observation, _ = env.reset()
    messages = [*sample["prompt"], *map(as_openai, messages_of(env, observation))]
    answer = post(f"{base_url}/chat/completions", {"messages": messages})["choices"][0]["message"]["content"]
    time.sleep(step_s)
    _, _, info = env.step(answer)
    post(f"{base_url}/result", {"reward": info["reward"], "metrics": info.get("metrics", {})})


def work(url: str) -> None:
    while True:
        try:
            if leased := post(f"{url}/lease", {"wait_s": 5}):
                play(leased["base_url"], leased["sample"], leased["args"]["step_s"])
        except (OSError, ValueError):  # the actor is away or its episode has ended: another one
            time.sleep(0.5)


if __name__ == "__main__":
    threads = [threading.Thread(target=work, args=(sys.argv[1],)) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
