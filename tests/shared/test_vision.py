"""Expansion, positions and patches against transformers' own."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from actor.engine.request_images import load_rgb
from shared.families.registry import FAMILIES
from shared.vision import VisionSpec, expand, patchify, pixel_values
from tests.support.tiny import draw_image, load_model

SPEC = VisionSpec(image_token_id=9, family=FAMILIES["qwen3_vl"], min_pixels=1024, max_pixels=1048576)
load_cached = functools.cache(load_model)


def test_a_placeholder_becomes_one_token_per_merged_patch():
    ids, compact = expand([1, 9, 2, 9], [(1, 2, 4), (1, 2, 2)], SPEC)
    assert ids.tolist() == [1, 9, 9, 2, 9]
    assert compact.tolist() == [0, 1, 1, 2, 3]
    assert ids.dtype == np.int64 and compact.dtype == np.int32


def test_what_is_no_model_or_fits_no_image_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        VisionSpec.load(tmp_path)
    with pytest.raises(ValueError, match="its sides may differ"):
        SPEC.grid(3000, 10)
    with pytest.raises(ValueError, match="2 image placeholders but 1 images"):
        expand([9, 9], [(1, 2, 2)], SPEC)
    with pytest.raises(ValueError, match="1 visual tokens"):
        SPEC.position_ids(np.array([9]), [(1, 4, 4)])


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[]", "holds a list, not a JSON object"),
        (b"null", "holds a NoneType, not a JSON object"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[" * 200_000, "is not valid JSON"),
        (None, "cannot be read as a file: Is a directory"),
    ],
)
def test_a_models_file_that_holds_no_object_is_named(tmp_path, name, content, words):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    if content is None:
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"/{name} {words}"):
        VisionSpec.load(tmp_path)


def test_a_file_in_place_of_a_models_folder_is_named(tmp_path):
    (tmp_path / "README.md").write_text("Hello")
    with pytest.raises(ValueError, match=r"README\.md is a file: give the folder of a model"):
        VisionSpec.load(tmp_path / "README.md")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_positions_equal_transformers_rope_index(folder, data):
    model = load_cached(folder)
    spec = VisionSpec.load(folder)
    token = spec.image_token_id
    sides = st.integers(1, 5).map(lambda n: 2 * n)
    parts = data.draw(st.lists(st.one_of(st.integers(1, 6), st.tuples(sides, sides)), min_size=1, max_size=6))
    compact, grids = [], []
    for part in parts:
        if isinstance(part, int):
            compact += list(range(20, 20 + part))
        else:
            compact += [19, token, 21]
            grids.append((1, *part))
    ids, _ = expand(compact, grids, spec)
    ours = spec.position_ids(ids, grids)
    theirs, _ = model.model.get_rope_index(
        torch.from_numpy(ids)[None],
        mm_token_type_ids=torch.from_numpy((ids == token).astype(np.int32))[None],
        image_grid_thw=torch.tensor(grids) if grids else None,
    )
    assert np.array_equal(ours, theirs[:, 0].numpy())


@settings(max_examples=200, deadline=None)
@given(st.integers(16, 3000), st.integers(16, 3000))
def test_resizing_agrees_with_the_image_processor(width, height):
    expected = smart_resize(height, width, factor=32, min_pixels=1024, max_pixels=1048576)
    assert SPEC.resized(width, height) == expected
    assert SPEC.grid(width, height) == (1, expected[0] // 16, expected[1] // 16)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(64, 64), (192, 96), (50, 70), (40, 20), (1500, 1200)])
def test_patches_equal_the_image_processors(width, height):
    image = draw_image(width, height, seed=width)
    size = {"shortest_edge": 1024, "longest_edge": 1048576}
    scale = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    processor = Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, size=size, **scale)
    expected = processor([image], return_tensors="np")
    rgb = load_rgb(image, SPEC)
    ours = pixel_values(patchify(rgb, SPEC), SPEC)
    assert expected["image_grid_thw"].tolist() == [list(SPEC.grid(width, height))]
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, expected["pixel_values"], atol=1e-6)


def test_transparent_and_grey_images_are_read_as_rgb():
    assert load_rgb(Image.new("L", (64, 64), 7), SPEC).tolist()[0][0] == [7, 7, 7]
    assert load_rgb(Image.new("RGBA", (64, 64), (1, 2, 3, 0)), SPEC).shape == (64, 64, 3)


def test_the_spec_is_read_from_the_model_folder(folder):
    spec, config = VisionSpec.load(folder), load_cached(folder).config
    assert (spec.patch_size, spec.merge_size, spec.min_pixels) == (16, 2, 1024)
    banned = {config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id}
    assert len(banned) == 4 and spec.banned_ids == tuple(sorted(banned))
    assert VisionSpec.load(folder, max_pixels=4096).max_pixels == 4096
