"""The picture that a person sees is the picture that the policy's engine and the learner see, whatever file it was."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image as PILImage
from transformers.image_transforms import convert_to_rgb

from actor.engine.request_images import ImageCache
from actor.isolation.process_messages import pack_plain, unpack_plain
from actor.render import Renderer
from envs import play, show
from envs.datasets import data_uri, load_dataset, with_images
from learner.batch.episodes import check_group
from learner.batch.image_decoder import ImageDecoder, rgb_of
from shared.rgb_images import as_png, check_plain, plain_file, to_rgb
from shared.types import Image
from shared.vision import VisionSpec, patchify
from tests.support.episodes import random_groups
from tests.support.odd_images import ODD_IMAGES, PLAIN_IMAGES, photo, saved, tolerance
from tests.support.tiny import tiny_model_dir, tiny_tokenizer


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer(tiny_tokenizer(), VisionSpec.load(tiny_model_dir(tmp_path_factory.mktemp("model"))))


def pixels(data) -> np.ndarray:
    with PILImage.open(io.BytesIO(data)) as file:
        assert file.mode == "RGB"
        return np.asarray(file)


def reopened(data) -> PILImage.Image:
    return PILImage.open(io.BytesIO(data))


def assert_close(kind, seen, expected):
    assert seen.shape == expected.shape
    assert np.abs(seen.astype(int) - expected.astype(int)).max() <= tolerance(kind)


@pytest.mark.parametrize("kind", ODD_IMAGES)
def test_everybody_sees_the_same_pixels(kind, renderer, tmp_path):
    data, expected = ODD_IMAGES[kind]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"problem": "<image>x?", "answer": "1", "images": [data_uri(data)]}) + "\n")
    (sample,) = load_dataset(path).samples
    from_row = renderer.start(sample.prompt, sample.images).images[0]
    reference = pixels(from_row.data)
    assert_close(kind, reference, expected)
    drawn = reopened(data)
    message = {"role": "user", "content": [{"type": "image", "image": drawn}]}
    as_file = {"role": "user", "content": [{"type": "image", "image": data}]}
    spec = renderer.spec
    cache = ImageCache(spec)
    patches = cache.get([cache.add(bytes(from_row.data))])[0][0].patches
    decoder = ImageDecoder(spec)
    decoder.check(from_row)
    resized = to_rgb(PILImage.fromarray(reference)).resize(
        tuple(reversed(spec.resized(*reversed(reference.shape[:2])))), PILImage.Resampling.BICUBIC
    )
    assert np.array_equal(patches, patchify(np.asarray(resized), spec))  # the engine
    assert np.array_equal(decoder.get(from_row).patches, patches)  # the learner
    for seen in (
        pixels(renderer.observation(message).images[0].data),  # an environment's observation
        pixels(renderer.observation(as_file).images[0].data),
        pixels(unpack_plain(pack_plain(reopened(data), "a frame"))),  # from another process
        rgb_of(from_row),  # dashboards
        np.asarray(show.frame([{"role": "user", "content": [{"type": "image", "image": reopened(data)}]}])),
        np.asarray(with_images(sample)[0]["content"][0]["image"].convert("RGB")),
    ):
        assert np.array_equal(seen, reference)
    message["content"][0]["image"] = reopened(data)
    play.show(message, tmp_path / "played", "turn0")
    assert np.array_equal(pixels((tmp_path / "played" / "turn0_0.png").read_bytes()), reference)


@pytest.mark.parametrize("kind", [kind for kind in ODD_IMAGES if "16 bits" not in kind and "orientation" not in kind])
def test_the_pixels_are_those_of_the_models_own_processor(kind):
    opened = PILImage.open(io.BytesIO(ODD_IMAGES[kind][0]))
    assert np.array_equal(np.asarray(to_rgb(opened)), convert_to_rgb(opened, return_numpy=True))


@pytest.mark.parametrize("kind", PLAIN_IMAGES)
def test_a_plain_file_passes_untouched(kind):
    data = PLAIN_IMAGES[kind]
    assert plain_file(data) is data
    check_plain(data)


@pytest.mark.parametrize("kind", ODD_IMAGES)
def test_an_odd_file_becomes_a_plain_one_once(kind):
    data = plain_file(ODD_IMAGES[kind][0])
    assert data.startswith(b"\x89PNG") and plain_file(data) is data


@pytest.mark.parametrize(
    ("values", "mode", "expected"),
    [
        ([[0, 128, 255]], "I", [0, 128, 255]),
        ([[0, 30000, 65535]], "I", [0, 117, 255]),
        ([[0.0, 0.5, 1.0]], "F", [0, 128, 255]),
        ([[0.0, 100.4, 255.0]], "F", [0, 100, 255]),
        ([[0, 30000, 65535]], "I;16", [0, 117, 255]),
    ],
)
def test_numbers_are_read_by_their_range(values, mode, expected):
    kinds = {"I": np.int32, "F": np.float32, "I;16": np.uint16}
    image = PILImage.fromarray(np.array(values, kinds[mode]))
    assert image.mode == mode
    assert pixels(as_png(image))[0, :, 0].tolist() == expected


@pytest.mark.parametrize("value", [-1.0, 1e6, np.nan, np.inf])
def test_numbers_that_are_no_brightness_are_refused(value):
    with pytest.raises(ValueError, match="mode F with values"):
        to_rgb(PILImage.fromarray(np.array([[value, 0.5]], np.float32)))


@pytest.mark.parametrize("mode", ["HSV", "YCbCr", "LAB", "CMYK", "RGBX", "La", "RGBa", "PA", "RGBA", "LA"])
def test_an_environment_may_draw_in_any_mode(mode):
    image = PILImage.new(mode, (8, 8))
    assert pixels(as_png(image)).shape == (8, 8, 3)
    if "A" in mode.upper() and mode != "LAB":  # nothing drawn is white
        assert pixels(as_png(image)).min() == 255


def test_what_an_environment_has_drawn_on_a_photo_keeps_its_place():
    exif = PILImage.Exif()
    exif[0x0112] = 6
    opened = PILImage.open(io.BytesIO(saved(photo(), "PNG", exif=exif)))
    assert to_rgb(opened).size == (photo().height, photo().width)
    assert to_rgb(opened.convert("RGB")).size == photo().size


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (saved(photo(), "GIF"), "a GIF; PNG, JPEG and WebP are read"),
        (saved(photo(), "BMP"), "a BMP; "),
        (saved(photo(), "TIFF"), "a TIFF; "),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG; "),
        (b"<!DOCTYPE html><html>", "an HTML page; "),
        (b"", "an empty file; "),
        (b"no image", "no image file, it begins with b'no image'; "),
    ],
)
def test_what_is_no_readable_image_is_called_by_its_name(data, words):
    with pytest.raises(ValueError) as refused:
        plain_file(data)
    assert words in str(refused.value) and "object at" not in str(refused.value)


REFUSED = ["RGBA", "palette with a transparent index", "WebP", "RGB of 16 bits", "PNG of orientation 6",
           "JPEG of orientation 8", "animated PNG", "animated WebP", "CMYK JPEG", "grey of 16 bits"]  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_the_learner_refuses_an_episode_whose_picture_decoders_see_differently(kind, renderer):
    (group,) = random_groups(renderer.spec, 1, turns=1, group_size=1)
    decoder = ImageDecoder(renderer.spec)
    check_group(group, decoder)
    (trajectory,) = group.trajectories
    images = (Image.of(ODD_IMAGES[kind][0]), *trajectory.images[1:])
    with pytest.raises(ValueError, match="decoders differ") as refused:
        check_group(replace(group, trajectories=(replace(trajectory, images=images),)), decoder)
    assert "\n" not in str(refused.value) and images[0].content_hash[:12] in str(refused.value)
