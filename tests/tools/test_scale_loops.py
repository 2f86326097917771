"""Loops of published models, and their miniatures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from learner.plan.duration import Speed, publication_time, step_time
from learner.plan.memory_use import Setting
from shared.families.registry import find_sizes
from tests.bench.scale.assumed import engine_gpus, loop_of
from tests.bench.scale.sim_miniature import miniature
from tests.bench.scale.simulation import simulate
from tests.bench.scale.sweep import Case, loop

DENSE = find_sizes("Qwen3-VL-8B")


def test_a_loop_without_an_engine_is_refused():
    with pytest.raises(ValueError, match="8 GPUs for the learner and 0 engines make no loop; use more GPUs"):
        loop_of(DENSE, Setting(gpus=8), 0)


def test_a_model_s_loop_has_the_plan_s_seconds():
    setting = Setting(gpus=8, episodes=256, activation_checkpointing=True)
    made = loop_of(DENSE, setting, 24, design="paused")
    assert made.step_s.mean == step_time(DENSE, setting, Speed()).seconds
    assert made.publication.send_s == publication_time(DENSE, setting, Speed()).seconds
    assert made.engine.token_s == pytest.approx(2 * DENSE.parameters / (3350e9 * 0.7))
    assert (made.groups_per_step, made.group_size) == (32, 8)
    assert [engine_gpus(find_sizes(name), setting) for name in ("Qwen3-VL-2B", "Qwen3-VL-235B-A22B")] == [1, 8]


@pytest.mark.slow
def test_a_miniature_is_as_fast_as_the_whole():
    case = Case("Qwen3-VL-8B", "systems", "ours", 64, 0.25, 1)
    whole = replace(loop(case, DENSE), groups_per_step=64)  # 512 episodes
    part, times = miniature(whole, 128)
    assert (part.engines, part.groups_per_step, times) == (12, 16, 4.0)
    fast = [simulate(one, 12, skip=3).episodes_per_s for one in (whole, part)]
    assert fast[1] * times == pytest.approx(fast[0], rel=0.1)
