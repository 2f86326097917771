"""What the plan proposes for what does not fit is obeyed, by a recipe, and fits."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from learner.plan.duration import Speed, offload_time
from learner.plan.fit import check_fits, setting_of
from learner.plan.memory_use import RESERVED_FRACTION, Setting, host_memory
from learner.plan.plan_command import main
from learner.plan.suggestions import suggest, suggest_for_host
from shared.config.recipe import Recipe, load_recipe
from shared.families.registry import find_sizes

FIELD = re.compile(r"(learner\.parallel\.\w+) = (\w+)")
ROOM = 1 - RESERVED_FRACTION


def recipe_with(fields: dict[str, str]) -> Recipe:
    return load_recipe("launch/recipes/geo3k_multi_turn.toml", [f"--{name}={value}" for name, value in fields.items()])


def complaint(model: str, fields: dict[str, str], gpus: int, gpu_gb: float) -> str:
    """Nothing if it fits."""
    recipe = recipe_with(fields)
    try:
        check_fits(
            find_sizes(model), setting_of(recipe, gpus, gpu_gb * 1e9), gpu_gb * 1e9, model, recipe.model.max_context
        )
    except ValueError as error:
        return str(error)
    return ""


def obeyed(line: str, fields: dict[str, str], gpus: int) -> list[tuple[dict[str, str], int]]:
    """The recipe's fields and the GPUs of each way that the line leaves."""
    always, _, either = line.rpartition("; ")[2].partition("either ")
    ways = []
    for way in either.split(" or "):
        words = f"{always} {way}"
        more = re.search(r"use (\d+) GPUs", words)
        ways.append((fields | dict(FIELD.findall(words)), int(more[1]) if more else gpus))
    return ways


@pytest.mark.parametrize("shard_size", [0, 2])
@pytest.mark.parametrize(
    ("model", "gpus", "gpu_gb", "longest"),
    [
        ("Qwen3-VL-2B", 1, 24, 8192),
        ("Qwen3-VL-2B", 1, 48, 32768),
        ("Qwen3-VL-2B", 1, 80, 200_001),
        ("Qwen3-VL-8B", 1, 80, 8192),
        ("Qwen3-VL-8B", 4, 80, 65536),
        ("Qwen3-VL-8B", 8, 80, 131_072),
        ("Qwen3-VL-8B", 6, 80, 100_001),
        ("Qwen3-VL-30B-A3B", 8, 141, 16384),
        ("Qwen3-VL-30B-A3B", 6, 80, 65536),
        ("Qwen3-VL-32B", 16, 80, 65536),
        ("Qwen3-VL-235B-A22B", 8, 141, 32768),
    ],
)
def test_whoever_obeys_the_line_has_a_recipe_that_fits(model, gpus, gpu_gb, longest, shard_size):
    given = {"model.max_context": str(longest), "learner.parallel.shard_size": str(shard_size if gpus % 2 == 0 else 0)}
    line = complaint(model, given, gpus, gpu_gb)
    ways = obeyed(line, given, gpus)
    assert line and all((fields, count) != (given, gpus) for fields, count in ways), line
    for fields, count in ways:
        recipe, now = recipe_with(fields), complaint(model, fields, count, gpu_gb)
        assert not now, (line, now)
        assert count % recipe.learner.parallel.context == 0
        if (tokens := fields.get("learner.parallel.microbatch_tokens")) is not None:  # what is said is what is taken
            assert int(tokens) == setting_of(recipe, count, 1e9).microbatch_tokens


def test_ranks_that_share_a_long_episode_are_proposed_and_no_microbatch_that_cannot_hold_it():
    line = complaint("Qwen3-VL-8B", {"model.max_context": "65536"}, 4, 80)
    assert line.endswith(
        "; set learner.parallel.activation_checkpointing = true, learner.parallel.context = 4 and "
        "learner.parallel.microbatch_tokens = 16384"
    )


def test_gpus_that_help_only_as_one_copy_are_proposed_with_the_setting_that_makes_them_one():
    sizes, room = find_sizes("Qwen3-VL-32B"), 80e9 * ROOM
    on = Setting(gpus=8, shard_size=8, activation_checkpointing=True, logits_bytes=8e9)
    assert suggest(sizes, on, room).startswith("either use 16 GPUs with learner.parallel.shard_size = 0 or ")
    assert suggest(sizes, replace(on, gpus=16), room).startswith("either set learner.parallel.shard_size = 0 or ")
    assert "use 16 GPUs or" in suggest(sizes, replace(on, shard_size=0), room)


