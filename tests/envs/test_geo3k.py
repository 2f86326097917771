"""The geometry environments against recorded episodes, their tool, their rewards, and drawn problems."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from envs import geo3k, geo3k_multi_turn
from envs.geo3k_multi_turn import build_env, episode_reward
from envs.geometry.triangles import KIND_NAMES, TriangleSettings, make_problem
from envs.tools.tool_call import MalformedCall, parse_tool_call
from learner.objective.advantages import group_advantages
from shared.types import Sample
from tests.support.paths import DATA

EPISODES = [json.loads(line) for line in (DATA / "geo3k_episodes.jsonl").read_text().splitlines()]


def call(arguments, name="calc_score"):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def env_for(label="60", **args):
    env = build_env(Sample("x", label=label), args)
    observation, info = env.reset()
    assert observation == {} and set(info["metrics"].values()) == {0.0}
    return env


@pytest.mark.parametrize("episode", EPISODES, ids=lambda episode: str(episode["id"]))
def test_every_recorded_episode_gets_the_same_feedback(episode):
    env = env_for(episode["ground_truth"], max_turns=episode["max_turns"])
    for turn in episode["turns"]:
        observation, done, info = env.step(turn["response"])
        if turn["feedback"] == "no_tool_call" and "<tool_call>" in turn["response"]:
            assert info["feedback"] in ("malformed_call", "correct")  # the recorded environment ended such episodes
            return
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
def test_a_call_that_cannot_be_read_gets_the_right_form_and_is_counted(text):
    assert isinstance(parse_tool_call(text), MalformedCall)
    observation, done, info = env_for().step(text)
    assert not done and '"name": "calc_score"' in observation["obs_str"]
    assert (info["feedback"], info["tool_call"], info["tool_executed"]) == ("malformed_call", None, False)
    metrics = info["metrics"]["turn_metrics"]
    assert (metrics["tool_call"], metrics["tool_malformed"], metrics["tool_executed"]) == (1.0, 1.0, 0.0)
    assert env_for(max_turns=1).step(text)[1]


PLAIN = '{"name": "calc_score", "arguments": {"answer": "60"}}'


def tagged(block):
    return f"I think so. <tool_call>{block}</tool_call>"


@pytest.mark.parametrize(
    ("text", "label"),
    [
        (tagged(r'{"name": "calc_score", "arguments": {"answer": "5\sqrt{3}"}}'), r"5\sqrt{3}"),
        (tagged(r'{"name": "calc_score", "arguments": {"answer": "\frac{3}{4}"}}'), r"\frac{3}{4}"),
        (tagged(r'{"name": "calc_score", "arguments": {"answer": "5\\sqrt{3}"}}'), r"5\sqrt{3}"),
        (tagged(r'{"name": "calc_score", "arguments": {"answer": "60 \text{ cm}"}}'), "60"),
        (tagged(r'{"name": "calc_score", "arguments": {"answer": "\boxed{60}"}}'), "60"),
        (tagged(r'{"name": "calc_score", "arguments": {"answer": "2\times\theta"}}'), r"2\times\theta"),
        (tagged(r'{"name": "calc_score", "arguments": {"answer": "\left(1,2\right)"}}'), "(1,2)"),
        (tagged(r'{"name": "calc_score", "arguments": {"answer": "x\neq 2"}}'), r"x\neq 2"),
        (tagged(r'{"name": "calc_score", "arguments": {"answer": "\nu"}}'), r"\nu"),
        (tagged(r'{"name": "calc_score", "arguments": {"answer": "60^\circ"}}'), "60"),
        (tagged(r'{"name": "calc_score", "arguments": {"answer": "\\{1,2\\}"}}'), r"\{1,2\}"),
        (tagged(r"""{'name': 'calc_score', 'arguments': {'answer': '\frac{3}{4}'}}"""), r"\frac{3}{4}"),
        (tagged('{"name": "calc_score", "arguments": {"answer": "60\n"}}'), "60"),
        (tagged('{"name": "calc_score", "arguments": {"answer": "60\\n"}}'), "60"),
        (tagged("{'name': 'calc_score', 'arguments': {'answer': '60'}}"), "60"),
        (tagged("{'name': 'calc_score', 'arguments': {'answer': '30'}}{'name': 'calc_score', 'arguments': "
                "{'answer': '60', 'sure': True}}"), "60"),
        (tagged('{"name": "calc_score", "arguments": {"answer": "60",},}'), "60"),
        (tagged('{"name": "calc_score", "arguments": {"answer": "60"}'), "60"),
        (tagged(PLAIN + "}"), "60"),
        (tagged(f"\n```json\n{PLAIN}\n```\n"), "60"),
        (f"```\n<tool_call>\n{PLAIN}\n</tool_call>\n```", "60"),
        (tagged(PLAIN.replace("60", "30") + "\n" + PLAIN), "60"),
        (tagged(PLAIN.replace("60", "30")) + tagged(PLAIN), "60"),
        (tagged(f"[{PLAIN}]"), "60"),
        (tagged(f"[{PLAIN.replace('60', '30')}, {PLAIN}]"), "60"),
        (f"<tool_call>\n{PLAIN}\n", "60"),
        (f"<tool_call>\n{PLAIN}\nNow I wait.", "60"),
        (tagged("<function=calc_score>\n<parameter=answer>\n60\n</parameter>\n</function>"), "60"),
        (tagged("<function=calc_score><parameter=answer>60"), "60"),
        (tagged('{"name": "calc_score", "parameters": {"answer": "60"}}'), "60"),
        (tagged('{"function": {"name": "calc_score", "arguments": "{\\"answer\\": \\"60\\"}"}}'), "60"),
        (tagged('{"name": "calc_score", "arguments": {"answer": 60}}'), "60"),
        (tagged('{"name": "calc_score", "arguments": {"answer": ["60"]}}'), "60"),
        (tagged('{"name": "calc_score", "arguments": {"answer": "60°"}}'), "60"),
        (tagged('{"name": "calc_score", "arguments": {"answer": "60", "note": "</tool_call>"}}'), "60"),
        (tagged('{"name": "calc_score", "arguments": {"answer": "60", "note": "no <tool_call>"}}'), "60"),
        (f"<think>first {tagged('{broken')}</think>{tagged(PLAIN)}", "60"),
        (tagged('calc_score(answer="60")'), "60"),
        (tagged("calc_score(60)"), "60"),
        (tagged(r'[calc_score(answer="\frac{3}{4}")]'), r"\frac{3}{4}"),
        (tagged('calc_score({"answer": "60"})'), "60"),
        (tagged('<calc_score answer="60"/>'), "60"),
        (tagged("<calc_score><answer>60</answer></calc_score>"), "60"),
        (tagged('<invoke name="calc_score"><parameter name="answer">60</parameter></invoke>'), "60"),
        (tagged('<name>calc_score</name><arguments>{"answer": "60"}</arguments>'), "60"),
        (tagged('calc_score\n{"answer": "60"}'), "60"),
        (tagged("calc_score\n<arg_key>answer</arg_key>\n<arg_value>60</arg_value>"), "60"),
        (tagged('<function=calc_score>{"answer": "60"}</function>'), "60"),
        ('<function=calc_score><parameter=answer>60</parameter></function>', "60"),
        ('<tool_call name="calc_score">{"answer": "60"}</tool_call>', "60"),
        ('<tool_call name="calc_score" answer="60"/>', "60"),
        (f"< tool_call >{PLAIN}</tool_call>", "60"),
        (f"<tool_calls>[{PLAIN}]</tool_calls>", "60"),
        (f"Let me see. {PLAIN}</tool_call>", "60"),
        (tagged('{"name": "calc_score", "arguments": {"answer": 3/4}}'), r"\frac{3}{4}"),
        (tagged(r'{"name": "calc_score", "arguments": {"answer": \frac{3}{4}}}'), r"\frac{3}{4}"),
        (tagged('{"name": "calc_score", "arguments": {"answer": 5√3}}'), r"5\sqrt{3}"),
        (tagged('{name: "calc_score", arguments: {answer: "60"}}'), "60"),
        (tagged("{“name”: “calc_score”, “arguments”: {“answer”: “60”}}"), "60"),
        (tagged('\\{"name": "calc_score", "arguments": \\{"answer": "60"\\}\\}'), "60"),
        (tagged("name: calc_score\narguments:\n  answer: 60"), "60"),
        (tagged('// score it\n{"name": "calc_score", /* now */ "arguments": {"answer": "60"}}'), "60"),
        (tagged('{"name": "calc_score", "answer": "60"}'), "60"),
        (tagged('{"tool": "calc_score", "args": {"answer": "60"}}'), "60"),
        (tagged('{"calc_score": {"answer": "60"}}'), "60"),
        (tagged('{"name": "functions.calc_score", "arguments": {"Answer": "60"}}'), "60"),
        (tagged('{"name": "calc_score", "arguments": {"answer": 0.12345678901234567890}}'), "0.12345678901234567890"),
        (f"<think>x</think>{tagged(PLAIN)}</think>", "60"),
    ],
)  # fmt: skip
def test_a_call_is_read_in_the_forms_that_models_write(text, label):
    env = env_for(label)
    _, done, info = env.step(text)
    assert (info["tool_executed"], info["score"], done) == (True, 1.0, False)
    assert info["metrics"]["turn_metrics"]["tool_malformed"] == 0.0


@pytest.mark.parametrize("thought", [f"<think>I could write {tagged(PLAIN)}</think>", f"so {tagged(PLAIN)}</think>"])
def test_a_call_drafted_in_a_thought_is_none(thought):
    env = env_for()
    _, done, info = env.step(thought + r" Answer: \boxed{60}")
    assert (done, info["feedback"], info["reward"]) == (True, "no_tool_call", 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "I do not write `<tool_call>` here.",
        'The tags "<tool_call>" and "</tool_call>" are not needed.',
        "No <tool_call> is needed, I am sure.",
        "A </tool_call> ends one.",
    ],
)
def test_a_sentence_about_calls_is_none(text):
    assert parse_tool_call(text + r" \boxed{60}") is None


@pytest.mark.parametrize(
    "block", ['{"name": "calc_score", "arguments": {"answer": "6', "calc_score(", "", "answer: 60"]
)
def test_a_call_that_breaks_off_is_not_guessed(block):
    assert isinstance(parse_tool_call("<tool_call>" + block), MalformedCall)


@pytest.mark.parametrize("piece", ["<tool_call>", "</tool_call>", "<function=", "{", "['", "\\", "<tool_call>{", '"'])
def test_no_answer_takes_long_to_read(piece):
    began = time.process_time()
    parse_tool_call("<tool_call>" + piece * (20_000 // len(piece)))
    parse_tool_call(piece * 100_000)
    assert time.process_time() - began < 2


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
    opened_by_the_template = (r"36?</think> \boxed{36.9}", r"36? \boxed{36.9}")
    assert [reward_of(each, reward_model="geo3k") for each in opened_by_the_template] == [1.0, 0.9]
    with pytest.raises(ValueError, match="reward_model = 'own': input should be 'default' or 'geo3k'"):
        reward_of("", reward_model="own")


def test_a_group_of_equal_rewards_of_nine_tenths_has_exactly_no_advantage():
    rewards = [reward_of(r"\boxed{36.9}", reward_model="geo3k", tolerance=0.0) for _ in range(8)]
    assert rewards == [0.9] * 8
    for leave_one_out in (False, True):
        assert group_advantages(rewards, leave_one_out=leave_one_out).tolist() == [0.0] * 8


@pytest.mark.slow
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


def test_the_options_of_a_sample_count_by_letter_and_by_text():
    sample = Sample("x", ({"role": "user", "content": "?"},), (), "B", metadata={"choices": ["30", "45"]})
    for answer, score in [(r"\boxed{45^\circ}", 1.0), (r"\boxed{B. 45}", 1.0), (r"\boxed{30}", 0.0)]:
        env = build_env(sample)
        env.reset()
        env.step(answer)
        assert env.score() == score
