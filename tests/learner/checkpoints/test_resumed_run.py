"""What a run that goes on from a checkpoint takes up: evaluations, counts, good checkpoints, the optimizer's state."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import learner.checkpoints.saver as saver_module
from learner import learner_loop
from learner.checkpoints.best_checkpoint import Best, newest_good
from learner.checkpoints.restoring import Restored, load_checkpoint
from learner.checkpoints.saver import Saver
from learner.coordinator import RemoteCoordinator
from learner.learner_loop import begin
from learner.metrics.episode_metrics import has_result
from learner.model.policy import load_policy
from learner.setup import build_coordinator
from learner.tickets.sources import SeedSource
from learner.training.guard_state import GuardState
from learner.training.trainer import Trainer
from shared.config.recipe import Recipe
from shared.config.sections import EnvConfig, EvalConfig, ModelConfig, RunConfig
from shared.types import Group
from tests.support.checkpoints import config, recipe, save
from tests.support.episodes import random_groups


@pytest.fixture
def new_trainer(folder, spec, ranks):
    return lambda **changes: Trainer(load_policy(str(folder), spec), config(**changes), ranks)


def begun(step: int, **evaluation: Any) -> tuple[list[str], int, bool]:
    """Of a run of 10 steps at this one: the evaluations begun, the best's candidate, whether no step is left."""
    names: list[str] = []
    coordinator = SimpleNamespace(evaluate=lambda name, greedy=False: names.append(name), state=dict)
    saver = SimpleNamespace(best=Best(Path("best.json")), save=lambda *_: names.append("saved"))
    settings = recipe().model_copy(update={"eval": EvalConfig(every_steps=5, **evaluation)})
    due = begin(settings, coordinator, SimpleNamespace(num_steps=step), saver, 0)  # type: ignore[arg-type]
    return names, saver.best.candidate, due.last


def test_an_evaluation_whose_result_the_checkpoint_awaited_is_made_again():
    assert begun(0) == (["before"], -1, False)
    assert begun(5) == (["step_5"], 5, False)
    assert begun(5, best="") == (["step_5"], -1, False)
    assert begun(7) == ([], -1, False)


def test_a_run_with_all_its_steps_has_only_its_last_evaluation_to_make(tmp_path):
    assert begun(10) == ([], 10, True)
    assert not has_result(tmp_path, 10)
    for text in ("[1]", "{", '{"optimizer_steps": 6}', '{"optimizer_steps": 10}'):
        (tmp_path / "result.json").write_text(text)
        assert has_result(tmp_path, 10) is text.endswith("10}")


@pytest.mark.parametrize("best", ["success", ""])
def test_a_run_that_is_to_leave_before_its_candidate_is_evaluated_goes_on_from_there(monkeypatch, best):
    """The checkpoint of a later step would not make the evaluation again; without candidates the run loses a point."""
    asked, saved = Event(), []

    def step(*_: Any) -> dict[str, float]:
        trainer.num_steps += 1
        if trainer.num_steps == 11:  # in the step after the evaluation was begun
            asked.set()
        return {}

    monkeypatch.setattr(learner_loop, "Guards", lambda *_, **__: SimpleNamespace(after_step=lambda *_: {}))
    monkeypatch.setattr(learner_loop, "watch", lambda *_: None)
    monkeypatch.setattr(learner_loop, "next_groups", lambda *_: [Group("g", "a", ())] if trainer.num_steps < 12 else [])
    trainer = SimpleNamespace(num_steps=9, step=step, guard=SimpleNamespace(bad_steps=0), config=config())
    trainer.start_critic = lambda _: None
    trainer.ranks = SimpleNamespace(is_main=True, rank=0)
    coordinator = FakeCoordinator(asked)
    publisher = SimpleNamespace(publish=lambda *_, **__: {}, verification_metrics=dict)
    saver = SimpleNamespace(
        best=Best(Path("best.json")), save=lambda *_: saved.append(trainer.num_steps), wait=lambda: None
    )
    saver.metrics = dict
    settings = recipe(total_steps=20).model_copy(update={"eval": EvalConfig(every_steps=10, best=best)})
    with pytest.raises(learner_loop.ShutdownRequested, match="step 10 is not evaluated" if best else "after step 12"):
        learner_loop.loop(settings, coordinator, trainer, publisher, saver, 0)  # type: ignore[arg-type]
    assert saved[-1] == (10 if best else 12)


class FakeCoordinator(RemoteCoordinator):
    """Whose evaluations end at once, unless the run is asked to leave."""

    def __init__(self, asked: Event) -> None:
        self.asked, self.running = asked, list[str]()

    def evaluate(self, name: str, *, greedy: bool = False) -> None:
        self.running.append(name)

    def finish_evaluations(self) -> bool:
        if not self.asked.is_set():
            self.running.clear()
        return not self.running

    def shutdown_requested(self) -> bool:
        return False

    def out_of_time(self) -> bool:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_before_the_first_step_changes_nothing_of_the_training(
    new_trainer, spec, ranks, tmp_path, optimizer
):
    plain, saved, resumed = (new_trainer(optimizer=optimizer) for _ in range(3))
    load_checkpoint(save(saved, ranks, tmp_path), resumed, ranks, recipe())
    for trainer in (plain, saved, resumed):
        for step in range(2):
            trainer.step(random_groups(spec, 2, seed=step), version=0)
    for other in (saved, resumed):
        for (name, p), expected in zip(other.policy.named_parameters(), plain.policy.parameters(), strict=True):
            assert torch.equal(p, expected), name


