"""Checkpoints: resumed equals uninterrupted, only whole ones count, another model is refused, export is loadable."""

from __future__ import annotations

import errno
import json
import resource
import shutil

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from learner.checkpoints.best_checkpoint import Best
from learner.checkpoints.checkpoint_folder import candidates, list_checkpoints
from learner.checkpoints.hf_export import export, export_checkpoint
from learner.checkpoints.restoring import Restored, load_checkpoint
from learner.checkpoints.saver import Saver
from learner.checkpoints.trainer_state import copied, training_state
from learner.export import main as export_main
from learner.model.policy import load_policy
from learner.model.sharding import parallelize
from learner.training.trainer import Trainer
from learner.weights.gathering import gathered
from tests.support.checkpoints import config, recipe, save
from tests.support.episodes import random_groups
from tests.support.tiny import load_model, tiny_model_dir


@pytest.fixture
def new_trainer(folder, spec, ranks):
    return lambda **changes: Trainer(load_policy(str(folder), spec), config(**changes), ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("background", "optimizer"), [(False, "adamw"), (True, "adamw"), (True, "muon")])
def test_resumed_equals_uninterrupted(new_trainer, spec, ranks, tmp_path, background, optimizer):
    trainer = new_trainer(optimizer=optimizer)
    for step in range(2):
        trainer.step(random_groups(spec, 2, seed=step), version=0)
    path = save(trainer, ranks, tmp_path, background=background)
    torch.manual_seed(123)
    for step in range(2, 4):
        trainer.step(random_groups(spec, 2, seed=step), version=0)

    resumed = new_trainer(optimizer=optimizer)
    restored = load_checkpoint(path, resumed, ranks, recipe())
    assert restored == Restored(7, {"cursor": 7, "open": ["a"]})
    assert resumed.num_steps == 2
    for step in range(2, 4):
        resumed.step(random_groups(spec, 2, seed=step), version=0)
    for (name, got), expected in zip(resumed.policy.named_parameters(), trainer.policy.parameters(), strict=True):
        assert torch.equal(got, expected), name
    assert resumed.state() == trainer.state()


@pytest.mark.slow
def test_a_resumed_run_follows_the_recipes_learning_rate(new_trainer, ranks, tmp_path, folder, spec):
    path = save(new_trainer(), ranks, tmp_path)
    changed = Trainer(load_policy(str(folder), spec), config(lr=5e-4), ranks)
    load_checkpoint(path, changed, ranks, recipe(lr=5e-4))
    assert [group["base_lr"] for group in changed.optimizer.param_groups] == [5e-4, 5e-4, 1e-2]


@pytest.mark.slow
def test_the_random_state_is_restored(new_trainer, ranks, tmp_path):
    trainer = new_trainer()
    path = save(trainer, ranks, tmp_path)
    expected = torch.rand(3)
    load_checkpoint(path, trainer, ranks, recipe())
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.slow
def test_the_last_few_checkpoints_are_kept_and_a_partial_one_is_no_checkpoint(new_trainer, ranks, tmp_path):
    trainer = new_trainer()
    for step in (1, 2, 3):
        trainer.num_steps = step
        save(trainer, ranks, tmp_path, keep=2)
    (tmp_path / ".step_00000004.partial").mkdir()
    (tmp_path / "step_00000005").mkdir()  # no meta.json
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_00000002", "step_00000003"]
    assert [p.name[-1] for p in candidates(tmp_path, "auto")] == ["5", "3", "2"]  # the first is damaged
    assert candidates(tmp_path, "never") == candidates(tmp_path / "none", "auto") == []


@pytest.mark.slow
def test_the_best_checkpoint_and_the_one_under_evaluation_are_not_removed(new_trainer, ranks, tmp_path):
    trainer = new_trainer()
    saver = Saver(tmp_path, trainer, ranks, recipe(keep=1, in_background=False))
    for step in (1, 2, 3, 4):
        trainer.num_steps = step
        if step in (1, 3):
            saver.best.candidate = step
        saver.save(0, {})
        if step == 1:
            saver.best.result(0.5)
    assert [p.name[-1] for p in list_checkpoints(tmp_path)] == ["1", "3", "4"]
    saver.result_of_last(0.7)
    assert [p.name[-1] for p in list_checkpoints(tmp_path)] == ["3", "4"]


@pytest.mark.parametrize("content", ["", "{", "7", "{}", '{"step": "x", "value": 1}', "[" * 100_000])
def test_a_damaged_note_of_the_best_checkpoint_is_replaced_by_the_next_result(tmp_path, content):
    (tmp_path / "best.json").write_text(content)
    best = Best.load(tmp_path)
    assert best.kept() == Best(tmp_path / "best.json").kept()
    best.candidate = 3
    assert best.result(0.5)
    assert (Best.load(tmp_path).step, Best.load(tmp_path).value) == (3, 0.5)
    assert [path.name for path in tmp_path.iterdir()] == ["best.json"]


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is no checkpoint"):
        candidates(tmp_path, str(tmp_path))


