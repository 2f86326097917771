"""The plan's sizes against models of transformers, and against what a forward really keeps."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from learner.batch.episodes import make_episode
from learner.batch.image_decoder import ImageDecoder
from learner.batch.packer import pack
from learner.model.lora_adapters import is_factor
from learner.model.policy import load_policy
from learner.model.sharding import parallelize
from learner.plan import fit
from learner.plan.duration import Engines, Speed, publication_time, step_time
from learner.plan.fit import check_fits
from learner.plan.memory_use import Setting, activations, host_memory, memory
from learner.plan.mesh_choice import choices
from learner.plan.plan_command import main
from learner.plan.plan_report import report_learner
from learner.training.optim import make_optimizer
from shared.config.learner_section import OptimizerConfig
from shared.config.objective_section import ObjectiveConfig
from shared.config.recipe import Recipe
from shared.config.sections import EnvConfig, ModelConfig
from shared.families.registry import PUBLISHED, find_sizes, sizes_of
from shared.vision import VisionSpec
from tests.support.episodes import learner_config, random_trajectory
from tests.support.loading.kept import kept_bytes
from tests.support.loading.models import qwen25
from tests.support.small.adapted import adapted_policy
from tests.support.small.families import glm4v, qwen3, qwen3_5, qwen3_moe
from tests.support.small.published import auto_class, published_config
from tests.support.tiny import moe_policy, tiny_model_dir

RECOMPUTED = ("--learner.parallel.activation_checkpointing", "true")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), hidden=128, layers=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameters_of_a_published_model_are_those_that_transformers_builds(name):
    config = published_config(name)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    model.tie_weights()
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name].parameters
    sizes = sizes_of(config.to_dict())
    assert sizes == dataclasses.replace(PUBLISHED[name], num_experts=sizes.num_experts)


def test_the_published_totals_are_the_known_ones():
    totals = [round(sizes.parameters / 1e9, 2) for sizes in PUBLISHED.values()]
    known = [
        2.13, 4.44, 8.77, 33.36, 31.07, 235.67, 3.75, 8.29, 33.45, 73.41,
        0.6, 1.72, 4.02, 4.02, 4.02, 8.19, 14.77, 32.76,
        0.85, 2.21, 4.54, 9.41, 27.36, 35.11, 122.56, 396.8,
        10.29, 10.29,
    ]  # fmt: skip
    assert totals == known


def packed(spec, sides=(64, 96)):
    decoder = ImageDecoder(spec)
    trajectories = [random_trajectory(spec, seed, turn_tokens=(20, 40), sides=sides) for seed in range(6)]
    return pack([make_episode(t, 0.0, decoder, ObjectiveConfig()) for t in trajectories], decoder, torch.device("cpu"))


def setting_of(batch, **changes):
    tokens, patches = batch.input_ids.shape[1], len(batch.patches)
    shares = {"visual_share": patches / 4 / tokens, "sampled_share": batch.num_tokens / tokens}
    return Setting(dtype_bytes=4, microbatch_tokens=tokens, **shares, **changes)


@pytest.mark.slow
def test_what_is_planned_for_qwen25_is_what_it_has_and_what_its_forward_keeps(tmp_path):
    folder = qwen25(tmp_path / "model")
    spec, sizes = VisionSpec.load(folder, min_pixels=784), find_sizes(str(folder))
    policy = load_policy(str(folder), spec)
    assert sum(p.numel() for p in policy.vlm.parameters()) == sizes.parameters
    assert (sizes.vision_full_blocks, sizes.window_patches) == (1, 16)
    batch = packed(policy.spec, sides=(56, 84, 140))
    assert activations(sizes, setting_of(batch)) == pytest.approx(kept_bytes(policy, batch, in_c=True), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("make", [qwen3, qwen3_5, glm4v])
def test_what_is_planned_for_a_text_model_for_delta_nets_and_for_glm_is_what_they_keep(tmp_path, make):
    """Chunks of the rule that are not full are not planned: here a fifth of them."""
    folder = make(tmp_path)
    policy = load_policy(str(folder), VisionSpec.load(folder, min_pixels=1024, max_pixels=1 << 20))
    batch = packed(policy.spec)
    planned = activations(find_sizes(str(folder)), setting_of(batch))
    assert planned == pytest.approx(kept_bytes(policy, batch, in_c=True), rel=0.1)


def test_an_engine_has_room_for_the_states_of_delta_nets_beside_keys_and_values():
    sizes = PUBLISHED["Qwen3.5-9B"]
    assert sizes.state_bytes(2) == 24 * (4 * 32 * 128 * 128 + 2 * 8192 * 3)
    engines = Engines(1, 1, 80e9, 0.8, 10_000, 2)
    each = 1000 * engines.token_bytes(sizes) + sizes.state_bytes(2)
    assert engines.batch(sizes, 1000, 1 << 20) == int((0.8 * 80e9 - 2 * sizes.parameters) // each)
    assert engines.token_bytes(sizes) == 2 * 8 * 4 * 256 * 2  # of the eight layers that attend
    with_context = {c.setting.context for c in choices(sizes, Setting(gpus=8), 8192, 141e9, Speed())}
    assert with_context == {1}


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True])
def test_planned_activations_are_within_a_tenth_of_what_a_forward_keeps(folder, spec, experts):
    policy, sizes = load_policy(str(folder), spec), find_sizes(str(folder))
    if experts:
        policy = moe_policy(folder, spec)
        sizes = sizes_of(policy.vlm.config.to_dict())
    assert sum(p.numel() for p in policy.vlm.parameters()) == sizes.parameters
    batch = packed(spec)
    assert activations(sizes, setting_of(batch)) == pytest.approx(kept_bytes(policy, batch, in_c=True), rel=0.05)
    assert kept_bytes(policy, batch, in_c=True) <= kept_bytes(policy, batch)


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
    policy, batch, sizes = load_policy(str(folder), spec), packed(spec), find_sizes(str(folder))
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
    half = memory(sizes, dataclasses.replace(plain, freeze_layers=18))
    rest = sizes.parameters - sizes.head_parameters - (sizes.text_parameters - 2 * sizes.head_parameters) / 2
    assert half.optimizer == pytest.approx(8 * rest / 8) and half.weights == need.weights


def test_a_model_that_cannot_fit_is_refused_with_the_numbers_and_the_cure():
    with pytest.raises(ValueError, match=r"does not fit: a rank needs [\d.]+ GB \(weights 8.5.*set learner") as error:
        check_fits(PUBLISHED["Qwen3-VL-2B"], Setting(), 24e9, "it")
    assert "\n" not in str(error.value)
    check_fits(PUBLISHED["Qwen3-VL-2B"], Setting(), 141e9, "it")
    text, fits = report_learner("it", PUBLISHED["Qwen3-VL-235B-A22B"], Setting(gpus=8), 141e9)
    assert not fits and "does not fit: set learner.parallel.activation_checkpointing = true and either use" in text


def test_gradients_of_the_largest_part_are_counted_in_float32_where_ranks_sum_them():
    """Of 8B that is embeddings, head and projector, of 235B a layer of experts."""
    on = Setting(gpus=8)
    assert memory(PUBLISHED["Qwen3-VL-8B"], on).reduced == pytest.approx(4 * (2 * 151936 * 4096 + 160e6), rel=0.01)
    assert memory(PUBLISHED["Qwen3-VL-235B-A22B"], on).reduced == pytest.approx(4 * 3 * 128 * 4096 * 1536, rel=0.05)
    assert memory(PUBLISHED["Qwen3-VL-8B"], dataclasses.replace(on, gpus=1)).reduced == 0


def test_more_ranks_than_experts_leave_some_without_any():
    """128 experts over 256 ranks: half of the ranks hold one of each layer, the others none."""
    sizes = PUBLISHED["Qwen3-VL-235B-A22B"]
    few, many = (memory(sizes, Setting(gpus=gpus)) for gpus in (128, 256))
    rest = sizes.parameters - sizes.expert_parameters
    assert few.weights == pytest.approx(4 * sizes.parameters / 128)
    assert many.weights == pytest.approx(4 * (sizes.expert_parameters / 128 + rest / 256))
    assert many.gathered - few.gathered == pytest.approx(2 * 3 * sizes.layer_experts)  # and twice as many are gathered


def test_the_host_holds_what_is_offloaded_and_the_copy_of_a_checkpoint():
    sizes, plain = PUBLISHED["Qwen3-VL-8B"], Setting(gpus=16)
    need = host_memory(sizes, plain)
    assert need.checkpoint == pytest.approx(8 * 12 * sizes.parameters / 16) and need.offloaded == 0
    assert host_memory(sizes, dataclasses.replace(plain, copies_checkpoint=False)).checkpoint == 0
    offloaded = host_memory(sizes, dataclasses.replace(plain, offload=True))
    assert offloaded.offloaded == pytest.approx(8 * 16 * sizes.parameters / 16)
    one = host_memory(sizes, dataclasses.replace(plain, gpus_per_node=1))
    assert one.checkpoint == need.checkpoint / 8 and one.processes == need.processes / 8


def test_the_seconds_of_a_step_and_of_a_publication_follow_from_what_is_assumed():
    sizes, plain, speed = PUBLISHED["Qwen3-VL-8B"], Setting(gpus=8), Speed(tflops=1000, mfu=0.5, gather=100, wire=50)
    step = step_time(sizes, plain, speed)
    assert step.flops == pytest.approx(6 * 8.6e9 * 128 * 8192, rel=0.1)  # a little less than all of its parameters
    assert step.seconds == pytest.approx(step.flops / (8 * 500e12))
    for factor, changes in ((2, {"passes": 2}), (4 / 3, {"activation_checkpointing": True}), (0.5, {"episodes": 64})):
        assert step_time(sizes, dataclasses.replace(plain, **changes), speed).flops == pytest.approx(
            factor * step.flops
        )
    sent = publication_time(sizes, plain, speed)
    assert sent.seconds == pytest.approx(sizes.parameters * (2 / 100e9 + 2 / 50e9))
    assert publication_time(sizes, dataclasses.replace(plain, gpus=1), speed).gathered == 0


def test_a_context_longer_than_the_models_is_one_line(folder):
    recipe = Recipe(model=ModelConfig(path=str(folder), max_context=10**7), env=EnvConfig(module="none"))
    with pytest.raises(ValueError, match=r"model.max_context = 10000000 is longer than the context of"):
        fit.check_recipe(recipe, 1, None)
    with pytest.raises(ValueError, match="does not fit"):
        fit.check_recipe(recipe.model_copy(update={"model": ModelConfig(path=str(folder))}), 1, 1e6)


def test_the_command_prints_every_published_model_and_names_an_unknown_one(capsys):
    assert main(["--gpus", "64", "--gpu", "h200", *RECOMPUTED]) == 1  # the largest does not fit
    assert capsys.readouterr().out.count("B parameters") == len(PUBLISHED)
    assert main(["--model", "Qwen3-VL-9B"]) == 2
    assert "no sizes of 'Qwen3-VL-9B'" in capsys.readouterr().err
    assert main(["--model", "Qwen/Qwen3-VL-2B-Thinking", "--gpu", "h200"]) == 0


def test_the_command_takes_a_recipe_with_overrides_and_options_of_its_own(capsys):
    recipe = ["--config", "launch/recipes/geo3k.toml", "--model", "Qwen3-VL-8B", "--gpus", "8", "--gpu", "h200"]
    assert main([*recipe, "--learner.parallel.microbatch_tokens", "16000"]) == 1  # of 141 GB
    assert "16000 tokens a microbatch" in capsys.readouterr().out
    assert main([*recipe, "--learner.parallel.activation_checkpointing", "true"]) == 0
    assert main([*recipe, *RECOMPUTED, "--learner.parallel.microbatch_tokens", "12000"]) == 0
    assert "12000 tokens a microbatch" in capsys.readouterr().out


def test_the_command_says_what_it_assumes_and_judges_the_host(capsys):
    start = ["--model", "Qwen3-VL-8B", "--gpus", "8", *RECOMPUTED]
    assert main([*start, "--assume", "mfu=0.4", "wire=20", "--learner.groups_per_step", "8"]) == 0
    told = capsys.readouterr().out
    assert "assuming 64 episodes of 8192 tokens" in told and "40% of 989 TFLOP/s" in told and "at 20 GB/s" in told
    assert main([*start, "--host-memory", "100"]) == 1
    assert "does not fit into 100 GB: set learner.checkpoint.in_background = false" in capsys.readouterr().out
    assert main([*start, "--assume", "mfu=0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_episodes_longer_than_the_models_context_are_refused(capsys):
    assert main(["--model", "Qwen3-VL-8B", "--gpus", "8", "--episode-tokens", "300000"]) == 2
    assert "--episode-tokens = 300000 is longer than the context of Qwen3-VL-8B" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--assume", "mfu"], "--assume mfu: write NAME=NUMBER"),
        (["--assume", "speed=2"], "--assume speed=2: known are tflops, mfu, gather"),
        (["--gpus", "0"], "count GPUs: at least 1"),
        (["--host-memory", "-1"], "at least 0"),
        (["--gpus", "6", "--learner.parallel.context", "4"], "context = 4 does not divide --gpus 6; set it to 3 or 6"),
        (["--learner.parallel.contexts", "4"], "did you mean --learner.parallel.context?"),
    ],
)
def test_a_plan_that_cannot_be_is_one_line(words, expected, capsys):
    try:
        code = main(["--model", "Qwen3-VL-8B", *words])
    except SystemExit as end:
        code = end.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


def test_a_kind_of_gpu_has_its_memory_and_its_speed(capsys):
    main(["--model", "Qwen3-VL-2B", "--gpu", "b200", "--assume", "wire=20"])
    text = capsys.readouterr().out
    assert "1 GPUs of 180 GB" in text and "30% of 2250 TFLOP/s" in text and "at 20 GB/s" in text


def test_a_frozen_policy_trains_as_many_parameters_as_planned(folder, spec, ranks):
    policy, sizes = load_policy(str(folder), spec), find_sizes(str(folder))
    parallelize(policy, ranks, learner_config(freeze=("vision",)), torch.float32)
    trained = sum(p.numel() for p in policy.vlm.parameters() if p.requires_grad)
    assert trained == sizes.parameters - sizes.vision_parameters


ADAPTED = [
    (tiny_model_dir, ("attention", "dense", "vision")),
    (qwen25, ("attention", "dense", "vision")),
    (qwen3_moe, ("attention", "experts")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "targets"), ADAPTED, ids=lambda value: getattr(value, "__name__", ""))
def test_planned_adapters_are_those_of_the_model_and_a_trainer_holds_nothing_else_of_it(tmp_path, make, targets):
    policy = adapted_policy(make(tmp_path / "model"), rank=3, targets=targets)
    sizes = sizes_of(policy.vlm.config.to_dict())
    factors = sum(p.numel() for name, p in policy.vlm.named_parameters() if is_factor(name))
    assert sizes.adapter_parameters(3, targets) == factors
    assert sum(math.prod(each.shape) for each in policy.adapters.of.values()) == sum(
        count * rows * columns for count, rows, columns in sizes.adapted(targets)
    )
    need = memory(sizes, Setting(dtype_bytes=4, lora_rank=3, lora_targets=targets))
    assert need.weights == sum(p.nbytes for p in policy.vlm.parameters())
    assert need.gradients == 4 * factors and need.optimizer == 8 * factors


def test_adapters_take_little_beside_frozen_weights_and_no_second_reference():
    sizes, whole = PUBLISHED["Qwen3-VL-8B"], Setting(reference=True)
    adapted = dataclasses.replace(whole, lora_rank=16)
    need = memory(sizes, adapted)
    assert need.weights == pytest.approx(2 * sizes.parameters, rel=0.02) and need.reference == 0
    assert need.gradients + need.optimizer < 0.01 * memory(sizes, whole).optimizer
    assert host_memory(sizes, adapted).checkpoint < 0.02 * host_memory(sizes, whole).checkpoint
    assert publication_time(sizes, adapted, Speed()).sent < publication_time(sizes, whole, Speed()).sent
    assert step_time(sizes, adapted, Speed()).flops < step_time(sizes, whole, Speed()).flops