@pytest.mark.slow
def test_a_checkpoint_after_steps_without_a_gradient_is_whole(new_trainer, ranks, tmp_path):
    trainer = new_trainer()
    for p in trainer.policy.parameters():  # as of a step that was left out
        p.grad = torch.zeros_like(p)
    load_checkpoint(save(trainer, ranks, tmp_path), new_trainer(), ranks, recipe())


@pytest.mark.slow
def test_counts_of_steps_in_a_row_go_on(new_trainer, ranks, tmp_path):
    trainer, resumed = new_trainer(), new_trainer()
    trainer.guard = GuardState(bad_steps=3, steps_without_variance=7, steps_outside_entropy=2, good=False)
    load_checkpoint(save(trainer, ranks, tmp_path), resumed, ranks, recipe())
    assert resumed.guard == trainer.guard


@pytest.mark.slow
def test_the_last_good_checkpoint_is_still_known_and_kept_after_a_restart(new_trainer, ranks, tmp_path):
    trainer = new_trainer()
    for step, good in ((100, True), (151, False)):
        trainer.num_steps, trainer.guard.good = step, good
        path = save(trainer, ranks, tmp_path)
    assert newest_good(tmp_path) == (100,)
    resumed = new_trainer()
    load_checkpoint(path, resumed, ranks, recipe())
    saver = Saver(tmp_path, resumed, ranks, recipe(keep=1, in_background=False))
    for step in (151, 152, 153):
        resumed.num_steps = step
        saver.save(0, {})
    assert saver.best.last_good() == tmp_path / "step_00000100"
    (tmp_path / "step_00000100" / "meta.json").write_text("[" * 100_000)
    assert newest_good(tmp_path) == ()


class Disk:
    """A saver's, which may be full."""

    def __init__(self, saver, monkeypatch):
        self.full, self._really = False, saver._begin
        monkeypatch.setattr(saver, "_begin", self._begin)

    def _begin(self, partial):
        if self.full:
            raise OSError("no space left on the disk")
        self._really(partial)


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_that_is_not_written_takes_no_protection_from_the_last_good_one(
    new_trainer, ranks, tmp_path, monkeypatch, background
):
    trainer, settings = new_trainer(), recipe(keep=1, in_background=background)
    saver = Saver(tmp_path, trainer, ranks, settings)
    disk = Disk(saver, monkeypatch)
    for step, good, full in ((100, True, False), (125, True, True), (150, False, False), (175, False, False)):
        trainer.num_steps, trainer.guard.good, disk.full = step, good, full
        saver.save(0, {})
        saver.wait()
        assert saver.best.last_good() == tmp_path / "step_00000100"
    trainer.num_steps, trainer.guard.good = 200, True
    saver.save(0, {})
    saver.wait()
    saver.close()
    assert saver.best.last_good() == tmp_path / "step_00000200"
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000200"]


@pytest.mark.slow
def test_a_step_whose_checkpoint_is_not_written_does_not_take_the_place_of_the_best(
    new_trainer, ranks, tmp_path, monkeypatch
):
    trainer = new_trainer()
    saver = Saver(tmp_path, trainer, ranks, recipe(keep=1, in_background=False))
    disk = Disk(saver, monkeypatch)
    trainer.guard.good = False
    for step, value, full in ((100, 0.5, False), (200, 0.9, True), (300, 0.4, False)):
        trainer.num_steps = saver.best.candidate = step
        disk.full = full
        saver.save(0, {})
        saver.best.result(value)
    assert (saver.best.step, saver.best.value) == (100, 0.5)
    assert {path.name for path in tmp_path.iterdir()} == {"best.json", "step_00000100", "step_00000300"}


def test_a_checkpoint_makes_progress_while_it_is_synced_and_measured(new_trainer, ranks, tmp_path, monkeypatch):
    saver, seen = Saver(tmp_path, new_trainer(), ranks, recipe(in_background=False), timeout_s=1e-3), []
    measured = saver_module.measured

    def watched(*args: Any) -> Any:
        seen.append(saver.written())
        return measured(*args)

    monkeypatch.setattr(saver_module, "measured", watched)
    saver.save(0, {})
    ((size, seconds),) = seen
    assert size > 0 and seconds == 1e-3  # that of a disk which hangs ends with the time limit
    assert saver.written() is None
    (tmp_path / ".step_00000007.partial" / "dcp").mkdir(parents=True)
    assert saver.written() == (0, 0.0)


def coordinator_of(trainer: Trainer, run_dir: Path, restored: Restored) -> Any:
    """Of a run that goes on at step 500."""
    own = Recipe(
        model=ModelConfig(path="m"),
        env=EnvConfig(module="envs.colour"),
        run=RunConfig(dir=str(run_dir), name="r"),
        learner=config(bind="tcp://127.0.0.1:*"),
    )
    trainer.num_steps = 500
    return build_coordinator(own, SeedSource(), [], trainer, restored, Event())


def test_a_run_goes_on_from_a_training_on_a_recording(new_trainer, tmp_path):
    coordinator = coordinator_of(new_trainer(), tmp_path, Restored(0, {"recording": "somewhere"}))
    assert coordinator.state()["tickets"]
    coordinator.close(None)


def test_a_run_that_ends_before_its_next_step_leaves_the_recordings_of_earlier_ones(new_trainer, tmp_path):
    coordinator, steps = coordinator_of(new_trainer(), tmp_path, Restored(125, {})), []
    coordinator._recorder.step = lambda step, version, *_, **__: steps.append((step, version))
    coordinator.close(None)
    assert steps == [(501, 125)]
