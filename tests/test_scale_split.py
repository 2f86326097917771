"""Loops of published models, their miniatures, and how the plan divides GPUs between learner and engines."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from learner import plan
from learner.model.duration import Speed, publication_time, step_time
from learner.model.memory import Setting
from learner.model.sizes import find
from learner.scale.assumed import engine_gpus, loop_of
from learner.scale.simulation import simulate
from learner.scale.split import miniature, splits
from tests.bench.scale.sweep import Case, loop

DENSE = find("Qwen3-VL-8B")


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
    assert [engine_gpus(find(name), setting) for name in ("Qwen3-VL-2B", "Qwen3-VL-235B-A22B")] == [1, 8]


def test_a_miniature_is_as_fast_as_the_whole():
    case = Case("Qwen3-VL-8B", "systems", "ours", 64, 0.25, 1)
    whole = replace(loop(case, DENSE), groups_per_step=64)  # 512 episodes
    part, times = miniature(whole, 128)
    assert (part.engines, part.groups_per_step, times) == (12, 16, 4.0)
    fast = [simulate(one, 12, skip=3).episodes_per_s for one in (whole, part)]
    assert fast[1] * times == pytest.approx(fast[0], rel=0.1)


def test_the_plan_divides_gpus_between_learner_and_engines(capsys):
    setting = Setting(gpus=32, episodes=512, activation_checkpointing=True)
    found = splits(DENSE, setting, 132e9, max_staleness=4)
    assert [split.learner + split.engines * split.engine_gpus for split in found] == [32] * len(found)
    made = [split.episodes_per_s for split in found]
    assert made == sorted(made, reverse=True)
    assert all(split.episodes_per_s <= split.bounds.least for split in found)
    command = ["--model", "Qwen3-VL-8B", "--gpus", "32", "--split", "--episodes", "512", "--activation-checkpointing"]
    assert plan.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Qwen3-VL-8B: 32 GPUs for learner and engines, 512 episodes a step"
    assert re.match(r"  \d+ GPUs for the learner, \d+ engines: ", lines[1])
    assert plan.main(["--model", "Qwen3-VL-235B-A22B", "--gpus", "8", "--split"]) == 0
    assert "no split fits: use more GPUs" in capsys.readouterr().out


SPLIT = ["--model", "Qwen3-VL-8B", "--gpus", "16", "--split", "--lora-rank", "16", "--activation-checkpointing"]
SPLIT += ["--microbatch-tokens", "2048"]


def test_a_split_has_the_engines_that_the_options_describe(capsys):
    told = []
    for options in ([], ["--gpu-memory", "24"], ["--hbm", "4800"], ["--decode", "0.8"]):
        assert plan.main([*SPLIT, *options]) == 0
        told.append(capsys.readouterr().out)
    plain, small, faster, busier = told
    assert " engines of 2 GPUs: " in small and " engines: " in plain  # 24 GB have no room for 8B twice
    alone = [max(map(float, re.findall(r"engines alone ([\d.]+)", each))) for each in (plain, faster, busier)]
    assert alone[0] < alone[1] < alone[2]
    setting = Setting(gpus=16, activation_checkpointing=True, lora_rank=16, microbatch_tokens=2048)
    batches = [splits(DENSE, setting, 22e9, gpu_bytes=gb * 1e9)[0].loop.engine.max_batch for gb in (80, 141)]
    assert batches == [41, 84]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--episode-tokens", "1"], "--episode-tokens 1 leaves no token to a prompt; set it to 2 at least"),
        (["--episode-tokens", "1", "--microbatch-tokens", "9999999"], "set it to 2 at least"),  # no learner fits
        (["--episode-tokens", "250000", "--gpu-memory", "24"], "no room on 2 GPUs of 24 GB, an engine's, beside"),
        (["--episode-tokens", "3000000"], "longer than the context of Qwen3-VL-8B; set it to 262144 at most"),
        (["--model", "", "--episode-tokens", "150000"], "longer than the context of Qwen2.5-VL-3B; set it to 128000"),
    ],
)  # fmt: skip
def test_episodes_that_no_engine_plays_are_one_line_with_the_next_length_that_it_does(options, said, capsys):
    assert plan.main([*SPLIT, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and f"--episode-tokens {options[options.index('--episode-tokens') + 1]}" in line


def test_episodes_longer_than_the_models_context_are_refused_without_a_split_too(capsys):
    assert plan.main(["--model", "Qwen3-VL-8B", "--gpus", "8", "--episode-tokens", "300000"]) == 2
    assert "--episode-tokens 300000 is longer than the context of Qwen3-VL-8B" in capsys.readouterr().err
