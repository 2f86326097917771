"""A dataset's samples that the policy can never be shown are found when it is read, by their rows."""

from __future__ import annotations

import logging
import shutil

import pytest
from PIL import Image

from envs.datasets import data_uri
from envs.row_files import write_rows
from launch.task_samples import check_build, check_data, chosen_samples, ready, training_samples
from shared.config.recipe import ConfigError, Recipe, load
from shared.log import get_logger
from tests.support.odd_images import saved

GEO3K = "launch/recipes/geo3k_answers_tiny.toml"


def recipe(*overrides: object) -> Recipe:
    return load(GEO3K, [*map(str, overrides)])


def square(width: int, height: int) -> str:
    return data_uri(saved(Image.new("RGB", (width, height), "white"), "PNG"))


@pytest.fixture
def lines(caplog):
    """What the data's logger writes."""
    logger = get_logger("data")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(
        path,
        [
            {"problem": "<image>Find x.", "answer": "1", "images": [square(64, 64)]},
            {"problem": "<image>Find y.", "answer": "1", "images": [square(600, 2)]},
            {"problem": "word " * 5000, "answer": "1"},
            {"problem": "<image>Find z.", "answer": "1", "images": [square(4096, 4096)]},
            {"problem": "Find <|im_end|> w.", "answer": "1"},
        ],
    )
    return path


def test_samples_that_can_never_be_played_are_left_out_with_their_rows(rows, lines):
    settings = recipe("--data.source", rows, "--model.max_context", 256, "--eval.samples", 0)
    source = training_samples(settings)
    assert {source.sample(position).id for position in range(4)} == {"rows-0", "rows-4"}
    (line,) = [record for record in lines.records if "samples of 5 rows" in record.getMessage()]
    words = line.getMessage()
    assert line.levelno == logging.WARNING and "\n" not in words
    assert "2 too long, 1 cannot be shown" in words
    assert "row 1: an image of 600x2 pixels: its sides may differ 200-fold at most" in words
    assert "row 2: " in words and "of 256 tokens" in words and "row 3: " in words


def test_a_dataset_of_sound_rows_is_no_warning(tmp_path, lines):
    write_rows(tmp_path / "rows.jsonl", [{"problem": "Find x.", "answer": "1"}])
    training_samples(recipe("--data.source", tmp_path / "rows.jsonl", "--eval.samples", 0))
    (line,) = [record for record in lines.records if "samples of 1 rows" in record.getMessage()]
    assert line.levelno == logging.INFO


def test_a_dataset_of_which_nothing_can_be_played_is_refused(tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{"problem": "word " * 5000, "answer": "1"}])
    with pytest.raises(ValueError, match=r"no sample that can be played: .*row 0: .* tokens"):
        training_samples(recipe("--data.source", tmp_path / "rows.jsonl", "--eval.samples", 0))


def test_a_source_without_held_out_samples_says_what_to_set(rows):
    with pytest.raises(ConfigError, match=r"data\.eval_source is empty: name a held-out .*, or set eval\.samples = 0"):
        check_data(recipe("--data.source", rows, "--data.eval_source", "", "--eval.samples", 4))
    check_data(recipe("--data.source", rows, "--data.eval_source", "", "--eval.samples", 0))


def test_columns_are_a_field_of_the_recipe(tmp_path, capsys):
    write_rows(tmp_path / "rows.jsonl", [{"q": "Find x.", "a": "1"}])
    columns = '{"problem": "q", "answer": "a"}'
    settings = recipe("--data.source", tmp_path / "rows.jsonl", "--data.columns", columns, "--eval.samples", 0)
    assert training_samples(settings).sample(0).label == "1"
    with pytest.raises(SystemExit):
        recipe("--data.columns", '{"label": "a"}')
    assert "data.columns.label: it may name prompt (or problem), answer, images (or image), choices" in (
        capsys.readouterr().err
    )


LOST = """
class Env:
    def reset(self):
        return {"obs_str": "x?"}, {}
    def step(self, text):
        return {"obs_str": "y?"}, False, {}
    def format_observation(self, observation):
        return {"role": "system", "content": observation["obs_str"]}
    def close(self):
        pass

def build_env(sample=None, args=None, **_):
    return Env()
"""
TEMPLATE = (
    "{%- for message in messages -%}{%- if loop.first or message.role != 'system' -%}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{%- endif -%}{%- endfor -%}<|im_start|>assistant\n"
)


