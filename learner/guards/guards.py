"""The guards that watch a run, the same on every rank: their metrics, their messages and their actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from learner.checkpoints.restoring import load_checkpoint
from learner.checkpoints.saver import Saver
from learner.guards.divergence import braked, kl_of_a_step
from learner.guards.entropy import EntropyGuard
from learner.guards.variance import VarianceGuard
from learner.training.trainer import Trainer
from shared.config.recipe import Recipe
from shared.log import get_logger
from shared.types import Group

MAX_REWINDS = 3


class Guards:
    """Checks a run after each step. All ranks call it with the same values, so that all act alike."""

    def __init__(self, recipe: Recipe, trainer: Trainer, saver: Saver, *, recorded: bool = False) -> None:
        """Set up the guards. `recorded`: the episodes' versions are not those of this run's policy, so they cannot show
        how far a step moves it."""
        self._recorded = recorded
        self._recipe, self._trainer, self._saver = recipe, trainer, saver
        self._config = recipe.learner.guard
        self._variance = VarianceGuard(recipe.learner, trainer.guard)
        self._entropy = EntropyGuard(self._config, trainer.guard)

    def after_step(self, groups: Sequence[Group], metrics: Mapping[str, float]) -> dict[str, float]:
        """Check a step on `groups` with these metrics; return the guards' metrics. Raise ValueError if the run has to
        end."""
        state = self._trainer.guard
        metrics_now = {"guard/steps_without_variance": float(self._check_variance(groups))}
        kl = kl_of_a_step(metrics, self._recipe.learner.publish.every)
        if kl is not None and not self._recorded:
            metrics_now["guard/kl_step"] = kl
            self._brake(kl)
        self._entropy.step(metrics.get("policy/entropy"))
        if self._entropy.out:
            self._leave_or_rewind()
        state.good = self._entropy.good
        metrics_now |= {"guard/brake": state.brake, "guard/rewinds": float(state.num_rewinds)}
        return metrics_now | {"guard/steps_outside_entropy": float(self._entropy.num_steps)}

    def _check_variance(self, groups: Sequence[Group]) -> int:
        if not self._recipe.learner.objective.needs_variance:
            return 0
        line = self._variance.step(groups)
        if self._variance.stops:
            raise ValueError(line)
        if line:
            self._say(line)
        return self._variance.num_steps

    def _brake(self, kl: float) -> None:
        state, limit = self._trainer.guard, self._config.max_kl
        before, free = state.brake, state.brake >= state.ceiling
        state.brake = braked(state, kl, limit) if limit else state.ceiling
        if free and state.brake < before:
            self._say(
                f"step {self._trainer.num_steps}: the policy moves by a KL of {kl:.3g} a token and step, beyond "
                f"learner.guard.max_kl = {limit:g}: its learning rate is multiplied by guard/brake, now "
                f"{state.brake:.3g}, until it moves less"
            )

    def _leave_or_rewind(self) -> None:
        self._saver.wait()
        line, good = self._entropy.line(self._trainer.num_steps), self._saver.best.last_good()
        state, rewinds = self._trainer.guard, self._config.on_entropy == "rewind"
        if good is None:
            raise ValueError(
                f"{line}; there is no checkpoint from before; start anew with a lower learner.optimizer.lr"
            )
        if not rewinds or state.num_rewinds >= MAX_REWINDS:
            done = f" after {state.num_rewinds} steps back" if rewinds else ""
            raise ValueError(
                f"{line}{done}; the last good checkpoint is {good}: go on from it with --learner.resume {good} and a "
                "lower --learner.optimizer.lr, or let the run step back itself with learner.guard.on_entropy = 'rewind'"
            )
        self._rewind(good)
        self._say(f"{line}; it steps back to {good}, with a learning rate multiplied by {state.ceiling:g}")

    def _rewind(self, path: Path) -> None:
        """Restore weights, optimizer and running moments from a checkpoint; counts of steps and versions, and tickets,
        continue.

        Episodes that the policy played meanwhile are trained on with their own, small ratios.
        """
        trainer = self._trainer
        steps, skipped, state = trainer.num_steps, trainer.num_skipped, trainer.guard
        load_checkpoint(path, trainer, trainer.ranks, self._recipe)
        trainer.num_steps, trainer.num_skipped, trainer.guard = steps, skipped, state
        state.num_rewinds += 1
        state.ceiling *= 0.5
        state.brake = min(state.brake, state.ceiling)
        state.steps_outside_entropy = 0

    def _say(self, line: str) -> None:
        if self._trainer.ranks.is_main:
            get_logger("learner").warning("%s", line)
