"""The contract of environments: loading, checking, playing by hand and showing them."""

from __future__ import annotations

import io
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from envs import check, colour, play, show
from envs.base import Env, flat_metrics, setting
from envs.check import check_env
from envs.loader import load_env, load_function, load_module, system_prompt
from shared.types import Sample
from tests.support.paths import DATA

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


def test_threads_that_load_a_file_at_once_all_get_the_whole_of_it(tmp_path):
    path = tmp_path / "slow_to_load.py"
    path.write_text("import time\ntime.sleep(0.2)\ndef build_env(**_): ...\n")
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: callable(load_module(str(path)).build_env), range(4)))
    assert loaded == [True] * 4


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
        ('{"obs_str": "Done."}, True', '"Done.", False', "obs_str"),
        ("randrange(1000))", 'randrange(1000) + __import__("time").perf_counter_ns())', "differ"),
        ('return {"obs_str": f"Is it', 'self.number += 1; return {"obs_str": f"Is it', "second reset"),
        ("right = float", "raise KeyError('boom'); right = float", "KeyError: 'boom'"),
        ("right = float", "__import__('time').sleep(60); right = float", "did not return within"),
        ("return Guess(", "return str(", "build_env returned str, which has no method reset"),
        ('"Done."}, True', '"D" * 60000}, False', "60000 characters"),
        ('return {"obs_str": "Done."}, True, ', "return ", "not (observation, done, info)"),
        ('"Done."}, True', '"Done.", "multi_modal_data": {"image": ["a.png"]}}, False', "not a PIL image"),
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
    assert (
        play.main(["envs.sokoban", "--seed", "3", "--env.args.render_mode", "text", "--pictures", str(tmp_path)]) == 0
    )
    printed = capsys.readouterr().out
    assert "Valid last actions: up, up" in printed
    assert "episode over: 2 turns" in printed
    assert play.main(["envs.nothing"]) == 2
    assert play.main(["envs.sokoban", "--env.args", "novalue"]) == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("return Guess(", "Guess(", "build_env returned NoneType, which has no method reset"),
        ("def build_env(sample=None, args=None, **_)", "def build_env(sample)", "build_env raised TypeError"),
        ("return Guess(", "return str(", "build_env returned str, which has no method reset"),
        (' - 3}?"}, {}', ' - 3}?"}', "raised TypeError: reset of Guess returned dict, not (observation, info)"),
        ("right = float", "raise KeyError('boom'); right = float", "raised KeyError: 'boom' (my_env.py:"),
        ("right = float", "raise SystemExit(0); right = float", "raised SystemExit: 0 (my_env.py:"),
    ],
)
def test_a_broken_environment_played_by_hand_is_one_line(tmp_path, capsys, monkeypatch, old, new, reason):
    assert old in GOOD
    monkeypatch.setattr("sys.stdin", io.StringIO("5\n"))
    assert play.main([env_file(tmp_path, GOOD.replace(old, new))]) == 2
    *trace, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and reason in line
    if "my_env.py:" in reason:
        assert trace[0] == "Traceback of the user's code:" and "my_env.py" in trace[1] and "in step" in trace[1]


def test_an_environment_that_ends_the_process_fails_its_check(tmp_path):
    found = check_env(env_file(tmp_path, GOOD.replace("right = float", "raise SystemExit(0); right = float")))
    assert len(found.problems) == 1 and found.problems[0].startswith("step raised SystemExit: 0 (my_env.py:")


def test_a_geometry_row_is_played_by_hand_with_its_image(tmp_path, capsys, monkeypatch):
    rows = DATA / "geometry3k" / "problems.jsonl"
    monkeypatch.setattr("sys.stdin", io.StringIO("\\boxed{5\\sqrt{3}}\n"))
    assert play.main(["envs.geo3k", "--data", str(rows), "--row", "4", "--pictures", str(tmp_path)]) == 0
    assert "reward 1" in capsys.readouterr().out
    assert len(list(tmp_path.glob("*.png"))) == 1
    assert play.main(["envs.geo3k", "--data", str(rows), "--row", "9"]) == 2


def test_a_strip_that_cannot_be_written_as_its_name_says_is_refused_with_a_name_that_can(tmp_path, capsys):
    assert show.main(["envs.colour", "--out", str(tmp_path / "episode.html")]) == 2
    output = capsys.readouterr()
    assert "episode.html: no picture can have that ending; give a name that ends with .png" in output.err
    assert not output.out and not list(tmp_path.iterdir())


def test_an_episode_is_shown_as_a_strip(tmp_path, capsys):
    out = tmp_path / "strip.png"
    assert (
        show.main(["envs.sokoban", "--seed", "3", "--solve", "--out", str(out), "--env.args.pixels_per_cell=16"]) == 0
    )
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
    assert "problem: step of Guess returned done = 1" in capsys.readouterr().out


