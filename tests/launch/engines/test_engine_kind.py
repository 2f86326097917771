"""A kind of engine is one module: what it names is started, plays and is stopped, and nothing else knows of it."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerFast

from actor.engine_pool import EnginePool
from actor.render import Renderer
from actor.worker import make_player
from launch.actors import check
from launch.engines.engine_supervisor import EngineServer, wait_until_serving
from launch.engines.host_engines import engine_specs
from launch.engines.kinds.embedded_engine import EmbeddedEngine
from launch.engines.kinds.engine_kind import engine_kind
from launch.engines.network import free_port
from launch.processes.restarts import how_it_ended
from launch.task_samples import training_samples
from shared.config.recipe import ConfigError, load_recipe
from shared.engine.engine_api import EngineClient
from shared.engine.engine_kinds import ENGINE_KINDS, EngineCapabilities
from shared.types import Ending, Sampling, Ticket

RECIPE = "launch/recipes/colour_tiny.toml"
CAPABILITIES = EngineCapabilities(module=__name__)


class EmbeddedAgain(EmbeddedEngine):
    """The embedded engine under another name, with fewer requests at once than the recipe says."""

    def spec(self, recipe, placement):
        spec = super().spec(recipe, placement)
        batch = spec.command.index("--max-batch")
        return replace(
            spec, name="the other one", command=(*spec.command[: batch + 1], "2", *spec.command[batch + 2 :])
        )


ENGINE = EmbeddedAgain()


def recipe(*overrides):
    return load_recipe(RECIPE, [str(word) for word in overrides])


@pytest.fixture(params=["embedded_again", __name__])
def kind(request, monkeypatch):
    """A name that this file alone registers, and this module by its path."""
    if request.param != __name__:
        monkeypatch.setitem(ENGINE_KINDS, request.param, CAPABILITIES)
    return request.param


async def episode(made, vision, url):
    """One episode of the recipe's task."""
    renderer = Renderer(PreTrainedTokenizerFast.from_pretrained(made.model.path), vision)
    sampling = Sampling(max_new_tokens=made.env.turn_tokens)
    ticket = Ticket("a ticket", training_samples(made).sample(0), 1, 0, sampling, 60.0)
    engines = EnginePool([EngineClient(url, timeout_s=60.0)], turn_tries=1)
    try:
        return await make_player(made, renderer, engines, None, None).play(ticket, 0)
    finally:
        await engines.close()


@pytest.mark.slow
def test_a_second_engine_starts_serves_an_episode_and_is_stopped(kind):
    made = recipe("--engine.kind", kind, "--engine.port", free_port())
    facts, (spec,) = check(made, "0")
    server = EngineServer(spec, made.engine)
    server.start()
    try:
        wait_until_serving((spec.url,), [server], facts, 120.0)
        played = asyncio.run(episode(made, facts.vision, spec.url))
    finally:
        server.child.kill()
    assert server.name == "the other one" and "2" in spec.command
    assert played.ending is Ending.COMPLETED and played.loss_mask.sum() > 0
    assert set(played.policy_versions[played.loss_mask == 1]) == {0}
    assert how_it_ended(server.child)


@pytest.mark.parametrize("name", ["sglan", "a.module.of.nobody", "", "a..b", ".a", "json.nothing"])
def test_an_unknown_engine_is_one_line_that_names_the_known_and_the_page(name):
    with pytest.raises(
        ConfigError, match=r"there is no such engine; known are embedded, sglang; of your own.*extend\.md"
    ):
        recipe("--engine.kind", name)


@pytest.mark.parametrize("text", ["raise RuntimeError('on\\ntwo lines')", "def f(:", "import nothing_of_that_name"])
def test_a_module_that_fails_while_it_is_imported_is_one_line_that_names_the_field(tmp_path, monkeypatch, text):
    (tmp_path / "failing_engine.py").write_text(text + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.kind = 'failing_engine': its module fails") as caught:
        recipe("--engine.kind", "failing_engine")
    assert "\n" not in str(caught.value) and "failing_engine.py" in str(caught.value)


def test_a_module_that_lacks_what_a_kind_has_is_named(monkeypatch):
    with pytest.raises(ConfigError, match=r"engine.kind = 'json.decoder': the module has no CAPABILITIES"):
        recipe("--engine.kind", "json.decoder")
    monkeypatch.delattr(sys.modules[__name__], "ENGINE")
    with pytest.raises(ConfigError, match="has no ENGINE; give it an instance of an EngineKind"):
        engine_specs(recipe("--engine.kind", __name__))


@pytest.mark.parametrize("name", sorted(ENGINE_KINDS))
def test_every_known_engine_has_its_module(name):
    assert engine_kind(name).examine(recipe("--engine.kind", name)).name == "engine software"