def test_a_checkpoint_of_another_model_is_refused_with_its_name(new_trainer, ranks, tmp_path, spec):
    path = save(new_trainer(), ranks, tmp_path / "run")
    other = tiny_model_dir(tmp_path, layers=1)
    trainer = Trainer(load_policy(str(other), spec), config(), ranks)
    with pytest.raises(ValueError, match="is of another model") as error:
        load_checkpoint(path, trainer, ranks, recipe())
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_saving_the_same_step_again_replaces_it(new_trainer, ranks, tmp_path):
    trainer = new_trainer()
    save(trainer, ranks, tmp_path, version=1)
    path = save(trainer, ranks, tmp_path, version=2)
    assert json.loads((path / "meta.json").read_text())["version"] == 2


class Allocated(TorchDispatchMode):
    """Counts the bytes of the tensors that operators make, views left out."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.num_bytes += made.to_local().nbytes if isinstance(made, DTensor) else made.nbytes
        return made


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_in_the_background_is_copied_once(folder, spec, ranks, dtype):
    policy = load_policy(str(folder), spec)
    parallelize(policy, ranks, config(), dtype)  # DTensors where the dtype is not float32
    trainer = Trainer(policy, config(), ranks)
    trainer.step(random_groups(spec, 2, seed=0), version=0)
    state = training_state(trainer)
    with Allocated() as allocated:
        copy = copied(state)
    assert copy.keys() == state.keys()
    held = sum(p.nbytes for p in policy.parameters())
    assert 3 * held <= allocated.num_bytes < 3.01 * held  # parameters and two moments
    for part in ("model", "optimizer"):
        theirs, mine = leaves(state[part]), leaves(copy[part])
        assert len(theirs) == len(mine)
        for before, after in zip(theirs, mine, strict=True):
            assert torch.equal(before, after) and before.data_ptr() != after.data_ptr()


def leaves(state):
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in leaves(value)]
    if isinstance(state, torch.Tensor):
        return [state.to_local() if isinstance(state, DTensor) else state]
    return []


@pytest.mark.slow
def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(new_trainer, spec, ranks, tmp_path):
    trainer = new_trainer()
    trainer.step(random_groups(spec, 2, seed=0), version=0)
    before = [p.detach().clone() for p in trainer.policy.parameters()]
    saver = Saver(tmp_path, trainer, ranks, recipe())
    path = saver.save(1, {})
    for step in range(1, 4):
        trainer.step(random_groups(spec, 2, seed=step), version=0)
    saver.wait()
    resumed = new_trainer()
    load_checkpoint(path, resumed, ranks, recipe())
    assert resumed.num_steps == 1
    assert all(torch.equal(p, q) for p, q in zip(resumed.policy.parameters(), before, strict=True))


def test_what_goes_wrong_in_the_background_is_raised_by_the_next_wait(new_trainer, ranks, tmp_path, monkeypatch):
    saver = Saver(tmp_path, new_trainer(), ranks, recipe())
    path = saver.save(1, {})
    saver.wait()
    monkeypatch.setattr("learner.checkpoints.saver._write", lambda *_: (_ for _ in ()).throw(ValueError("a mistake")))
    saver.save(2, {})
    with pytest.raises(ValueError, match="a mistake"):
        saver.wait()
    assert list_checkpoints(tmp_path) == [path]


@pytest.mark.parametrize("part", ["_begin", "_save", "_export", "_seal", "_finish", "_keep"])
def test_a_runs_folder_that_is_deleted_while_a_checkpoint_is_written_does_not_come_back(
    new_trainer, ranks, tmp_path, monkeypatch, part
):
    run = tmp_path / "run"
    run.mkdir()
    saver = Saver(run / "checkpoints", new_trainer(), ranks, recipe(in_background=False, export=True))
    whole = getattr(saver, part)
    monkeypatch.setattr(saver, part, lambda *args, **how: (shutil.rmtree(run), whole(*args, **how)))
    saver.save(1, {})
    assert not run.exists()


def test_a_checkpoint_of_another_recipe_names_the_fields_that_differ(new_trainer, ranks, tmp_path):
    path = save(new_trainer(), ranks, tmp_path)
    other = recipe(objective="grpo", group_size=4, lr=5e-4)
    with pytest.raises(ValueError, match="is of another recipe") as error:
        load_checkpoint(path, new_trainer(), ranks, other)
    assert "learner.group_size (it: 1, now: 4), learner.objective.name (it: 'vtrace', now: 'grpo')" in str(error.value)
    assert "learner.optimizer.lr" not in str(error.value) and "\n" not in str(error.value)


def test_what_is_being_written_can_be_seen_to_grow(new_trainer, ranks, tmp_path):
    saver = Saver(tmp_path, new_trainer(), ranks, recipe())
    part = tmp_path / ".step_00000007.partial" / "dcp"
    assert saver.written() is None
    part.mkdir(parents=True)
    assert saver.written() == (0, 0.0)
    (part / "__0_0.distcp").write_bytes(b"12345")
    assert saver.written() == (5, 0.0)
    saver.close()


def moved(trainer):
    with torch.no_grad():
        for p in trainer.policy.parameters():
            p.add_(0.125)
    return trainer


@pytest.mark.parametrize("file_bytes", [1 << 30, 100_000])
def test_the_exported_folder_is_loaded_by_transformers(new_trainer, folder, tmp_path, file_bytes):
    trainer, out = moved(new_trainer()), tmp_path / "export"
    export(out, gathered(trainer.policy), model_path=str(folder), file_bytes=file_bytes)
    loaded = dict(load_model(out).named_parameters())
    for name, p in trainer.policy.vlm.named_parameters():
        assert torch.equal(loaded[name], p), name
    weights = [p for p in out.iterdir() if p.suffix == ".safetensors"]
    assert (len(weights) > 1) == (file_bytes < 1 << 30)
    others = {p.name for p in folder.iterdir()} - {"model.safetensors"}
    assert others == {p.name for p in out.iterdir()} - {p.name for p in weights} - {"model.safetensors.index.json"}


def test_a_checkpoint_is_exported_without_a_trainer_and_with_one_line(
    new_trainer, folder, ranks, tmp_path, capfd, recwarn
):
    trainer = moved(new_trainer())
    path = save(trainer, ranks, tmp_path / "run")
    capfd.readouterr()
    recwarn.clear()
    assert export_main([str(path), "--out", str(tmp_path / "export"), "--model", str(folder)]) == 0
    printed = capfd.readouterr()
    assert printed.out.startswith(f"{tmp_path / 'export'}: 1 file of weights (") and printed.out.count("\n") == 1
    assert (printed.err, recwarn.list) == ("", [])
    loaded = dict(load_model(tmp_path / "export").named_parameters())
    assert all(torch.equal(loaded[name], p) for name, p in trainer.policy.vlm.named_parameters())
    with pytest.raises(ValueError, match="is no checkpoint"):
        export_checkpoint(tmp_path, tmp_path / "export", model_path=str(folder), dtype=None)


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_costs_one_checkpoint_and_the_last_good_one_stays(new_trainer, ranks, tmp_path, background):
    trainer = new_trainer()
    good = save(trainer, ranks, tmp_path, background=background)
    trainer.num_steps += 1
    settings = recipe(keep=1, in_background=background)
    saver = Saver(tmp_path, trainer, ranks, settings)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        saver.save(8, {})
        saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert saver.metrics() == {"checkpoint/failed": 1.0, "checkpoint/failed_in_a_row": 1.0}
    assert list_checkpoints(tmp_path) == [good]
    assert [p.name for p in tmp_path.iterdir()] == [good.name]
    saver.save(8, {})
    saver.wait()
    assert saver.metrics() == {"checkpoint/failed": 1.0, "checkpoint/failed_in_a_row": 0.0}
    saver.close()
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_00000001"]


@pytest.mark.slow
def test_weights_or_moments_that_are_not_finite_make_no_checkpoint_and_the_last_good_one_stays(
    new_trainer, spec, ranks, tmp_path
):
    trainer = new_trainer()
    trainer.step(random_groups(spec, 2, seed=0), version=0)
    good = save(trainer, ranks, tmp_path)
    trainer.num_steps += 1
    bias = trainer.policy.value_head.weight
    for kind, spoilt in (("", bias.data), ("exp_avg_sq of ", trainer.optimizer.state[bias]["exp_avg_sq"])):
        before = spoilt.clone()
        spoilt.view(-1)[0] = float("inf")
        with pytest.raises(ValueError, match=rf"no finite number of float32 \({kind}value_head.weight\)"):
            save(trainer, ranks, tmp_path)
        assert list_checkpoints(tmp_path) == [good]
        spoilt.copy_(before)
    assert save(trainer, ranks, tmp_path) != good


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_cannot_even_be_listed_costs_one_checkpoint(new_trainer, ranks, tmp_path, background, monkeypatch):
    """As when a process may open no further file."""

    def refuse(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    trainer = new_trainer()
    saver = Saver(tmp_path, trainer, ranks, recipe(keep=1, in_background=background))
    monkeypatch.setattr("learner.checkpoints.saver.list_checkpoints", refuse)
    monkeypatch.setattr(saver, "_begin", refuse)
    saver.save(1, {})
    saver.wait()
    assert saver.num_failed == 1 and "there is no checkpoint" in saver.how_to_go_on()
    saver.close()
