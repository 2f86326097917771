"""SGLang's server counts the tokens of an image within the recipe's bounds, and so does the learner."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
from transformers import Qwen2VLImageProcessorPil

from launch.engines.kinds.engine_kind import EnginePlacement
from launch.engines.kinds.sglang_engine import PLUGIN, sglang_flags
from shared.config.recipe import load_recipe
from shared.vision import VisionSpec
from tests.support.runs import RECIPE

PUBLISHED = {"shortest_edge": 65536, "longest_edge": 16777216}
"""The bounds of the published Qwen3-VL's preprocessor_config.json."""


def counted(processor, sizes):
    """As SGLang's `resolve_image_token_counts` does, by transformers."""
    images = processor._processor.image_processor
    return [images.get_number_of_image_patches(height, width) // images.merge_size**2 for width, height in sizes]


@pytest.mark.parametrize("size", [(64, 96), (400, 300), (2000, 1500)])
def test_an_image_has_as_many_tokens_for_the_server_as_for_the_learner(monkeypatch, size):
    monkeypatch.syspath_prepend(PLUGIN)
    plugin, recipe = importlib.import_module("pronk_image_bounds"), load_recipe(RECIPE, [])
    images = Qwen2VLImageProcessorPil(patch_size=16, temporal_patch_size=2, merge_size=2, size=PUBLISHED)
    config = sglang_flags(recipe, EnginePlacement(0, 30000))["mm-process-config"]["image"]
    processor = SimpleNamespace(image_config=config, _processor=SimpleNamespace(image_processor=images))
    spec = VisionSpec.load(recipe.model.path, min_pixels=recipe.model.min_pixels, max_pixels=recipe.model.max_pixels)
    expected = [spec.num_tokens(spec.grid(*size))]
    alone = counted(processor, [size])
    assert plugin.count(counted, processor, [size]) == expected
    assert (alone == expected) is (size == (400, 300))  # which lies within either bounds


def test_a_server_without_bounds_of_its_own_keeps_the_models(monkeypatch):
    monkeypatch.syspath_prepend(PLUGIN)
    plugin = importlib.import_module("pronk_image_bounds")
    images = Qwen2VLImageProcessorPil(patch_size=16, temporal_patch_size=2, merge_size=2, size=PUBLISHED)
    processor = SimpleNamespace(image_config={}, _processor=SimpleNamespace(image_processor=images))
    assert plugin.count(counted, processor, [(64, 96)]) == counted(processor, [(64, 96)]) == [70]
