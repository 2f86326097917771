"""Other content under the same names is noticed when a run resumes."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from learner.checkpoints.contents import check_contents, contents_of, samples_digest, weights_digest
from learner.checkpoints.restoring import restore
from learner.checkpoints.saver import Saver
from learner.model.policy import load_policy
from learner.tickets.sources import ListSource
from learner.training.trainer import Trainer
from shared.config.recipe import load_recipe
from shared.log import get_logger
from shared.types import Image, Sample
from tests.support.checkpoints import config, recipe

MODEL = Path("launch/models/colour_tiny")
RECIPE = "launch/recipes/colour_tiny.toml"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture):
    logger = get_logger("learner")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def a_model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    return folder


@pytest.mark.parametrize("which", ["first", "last", "largest", "added"])
def test_a_change_of_one_tensor_is_another_model(tmp_path: Path, which: str) -> None:
    folder = a_model(tmp_path)
    before, weights = weights_digest(folder), load_file(folder / "model.safetensors")
    names = sorted(weights)
    name = {"first": names[0], "last": names[-1], "largest": max(names, key=lambda name: weights[name].numel())}.get(
        which
    )
    if name is None:
        weights["another"] = torch.zeros(1)
    else:
        weights[name] = weights[name] * 1.01 + 0.01
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert weights_digest(folder) != before


def test_how_weights_are_split_into_files_does_not_count(tmp_path: Path) -> None:
    folder = a_model(tmp_path)
    before, weights = weights_digest(folder), load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    weight_map = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in {*weight_map.values()}:
        save_file({name: weights[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert weights_digest(folder) == before


def test_a_block_of_a_large_tensor_is_noticed(tmp_path: Path) -> None:
    large = torch.zeros(4_000_000)
    save_file({"w": large}, tmp_path / "model.safetensors")
    before = weights_digest(tmp_path)
    save_file({"w": large + 1e-3}, tmp_path / "model.safetensors")
    assert weights_digest(tmp_path) != before


SAMPLES = [Sample(f"s{i}", ({"role": "user", "content": f"q{i}"},), label=str(i)) for i in range(6)]
CHANGES = {
    "one less": SAMPLES[:-1],
    "one more": [*SAMPLES, SAMPLES[0]],
    "another order": SAMPLES[::-1],
    "another answer": [*SAMPLES[:-1], Sample("s5", SAMPLES[5].prompt, label="6")],
    "another question": [*SAMPLES[:-1], Sample("s5", ({"role": "user", "content": "?"},), label="5")],
    "another image": [*SAMPLES[:-1], Sample("s5", SAMPLES[5].prompt, (Image.of(b"x"),), label="5")],
    "another level": [*SAMPLES[:-1], Sample("s5", SAMPLES[5].prompt, label="5", metadata={"level": 2})],
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_samples_under_the_same_path_are_refused_by_name(change: str) -> None:
    settings = load_recipe(RECIPE, ["--data.source", "a.jsonl", "--data.eval_source", "b.jsonl"])
    before = contents_of(settings, ListSource(SAMPLES), SAMPLES)
    check_contents(Path("step_1"), before, contents_of(settings, ListSource(SAMPLES), SAMPLES))
    with pytest.raises(ValueError, match=r"step_1.*data\.source.*6 samples.*learner\.resume = 'never'") as refused:
        check_contents(Path("step_1"), before, contents_of(settings, ListSource(CHANGES[change]), SAMPLES))
    assert "\n" not in str(refused.value) and "eval_source" not in str(refused.value)
    with pytest.raises(ValueError, match=r"data\.eval_source"):
        check_contents(Path("step_1"), before, contents_of(settings, ListSource(SAMPLES), CHANGES[change]))


def test_the_system_prompt_and_the_number_of_evaluated_samples_may_change() -> None:
    with_prompt = [
        Sample(s.id, ({"role": "system", "content": "new"}, *s.prompt), s.images, s.label, s.metadata) for s in SAMPLES
    ]
    assert samples_digest(with_prompt) == samples_digest(SAMPLES)
    words = ["--data.source", "a.jsonl", "--data.eval_source", "b.jsonl"]
    before = contents_of(load_recipe(RECIPE, [*words, "--eval.samples", "6"]), ListSource(SAMPLES), SAMPLES)
    now = contents_of(load_recipe(RECIPE, [*words, "--eval.samples", "3"]), ListSource(SAMPLES), SAMPLES[:3])
    check_contents(Path("step_1"), before, now)


def test_other_code_of_the_user_is_said_and_goes_on(tmp_path: Path, lines: pytest.LogCaptureFixture) -> None:
    env = tmp_path / "mine.py"
    env.write_text("x = 1\n")
    settings = load_recipe(RECIPE, ["--env.module", str(env)])
    before = contents_of(settings)
    env.write_text("x = 2\n")
    check_contents(Path("step_1"), before, contents_of(settings))
    (line,) = [record.getMessage() for record in lines.records if record.levelno == logging.WARNING]
    assert "env.module" in line


@pytest.mark.parametrize("same_path", [True, False])
def test_a_run_does_not_resume_on_another_model_of_the_same_shape(tmp_path, ranks, spec, lines, same_path) -> None:
    folder = a_model(tmp_path)
    settings = recipe(in_background=False)
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"path": str(folder)})})
    trainer = Trainer(load_policy(str(folder), spec), config(), ranks)
    trainer.num_steps = 1
    saver = Saver(tmp_path / "checkpoints", trainer, ranks, settings, contents=contents_of(settings))
    path = saver.save(1, {})
    saver.close()
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    there = settings.model_copy(update={"model": settings.model.model_copy(update={"path": str(moved)})})
    assert restore(tmp_path / "checkpoints", trainer, ranks, there, contents_of(there)).version == 1
    target = folder if same_path else moved
    weights = {name: tensor + 0.01 for name, tensor in load_file(target / "model.safetensors").items()}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    other = settings if same_path else there
    with pytest.raises(ValueError, match=r"other content: model\.path .*put the files back"):
        restore(tmp_path / "checkpoints", trainer, ranks, other, contents_of(other))
    meta = json.loads((path / "meta.json").read_text())
    assert meta["contents"]["model.path"].endswith(weights_digest(folder if not same_path else moved).split()[-1])


def test_a_checkpoint_without_contents_resumes_with_one_warning(tmp_path, ranks, spec, lines) -> None:
    settings = recipe(in_background=False)
    trainer = Trainer(load_policy(str(MODEL), spec), config(), ranks)
    trainer.num_steps = 1
    Saver(tmp_path / "checkpoints", trainer, ranks, settings).save(1, {})
    assert restore(tmp_path / "checkpoints", trainer, ranks, settings, {"model.path": "5 tensors, abc"}).version == 1
    warnings = [record.getMessage() for record in lines.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "not compared" in warnings[0]
