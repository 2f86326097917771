"""The agents of the documentation's pages, and episodes that a recipe's actor plays on an engine of the test's. Where
`openai` is not installed, there is a stand-in."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from actor.engine_pool import EnginePool
from actor.render import Renderer
from actor.worker import make_players
from launch.task_samples import held_out_samples
from shared.config.recipe import Recipe, load_recipe
from shared.engine.engine_api import EngineClient
from shared.types import Sampling, Ticket, Trajectory
from shared.vision import VisionSpec

HAS_OPENAI = importlib.util.find_spec("openai") is not None
# What the examples use of the package openai, which is not among those that Pronk needs.
CLIENT = '''
"""A client of OpenAI's API: as much of it as the examples use."""

import asyncio
import json
import urllib.error
import urllib.request
from types import SimpleNamespace


class APIStatusError(Exception):
    pass


class BadRequestError(APIStatusError):
    pass


class Answered(SimpleNamespace):
    def __getattr__(self, name):
        return None


class OpenAI:
    def __init__(self, base_url, api_key):
        self.url, self.headers = f"{base_url}/chat/completions", {"authorization": f"Bearer {api_key}"}
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

    def with_options(self, base_url):
        return type(self)(base_url, "none")

    def create(self, **body):
        request = urllib.request.Request(self.url, json.dumps(body, default=vars).encode(), self.headers)
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer, object_hook=lambda fields: Answered(**fields))
        except urllib.error.HTTPError as error:
            raise (BadRequestError if error.code == 400 else APIStatusError)(error.read().decode()) from None


class AsyncOpenAI(OpenAI):
    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def create(self, **body):
        return await asyncio.to_thread(super().create, **body)
'''


def example_agent(page: str, folder: Path) -> Path:
    """Write the first Python example of a page into the file that it names, and beside it the stand-in for `openai`,
    unless that is installed; return the file."""
    example = re.search(r"```python\n# (\w+\.py)\n(.*?)```", Path(page).read_text(encoding="utf-8"), re.DOTALL)
    assert example
    if not HAS_OPENAI:
        (folder / "openai.py").write_text(CLIENT, encoding="utf-8")
    agent = folder / example[1]
    agent.write_text(example[2], encoding="utf-8")
    return agent


def tickets_of(recipe: Recipe, count: int) -> list[Ticket]:
    """Return tickets of the recipe's first held-out samples."""
    fields = {
        "group_size": 1,
        "version": 0,
        "lease_s": 60.0,
        "sampling": Sampling(max_new_tokens=recipe.env.turn_tokens),
    }
    samples = held_out_samples(recipe)[:count]
    return [Ticket(id=f"t{i}", sample=sample, seed=1 + i, **fields) for i, sample in enumerate(samples)]


def play_recipe(recipe: Recipe, url: str, tickets: Sequence[Ticket]) -> list[Trajectory]:
    """Play an episode of each ticket, one after another, on the engine at `url`, as an actor of the recipe does."""
    vision = VisionSpec.load(recipe.model.path, min_pixels=recipe.model.min_pixels, max_pixels=recipe.model.max_pixels)
    renderer = Renderer(PreTrainedTokenizerFast.from_pretrained(recipe.model.path), vision)

    async def main() -> list[Trajectory]:
        async with EngineClient(url) as client:
            players, _ = make_players(recipe, renderer, EnginePool([client]))
            try:
                return [await players.play(ticket) for ticket in tickets]
            finally:
                await players.close(1.0)

    return asyncio.run(main())


def small(name: str, **changes: object) -> Recipe:
    """Return a shipped recipe with changes; `__` in a name stands for a dot."""
    words = [word for key, value in changes.items() for word in (f"--{key.replace('__', '.')}", str(value))]
    return load_recipe(f"launch/recipes/{name}.toml", words)
