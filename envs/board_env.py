"""What games on a board share: settings, the answer's grammar, the turn, and what is shown and measured."""

from __future__ import annotations

import re
from abc import abstractmethod
from random import Random
from typing import Generic, Literal, Protocol, Self, TypeVar

from PIL import Image
from pydantic import Field, model_validator

from envs.answer_tags import answer_in, thinks
from envs.base import Env, Info, Observation
from envs.boards.board import MOVES
from envs.boards.tile_sets import Grid, TileSet
from envs.env_settings import EnvSettings

ANSWER_FORM = "Answer with your next moves like this: <answer>up, left</answer>"
GridSize = int | tuple[int, int] | list[tuple[int, int]]
SIZE_TEXT = "rows and columns, one number for both, or a list of pairs, of which each board draws one"
_SEPARATORS = re.compile(r"[,;\s]+")


class BoardSettings(EnvSettings):
    """Settings of every game on a board."""

    render_mode: Literal["vision", "text"] = Field("vision", description="how a board is shown: vision or text")
    pixels_per_cell: int = Field(64, ge=8, le=256, description="side of a cell in the picture")
    max_steps: int = Field(100, ge=1, description="moves of an episode")
    max_actions_per_step: int = Field(3, ge=1, description="moves of one turn; further moves in an answer are ignored")
    min_solution: int = Field(1, ge=1, description="moves of the shortest solution, at least")
    max_solution: int = Field(1_000_000, description="the same, at most")
    split: Literal["", "train", "heldout"] = Field(
        "", description="which part the boards come from; a sample's own split overrides it"
    )
    diagnostics: bool = Field(
        False, description="also measures success by solution length, and what the model wrote about the board"
    )

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if getattr(self, "grid_size", None) == []:
            raise ValueError("grid_size must not be empty")
        if self.min_solution > self.max_solution:
            raise ValueError(f"min_solution = {self.min_solution} is above max_solution = {self.max_solution}")
        return self


class Position(Grid, Protocol):
    """A position of a game."""

    @property
    def solved(self) -> bool: ...

    @property
    def over(self) -> bool:
        """Tell whether the game has ended, won or lost."""


P = TypeVar("P", bound=Position)


class BoardEnv(Env, Generic[P]):
    """One episode: it starts at `board`; `position` is the current board. A game derives from it and says what a move
    does."""

    tiles: TileSet

    def __init__(self, board: P, settings: BoardSettings) -> None:
        self.board, self.settings = board, settings
        self._classes = length_classes(len(self.solution(board))) if settings.diagnostics else ()
        self.reset()

    @abstractmethod
    def move(self, move: str) -> float:
        """Make a move from `position`, which it changes; return its reward."""

    @abstractmethod
    def solution(self, position: P) -> list[str]:
        """Return a shortest solution; [] if there is none."""

    @abstractmethod
    def reading(self, position: P) -> str:
        """Return what a small model writes about a position in <think>."""

    def best_response(self) -> str:
        """Return the best answer from here."""
        moves = self.solution(self.position)[: self.settings.max_actions_per_step]
        return f"<answer>{', '.join(moves)}</answer>"

    def reset(self) -> tuple[Observation, Info]:
        self.position = self.board
        self.num_steps = 0
        self.turn_rewards: list[float] = []
        return self._observation([]), {"metrics": self._successes(), "state": self.position}

    @property
    def success(self) -> bool:
        return self.position.solved

    def step(self, response_text: str) -> tuple[Observation, bool, Info]:
        actions = parse_actions(response_text, self.settings.max_actions_per_step)
        turn_metrics = self._accuracies(response_text) if self.settings.diagnostics else {}
        reward, moved = 0.0, False
        for action in actions:
            if self._done():
                break
            before = self.position
            reward += self.move(action)
            moved |= self.position != before
            self.num_steps += 1
        self.turn_rewards.append(reward)
        turn_metrics |= {"action_is_valid": bool(actions), "action_is_effective": moved}
        info = {
            "raw_action": response_text,
            "parsed_actions": actions,
            "reward": reward,
            "metrics": {"turn_metrics": turn_metrics, "traj_metrics": self._successes()},
            "state": self.position,
        }
        return self._observation(actions), self._done(), info

    def _done(self) -> bool:
        return self.position.over or self.num_steps >= self.settings.max_steps

    def _successes(self) -> dict[str, float]:
        """Return the success so far, also by the classes of the board's length."""
        success = float(self.success)
        return {"success": success} | {f"success_{name}": success for name in self._classes}

    def _accuracies(self, response: str) -> dict[str, bool]:
        """Return whether <think> describes the board correctly. Call it before the moves are made."""
        return {"read_accuracy": thinks(response, self.reading(self.position))}

    def _observation(self, actions: list[str]) -> Observation:
        if self.settings.render_mode == "text":
            return observation_of(self.tiles.text(self.position), actions)
        return observation_of(self.tiles.render(self.position, self.settings.pixels_per_cell), actions)


def observation_of(board: str | Image.Image, actions: list[str]) -> Observation:
    """Return the observation of a board, drawn or in symbols, after the moves `actions`."""
    grid = board if isinstance(board, str) else "(Refer to the image for the grid layout.)"
    last = ", ".join(actions) or "None"
    ask = "Provide your next move(s) using Up, Down, Left, Right."
    text = f"[Observation]\n{grid}\nValid last actions: {last}\n{ask}"
    return {"obs_str": text} if isinstance(board, str) else {"obs_str": text, "multi_modal_data": {"image": [board]}}


def parse_actions(text: str, limit: int) -> list[str]:
    """Return the first `limit` moves named in the first <answer> block, or in the whole text if there is none."""
    answer = answer_in(text)
    words = _SEPARATORS.split((text if answer is None else answer).lower())
    return [word for word in words if word in MOVES][:limit]


def length_classes(moves: int) -> tuple[str, ...]:
    """Return the classes of boards whose shortest solution has `moves` moves."""
    if moves <= 3:
        return ("1_3",)
    return ("4_6" if moves <= 6 else "7_9" if moves <= 9 else "10_up", "long")


def random_response(rng: Random) -> str:
    """Return an answer like that of a policy that knows only the format."""
    moves = [MOVES[rng.randrange(4)] for _ in range(rng.randint(1, 3))]
    return f"<answer>{', '.join(moves)}</answer>"


def sizes_of(size: GridSize) -> tuple[tuple[int, int], ...]:
    """Return the sizes of boards, of which each board draws one, from a setting: a side, one pair or a list of
    pairs."""
    return tuple([(size, size)] if isinstance(size, int) else [size] if isinstance(size, tuple) else size)
