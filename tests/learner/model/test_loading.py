"""Models are loaded shard by shard: the same values as transformers loads, and no more memory than the shards."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from learner.checkpoints.hf_export import export
from learner.model.policy import empty_policy, load_policy, load_weights
from learner.model.sharding import parallelize
from shared.vision import VisionSpec
from tests.support.episodes import learner_config
from tests.support.loading.models import FAMILIES, auto_class, experts, rewrite, tensors
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: make(tmp_path_factory.mktemp("model")) for name, make in FAMILIES.items()}


def load(folder, width=0):
    return load_policy(str(folder), VisionSpec.load(folder), width)


def wanted(folder):
    return auto_class(folder).from_pretrained(folder, dtype=torch.float32)


def assert_equal(policy, model):
    own = {"model.visual.patch_embed.scale", "model.visual.patch_embed.shift"}
    found = policy.vlm.state_dict() | {n: b for n, b in policy.vlm.named_buffers() if n not in own}
    expected = model.state_dict() | dict(model.named_buffers())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def copy(folder, tmp_path):
    return Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_and_buffers_are_bit_for_bit_those_of_transformers(folders, name):
    assert_equal(load(folders[name]), wanted(folders[name]))


@pytest.fixture(scope="module")
def on_two_ranks(folders, tmp_path_factory):
    """What each of two ranks under torchrun found."""
    large = experts(tmp_path_factory.mktemp("large"), hidden=512, expert=1536, number=32, vocab_size=40000)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.support.loading.ranks", str(large), *map(str, folders.values())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    shutil.rmtree(large)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_two_ranks_together_hold_bit_for_bit_what_transformers_loads(on_two_ranks):
    assert [found["differing"] for found in on_two_ranks] == [[], []]


@pytest.mark.slow
def test_loading_takes_no_more_memory_than_a_ranks_shards_and_one_tensor(on_two_ranks):
    for found in (found["memory"] for found in on_two_ranks):
        assert 180e6 < found["parameters"] < 220e6 and found["shards"] < 2.2 * found["parameters"]
        assert found["shards"] * 0.9 < found["peak"] <= 1.2 * (found["shards"] + found["largest"]), found


def test_a_model_in_half_precision_and_several_files_is_widened_as_transformers_widens_it(folders, tmp_path):
    folder = copy(folders["Qwen3-VL"], tmp_path)
    rewrite(folder, {name: tensor.half() for name, tensor in tensors(folder).items()}, files=3)
    assert_equal(load(folder), wanted(folder))


def test_experts_load_from_either_layout(folders, tmp_path):
    published, folder = wanted(folders["Qwen3-VL-MoE"]), copy(folders["Qwen3-VL-MoE"], tmp_path)
    rewrite(folder, dict(published.named_parameters()))
    assert tensors(folder)["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (6, 80, 64)
    assert_equal(load(folder), published)


def test_a_stack_of_square_experts_lies_as_the_others_of_its_model_do(tmp_path):
    """The shape of gate_up_proj says nothing where the hidden size is twice the experts'; that of down_proj does."""
    folder = experts(tmp_path, hidden=64, expert=32)
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    stored, policy = tensors(folder)[name], load(folder)
    assert stored.shape == (6, 64, 64)
    assert torch.equal(dict(policy.named_weights())[name], stored.mT)


def test_qwen25_loads_under_the_names_of_transformers_too(folders, tmp_path):
    model, folder = wanted(folders["Qwen2.5-VL"]), copy(folders["Qwen2.5-VL"], tmp_path)
    rewrite(folder, dict(model.named_parameters()))
    assert_equal(load(folder), model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [False, True])
