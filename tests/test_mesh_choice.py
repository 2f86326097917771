"""Which mesh the plan recommends, and what it counts of the wire."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner import plan
from learner.model.duration import Speed
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
