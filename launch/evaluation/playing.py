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
from learner.tickets.book import BookSettings, EvaluationResult
from learner.tickets.evaluations import Plan
from learner.tickets.patience import result_in_time
from learner.tickets.sources import SeedSource
from shared.codec import TokenRules
from shared.config import Recipe
from shared.types import Sample

NAME = "evaluation"


class EvaluationFailed(Exception):
    """One line: why there is no result."""


class Evaluation(OwnServer):
    """Issues the samples' tickets and no other; `result` or `failure` is there when the actors are told to stop."""

    def __init__(self, samples: Sequence[Sample], plan: Plan, recipe: Recipe, rules: TokenRules) -> None:
        self._samples, self._plan, self._timeout_s = samples, plan, recipe.learner.wait_timeout_s
        self.result: EvaluationResult | None = None
        self.failure: Exception | None = None
        book = replace(BookSettings.of(recipe), total_groups=0)
        super().__init__(recipe, SeedSource(), book, Path(recipe.run.dir) / recipe.run.name, rules)

    def work(self) -> str:
        self.ticket_server.start_evaluation(NAME, self._samples, self._plan.sampling, self._plan.repeats)
        self.result = result_in_time(self.ticket_server, NAME, self._timeout_s, Event(), lambda: None)
        return "the evaluation is complete"

    def failed(self, error: Exception) -> None:
        self.failure = error


def play(
    recipe: Recipe, samples: Sequence[Sample], plan: Plan, screen: Screen | None = None, *, last: bool = True
) -> EvaluationResult:
    """Starts the recipe's engines and actors on `model.path`, and ends them. `last`: nothing is started afterwards.

    EvaluationFailed, EngineError, ActorFailed, ValueError: it came to nothing, and why.
    """
    made: list[Evaluation] = []

    def make(ready: Recipe, rules: TokenRules) -> Evaluation:
        made.append(Evaluation(samples, plan, ready, rules))
        return made[0]

    with ExitStack() as cleanup:
        try:
            actors.run(recipe, cleanup, make, screen, last=last)
        except ActorFailed:
            if made and made[0].failure:
                raise EvaluationFailed(str(made[0].failure)) from made[0].failure  # which is why
            raise
    (evaluation,) = made
    if evaluation.result is None:
        raise EvaluationFailed(str(evaluation.failure or "the actors have ended before the evaluation"))
    return evaluation.result
