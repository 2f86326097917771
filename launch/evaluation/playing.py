"""Plays an evaluation's samples with one model's engines and actors, as a run plays its held-out samples."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event

from launch import actors
from launch.processes.actor_supervisor import ActorFailed
from launch.processes.own_server import OwnServer
from launch.terminal.screen import Screen
from learner.tickets.evaluations import EvaluationPlan
from learner.tickets.sources import SeedSource
from learner.tickets.ticket_book import BookSettings, EvaluationResult
from learner.tickets.ticket_server import wait_for_evaluation
from shared.config.recipe import Recipe
from shared.types import Sample
from shared.wire.codec import TokenRules

NAME = "evaluation"


class EvaluationFailed(Exception):
    """There is no result; the message says why, in one line."""


class Evaluation(OwnServer):
    """A server that issues only the samples' tickets. `result` or `failure` is set when the actors are told to stop."""

    def __init__(self, samples: Sequence[Sample], plan: EvaluationPlan, recipe: Recipe, rules: TokenRules) -> None:
        self._samples, self._plan, self._timeout_s = samples, plan, recipe.learner.wait_timeout_s
        self.result: EvaluationResult | None = None
        self.failure: Exception | None = None
        book = replace(BookSettings.of(recipe), total_groups=0)
        super().__init__(recipe, SeedSource(), book, Path(recipe.run.dir) / recipe.run.name, rules)

    def work(self) -> str:
        self.ticket_server.start_evaluation(NAME, self._samples, self._plan.sampling, self._plan.repeats)
        self.result = wait_for_evaluation(self.ticket_server, NAME, self._timeout_s, Event(), lambda: None)
        return "the evaluation is complete"

    def failed(self, error: Exception) -> None:
        self.failure = error


def play(
    recipe: Recipe, samples: Sequence[Sample], plan: EvaluationPlan, screen: Screen | None = None, *, last: bool = True
) -> EvaluationResult:
    """Start the recipe's engines and actors on `model.path`, play the samples, and end them; return the result. `last`:
    no other evaluation follows in this process. Raise EvaluationFailed, EngineError, ActorFailed or ValueError, with
    the reason, if it fails."""
    made: list[Evaluation] = []

    def make(ready: Recipe, rules: TokenRules) -> Evaluation:
        made.append(Evaluation(samples, plan, ready, rules))
        return made[0]

    with ExitStack() as cleanup:
        try:
            actors.run(recipe, cleanup, make, screen, last=last)
        except ActorFailed:
            if made and made[0].failure:
                raise EvaluationFailed(str(made[0].failure)) from made[0].failure  # the cause
            raise
    (evaluation,) = made
    if evaluation.result is None:
        raise EvaluationFailed(str(evaluation.failure or "the actors have ended before the evaluation"))
    return evaluation.result