def test_no_gpus_are_proposed_over_which_the_experts_cannot_be_dealt():
    sizes, room = find_sizes("Qwen3-VL-30B-A3B"), 80e9 * ROOM
    on = Setting(gpus=6, expert=2, microbatch_tokens=1024)  # 1,536 and 2,048 rows over 3, 6, ... ranks
    assert "GPUs" not in suggest(sizes, on, room) and "offload" in suggest(sizes, on, room)


def test_a_microbatch_holds_the_longest_episode_on_all_of_its_ranks(capsys):
    words = ["--config", "launch/recipes/geo3k_multi_turn.toml", "--model.max_context", "65536", "--gpus", "8"]
    words += ["--gpu-memory", "80", "--model", "Qwen3-VL-8B", "--learner.parallel.activation_checkpointing", "true"]
    main([*words, "--learner.parallel.microbatch_tokens", "4096"])
    assert "65536 tokens a microbatch" in capsys.readouterr().out
    main([*words, "--learner.parallel.context", "4"])
    assert "65536 tokens a microbatch" in capsys.readouterr().out  # 16,384 of them on each rank


def test_what_is_too_much_for_a_host_is_left_out_where_that_is_enough():
    sizes, both = find_sizes("Qwen3-VL-8B"), Setting(gpus=8, offload=True)
    copied = host_memory(sizes, both).total
    apart = host_memory(sizes, replace(both, copies_checkpoint=False)).total
    assert suggest_for_host(sizes, both, apart) == "set learner.checkpoint.in_background = false" and apart < copied
    assert (
        suggest_for_host(sizes, replace(both, copies_checkpoint=False), apart / 2)
        == "set learner.parallel.offload = false"
    )
    assert suggest_for_host(sizes, both, 1e9).startswith("use more nodes")


# ---------------------------------------------------------------------- what the host holds, and what travels from it


def test_offloaded_weights_travel_as_they_rest_and_gradients_of_trained_ones_alone():
    sizes, speed, off = find_sizes("Qwen3-VL-4B"), Speed(host=25), Setting(gpus=2, offload=True)
    assert offload_time(sizes, off, speed) == pytest.approx(12 * sizes.parameters / 2 / 25e9)
    adapters = sizes.adapter_parameters(32, off.lora_targets)
    adapted = 2 * 2 * sizes.parameters + 12 * adapters  # frozen ones in bfloat16
    assert offload_time(sizes, replace(off, lora_rank=32), speed) == pytest.approx(adapted / 2 / 25e9)
    frozen = 12 * sizes.parameters - 4 * sizes.vision_parameters
    assert offload_time(sizes, replace(off, freeze=("vision",)), speed) == pytest.approx(frozen / 2 / 25e9)
    assert offload_time(sizes, replace(off, offload=False), speed) == 0


def test_pictures_are_counted_on_the_ranks_that_train_on_them_and_whole_on_rank_0_alone():
    sizes = find_sizes("Qwen3-VL-8B")
    plain = Setting(gpus=64, context=8, steps_held=3)
    pixels = plain.episodes * plain.episode_tokens / 2 * 4 * 16 * 16 * 3
    assert host_memory(sizes, plain).pictures == pytest.approx((7 / 64 + 3) * pixels)
    assert host_memory(sizes, replace(plain, gpus=1, context=1)).pictures == pytest.approx(3 * pixels)
    assert host_memory(sizes, replace(plain, deals=3)).pictures == pytest.approx((7 * 3 / 64 + 3) * pixels)
    assert host_memory(sizes, replace(plain, gpus=2, context=1, deals=3)).pictures == pytest.approx(4 * pixels)
    cut = {"learner.objective.minibatches": "2", "learner.objective.passes": "2"}
    assert [setting_of(recipe_with(fields), 2, 1e9).deals for fields in ({}, cut)] == [1, 3]


def test_a_plan_in_float32_says_that_its_seconds_are_those_of_bfloat16(capsys):
    words = ["--model", "Qwen3-VL-2B", "--gpus", "8", "--learner.parallel.activation_checkpointing", "true"]
    told = []
    for dtype in ("bfloat16", "float32"):
        assert main([*words, "--model.dtype", dtype]) == 0
        told.append(capsys.readouterr().out)
    assert all("TFLOP/s a GPU in bfloat16" in each for each in told)
    assert ["in float32 matrix products take about 14 times as long" in each for each in told] == [False, True]
