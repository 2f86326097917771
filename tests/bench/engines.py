"""Requests and tokens a second of the embedded engine and of SGLang, on the same prompts with images, 1, 8 and 32 at
once: python -m tests.bench.engines [--recipe R.toml] [--kinds embedded,sglang] [--seconds 10] [--section.key VALUE ...]

Every request is the first turn of an episode of its own, which finds nothing of another's in a cache but the image, and
runs to 16 new tokens. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformers import AutoTokenizer

from actor.render import Fragment, Renderer
from envs.loader import load_env
from launch.actors import check
from launch.engines.engine_supervisor import EngineServer, wait_until_serving
from launch.engines.network import free_port
from launch.processes.children import stop_all
from launch.task_samples import held_out_samples, ready
from shared.config.recipe import Recipe, fail, load
from shared.engine.engine_api import EngineClient, EngineError
from shared.engine.engine_messages import generate_body
from shared.types import Sampling
from shared.vision import VisionSpec

AT_ONCE = (1, 8, 32)
NEW_TOKENS = 16
NUM_PROMPTS = 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--recipe", default="launch/recipes/sokoban_tiny.toml")
    parser.add_argument("--kinds", default="embedded,sglang")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    options, overrides = parser.parse_known_args()
    results: dict[str, Any] = {}
    for kind in options.kinds.split(","):
        own = ["--engine.kind", kind, "--engine.port", str(free_port()), "--eval.samples", str(NUM_PROMPTS)]
        try:
            results[kind] = measure_kind(ready(load(options.recipe, [*own, *overrides])), options.seconds)
        except (EngineError, ValueError) as error:
            return fail(error)
    print(json.dumps({"benchmark": "engines", "new_tokens": NEW_TOKENS, **results}))
    return 0


def measure_kind(recipe: Recipe, seconds: float) -> dict[str, Any]:
    """Starts the recipe's engine and measures it; {at once: figures}."""
    model, specs = check(recipe)
    bodies = ({**body, "extra_key": str(n)} for n, body in enumerate(cycle(prompts(recipe, model.vision))))
    engines = [EngineServer(spec, recipe.engine) for spec in specs[:1]]
    try:
        began = time.monotonic()
        engines[0].start()
        wait_until_serving((specs[0].url,), engines, model, recipe.engine.start_limit_s)
        figures: dict[str, Any] = {"start_s": round(time.monotonic() - began, 1)}
        for at_once in AT_ONCE:
            asyncio.run(measure(specs[0].url, bodies, at_once, min(3.0, seconds)))
            figures[str(at_once)] = asyncio.run(measure(specs[0].url, bodies, at_once, seconds))
            print(f"{recipe.engine.kind:10} {at_once:3} at once  {figures[str(at_once)]}", flush=True)
        return figures
    finally:
        stop_all([engine.child for engine in engines if engine.child])


def prompts(recipe: Recipe, vision: VisionSpec) -> list[dict[str, Any]]:
    """Requests for the first turns of held-out episodes; no two have the same image where the task allows."""
    renderer = Renderer(AutoTokenizer.from_pretrained(recipe.model.path), vision)
    banned, none = (*vision.banned_ids, renderer.end_id), Sampling()
    return [
        generate_body(f.token_ids, f.images, none, banned, max_new_tokens=NEW_TOKENS) for f in starts(recipe, renderer)
    ]


def starts(recipe: Recipe, renderer: Renderer) -> list[Fragment]:
    """What an engine is told first of each held-out episode."""
    build_env = load_env(recipe.env.module)

    def start(sample: Any) -> Fragment:
        env = build_env(sample=sample, args=recipe.env.args)
        observation, _ = env.reset()
        env.close()
        return renderer.start([*sample.prompt, env.format_observation(observation)], sample.images)

    return [start(sample) for sample in held_out_samples(recipe)]


async def measure(url: str, bodies: Iterator[dict[str, Any]], at_once: int, seconds: float) -> dict[str, float]:
    """`at_once` clients that ask one request after another for `seconds`."""
    began = time.monotonic()
    num_requests = num_tokens = 0

    async def ask(client: EngineClient) -> None:
        nonlocal num_requests, num_tokens
        while time.monotonic() - began < seconds:
            answer = await client.post("/generate", next(bodies), 300.0)
            num_requests += 1
            num_tokens += answer["meta_info"]["completion_tokens"]

    async with EngineClient(url) as client:
        await asyncio.gather(*(ask(client) for _ in range(at_once)))
    took = time.monotonic() - began
    return {"requests_per_s": round(num_requests / took, 1), "tokens_per_s": round(num_tokens / took, 1)}


if __name__ == "__main__":
    sys.exit(main())
