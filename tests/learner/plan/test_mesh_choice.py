"""Which mesh the plan recommends, and what it counts of the wire."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.tiny_models.mixture import mixture_of
from learner.plan import fit
from learner.plan.divisors import check_deal, deals
from learner.plan.duration import Engines, Speed, generation_time
from learner.plan.memory_use import RESERVED_FRACTION, Setting, memory
from learner.plan.mesh_choice import choices
from learner.plan.plan_command import main
from learner.plan.traffic import Traffic, traffic, wire_time
from shared.config.recipe import load_recipe
from shared.families.registry import PUBLISHED, find_sizes

DENSE, MIXTURE, LARGE = (find_sizes(name) for name in ("Qwen3-VL-8B", "Qwen3-VL-30B-A3B", "Qwen3-VL-235B-A22B"))
ROOM = 141e9 * (1 - RESERVED_FRACTION)


def test_shards_are_gathered_twice_in_bfloat16_and_reduced_once_in_float32():
    found = traffic(DENSE, Setting(gpus=64))
    assert found.shards == pytest.approx(8 * DENSE.parameters * 63 / 64) and (found.context, found.experts) == (0, 0)
    replicas = traffic(DENSE, Setting(gpus=64, shard_size=8))  # whose shards of the gradients are added up besides
    added_up = 8 * DENSE.parameters / 8 * 7 / 8
    assert replicas.shards == pytest.approx(8 * DENSE.parameters * 7 / 8 + added_up)
    several = traffic(DENSE, Setting(gpus=64, shard_size=8), 4)  # they do so once an update
    assert several.shards == pytest.approx(replicas.shards - 3 / 4 * added_up)


def test_keys_and_values_of_the_other_ranks_come_in_the_forward_and_their_gradients_in_the_backward():
    setting = Setting(gpus=8, context=8, microbatch_tokens=8192)
    of_token = 2 * 8 * 128 * 2 * 36  # keys and values, 8 heads of 128, bfloat16, 36 layers
    assert traffic(DENSE, setting).context == pytest.approx(2 * of_token * 65536 * 7 / 8)
    assert traffic(DENSE, replace(setting, activation_checkpointing=True)).context == pytest.approx(
        3 * of_token * 65536 * 7 / 8
    )


def test_rows_go_to_dealt_experts_and_back_and_their_parameters_are_gathered_from_fewer_ranks():
    setting = Setting(gpus=64, expert=8, microbatch_tokens=8192, activation_checkpointing=True)
    found = traffic(MIXTURE, setting)
    assert found.experts == pytest.approx(3 * 2 * 8192 * 8 * 48 * 2048 * 2 * 7 / 8)  # 8 experts a token, 48 layers
    dense, experts = MIXTURE.parameters - MIXTURE.expert_parameters, MIXTURE.expert_parameters
    assert found.shards == pytest.approx(8 * (dense * 63 / 64 + experts / 8 * 7 / 8))


def test_dealt_experts_are_not_gathered_whole():
    plain, dealt = (memory(LARGE, Setting(gpus=64, expert=expert)) for expert in (1, 8))
    layer = LARGE.layer_experts * (1 - 1 / 8)
    assert plain.gathered - dealt.gathered == pytest.approx(2 * 3 * layer)  # bfloat16, three layers at a time
    assert dealt.reduced < plain.reduced
    assert dealt.weights == pytest.approx(plain.weights, rel=1e-6)


def test_what_neighbours_share_stays_within_a_node_while_it_fits():
    sent = Traffic(shards=350e9, context=350e9, experts=350e9)
    inside = wire_time(sent, Setting(gpus=8, context=8, expert=8), node=350, net=35)
    assert (inside.shards, inside.context, inside.experts) == (1, 1, 1) and inside.beside(2.0) == 4.0
    across = wire_time(sent, Setting(gpus=16, context=16, expert=8), node=350, net=35)
    assert (across.shards, across.context, across.experts) == (10, 10, 1) and across.beside(2.0) == 21.0


def test_one_long_episode_sets_the_time_unless_ranks_share_it():
    best, *others = choices(DENSE, Setting(gpus=64), 65536, ROOM, Speed())
    alone = next(c for c in others if c.setting.context == 1)
    assert best.setting.context >= 4 and best.seconds < 0.3 * alone.seconds


def test_the_large_mixture_fits_64_gpus_only_with_what_is_shared():
    found = choices(LARGE, Setting(gpus=64), 65536, ROOM, Speed())
    assert found and all(c.setting.context > 1 for c in found)
    assert choices(LARGE, Setting(gpus=8), 65536, ROOM, Speed()) == []


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([*PUBLISHED]), st.sampled_from([1, 8, 24, 64]), st.integers(1000, 100_000))
def test_every_choice_fits_divides_and_holds_the_longest_episode(name, gpus, longest):
    sizes = find_sizes(name)
    found = choices(sizes, Setting(gpus=gpus), longest, ROOM, Speed())
    assert [c.seconds for c in found] == sorted((c.seconds for c in found), key=lambda s: round(s, 2))
    for choice in found:
        s = choice.setting
        assert choice.bytes_of_rank <= ROOM and s.microbatch_tokens * s.context >= longest
        assert gpus % s.context == gpus % s.shards == s.shards % s.expert == 0
        assert s.expert == 1 or sizes.num_experts % s.expert == 0
        assert choice.seconds >= choice.computing * (1 - 1e-9)


def test_the_command_compares_meshes_for_the_longest_episode(capsys):
    assert main(["--model", "Qwen3-VL-8B", "--gpus", "64", "--gpu", "h200", "--longest", "65536"]) == 0
    best, *_, alone = capsys.readouterr().out.splitlines()[1:]
    assert best.startswith("  context 8, microbatch_tokens 8192: ") and "69 GB of shards" in best
    assert alone.startswith("  with FSDP alone: context 1")
    assert main(["--model", "Qwen3-VL-235B-A22B", "--gpus", "8", "--longest", "65536"]) == 0
    assert "no mesh fits: use more GPUs, or offload" in capsys.readouterr().out
    assert main(["--model", "Qwen3-VL-8B", "--gpus", "8", "--learner.parallel.expert", "3"]) == 2
    assert "learner.parallel.expert = 3 does not divide the 8 GPUs of a copy" in capsys.readouterr().err


def test_fields_that_are_fixed_stay_and_an_offloaded_rank_waits_for_its_shards():
    fixed = {"context": 2, "activation_checkpointing": True, "microbatch_tokens": 3000}
    found = choices(DENSE, Setting(gpus=8), 8192, ROOM, Speed(), fixed)
    assert {(c.setting.context, c.setting.microbatch_tokens) for c in found} == {
        (2, 4096)
    }  # it holds the longest episode
    (kept,) = [c for c in found if c.setting.activation_checkpointing]
    (offloaded,) = choices(DENSE, Setting(gpus=8, offload=True), 8192, ROOM, Speed(), fixed)
    microbatches = 128 * 8192 / (8 * 4096)
    assert offloaded.seconds - kept.seconds == pytest.approx(microbatches * 12 * DENSE.parameters / 8 / 25e9)


def test_generation_reads_weights_and_episodes_for_each_token_and_halves_on_twice_the_engines():
    setting, speed = Setting(gpus=8, episodes=512, episode_tokens=4096), Speed(hbm=1000, decode=0.5, tflops=1e9)
    engines = Engines(4, 1, 141e9, 0.8, 64)
    seconds = generation_time(DENSE, setting, engines, 10_000, 1000, speed)
    weights = 2 * (DENSE.text_parameters - DENSE.head_parameters)
    cache = 64 * 4096 * 2 * 36 * 8 * 128 * 2  # keys and values of 36 layers, 8 heads of 128, bfloat16
    assert seconds == pytest.approx(512 * 1000 / (4 * 64) * (weights + cache) / 500e9, rel=1e-3)
    assert generation_time(DENSE, setting, replace(engines, count=8), 10_000, 1000, speed) == pytest.approx(seconds / 2)
    assert engines.cache_tokens(LARGE) < 0 < replace(engines, tensor_parallel=8).cache_tokens(LARGE)
    few, many = (generation_time(MIXTURE, setting, replace(engines, max_batch=n), 10_000, 1000, speed) for n in (1, 64))
    assert few / 64 < many < few  # one episode reads the experts of a token, many read nearly all


# ---------------------------------------------------------------------- what the documentation recommends

PAGE = Path("docs/explanation/model-parallelism.md")
ROW = re.compile(
    r"^\| (8B|30B-A3B|235B-A22B) \| (\d+)K \| (\d+) \| ([^|]*) \| ([\d.]*) ?\| (\d*) ?\| ([^|]+) \|$", re.M
)
TABLE = ROW.findall(PAGE.read_text())


def test_the_table_has_each_model_on_each_number_of_gpus():
    assert {row[:3] for row in TABLE} == {
        (model, longest, gpus)
        for model in ("8B", "30B-A3B", "235B-A22B")
        for longest in ("32", "64")
        for gpus in ("8", "64", "512")
    }


@pytest.mark.parametrize("row", TABLE, ids=lambda row: " ".join(row[:3]))
def test_the_table_says_what_the_plan_does(row):
    model, longest, gpus, mesh, seconds, room, alone = row
    setting = Setting(gpus=int(gpus), logits_bytes=14.1e9)
    found = choices(find_sizes(f"Qwen3-VL-{model}"), setting, int(longest) * 1024, ROOM, Speed())
    plain = next((c for c in found if c.setting.context == c.setting.expert == 1), None)
    assert alone == (f"{plain.seconds:.1f} s" if plain else "does not fit")
    best = found[0] if found else None
    told = (f"{best}".partition(": ")[0], f"{best.seconds:.1f}", f"{best.bytes_of_rank / 1e9:.0f}") if best else None
    assert (mesh, seconds, room) == (told or ("none fits", "", ""))


@pytest.mark.parametrize(
    ("model", "gpus", "longest", "mesh", "seconds"),
    [
        ("8B", 8, 12288, (1, 1), "24.9 s"),
        ("8B", 8, 16384, (1, 1), "33.2 s"),
        ("8B", 8, 16384, (2, 1), "25.0 s"),
        ("8B", 64, 65536, (1, 1), "31.6 s"),
        ("8B", 64, 65536, (8, 1), "3.2 s"),
        ("30B-A3B", 8, 32768, (1, 1), "19.4 s"),
        ("30B-A3B", 16, 16384, (1, 1), "19.7 s"),
        ("30B-A3B", 16, 16384, (2, 8), "8.3 s"),
    ],
)
def test_where_a_mesh_begins_to_pay_is_as_the_plan_reckons(model, gpus, longest, mesh, seconds):
    found = choices(find_sizes(f"Qwen3-VL-{model}"), Setting(gpus=gpus, logits_bytes=14.1e9), longest, ROOM, Speed())
    fastest = next(c for c in found if (c.setting.context, c.setting.expert) == mesh)
    assert f"{fastest.seconds:.1f} s" == seconds and seconds in PAGE.read_text()


@pytest.mark.parametrize("row", [row for row in TABLE if row[4]], ids=lambda row: " ".join(row[:3]))
def test_each_row_is_overrides_of_a_recipe_and_fits(row):
    model, longest, gpus, mesh, *_ = row
    words = [f"{setting} true".split()[:2] for setting in mesh.split(", ")]
    fields = {f"learner.parallel.{name}": value for name, value in words} | {"model.max_context": int(longest) * 1024}
    name = "geo3k_multi_turn_long" if model == "8B" else "sokoban_long"
    recipe = load_recipe(f"launch/recipes/{name}.toml", [f"--{key}={value}" for key, value in fields.items()])
    sizes, ranks = find_sizes(f"Qwen3-VL-{model}"), int(gpus)
    setting = fit.setting_of(recipe, ranks, 141e9)
    assert setting.microbatch_tokens * setting.context >= recipe.model.max_context
    assert ranks % setting.context == 0 and setting.expert in deals(sizes.num_experts, sizes.expert_rows, ranks)
    fit.check_fits(sizes, setting, 141e9, name)


@pytest.mark.parametrize(("name", "row"), [("geo3k_multi_turn_long", "8B 64 8"), ("sokoban_long", "30B-A3B 32 64")])
def test_the_recipes_are_rows_of_the_table(name, row):
    (mesh,) = [found[3] for found in TABLE if " ".join(found[:3]) == row]
    recipe = load_recipe(f"launch/recipes/{name}.toml")
    model, longest, _ = row.split()
    assert f"Qwen3-VL-{model}-" in recipe.model.path and recipe.model.max_context == int(longest) * 1024
    parallel = recipe.learner.parallel
    dealt = f", expert {parallel.expert}" if parallel.expert > 1 else ""
    assert mesh == f"context {parallel.context}{dealt}, microbatch_tokens {parallel.microbatch_tokens}"


# ---------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "8B --gpus 8 --learner.parallel.context 3",
            "learner.parallel.context = 3 does not divide --gpus 8; set it to 2 or 4",
        ),
        (
            "8B --gpus 8 --learner.parallel.shard_size 3",
            "learner.parallel.shard_size = 3 does not divide --gpus 8; set it to 2 or 4",
        ),
        (
            "30B-A3B --gpus 8 --learner.parallel.expert 3",
            "expert = 3 does not divide the 8 GPUs of a copy; set it to 2 or 4",
        ),
        (
            "8B --gpus 8 --learner.parallel.expert 2",
            "learner.parallel.expert = 2, but Qwen3-VL-8B has no experts; set it to 1",
        ),
        (
            "30B-A3B --gpus 12 --learner.parallel.expert 3",
            "expert = 3 does not divide the model's 128 experts; set it to 1",
        ),
        ("30B-A3B --gpus 0", "count GPUs: at least 1"),
        (
            "8B --gpus 8 --longest 300000",
            "longer than the context of Qwen3-VL-8B, which is 262144 tokens; set it to 262144",
        ),
    ],
)
def test_what_does_not_fit_is_one_line_with_the_next_values_that_do(capsys, arguments, said):
    model, *options = arguments.split()
    assert main(["--model", f"Qwen3-VL-{model}", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_ranks_that_would_cut_the_rows_of_experts_unevenly_are_named_with_those_that_do_not():
    assert deals(128, (1536, 2048), 8) == [1, 2, 4, 8] and deals(128, (1536, 2048), 24) == [1]
    assert deals(0, (0, 4096), 8) == [1]
    with pytest.raises(ValueError, match=r"expert = 2 leaves 5 ranks to cut the 64 and 192 rows .* set it to 1, or"):
        check_deal(2, "qwen3_vl_moe", 8, (192, 64), 10)
    with pytest.raises(ValueError, match=r"expert = 6 does not divide the model's 8 experts; set it to 4 or 8$"):
        check_deal(6, "qwen3_vl_moe", 8, (192, 96), 24)


@pytest.mark.parametrize("fields", [{"expert": 2}, {"expert": 3}])
def test_experts_that_cannot_be_dealt_are_refused_from_the_config_alone(tmp_path, fields):
    mixture = mixture_of("launch/models/colour_tiny", tmp_path / "mixture") if fields["expert"] == 3 else None
    arguments = [f"--learner.parallel.{name}={value}" for name, value in fields.items()]
    arguments += [f"--model.path={mixture}"] if mixture else []
    recipe = load_recipe("launch/recipes/colour_tiny.toml", arguments)
    with pytest.raises(ValueError, match=r"has no experts; set it to 1|does not divide the model's 4 experts"):
        fit.check_recipe(recipe, 6, None)