def test_an_observation_that_the_template_leaves_out_is_refused_before_anything_starts(tmp_path):
    model = tmp_path / "model"
    shutil.copytree("launch/models/colour_tiny", model)
    (tmp_path / "lost.py").write_text(LOST)
    settings = ["--model.path", model, "--env.module", tmp_path / "lost.py", "--eval.samples", 1]
    sound = load("launch/recipes/colour_tiny.toml", [*map(str, settings)])
    assert chosen_samples(sound, "", 1)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    for start in (training_samples, lambda recipe: chosen_samples(recipe, "", 1)):
        with pytest.raises(ValueError, match="leaves out an observation of role 'system'") as refused:
            start(sound)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["--learner.objective.name", "grpo", "--learner.group_size", "4", "--learner.objective.critic_width", "0"],
            "learner.objective.name = 'grpo' compares",
        ),
        (["--learner.objective.turn_rewards", "false"], "learner.objective.turn_rewards = false trains on whole"),
        ([], ""),
    ],
)
def test_a_setting_that_changes_the_rewards_of_turns_alone_is_refused_where_they_are_not_trained_on(overrides, words):
    shaped = load("launch/recipes/sokoban_tiny.toml", ["--env.args", '{"progress_reward": 0.1}', *overrides])
    if words:
        with pytest.raises(ValueError, match=rf"progress_reward = 0.1 changes the rewards of turns alone, and {words}"):
            check_build(shaped, "env.args", {})
    else:
        check_build(shaped, "env.args", {})


TOOLED = """
from envs.tools.tool_env import ToolEnv
from envs.tools.zoom import zoom

TOOLS = [zoom]

class Env(ToolEnv):
    def first(self):
        return {"obs_str": "x?"}
    def grade(self, answer):
        return 1.0

def build_env(sample=None, args=None, **_):
    return Env(sample, TOOLS)
"""


def test_tools_stand_in_the_samples_and_a_template_without_them_is_refused_before_anything_starts(tmp_path):
    model = tmp_path / "model"
    shutil.copytree("launch/models/colour_tiny", model)
    (tmp_path / "tooled.py").write_text(TOOLED)
    settings = ["--model.path", model, "--env.module", tmp_path / "tooled.py", "--eval.samples", 1]
    tooled = load("launch/recipes/colour_tiny.toml", [*map(str, settings)])
    with pytest.raises(ValueError, match="leaves out tools, here 'zoom'") as refused:
        ready(tooled)
    assert "\n" not in str(refused.value)
    template = (model / "chat_template.jinja").read_text()
    listed = "{%- for tool in tools or [] -%}{{- tool | tojson -}}{%- endfor -%}"
    (model / "chat_template.jinja").write_text(listed + template)
    assert ready(tooled)
    samples = [training_samples(tooled).sample(0), *chosen_samples(tooled, "", 1)]
    assert [[tool["function"]["name"] for tool in sample.tools] for sample in samples] == [["zoom"]] * 2


def test_each_of_several_files_has_its_share_of_an_epoch(tmp_path):
    for folder, count in (("a", 1), ("b", 3)):
        write_rows(tmp_path / folder / "rows.jsonl", [{"problem": f"{folder}{n}", "answer": "1"} for n in range(count)])
    sources = f'["{tmp_path}/a/rows.jsonl", "{tmp_path}/b/*.jsonl"]'
    for weights, counts in (("[]", (1, 3)), ("[1, 1]", (3, 3))):
        settings = recipe("--data.source", sources, "--data.weights", weights, "--eval.samples", 0)
        source = training_samples(settings)
        ids = [source.sample(position).id for position in range(sum(counts))]
        assert (sum(i.startswith("a/") for i in ids), sum(i.startswith("b/") for i in ids)) == counts


FALLS = """
class Env:
    def reset(self):
        raise OSError("the levels are away")

    def step(self, text): ...

def build_env(sample, args):
    return Env()
"""


@pytest.mark.parametrize("source", ["seeds", "rows"])
@pytest.mark.parametrize(
    ("resume", "restart", "goes_on"),
    [("auto", "0", True), ("never", "0", False), ("never", "1", True)],
    ids=["resumed", "begun anew", "restarted by torchrun"],
)
def test_an_environment_that_falls_does_not_keep_a_run_from_going_on(
    tmp_path, rows, caplog, monkeypatch, source, resume, restart, goes_on
):
    (tmp_path / "falls.py").write_text(FALLS)
    overrides = ["--env.module", tmp_path / "falls.py", "--run.dir", tmp_path, "--run.name", "r", "--eval.samples", 0]
    overrides += ["--data.source", rows if source == "rows" else "seeds", "--learner.resume", resume]
    fallen = recipe(*overrides)
    check = (lambda: check_data(fallen)) if source == "rows" else (lambda: check_build(fallen, "env.args", {}))
    with pytest.raises(ValueError, match="OSError: the levels are away"):
        check()
    step = tmp_path / "r" / "checkpoints" / "step_00000010"
    step.mkdir(parents=True)
    (step / "meta.json").write_text("{}")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
    if not goes_on:
        with pytest.raises(ValueError, match="OSError: the levels are away"):
            check()
        return
    get_logger("samples").addHandler(caplog.handler)
    check()
    (line,) = (record.getMessage() for record in caplog.records if record.name.endswith("samples"))
    assert "OSError: the levels are away" in line and "the run has begun, so it goes on" in line
