"""A family without a vision tower: what has to do with images is refused in one line, or counted."""

from __future__ import annotations

import pytest
import torch

from actor.render import Renderer
from launch.engines.probe import ModelFacts
from launch.task_samples import ready
from learner.model.lora_attach import attach
from learner.model.policy import load_policy
from learner.model.sharding import freeze
from learner.weights.canary import Canary
from shared.config.lora_section import LoraConfig
from shared.config.recipe import ConfigError, load
from shared.engine.engine_api import EngineError
from shared.families.registry import FAMILIES, HUB_NAMES, PUBLISHED, find_sizes
from shared.types import Ending, Image, Sampling
from shared.vision import VisionSpec
from tests.support.engines import ask
from tests.support.rollout_rig import play, threads
from tests.support.small.families import qwen3
from tests.support.tiny import draw_image, png, running_engine, tiny_tokenizer

__all__ = ["threads"]  # a fixture


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def spec(folder):
    return VisionSpec.load(folder)


def test_its_folder_needs_no_image_processor_and_no_stream_holds_its_image_token(folder, spec):
    assert not (folder / "preprocessor_config.json").exists()
    assert not spec.takes_images and spec.image_token_id < 0 and spec.banned_ids == ()
    assert ModelFacts.load(str(folder), spec).image_ids == ()


def test_an_image_in_an_episode_ends_it_as_an_error_of_the_environment(spec, threads):
    trajectory, engine = play(Renderer(tiny_tokenizer(), spec), threads, [])
    assert trajectory.ending is Ending.ENV_ERROR and engine.requests == []
    assert "1 images, but Qwen3 models take text alone" in trajectory.error


def test_a_task_that_shows_images_is_refused_before_anything_starts(folder):
    recipe = ["--model.path", str(folder), "--run.name", "never"]
    with pytest.raises(ConfigError) as caught:
        ready(load("launch/recipes/colour_tiny.toml", recipe))
    line = str(caught.value)
    assert "\n" not in line and "env.module = 'envs.colour' shows images" in line and "text model (Qwen3)" in line
    assert 'env.args.render_mode = "text"' in line
    assert ready(load("launch/recipes/colour_text_tiny.toml", recipe)).model.path == str(folder)


def test_the_engine_refuses_an_image(folder):
    with running_engine(folder) as (url, app):
        image = Image.of(png(draw_image(64, 64)))
        with pytest.raises(EngineError, match="Qwen3 is a family of text models, which take none"):
            ask(url, lambda client: client.generate([5, 6], [image], Sampling(max_new_tokens=2)))
        assert len(ask(url, lambda client: client.generate([5, 6], [], Sampling(max_new_tokens=2))).token_ids) >= 1
        assert app.scheduler.failed is None


def test_what_asks_for_its_tower_is_refused_in_one_line(folder, spec):
    policy = load_policy(str(folder), spec)
    with pytest.raises(ValueError, match=r"freeze = \['vision'\]: Qwen3 models have no vision tower; leave it out"):
        freeze(policy, ("vision",))
    with pytest.raises(ValueError, match="'vision' matches nothing in this qwen3 model"):
        attach(policy.vlm, LoraConfig(rank=2, targets=("attention", "vision")), policy.dtype)


def test_its_canary_is_a_question_without_an_image(folder, spec):
    canary = Canary(load_policy(str(folder), spec), str(folder), torch.device("cpu"))
    assert canary.images == () and len(set(canary.expected_logprobs())) > 1


def test_every_published_name_finds_its_own_sizes():
    assert HUB_NAMES["Qwen3-8B"] == "Qwen/Qwen3-8B" and HUB_NAMES["Qwen3-8B-Base"] == "Qwen/Qwen3-8B-Base"
    for family in FAMILIES.values():
        for name, model in family.published.items():
            for short, full in model.hub_names(name).items():
                assert HUB_NAMES[short] == full and find_sizes(full) == find_sizes(short) == PUBLISHED[name]