def test_a_policy_that_is_filled_after_it_was_sharded_computes_what_a_loaded_one_does(folders, ranks, dtype, offload):
    folder, config = folders["Qwen3-VL-MoE"], learner_config(freeze=("vision",), offload=offload)
    policies = []
    for early in (True, False):
        torch.manual_seed(0)
        spec = VisionSpec.load(folder)
        policy = load_policy(str(folder), spec, 16) if early else empty_policy(str(folder), spec, 16)
        parallelize(policy, ranks, config, dtype)
        if not early:
            load_weights(policy, str(folder), ranks.device, offload=offload)
        policies.append(policy)
    early, late = (dict(policy.named_parameters()) for policy in policies)
    assert early.keys() == late.keys()
    for name, p in early.items():
        assert torch.equal(late[name], p) and late[name].requires_grad == p.requires_grad, name


def test_a_folder_that_was_exported_loads_again(folders, tmp_path):
    policy, out = load(folders["Qwen3-VL"]), tmp_path / "out"
    export(out, policy.named_weights(), model_path=str(folders["Qwen3-VL"]), file_bytes=100_000)
    assert len(list(out.glob("*.safetensors"))) > 2
    assert_equal(load(out), wanted(folders["Qwen3-VL"]))


# ---------------------------------------------------------------------- what is refused

NORM, HEAD = "model.language_model.norm.weight", "lm_head.weight"


def without(weights, name):
    return {key: tensor for key, tensor in weights.items() if key != name}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: without(w, NORM), rf"lacks {NORM}$"),
        (lambda w: w | {"value_head.weight": torch.zeros(3)}, r"holds value_head.weight, which the model has not$"),
        (lambda w: w | {NORM: torch.zeros(3)}, rf"{NORM} is \[3\] instead of \[64\]$"),
        (lambda w: w | {NORM: torch.zeros(64, dtype=torch.int8)}, rf"{NORM} is I8, the learner reads F64, F32"),
        (lambda w: {}, r"lacks model.visual.patch_embed.proj.weight.* and \d+ more"),
        (lambda w: w | {HEAD: torch.ones(640, 64)}, r"lm_head.weight that differs.* tie_word_embeddings .* false"),
        (lambda w: w | {HEAD: torch.ones(3, 64)}, r"lm_head.weight that differs"),
    ],
)
def test_weights_that_are_not_the_models_are_named_in_one_line(folders, tmp_path, change, said):
    folder = copy(folders["Qwen3-VL"], tmp_path)
    rewrite(folder, change(tensors(folder)) or {"nothing": torch.zeros(1)})
    with pytest.raises(ValueError, match=said) as error:
        load(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


def test_what_older_checkpoints_hold_besides_the_weights_does_no_harm(folders, tmp_path):
    folder = copy(folders["Qwen3-VL"], tmp_path)
    weights = tensors(folder)
    weights[HEAD] = weights["model.language_model.embed_tokens.weight"].clone()
    weights["model.language_model.rotary_emb.inv_freq"] = torch.zeros(16)
    rewrite(folder, weights)
    assert_equal(load(folder), wanted(folders["Qwen3-VL"]))


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def a_lost_file(folder):
    rewrite(folder, tensors(folder), files=3)
    (folder / "model-00002-of-00003.safetensors").unlink()


def a_broken_index(folder):
    rewrite(folder, tensors(folder), files=2)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')


def a_cut_file(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (no_weights, "holds no weights: neither model.safetensors nor model.safetensors.index.json is there"),
        (a_lost_file, "lacks model-00002-of-00003.safetensors of its model.safetensors.index.json"),
        (a_broken_index, "index.json is no index of weights"),
        (a_cut_file, "model.safetensors cannot be read as safetensors"),
    ],
)
def test_a_folder_without_whole_files_is_refused_in_one_line(folders, tmp_path, change, said):
    folder = copy(folders["Qwen3-VL"], tmp_path)
    change(folder)
    with pytest.raises(ValueError, match=said) as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_nothing_is_allocated_for_a_model_whose_files_do_not_fit(folders, tmp_path):
    folder = copy(folders["Qwen3-VL"], tmp_path)
    rewrite(folder, without(tensors(folder), NORM))
    policy = empty_policy(str(folder), VisionSpec.load(folder))
    with pytest.raises(ValueError, match="lacks"):
        load_weights(policy, str(folder), torch.device("cpu"))
    assert all(p.is_meta for _, p in policy.named_weights())