@pytest.mark.parametrize("module", ["envs.colour", "envs.geo3k", "envs.geo3k_multi_turn", "envs.sokoban"])
def test_a_shipped_environment_reports_at_the_start_every_share_that_it_reports_at_the_end(module: str) -> None:
    """So that an episode whose first answer is cut off counts among the same episodes."""
    env = load_module(module).build_env(Sample("s", metadata={"seed": 3}))
    _, info = env.reset()
    last = {}
    for _ in range(3):
        _, done, step_info = env.step("nothing")
        last = step_info["metrics"]
        assert "success" in flat_metrics(last)
        if done:
            break
    at_start = flat_metrics(info["metrics"])
    last.pop("turn_metrics", None)
    assert at_start["success"] == 0.0 and at_start.keys() == flat_metrics(last).keys()


STEPS = {
    "raise KeyboardInterrupt": "step raised UserCodeExit: KeyboardInterrupt (my_env.py:",
    "raise asyncio.CancelledError": "step raised UserCodeExit: CancelledError (my_env.py:",
    'raise BaseException("base")': "step raised UserCodeExit: BaseException base (my_env.py:",
    'raise ExceptionGroup("two", [ValueError("one")])': "two (1 sub-exception): ValueError: one (my_env.py:",
    'return {}, True, {"reward": 10**400}': "info['reward'] is 1000",
    'return {}, True, {"reward": Bad()}': "info['reward'] is (Bad without a text), not a finite number",
    'return {}, True, {"reward": 0.0, "metrics": {"a": Bad()}}': "the metric 'a' is (Bad without a text)",
    'return {}, True, {"reward": 0.0, "metrics": {5: 1.0}}': "a metric's name is 5",
    'return {}, True, {"reward": 0.0, "metrics": {"a\\nb": 1.0}}': "a metric's name is 'a\\nb'",
    'return np.zeros(3), False, {"reward": 0.0}': "an observation of E is array([0., 0., 0.]), not a dict",
    'return shown(np.zeros((9, 9, 3), np.uint8)), False, {}': "an image is ndarray, not a PIL image: make it one",
    'return shown(Image.new("F", (9, 9), 1e9)), False, {}': "an image cannot be shown: an image of mode F with values",
    'return shown(Image.new("RGB", (0, 9))), False, {}': "an image cannot be shown: it has no pixels",
    'return {"obs_str": "", "multi_modal_data": {"image": Image.new("L", (9, 9))}}, False, {}': "not a list of images",
}  # fmt: skip
STRANGE = """
import asyncio
import numpy as np
from PIL import Image
from envs.base import Env

SYSTEM_PROMPT = "x"

class Bad:
    def __float__(self): raise RuntimeError
    def __repr__(self): raise RuntimeError

def shown(image): return {"obs_str": "", "multi_modal_data": {"image": [image]}}

class E(Env):
    def reset(self): return {"obs_str": "begin"}, {}
    def step(self, text):
        STEP

def build_env(sample=None, args=None, **_): return E()
"""


@pytest.mark.parametrize(("step", "words"), STEPS.items())
def test_a_strange_result_or_exception_is_a_problem_in_one_line(tmp_path, step, words):
    problems = check_env(env_file(tmp_path, STRANGE.replace("STEP", step))).problems
    assert len(problems) == 1 and words in problems[0] and problems[0].isprintable()


@pytest.mark.parametrize("value", ["Fraction(1, 2)", 'Decimal("0.5")', "np.float32(0.5)"])
def test_what_the_actor_takes_for_a_number_is_one(tmp_path, value):
    step = f'return {{}}, True, {{"reward": {value}, "metrics": types.MappingProxyType({{"a": {value}}})}}'
    imports = "import types\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
    assert check_env(env_file(tmp_path, imports + STRANGE.replace("STEP", step))).problems == []


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("None", "build_env returned None"),
        ("Class", "build_env returned the class Class"),
        ("Class()", "RuntimeError: ga"),
    ],
)
def test_what_is_no_environment_is_a_problem(tmp_path, result, words):
    source = "class Class:\n    def __getattr__(self, name): raise RuntimeError('ga ' + name)\n"
    source += f"def build_env(**_): return {result}\n"
    assert words in check_env(env_file(tmp_path, source)).problems[0]


def test_a_module_that_ends_in_another_way_at_import_is_a_problem(tmp_path):
    (problem,) = check_env(env_file(tmp_path, 'raise BaseException("x")')).problems
    assert "cannot be loaded: BaseException: x (my_env.py:1 in <module>)" in problem


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["check", "play", "show"])
def test_the_commands_are_called_by_their_path_from_another_folder(tmp_path, tool):
    env_file(tmp_path, GOOD)
    command = [sys.executable, str(Path("envs", f"{tool}.py").resolve()), "my_env.py"]
    done = subprocess.run(command, cwd=tmp_path, input="1\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
