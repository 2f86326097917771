"""Pays for what a model writes: the form of an answer, the description of what is seen, and of what comes next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pydantic import Field, model_validator

from envs.env_settings import EnvSettings
from envs.reasoning.board_facts import BoardFacts
from envs.reasoning.forms import Language, Parts, Reasoning
from envs.reasoning.grids import grid_score
from envs.reasoning.relations import relations_score


class ReasoningSettings(EnvSettings):
    reasoning: Reasoning = Field(
        "none",
        description=(
            "the form that answers are asked for: the moves alone, thoughts before them (free), or also what is seen "
            "and what will be seen (world_model); with free and world_model an answer of another form makes no move"
        ),
    )
    state_language: Language = Field(
        "relations",
        description="how world_model describes a board: where things are relative to the player, or rows of symbols",
    )
    form_reward: float = Field(0.0, description="reward of a turn whose answer has the form and names a move")
    state_reward: float = Field(
        0.0, description="world_model: reward of a turn, times how well the observation agrees with the board (0 to 1)"
    )
    foresight_reward: float = Field(
        0.0, description="world_model: reward of a turn, times how well the prediction agrees with the next board"
    )

    @property
    def writes_grids(self) -> bool:
        """Tell whether answers describe boards in symbols."""
        return self.reasoning == "world_model" and self.state_language == "grid"

    @property
    def judges_words(self) -> bool:
        """Tell whether what is written is measured."""
        return self.reasoning != "none" or bool(self.form_reward)

    @model_validator(mode="after")
    def _pays_for_parts_that_there_are(self) -> Self:
        for name in ("state_reward", "foresight_reward"):
            value = getattr(self, name)
            if value and self.reasoning != "world_model":
                raise ValueError(f'{name} = {value} needs reasoning = "world_model", not {self.reasoning!r}')
        return self


@dataclass(frozen=True, slots=True)
class Written:
    """How good what was written in a turn is: whether it has the form, and two scores from 0 to 1."""

    has_form: bool
    state: float = 0.0
    foresight: float = 0.0

    def reward(self, settings: ReasoningSettings) -> float:
        return (
            settings.form_reward * self.has_form
            + settings.state_reward * self.state
            + settings.foresight_reward * self.foresight
        )

    def metrics(self, settings: ReasoningSettings) -> dict[str, float]:
        """Return the metrics of a turn: those that the settings ask for."""
        scores = {"state_accuracy": self.state, "prediction_accuracy": self.foresight}
        return {"form_is_valid": float(self.has_form)} | (scores if settings.reasoning == "world_model" else {})


def judged(parts: Parts | None, moves: int, before: BoardFacts, after: BoardFacts, language: Language) -> Written:
    """Return how good an answer is whose `moves` moves led from `before` to `after`. Without a move of its own a
    prediction is of what is seen already, and gets nothing."""
    if parts is None or not moves:
        return Written(False)
    score = grid_score if language == "grid" else relations_score
    return Written(True, score(parts.observation, before), score(parts.prediction, after))
