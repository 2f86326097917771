"""The plan's sizes against models of transformers, and against what a forward really keeps."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText, Qwen3VLConfig, Qwen3VLMoeConfig

from learner import plan
from learner.batch import make_episode, pack
from learner.images import ImageDecoder
from learner.model.policy import load_policy
from learner.model.sharding import parallelize
from learner.model.sizes import PUBLISHED, find, sizes_of
from learner.optim import make_optimizer
from learner.plan import Setting, activations, check, memory, report
from shared.config import Recipe
from shared.learner_config import ObjectiveConfig, OptimizerConfig
from shared.sections import EnvConfig, ModelConfig
from tests.support.episodes import learner_config, random_trajectory
from tests.support.tiny import moe_policy, tiny_model_dir


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), hidden=128, layers=4)


def published_config(name):
    """A config of transformers' with the table's sizes."""
    sizes = PUBLISHED[name]
    text = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.intermediate_size,
        "num_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.experts_per_token,
        "moe_intermediate_size": sizes.expert_size,
        "max_position_embeddings": sizes.max_context,
    }
    vision = {
        "depth": sizes.vision_depth,
        "hidden_size": sizes.vision_hidden,
        "intermediate_size": sizes.vision_intermediate,
        "out_hidden_size": sizes.hidden_size,
        "num_position_embeddings": sizes.vision_positions,
        "deepstack_visual_indexes": [5, 11, 17],
    }
    kind = Qwen3VLMoeConfig if sizes.num_experts else Qwen3VLConfig
    return kind(text_config=text, vision_config=vision, tie_word_embeddings=sizes.tied)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameters_of_a_published_model_are_those_that_transformers_builds(name):
    config = published_config(name)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    model.tie_weights()
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name].parameters
    sizes = sizes_of(config.to_dict())
    assert sizes == dataclasses.replace(PUBLISHED[name], num_experts=sizes.num_experts)


def test_the_published_totals_are_the_known_ones():
    totals = {name: round(sizes.parameters / 1e9, 2) for name, sizes in PUBLISHED.items()}
    assert list(totals.values()) == [2.13, 4.44, 8.77, 31.07, 235.67]


def packed(spec):
    decoder = ImageDecoder(spec)
    trajectories = [random_trajectory(spec, seed, turn_tokens=(20, 40)) for seed in range(6)]
    return pack([make_episode(t, 0.0, decoder, ObjectiveConfig()) for t in trajectories], decoder, torch.device("cpu"))


def setting_of(batch, **changes):
    tokens, patches = batch.input_ids.shape[1], len(batch.patches)
    shares = {"visual_share": patches / 4 / tokens, "sampled_share": batch.num_tokens / tokens}
    return Setting(dtype_bytes=4, microbatch_tokens=tokens, **shares, **changes)


def kept_bytes(policy, batch) -> int:
    """Distinct memory that the forward keeps for the backward, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that its place is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = policy.train()(batch, 1.0)
    del output
    return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in own)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True])
def test_planned_activations_are_within_a_tenth_of_what_a_forward_keeps(folder, spec, experts):
    policy, sizes = load_policy(str(folder), spec), find(str(folder))
    if experts:
        policy = moe_policy(folder, spec)
        sizes = sizes_of(policy.vlm.config.to_dict())
    assert sum(p.numel() for p in policy.vlm.parameters()) == sizes.parameters
    batch = packed(spec)
    assert activations(sizes, setting_of(batch)) == pytest.approx(kept_bytes(policy, batch), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "experts"), [("adamw", False), ("muon", False), ("muon", True)])
def test_planned_weights_gradients_and_optimizer_state_are_what_a_trainer_holds(folder, spec, optimizer, experts):
    policy = moe_policy(folder, spec) if experts else load_policy(str(folder), spec)
    need = memory(sizes_of(policy.vlm.config.to_dict()), Setting(dtype_bytes=4, optimizer=optimizer))
    optimizer = make_optimizer(policy, OptimizerConfig(name=optimizer))
    parameters = list(policy.vlm.parameters())
    for p in parameters:
        p.grad = torch.ones_like(p)
    assert need.weights == sum(p.nbytes for p in parameters)
    assert need.gradients == sum(p.grad.nbytes for p in parameters)
    optimizer.step()
    states = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    assert need.optimizer == pytest.approx(states, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 3])
