"""What launch/run.py takes for a task's data: files that are whole, and those that the user has named."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from envs.datasets import load_dataset
from envs.geometry.triangles import rows
from envs.row_files import write_rows
from launch import prepare, run
from launch.task_run.downloads import Data, data_of
from launch.task_run.run_request import resolve, run_parser
from launch.task_samples import check_data, training_samples
from launch.task_samples import rows as rows_of_dataset
from shared.config.recipe import ConfigError, Recipe, load_recipe
from shared.log import get_logger


def test_files_of_one_name_and_one_that_was_changed_are_prepared_apart(tmp_path) -> None:
    recipe, made = load_recipe("launch/recipes/geo3k.toml"), set()
    for folder, count in (("a", 4), ("b", 4), ("b", 5)):
        (tmp_path / folder).mkdir(exist_ok=True)
        write_rows(tmp_path / folder / "own.jsonl", rows(count, "train"))
        made.add(data_of(recipe, str(tmp_path / folder / "own.jsonl"), str(tmp_path), given=False).source)
    assert len(made) == 3


def test_data_without_its_held_out_part_is_not_here(tmp_path) -> None:
    data = Data(str(tmp_path / "train.jsonl"), str(tmp_path / "heldout.jsonl"), ("geo3k",))
    write_rows(data.source, rows(4, "train"))
    assert not data.is_here
    write_rows(data.heldout, rows(4, "heldout"))
    assert data.is_here


@pytest.mark.parametrize("at", [1, 2])
def test_a_full_disk_leaves_the_files_that_were_there(tmp_path, monkeypatch, at) -> None:
    parts = {tmp_path / f"{name}.jsonl": [{"a": 1}] for name in ("heldout", "train")}
    prepare.write_all(parts)
    before, calls = {path: path.read_bytes() for path in tmp_path.iterdir()}, []

    def full(path: Path, rows: Any) -> None:
        calls.append(path)
        path.write_bytes(b"{")
        if len(calls) == at:
            raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(prepare, "write_rows", full)
    with pytest.raises(OSError, match="no space"):
        prepare.write_all(parts)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "words",
    [
        "--make 4 --heldout-from nowhere.jsonl",
        "--from a.jsonl --dataset an/other",
        "--from a.jsonl --heldout 3 --heldout-from b.jsonl",
    ],
)
def test_options_that_leave_one_another_without_effect_are_refused(tmp_path, capsys, words) -> None:
    assert prepare.main(["geo3k", *words.split(), "--out", str(tmp_path / "out")]) == 2
    assert "leave" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--gpus-per-node=0", "--episode-tokens=-5", "--gpu-memory=-1", "--host-memory=-1"])
def test_machines_and_episodes_that_cannot_be_are_refused(capsys, option) -> None:
    name, _, value = option.partition("=")
    assert run.main(["geo3k", "--gpus", "4", "--dry-run", option]) == 2
    assert f"{name} {value}: at least" in capsys.readouterr().err


def sokoban_of(tmp_path: Path, problem_rows: int) -> Recipe:
    """Of files with problems, which have neither a board nor a seed."""
    for name in ("train", "heldout"):
        write_rows(tmp_path / f"{name}.jsonl", rows(problem_rows, name))
    fields = [f"--data.source={tmp_path}/train.jsonl", f"--data.eval_source={tmp_path}/heldout.jsonl"]
    return load_recipe("launch/recipes/sokoban_tiny.toml", [*fields, "--data.variants=[]"])


def test_rows_of_another_task_are_refused_before_anything_starts(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"'envs\.sokoban' cannot play sample train-0: .* has no seed, only row"):
        check_data(sokoban_of(tmp_path, 4))


def test_a_file_of_which_no_sample_can_be_read_is_refused_before_anything_starts(tmp_path) -> None:
    recipe = sokoban_of(tmp_path, 1)
    Path(recipe.data.source).write_text("{}")
    with pytest.raises(ValueError, match="no column problem and no column answer"):
        check_data(recipe)
    Path(recipe.data.source).unlink()
    with pytest.raises(ValueError, match=r"train\.jsonl"):
        check_data(recipe)


def test_a_held_out_file_that_nobody_would_read_is_refused() -> None:
    recipe = load_recipe("launch/recipes/colour_tiny.toml", ["--data.eval_source=rows.jsonl"])
    with pytest.raises(ConfigError, match=r"data\.eval_source = 'rows\.jsonl', but data\.source = 'seeds'"):
        check_data(recipe)


def test_a_held_out_file_that_is_trained_on_is_said(tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(get_logger("data"), "propagate", True)
    write_rows(tmp_path / "train.jsonl", rows(2, "train"))
    both = [f"--data.{name}={tmp_path}/train.jsonl" for name in ("source", "eval_source")]
    training_samples(load_recipe("launch/recipes/geo3k_tiny.toml", both))
    assert "what the run calls held out is trained on" in caplog.text


@pytest.mark.parametrize("answer", [float("nan"), ["3"], {"value": 3}])
def test_an_answer_that_is_no_text_and_no_number_is_no_label(tmp_path, answer) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"problem": "Find x.", "answer": 3}, {"problem": "Find y.", "answer": answer}])
    report = load_dataset(tmp_path / "rows.jsonl").report
    assert (report.samples, report.bad_labels) == (1, 1) and "is to be a text or a number" in report.summary()


@pytest.mark.parametrize(
    ("settings", "count"), [([], 1), (["--env.reward=my.py:score"], 2), (["--reward.url=http://host/grade"], 2)]
)
def test_labels_that_the_math_reward_cannot_read_are_left_out_unless_another_reward_reads_them(
    tmp_path, settings, count
) -> None:
    answers = [{"problem": f"Find {answer}.", "answer": answer} for answer in ("3", r"\frac{60}{1")]
    write_rows(tmp_path / "rows.jsonl", answers)
    recipe = load_recipe("launch/recipes/geo3k_tiny.toml", [f"--data.source={tmp_path}/rows.jsonl", *settings])
    assert len(rows_of_dataset(recipe, recipe.data.source, most=9)) == count


@pytest.mark.parametrize("variable", [True, False])
def test_a_file_with_columns_of_other_names_is_prepared_and_read(tmp_path, capsys, monkeypatch, variable) -> None:
    own = [{"q": {"text": row["problem"]}, "gold": row["answer"], "pic": row["images"]} for row in rows(12, "train")]
    write_rows(tmp_path / "own.jsonl", own)
    columns, words = '{"problem": "q.text", "answer": "gold", "image": "pic"}', ["geo3k_tiny", "--dry-run", "--json"]
    words += ["--dataset", str(tmp_path / "own.jsonl"), "--folder", str(tmp_path)]
    if variable:
        monkeypatch.setenv("PRONK_DATA__COLUMNS", columns)
    options, overrides = run_parser("").parse_known_args(words + ([] if variable else ["--data.columns", columns]))
    request = resolve(options, overrides)
    assert not request.data.is_here and prepare.main(list(request.data.arguments)) == 0
    recipe = load_recipe(request.config, list(request.options))
    assert recipe.data == request.recipe.data
    samples = rows_of_dataset(recipe, recipe.data.source)
    assert len(samples) == 11 and all(len(sample.images) == 1 for sample in samples)
    assert resolve(options, overrides).data.is_here
