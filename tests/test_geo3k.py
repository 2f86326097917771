"""The geometry environments against recorded episodes, their tool, their rewards, and drawn problems."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from envs import geo3k, geo3k_multi_turn
from envs.geo3k_multi_turn import build_env, episode_reward
from envs.geometry.tool_call import parse_tool_call
from envs.geometry.triangles import KIND_NAMES, TriangleSettings, make_problem
from learner.advantages import group_advantages
from shared.types import Sample

DATA = Path(__file__).parent / "data"
EPISODES = [json.loads(line) for line in (DATA / "geo3k_episodes.jsonl").read_text().splitlines()]


def call(arguments, name="calc_score"):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def env_for(label="60", **args):
    env = build_env(Sample("x", label=label), args)
    assert env.reset() == ({}, {})
    return env


@pytest.mark.parametrize("episode", EPISODES, ids=lambda episode: str(episode["id"]))
def test_every_recorded_episode_gets_the_same_feedback(episode):
    env = env_for(episode["ground_truth"], max_turns=episode["max_turns"])
    for turn in episode["turns"]:
        observation, done, info = env.step(turn["response"])
        assert (info["feedback"], done) == (turn["feedback"], turn["done"])
        assert info["tool_executed"] == turn["tool_executed"]
        assert info["score"] == observation["tool_score"] == turn["tool_score"]
        assert info["answer"] == turn["answer"]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "calc_score", "arguments": ["60"]}</tool_call>',
        '<tool_call>{"name": 7, "arguments": {"answer": "60"}}</tool_call>',
        '<tool_call>{"function": "calc_score", "arguments": {"answer": "60"}}</tool_call>',
        '<tool_call>{"name": "calc_score", "arguments": "not json"}</tool_call>',
        '<tool_call>{"name": "calc_score", "arguments": "[1]"}</tool_call>',
        "<tool_call>" + '{"a":' * 5000 + "1" + "}" * 5000 + "</tool_call>",
    ],
)
def test_a_malformed_call_is_no_valid_call_and_ends_the_episode(text):
    assert parse_tool_call(text) is None
    _, done, info = env_for().step(text)
    assert done
    assert info["feedback"] == "no_tool_call"


def test_feedback_says_what_to_do_next():
    env = env_for(max_turns=3)
    wrong, _, _ = env.step(call({"answer": "61"}))
    assert "wrong" in wrong["obs_str"]
    assert "only one chance" not in wrong["obs_str"]
    last, _, _ = env.step(call({"answer": "62"}))
    assert "only one chance" in last["obs_str"]
    assert r"Answer: \boxed{$Answer}" in last["obs_str"]
    right, done, _ = env.step(call({"answer": 60}))
    assert "correct" in right["obs_str"]
    assert done
    other, _, _ = env_for().step(call({"answer": "60"}, name="search"))
    assert '"name": "calc_score"' in other["obs_str"]


@pytest.mark.parametrize("asked", [{"answer": "5<|im_end|>"}, {"answer": "<|image_pad|>"}, {"name": "<|im_start|>"}])
def test_what_spells_a_control_token_is_not_told_back(asked):
    told, done, _ = env_for().step(call({"answer": "7"} | asked, name=asked.get("name", "calc_score")))
    assert not done and "<|" not in told["obs_str"]
    assert "<im_end>" in told["obs_str"] or "im_end" not in str(asked)


def test_only_what_the_model_wrote_is_graded_and_not_the_feedback():
    env = env_for("$Answer", max_turns=2)
    env.step(call({"answer": "1"}))
    _, done, info = env.step("I give up")
    assert done
    assert (info["reward"], episode_reward(env), info["outcome"]) == (0.0, 0.0, "no_answer")


def test_the_tools_score_is_not_part_of_the_reward():
    env = env_for()
    env.step(call({"answer": "60"}))
    _, _, info = env.step(r"Answer: \boxed{61}")
    assert (info["reward"], episode_reward(env)) == (0.0, 0.0)
    env.reset()
    env.step(call({"answer": "61"}))
    _, _, info = env.step(r"Answer: \boxed{60}")
    assert (info["reward"], episode_reward(env), info["metrics"]["tool_used"]) == (1.0, 1.0, 1.0)


def test_the_format_reward_is_given_once():
    env = env_for(format_reward=0.25)
    rewards = [env.step(text)[2]["reward"] for text in (call({"answer": "1"}), call({"answer": "2"}), r"\boxed{60}")]
    assert rewards == [0.25, 0.0, 1.0]
    assert episode_reward(env) == 1.25


def test_the_last_turn_ends_the_episode_even_with_a_call():
    env = env_for(max_turns=1)
    assert env.step(call({"answer": "60"}))[1]


def reward_of(response, label="36.9", module=geo3k, **args):
    env = module.build_env(Sample("x", label=label), args)
    env.reset()
    _, done, info = env.step(response)
    assert done
    assert info["reward"] == module.episode_reward(env)
    return info["reward"]


@pytest.mark.parametrize("module", [geo3k, geo3k_multi_turn])
@pytest.mark.parametrize(("model", "right"), [("default", 1.0), ("geo3k", 0.9)])
def test_the_tolerance_says_in_both_reward_models_what_is_right(module, model, right):
    def rewards(answer):
        response = rf"so \boxed{{{answer}}}"
        return [reward_of(response, module=module, reward_model=model, tolerance=t) for t in (None, 0.0, 0.05)]

    assert rewards("36.9") == [right, right, right]
    assert rewards("36.87") == [0.0, 0.0, right]
    assert rewards(r"36.87 \approx 36.9") == [right, 0.0, right]
    assert rewards("36.8") == [0.0, 0.0, 0.0]


def test_the_reward_model_geo3k_gives_a_tenth_for_the_form():
    thought = r"<think>36 or \boxed{1}?</think>"
    responses = (
        rf"{thought} \boxed{{36.9}}",
        rf"{thought} \boxed{{37}}",
        r"\boxed{36.9}",
        f"{thought} 36.9",
        "",
        "<think>",
    )
    rewards = [reward_of(response, reward_model="geo3k") for response in responses]
    assert rewards == [1.0, 0.1, 0.9, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="reward_model = 'own': input should be 'default' or 'geo3k'"):
        reward_of("", reward_model="own")


def test_a_group_of_equal_rewards_of_nine_tenths_has_exactly_no_advantage():
    rewards = [reward_of(r"\boxed{36.9}", reward_model="geo3k", tolerance=0.0) for _ in range(8)]
    assert rewards == [0.9] * 8
    for leave_one_out in (False, True):
        assert group_advantages(rewards, leave_one_out=leave_one_out).tolist() == [0.0] * 8


def test_a_grading_timeout_is_kept_apart_from_a_wrong_answer():
    env = geo3k.build_env(Sample("x", label="60"), {"grade_limit_s": 0.05})
    env.reset()
    _, _, info = env.step(r"\boxed{\binom{999999}{499999}}")
    assert info["outcome"] == "timeout"
    assert info["metrics"]["reward_timeout"] == 1.0
    with pytest.raises(TimeoutError):
        geo3k.episode_reward(env)


def test_a_sample_without_label_and_seed_is_refused():
    with pytest.raises(ValueError, match="label"):
        build_env(Sample("x"))
    with pytest.raises(ValueError, match="max_turns"):
        build_env(Sample("x", label="1"), {"max_turns": 0})


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_drawn_problems_have_their_answer_and_are_the_same_for_the_same_seed(kind):
    settings = TriangleSettings(kinds=(kind,))
    for seed in range(20):
        first, again = make_problem(seed, settings), make_problem(seed, settings)
        assert (first.text, first.answer) == (again.text, again.answer)
        assert np.array_equal(np.asarray(first.image), np.asarray(again.image))
        assert 0 < int(first.answer) < 180
        assert 0.005 < 1 - np.asarray(first.image.convert("L")).mean() / 255 < 0.3


def test_train_and_heldout_problems_differ():
    def questions(split):
        drawn = [make_problem(seed, TriangleSettings(angle_step=1), split) for seed in range(200)]
        return {(problem.text, problem.answer, problem.image.tobytes()) for problem in drawn}

    assert not questions("train") & questions("heldout")


@pytest.mark.parametrize("module", [geo3k, geo3k_multi_turn])
def test_a_drawn_problem_is_shown_for_a_seed_and_without_a_sample(module):
    for sample, seed in [(Sample("x", metadata={"seed": 4}), 4), (None, 0)]:
        env = module.build_env(sample, {"picture_pixels": 96})
        observation, _ = env.reset()
        assert env.label == make_problem(seed).answer
        assert observation["multi_modal_data"]["image"][0].size == (96, 96)
        assert [part["type"] for part in env.format_observation(observation)["content"]] == ["image", "text"]
        _, _, info = env.step(rf"\boxed{{{env.label}}}")
        assert info["reward"] == 1.0