def test_counted_operations_are_those_of_the_forward(tmp_path, spec, layers):
    folder = tiny_model_dir(tmp_path, layers=layers)
    policy, batch, sizes = load_policy(str(folder), spec), packed(spec), find(str(folder))
    onednn_off = torch.backends.mkldnn.flags(enabled=False)  # its products are not counted by torch
    with FlopCounterMode(display=False) as counter, torch.no_grad(), onednn_off:
        policy(batch, 1.0)
    names = ("mm", "addmm", "bmm", "baddbmm")
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if str(op).split(".")[-1] in names)
    planned = sizes.forward_flops(batch.lengths, batch.image_lengths, batch.num_tokens)
    width = 4 * sizes.num_layers * sizes.num_heads * sizes.head_dim
    attention = width / 2 * sum(n * (n + 1) for n in batch.lengths)
    attention += 4 * sizes.vision_depth * sizes.vision_hidden * sum(n * n for n in batch.image_lengths)
    assert planned - attention == pytest.approx(counted, rel=0.03)


def test_each_way_to_save_memory_saves_what_it_says():
    sizes, plain = PUBLISHED["Qwen3-VL-8B"], Setting(gpus=8)
    need = memory(sizes, plain)
    assert memory(sizes, dataclasses.replace(plain, activation_checkpointing=True)).activations < need.activations / 10
    assert memory(sizes, dataclasses.replace(plain, gpus=16)).optimizer == need.optimizer / 2
    assert memory(sizes, dataclasses.replace(plain, shard_size=4)).optimizer == need.optimizer * 2
    offloaded = memory(sizes, dataclasses.replace(plain, offload=True))
    assert offloaded.weights == offloaded.optimizer == 0
    frozen = memory(sizes, dataclasses.replace(plain, freeze=("vision", "projector")))
    assert frozen.optimizer == 8 * sizes.text_parameters / 8 and frozen.weights == need.weights


def test_a_model_that_cannot_fit_is_refused_with_the_numbers_and_the_cure():
    with pytest.raises(ValueError, match=r"does not fit: a rank needs [\d.]+ GB \(weights 8.5.*set learner") as error:
        check(PUBLISHED["Qwen3-VL-2B"], Setting(), 24e9, "it")
    assert "\n" not in str(error.value)
    check(PUBLISHED["Qwen3-VL-2B"], Setting(), 141e9, "it")
    text, fits = report("it", PUBLISHED["Qwen3-VL-235B-A22B"], Setting(gpus=8), 141e9)
    assert not fits and "does not fit: set learner.parallel.activation_checkpointing = true and use" in text


def test_a_context_longer_than_the_models_is_one_line(folder):
    recipe = Recipe(model=ModelConfig(path=str(folder), max_context=10**7), env=EnvConfig(module="none"))
    with pytest.raises(ValueError, match=r"model.max_context = 10000000 is longer than the context of"):
        plan.check_recipe(recipe, 1, None)
    with pytest.raises(ValueError, match="does not fit"):
        plan.check_recipe(recipe.model_copy(update={"model": ModelConfig(path=str(folder))}), 1, 1e6)


def test_the_command_prints_every_published_model_and_names_an_unknown_one(capsys):
    assert plan.main(["--gpus", "64", "--activation-checkpointing"]) == 0
    assert capsys.readouterr().out.count("B parameters") == len(PUBLISHED)
    assert plan.main(["--model", "Qwen3-VL-9B"]) == 2
    assert "no sizes of 'Qwen3-VL-9B'" in capsys.readouterr().err
    assert plan.main(["--model", "Qwen/Qwen3-VL-2B-Thinking"]) == 0


def test_the_command_takes_a_recipe_with_overrides_and_options_of_its_own(capsys):
    recipe = ["--config", "launch/recipes/geo3k.toml", "--model", "Qwen3-VL-8B", "--gpus", "8"]
    assert plan.main([*recipe, "--learner.parallel.microbatch_tokens", "12000"]) == 1  # of 141 GB
    assert "12000 tokens a microbatch" in capsys.readouterr().out
    assert plan.main([*recipe, "--learner.parallel.activation_checkpointing", "true"]) == 0
    assert plan.main([*recipe, "--activation-checkpointing", "--microbatch-tokens", "4096"]) == 0
    assert "4096 tokens a microbatch" in capsys.readouterr().out


def test_a_frozen_policy_trains_as_many_parameters_as_planned(folder, spec, ranks):
    policy, sizes = load_policy(str(folder), spec), find(str(folder))
    parallelize(policy, ranks, learner_config(freeze=("vision",)), torch.float32)
    trained = sum(p.numel() for p in policy.vlm.parameters() if p.requires_grad)
    assert trained == sizes.parameters - sizes.vision_parameters
