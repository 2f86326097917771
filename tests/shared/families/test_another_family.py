"""A family that is Qwen3-VL under another name, added from here alone: nothing outside its room has to know it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from actor.engine.weight_loader import WeightLoader
from learner.checkpoints.hf_export import export, published
from learner.model.lora_attach import attach
from learner.model.policy import Policy, load_policy
from shared.config.lora_section import LoraConfig
from shared.families.model_family import PublishedModel
from shared.families.qwen3_vl.qwen3_vl_family import Qwen3VL
from shared.families.registry import FAMILIES, HUB_NAMES, PAGE, PUBLISHED, family_of, find_sizes, register
from shared.types import Image, Sampling
from shared.vision import VisionSpec
from tests.support.engines import ask
from tests.support.episodes import packed, random_trajectory
from tests.support.tiny import draw_image, png, running_engine, tiny_model_dir

MODEL_TYPE = "renamed_vl"


class RenamedConfig(Qwen3VLConfig):
    model_type = MODEL_TYPE


class RenamedModel(Qwen3VLForConditionalGeneration):
    config_class = RenamedConfig


class Renamed(Qwen3VL):
    """Qwen3-VL with names of its own for the halves of the model, whose classes transformers does not have."""

    model_type = MODEL_TYPE
    prefixes = (("model.language_model.", "words."), ("model.visual.", "eyes."))
    published: ClassVar = {"Renamed-VL-1B": PublishedModel("somebody", ("Chat",), PUBLISHED["Qwen3-VL-2B"])}

    def prepare(self) -> None:
        AutoConfig.register(MODEL_TYPE, RenamedConfig, exist_ok=True)
        AutoModelForImageTextToText.register(RenamedConfig, RenamedModel, exist_ok=True)
        names = [WeightRenaming(f"^{published}", own) for own, published in self.prefixes]
        register_checkpoint_conversion_mapping(MODEL_TYPE, names, overwrite=True)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register(Renamed())
    yield
    del FAMILIES[MODEL_TYPE], PUBLISHED["Renamed-VL-1B"], HUB_NAMES["Renamed-VL-1B-Chat"]


@pytest.fixture
def original(tmp_path: Path) -> Path:
    return tiny_model_dir(tmp_path)


@pytest.fixture
def folder(original: Path) -> Path:
    """The model in `original`, with this family's model_type and names of parameters."""
    renamed = shutil.copytree(original, original.parent / "renamed")
    config = json.loads((renamed / "config.json").read_text())
    (renamed / "config.json").write_text(json.dumps(config | {"model_type": MODEL_TYPE}))
    weights, family = load_file(renamed / "model.safetensors"), Renamed()
    published = {family.published_name(name): tensor for name, tensor in weights.items()}
    assert any(name.startswith("words.") for name in published) and any(name.startswith("eyes.") for name in published)
    save_file(published, renamed / "model.safetensors", metadata={"format": "pt"})
    return renamed


def policy_of(folder: Path) -> Policy:
    return load_policy(str(folder), VisionSpec.load(folder))


def test_its_policy_computes_what_qwen3_vl_computes(original, folder):
    one, other = policy_of(original), policy_of(folder)
    batch = packed(one, [random_trajectory(one.spec, seed, turns=2) for seed in range(2)])
    for got, expected in zip(other(batch, 1.0)[:3], one(batch, 1.0)[:3], strict=True):
        assert torch.equal(got, expected)


def test_its_engine_samples_what_qwen3_vl_samples(original, folder):
    spec = VisionSpec.load(folder)
    prompt, image = (5, 6, spec.image_token_id, 7), Image.of(png(draw_image(64, 96, 1)))
    answers = []
    for each in (original, folder):
        with running_engine(each, min_pixels=1024, max_pixels=1 << 20) as (url, _):
            answers.append(ask(url, lambda c: c.generate(prompt, [image], Sampling(1.0, max_new_tokens=12), seed=3)))
    one, other = answers
    assert len(one.token_ids) > 6 and other.token_ids == one.token_ids
    np.testing.assert_array_equal(other.logprobs, one.logprobs)


def test_its_weights_go_to_engines_and_into_exports_under_its_own_names(folder, tmp_path):
    policy, out = policy_of(folder), tmp_path / "export"
    sent = dict(published(policy, name, p.detach()) for name, p in policy.named_weights())
    export(out, sent.items(), model_path=str(folder))
    files = load_file(folder / "model.safetensors")
    assert files.keys() == sent.keys() == load_file(out / "model.safetensors").keys()
    assert all(torch.equal(tensor, files[name]) for name, tensor in load_file(out / "model.safetensors").items())
    assert policy_of(out).family.model_type == MODEL_TYPE
    Renamed().prepare()
    model = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32)
    assert files.keys() <= {*WeightLoader(model).names}


def test_adapters_find_its_linears(folder):
    policy = policy_of(folder)
    adapters = attach(policy.vlm, LoraConfig(rank=4, targets=("attention", "dense", "vision")), torch.float32)
    halves = {name.split(".")[1] for name in adapters.of}
    assert halves == {"language_model", "visual"}


def test_its_sizes_are_known_by_folder_and_by_published_name(folder):
    assert find_sizes(str(folder)).parameters == sum(p.numel() for p in policy_of(folder).vlm.parameters())
    assert find_sizes("somebody/Renamed-VL-1B-Chat") == find_sizes("Renamed-VL-1B") == PUBLISHED["Qwen3-VL-2B"]
    with pytest.raises(ValueError, match="no sizes of 'Renamed-VL-1B-Instruct'"):
        find_sizes("Renamed-VL-1B-Instruct")


def test_an_unknown_model_type_names_what_is_known_and_where_to_add_it(folder):
    del FAMILIES[MODEL_TYPE]
    try:
        with pytest.raises(ValueError) as caught:
            VisionSpec.load(folder)
    finally:
        register(Renamed())
    line = str(caught.value)
    assert "\n" not in line and f"the family {MODEL_TYPE!r}, but those that run are qwen3_vl, qwen3_vl_moe" in line
    page, _, heading = PAGE.partition("#")
    assert line.endswith(f"{PAGE} tells how to add another")
    assert f"\n## {heading.replace('-', ' ').capitalize()}\n" in Path(page).read_text()


@pytest.mark.parametrize("model_type", [None, 3, ["qwen3_vl"], {"name": "qwen3_vl"}])
def test_a_model_type_that_is_no_text_is_an_unknown_one(folder, model_type):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    with pytest.raises(ValueError, match=r"holds a model of the family .*, but those that run are qwen3_vl, "):
        VisionSpec.load(folder)


def test_two_families_cannot_have_one_model_type():
    with pytest.raises(ValueError, match=f"there is a family with the model_type {MODEL_TYPE!r}"):
        register(Renamed())


def test_quantized_weights_are_refused_in_one_line():
    config = {"model_type": "qwen3_vl", "quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(ValueError, match=r"m holds quantized weights \(fp8\): train the model in bfloat16"):
        family_of(config, "m")
