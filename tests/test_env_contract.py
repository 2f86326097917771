"""The contract of environments: loading, checking, playing by hand and showing them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from envs import check, colour, play, show
from envs.base import Env, flat_metrics, setting
from envs.check import check_env
from envs.loader import load_env, load_function, load_module, system_prompt
from shared.types import Sample

BUILT_IN = ["envs.sokoban", "envs.colour", "envs.geo3k", "envs.geo3k_multi_turn"]
GOOD = '''
"""Guess a number."""
from random import Random
from envs.base import Env

SYSTEM_PROMPT = "Guess the number from 0 to 9."

def build_env(sample=None, args=None, **_):
    return Guess(Random(sample.metadata["seed"]).randrange(1000))

class Guess(Env):
    def __init__(self, number):
        self.number = number
    def reset(self):
        return {"obs_str": f"Is it above {self.number - 3}?"}, {}
    def step(self, response_text):
        right = float(str(self.number) in response_text)
        return {"obs_str": "Done."}, True, {"reward": right, "metrics": {"success": right}}
'''


def env_file(tmp_path: Path, source: str, name: str = "my_env.py") -> str:
    path = tmp_path / name
    path.write_text(source, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("module", BUILT_IN)
def test_the_built_in_environments_keep_the_contract(module):
    assert check_env(module).problems == []


def test_an_own_environment_in_a_file_is_loaded_and_kept_to_the_contract(tmp_path):
    path = env_file(tmp_path, GOOD)
    found = check_env(path)
    assert (found.problems, found.notes) == ([], [])
    env = load_env(path)(sample=Sample("x", metadata={"seed": 1}))
    assert isinstance(env, Env)
    assert system_prompt(load_module(path), {}) == "Guess the number from 0 to 9."


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("True, {", "1, {", "not bool"),
        ('"reward": right', '"reward": "high"', "not a finite number"),
        ('"reward": right', '"reward": float("nan")', "not a finite number"),
        ('{"success": right}', '{"success": "yes"}', "metric 'success'"),
        ('{"obs_str": "Done."}, True', '"Done.", True', "obs_str"),
        ("randrange(1000))", 'randrange(1000) + __import__("time").perf_counter_ns())', "differ"),
        ('return {"obs_str": f"Is it', 'self.number += 1; return {"obs_str": f"Is it', "second reset"),
        ("right = float", "raise KeyError('boom'); right = float", "KeyError: 'boom'"),
        ("right = float", "__import__('time').sleep(60); right = float", "did not return within"),
        ("class Guess(Env):", "class Guess:", "no method format_observation"),
        ('"Done."}', '"D" * 60000}', "60000 characters"),
        ('return {"obs_str": "Done."}, True, ', "return ", "not (observation, done, info)"),
        ('"Done."}', '"Done.", "multi_modal_data": {"image": ["a.png"]}}', "not a PIL image"),
    ],
)
def test_a_broken_environment_is_told_what_is_wrong(tmp_path, old, new, problem):
    assert old in GOOD
    found = check_env(env_file(tmp_path, GOOD.replace(old, new)), limit_s=1.0)
    assert any(problem in text for text in found.problems), found.problems


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = 1\n", "no function build_env"),
        ("def build_env(:\n", "SyntaxError"),
        ("1 / 0\n", "ZeroDivisionError"),
        ("import no_such_library\n", "imports 'no_such_library'"),
        ("raise OSError('disk')\n", "disk"),
        ("import sys\nsys.exit()\n", r"ends the process at import \(SystemExit None\): put what runs as a program"),
        ("raise SystemExit(3)\n", r"my_env.py' ends the process at import \(SystemExit 3\)"),
    ],
)
def test_a_broken_module_is_one_line_that_names_it(tmp_path, source, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        load_env(env_file(tmp_path, source))
    assert "\n" not in str(caught.value)


def test_a_missing_module_or_function_is_named(tmp_path):
    for path in ("envs.nothing", "nothing_at_all", "", str(tmp_path / "none.py")):
        with pytest.raises(ValueError, match=r"no module|no file|empty"):
            load_env(path)
    assert load_function("envs.sokoban.episode_reward") is load_module("envs.sokoban").episode_reward
    path = env_file(tmp_path, "def reward(env):\n    return 1.0\n")
    assert load_function(f"{path}:reward")(None) == 1.0
    with pytest.raises(ValueError, match="no function bonus; it has reward"):
        load_function(f"{path}:bonus")
    with pytest.raises(ValueError, match="names no function"):
        load_function("reward")
    with pytest.raises(ValueError, match=r"names no function: write package.module.function or file.py:function"):
        load_function(path)


PROMPT = 'SYSTEM_PROMPT = "Guess the number from 0 to 9."'


@pytest.mark.parametrize("own", ["", "SYSTEM_PROMPT = None", "def system_prompt(args):\n    return None"])
def test_no_system_prompt_or_one_that_is_none_says_nothing_to_the_model(tmp_path, own):
    path = env_file(tmp_path, GOOD.replace(PROMPT, own))
    assert system_prompt(load_module(path), {}) == ""
    assert "no SYSTEM_PROMPT" in check_env(path).notes[0]


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        ("SYSTEM_PROMPT = 5", r"SYSTEM_PROMPT in .*my_env.py is int, not str"),
        ("def system_prompt(args):\n    return ['a']", r"what system_prompt\(args\) returns in .*my_env.py is list"),
        ("def system_prompt():\n    return 'a'", r"system_prompt\(args\) of .*my_env.py raised TypeError: .* takes 0"),
        ("def system_prompt(args):\n    return args['a\\n']", r"system_prompt\(args\) of .*my_env.py raised KeyError"),
        ("def system_prompt(args):\n    raise SystemExit(0)", r"of .*my_env.py raised SystemExit: 0"),
    ],
)
def test_a_system_prompt_that_is_no_text_is_one_line_that_names_the_module(tmp_path, capsys, own, reason):
    path = env_file(tmp_path, GOOD.replace(PROMPT, own))
    with pytest.raises(ValueError, match=reason) as caught:
        system_prompt(load_module(path), {})
    assert play.main([path]) == 2
    assert capsys.readouterr().err == f"error: {caught.value}\n"
    assert check_env(path).problems == [str(caught.value)]


def test_settings_come_from_mappings_and_from_attributes():
    class Args:
        max_turns = 5

    assert (setting({"max_turns": 4}, "max_turns", 3), setting(Args(), "max_turns", 3)) == (4, 5)
    assert (setting({}, "max_turns", 3), setting(None, "max_turns", 3), setting(Args(), "other", 1)) == (3, 3, 1)


def test_nested_metrics_flatten_to_numbers():
    metrics = {"turn_metrics": {"valid": True}, "reward": 0.5, "note": "text"}
    assert flat_metrics(metrics) == {"valid": 1.0, "reward": 0.5}


@pytest.mark.parametrize("seed", range(4))
def test_a_colour_is_right_whatever_its_case_and_wrong_otherwise(seed):
    env = colour.build_env(Sample("x", metadata={"seed": seed}))
    image = env.reset()[0]["multi_modal_data"]["image"][0]
    assert image.size == (32, 32)
    assert image.getpixel((5, 5)) == colour.COLOURS[env.colour]
    rewards = [env.step(text)[2]["reward"] for text in (env.colour, f" {env.colour.upper()}. It is", "", "the red")]
    assert rewards == [1.0, 1.0, 0.0, 0.0]
    assert env.step("anything")[1]


def test_an_episode_can_be_played_by_hand(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("<answer>left</answer>\nup, up\n\n"))
    assert play.main(["envs.sokoban", "--seed", "3", "--set", "render_mode=text", "--pictures", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Valid last actions: up, up" in printed
    assert "episode over: 2 turns" in printed
    assert play.main(["envs.nothing"]) == 2
    assert play.main(["envs.sokoban", "--set", "novalue"]) == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("return Guess(", "Guess(", "build_env returned NoneType, which has no method reset"),
        ("def build_env(sample=None, args=None, **_)", "def build_env(sample)", "build_env raised TypeError"),
        ("class Guess(Env):", "class Guess:", "build_env returned Guess, which has no method format_observation"),
        (' - 3}?"}, {}', ' - 3}?"}', "raised ValueError: not enough values to unpack"),
        ("right = float", "raise KeyError('boom'); right = float", "raised KeyError: 'boom'; python -m envs.check"),
        ("right = float", "raise SystemExit(0); right = float", "raised SystemExit: 0; python -m envs.check"),
    ],
)
def test_a_broken_environment_played_by_hand_is_one_line(tmp_path, capsys, monkeypatch, old, new, reason):
    assert old in GOOD
    monkeypatch.setattr("sys.stdin", io.StringIO("5\n"))
    assert play.main([env_file(tmp_path, GOOD.replace(old, new))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and reason in line


def test_an_environment_that_ends_the_process_fails_its_check(tmp_path):
    found = check_env(env_file(tmp_path, GOOD.replace("right = float", "raise SystemExit(0); right = float")))
    assert found.problems == ["it raised SystemExit: 0"]


def test_a_geometry_row_is_played_by_hand_with_its_image(tmp_path, capsys, monkeypatch):
    rows = Path(__file__).parent / "data" / "geometry3k" / "problems.jsonl"
    monkeypatch.setattr("sys.stdin", io.StringIO("\\boxed{5\\sqrt{3}}\n"))
    assert play.main(["envs.geo3k", "--data", str(rows), "--row", "4", "--pictures", str(tmp_path)]) == 0
    assert "reward 1" in capsys.readouterr().out
    assert len(list(tmp_path.glob("*.png"))) == 1
    assert play.main(["envs.geo3k", "--data", str(rows), "--row", "9"]) == 2


def test_an_episode_is_shown_as_a_strip(tmp_path, capsys):
    out = tmp_path / "strip.png"
    assert show.main(["envs.sokoban", "--seed", "3", "--solve", "--out", str(out), "--set", "pixels_per_cell=16"]) == 0
    strip = Image.open(out)
    assert strip.width > strip.height > 96
    answers = tmp_path / "answers.txt"
    answers.write_text("I think\\nAnswer: \\boxed{30}\n", encoding="utf-8")
    assert show.main(["envs.geo3k", "--seed", "1", "--answers", str(answers), "--out", str(out)]) == 0
    assert "1 turns, reward 1.0000" in capsys.readouterr().out
    assert show.main(["envs.colour", "--solve", "--out", str(out)]) == 2


def test_the_check_command_says_ok_or_what_is_wrong(tmp_path, capsys):
    assert check.main([env_file(tmp_path, GOOD)]) == 0
    assert "keeps the contract" in capsys.readouterr().out
    assert check.main([env_file(tmp_path, GOOD.replace("True, {", "1, {"), "worse.py")]) == 1
    assert "problem: step returned done = 1" in capsys.readouterr().out
