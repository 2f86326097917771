"""Whole trainings by demonstrations: by the command with two ranks, and in parts."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

from launch.sft import main, prepare
from learner.offline import run_recorded
from learner.shutdown import Shutdown
from shared.config.recipe import parse, recipe_parser
from tests.support.demonstrated import colour_rows, write
from tests.support.runs import RECIPE, finished, places
from tests.support.tiny import load_model

SMALL = {"learner.groups_per_step": 1, "learner.group_size": 2, "learner.checkpoint.every": 3, "actor.groups": 2}


def words(tmp_path, data, *more, **fields):
    return ["--config", RECIPE, "--data", str(data), *more, *places(tmp_path, **SMALL | fields)]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_a_model_learns_by_demonstrations_on_two_ranks_and_is_played_before_and_after(tmp_path):
    data = write(tmp_path / "colours.jsonl", colour_rows(12))
    played = {"eval.samples": 16, "eval.greedy": "true", "learner.optimizer.lr": 3e-3, "learner.checkpoint.every": 50}
    command = [sys.executable, "launch/sft.py", *words(tmp_path, data, "--epochs", "8", "--ranks", "2", **played)]
    result = json.loads(finished(command).stdout.splitlines()[-1])
    assert result["demonstrations"] == 12 and result["steps"] == 48 and result["left_out"] == 0
    assert result["success_after"] >= 0.9 > result["success_before"] + 0.2 and result["difference_low"] > 0
    rows = [json.loads(line) for line in (tmp_path / "colour_tiny" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, 49)] and rows[-1]["loss/policy"] < 0.3 < rows[0]["loss/policy"]
    assert "rollout/reward" not in rows[0] and rows[0]["rollout/turns"] == 1
    assert rows[-1]["loss/policy"] == result["loss"]
    assert load_model(result["model"]).config.model_type == "qwen3_vl"
    goes_on = {"learner.resume": "auto", "eval.samples": 0}
    again = finished([*command[:2], *words(tmp_path, data, "--epochs", "8", **played | goes_on)])
    assert json.loads(again.stdout.splitlines()[-1]) | {"loss": None} == {
        name: value
        for name, value in result.items()
        if "success" not in name and "difference" not in name and name != "played"
    } | {"loss": None}


class Trained:
    """Trainings in this process, in one run's folder."""

    def __init__(self, tmp_path):
        self.path = tmp_path

    def __call__(self, name, data, epochs):
        """Train for so many epochs, going on from what is there; return the weights."""
        parser = recipe_parser("")
        for option in ("--data", "--epochs", "--ranks"):
            parser.add_argument(option)
        own = {"run.name": name, "eval.samples": 0, "learner.optimizer.lr": 1e-4, "learner.resume": "auto"}
        recipe, options = parse(parser, words(self.path, data, **own))
        options.epochs = epochs
        learned = prepare(recipe, options)
        run_recorded(learned.lesson, learned.folder / "demonstrations", Shutdown(10.0), shuffled=True)
        (file,) = (learned.checkpoint / "hf").glob("*.safetensors")
        return load_file(file)


def test_an_interrupted_training_ends_as_one_that_was_not_and_takes_no_other_demonstrations(tmp_path):
    data, trained = write(tmp_path / "colours.jsonl", colour_rows(12)), Trained(tmp_path)
    whole = trained("whole", data, 1.0)
    trained("parts", data, 0.5)
    assert not (tmp_path / "parts/checkpoints/step_00000006").exists()
    resumed = trained("parts", data, 1.0)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    start = load_model("launch/models/colour_tiny").state_dict()
    assert any(not torch.equal(weight.float(), start[name]) for name, weight in whole.items() if name in start)
    other = write(tmp_path / "other.jsonl", colour_rows(11))
    with pytest.raises(ValueError, match=r"is of other content: recorded groups \(then: 12 groups.*resume = 'never'"):
        trained("parts", other, 2.0)


@pytest.mark.parametrize(
    ("rows", "more", "expected"),
    [
        ([{"question": "?"}], (), "data.jsonl holds no usable demonstration: 0 of 1 demonstrations, 1 unusable"),
        (None, (), "no dataset file"),
        ([{}], ("--epochs", "0"), "--epochs 0: above 0"),
        ([{}], ("--ranks", "0"), "--ranks 0: at least 1"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_trained(tmp_path, capsys, rows, more, expected):
    data = tmp_path / "data.jsonl"
    if rows is not None:
        write(data, rows)
    assert main(words(tmp_path, data, *more)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and expected in line
    assert not list(tmp_path.glob("colour_tiny/checkpoints"))
