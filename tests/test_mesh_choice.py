"""Which mesh the plan recommends, and what it counts of the wire."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner import plan
from learner.model.duration import Engines, Speed, generation_time
from learner.model.memory import Setting, memory
from learner.model.sizes import PUBLISHED, find
from learner.model.traffic import Traffic, traffic, wire_time
from learner.parallel.choice import choices

DENSE, MIXTURE, LARGE = (find(name) for name in ("Qwen3-VL-8B", "Qwen3-VL-30B-A3B", "Qwen3-VL-235B-A22B"))
ROOM = 141e9 * (1 - plan.RESERVED_FRACTION)


def test_shards_are_gathered_twice_in_bfloat16_and_reduced_once_in_float32():
    found = traffic(DENSE, Setting(gpus=64))
    assert found.shards == pytest.approx(8 * DENSE.parameters * 63 / 64) and (found.context, found.experts) == (0, 0)
    replicas = traffic(DENSE, Setting(gpus=64, shard_size=8))  # whose shards of the gradients are added up besides
    assert replicas.shards == pytest.approx(8 * DENSE.parameters * 7 / 8 + 8 * DENSE.parameters / 8 * 7 / 8)


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
    sizes = find(name)
    found = choices(sizes, Setting(gpus=gpus), longest, ROOM, Speed())
    assert [c.seconds for c in found] == sorted((c.seconds for c in found), key=lambda s: round(s, 2))
    for choice in found:
        s = choice.setting
        assert choice.bytes_of_rank <= ROOM and s.microbatch_tokens * s.context >= longest
        assert gpus % s.context == gpus % s.shards == s.shards % s.expert == 0
        assert s.expert == 1 or sizes.num_experts % s.expert == 0
        assert choice.seconds >= choice.computing * (1 - 1e-9)


def test_the_command_compares_meshes_for_the_longest_episode(capsys):
    assert plan.main(["--model", "Qwen3-VL-8B", "--gpus", "64", "--longest", "65536"]) == 0
    best, *_, alone = capsys.readouterr().out.splitlines()[1:]
    assert best.startswith("  context 8, microbatch_tokens 8192: ") and "69 GB of shards" in best
    assert alone.startswith("  with FSDP alone: context 1")
    assert plan.main(["--model", "Qwen3-VL-235B-A22B", "--gpus", "8", "--longest", "65536"]) == 0
    assert "no mesh fits: use more GPUs, or offload" in capsys.readouterr().out
    assert plan.main(["--model", "Qwen3-VL-8B", "--gpus", "8", "--expert", "3"]) == 2
    assert "--expert 3 does not divide the 8 GPUs of a copy" in capsys.readouterr().err


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
