"""A checkpoint holds its weights as a Hugging Face folder too where the recipe says so; an export is of its model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from learner.checkpoints.checkpoint_folder import list_checkpoints
from learner.checkpoints.hf_export import export_checkpoint, export_stored
from learner.checkpoints.restoring import load_checkpoint
from learner.checkpoints.saver import Saver
from learner.export import main
from learner.model.policy import load_policy
from learner.training.trainer import Trainer
from shared.config.recipe import Recipe
from shared.config.sections import EnvConfig, ModelConfig
from shared.log import get_logger
from tests.support.checkpoints import config
from tests.support.tiny import load_model, tiny_model_dir


@pytest.fixture
def trainer(folder, spec, ranks):
    made = Trainer(load_policy(str(folder), spec), config(), ranks)
    with torch.no_grad():
        for p in made.policy.parameters():
            p.add_(0.125)
    return made


def recipe_of(folder: Path, *, background: bool = False, keep: int = 2, dtype: str = "float32") -> Recipe:
    made = config(in_background=background, keep=keep)
    checkpoint = made.checkpoint.model_copy(update={"export": True})
    learner = made.model_copy(update={"checkpoint": checkpoint})
    return Recipe(
        model=ModelConfig(path=str(folder), dtype=dtype), env=EnvConfig(module="envs.colour"), learner=learner
    )


def saved(trainer: Trainer, ranks, path: Path, recipe: Recipe) -> Path:
    saver = Saver(path, trainer, ranks, recipe)
    where = saver.save(1, {})
    saver.wait()
    saver.close()
    return where


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_each_checkpoint_holds_what_transformers_loads_and_takes_it_along_when_it_goes(
    trainer, ranks, folder, tmp_path, background
):
    recipe = recipe_of(folder, background=background, keep=1)
    for step in (1, 2):
        trainer.num_steps = step
        path = saved(trainer, ranks, tmp_path / "run", recipe)
    loaded = dict(load_model(path / "hf").named_parameters())
    assert all(torch.equal(loaded[name], p) for name, p in trainer.policy.vlm.named_parameters())
    assert (path / "hf" / "tokenizer.json").exists()
    assert [each.name for each in list_checkpoints(tmp_path / "run")] == ["step_00000002"]
    assert not list((tmp_path / "run").rglob("step_00000001*"))
    assert load_checkpoint(path, trainer, ranks, recipe).version == 1


def test_its_weights_have_the_dtype_that_engines_are_given(trainer, ranks, folder, tmp_path):
    path = saved(trainer, ranks, tmp_path, recipe_of(folder, dtype="bfloat16"))
    with safe_open(path / "hf" / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_a_checkpoint_whose_export_fails_stays_without_it(trainer, ranks, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(get_logger("learner"), "propagate", True)
    path = saved(trainer, ranks, tmp_path, recipe_of(tmp_path / "gone"))
    assert (path / "meta.json").exists() and not (path / "hf").exists()
    assert "step_00000000 has no export: no config.json in" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("file_bytes", [1 << 30, 100_000])
def test_an_export_reads_a_part_at_a_time_and_refuses_another_model(trainer, ranks, folder, tmp_path, file_bytes):
    path = saved(trainer, ranks, tmp_path / "run", recipe_of(folder))
    export_stored(path / "dcp", tmp_path / "out", model_path=str(folder), dtype=None, file_bytes=file_bytes)
    loaded = dict(load_model(tmp_path / "out").named_parameters())
    assert all(torch.equal(loaded[name], p) for name, p in trainer.policy.vlm.named_parameters())
    other = tiny_model_dir(tmp_path, hidden=128)
    with pytest.raises(ValueError, match="is of another model than"):
        export_checkpoint(path, tmp_path / "other", model_path=str(other), dtype=None)
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_folder_that_holds_an_earlier_export_is_refused_in_one_line(trainer, ranks, folder, tmp_path, capsys):
    """Whoever loads it would take the old file for the new ones."""
    path = saved(trainer, ranks, tmp_path / "run", recipe_of(folder))
    assert main([str(path), "--out", str(tmp_path / "out")]) == 0
    assert main([str(path), "--out", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 2
    assert capsys.readouterr().err == f"error: --out {tmp_path / 'out'} is not empty: choose another folder\n"
    (tmp_path / "file").touch()
    assert main([str(path), "--out", str(tmp_path / "file")]) == 2 and "Not a directory" in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_that_is_no_checkpoint_is_told_which_one_is(trainer, ranks, folder, tmp_path, capsys):
    path = saved(trainer, ranks, tmp_path / "run", recipe_of(folder))
    (tmp_path / "of_a_run").mkdir()
    (tmp_path / "of_a_run/checkpoints").symlink_to(path.parent)
    for wrong in (path.parent, tmp_path / "of_a_run"):
        assert main([str(wrong), "--out", str(tmp_path / "out")]) == 2
        line = capsys.readouterr().err
        assert f"{wrong} is no checkpoint" in line and "such as" in line and path.name in line
    assert main([str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_damaged_checkpoint_is_not_exported(trainer, ranks, folder, tmp_path):
    path = saved(trainer, ranks, tmp_path / "run", recipe_of(folder))
    (stored,) = (path / "dcp").glob("__0_*")
    stored.write_bytes(stored.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"is damaged: dcp/__0_0.distcp has \d+ bytes instead of"):
        export_checkpoint(path, tmp_path / "out", model_path=str(folder), dtype=None)
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, "version": 9}))
    with pytest.raises(ValueError, match="other values than were written"):
        export_checkpoint(path, tmp_path / "out", model_path=str(folder), dtype=None)


@pytest.mark.slow
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_an_export_is_as_readable_as_the_umask_says_and_says_what_it_is(
    trainer, ranks, folder, tmp_path, capsys, umask, mode
):
    path = saved(trainer, ranks, tmp_path / "run", recipe_of(folder, dtype="bfloat16"))
    before = os.umask(umask)
    try:
        assert main([str(path), "--out", str(tmp_path / "out")]) == 0
    finally:
        os.umask(before)
    weights = tmp_path / "out/model.safetensors"
    assert weights.stat().st_mode & 0o777 == mode
    (line,) = capsys.readouterr().out.splitlines()
    assert "1 file of weights" in line and "BF16" in line and str(tmp_path / "out") in line
    assert main([str(path), "--out", str(tmp_path / "wide"), "--dtype", "float32"]) == 0
    assert "F32" in capsys.readouterr().out
    for name, dtype in (("out", "bfloat16"), ("wide", "float32")):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert {config[key] for key in ("dtype", "torch_dtype") if key in config} <= {dtype}
