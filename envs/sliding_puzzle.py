"""The sliding puzzle over several turns, shown as an image or as text.

A sample's metadata holds {"seed": n, "split": "train" | "heldout" (optional)}, from which its puzzle is drawn.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from envs.base import metadata_of, seed_of, setting
from envs.board_env import ANSWER_FORM, SIZE_TEXT, BoardEnv, BoardSettings, GridSize, sizes_of
from envs.board_env import random_response as random_response
from envs.boards.puzzle import TILES, Puzzle, PuzzleSpec, make_puzzle, shortest
from envs.boards.puzzle_words import reading
from envs.env_settings import read_settings

_RULES = (
    "Put the tiles in order, row by row from the upper left, with the gap at the end. A move names the way that the "
    f"gap goes; the tile there takes its place. {ANSWER_FORM}"
)
SYSTEM_PROMPT = f"Solve the sliding puzzle. The dark cell is the gap. {_RULES}"
TEXT_PROMPT = f"Solve the sliding puzzle. _ is the gap. {_RULES}"


class SlidingPuzzleSettings(BoardSettings):
    grid_size: GridSize = Field((3, 3), description=SIZE_TEXT)
    scramble: int | list[int] = Field(
        8, description="random moves that mix the tiles; or a list, of which each puzzle draws one"
    )
    solved_reward: float = Field(1.0, description="of the move that solves the puzzle")
    step_reward: float = Field(0.0, description="of each move; below 0 it makes long ways cost")

    def spec(self, split: str = "") -> PuzzleSpec:
        scramble = (self.scramble,) if isinstance(self.scramble, int) else tuple(self.scramble)
        return PuzzleSpec(sizes_of(self.grid_size), scramble, self.min_solution, self.max_solution, split)


SETTINGS = SlidingPuzzleSettings


def system_prompt(args: Any = None) -> str:
    """Return the system prompt for the render mode in `args`."""
    return TEXT_PROMPT if setting(args, "render_mode", "vision") == "text" else SYSTEM_PROMPT


def build_env(sample: Any = None, args: Any = None, **_: Any) -> SlidingPuzzleEnv:
    """Return the environment of a sample, or of seed 0 without a sample. Raise ValueError for settings that allow no
    puzzle, and for a sample without a seed."""
    settings = read_settings(SlidingPuzzleSettings, sample, args)
    split = metadata_of(sample).get("split", settings.split)
    return SlidingPuzzleEnv(make_puzzle(seed_of(sample), settings.spec(split)), settings)


class SlidingPuzzleEnv(BoardEnv[Puzzle]):
    """One episode: it starts at `board`; `position` is the current puzzle."""

    settings: SlidingPuzzleSettings
    tiles = TILES

    def move(self, move: str) -> float:
        self.position = self.position.moved(move)
        return self.settings.step_reward + self.settings.solved_reward * self.success

    def solution(self, position: Puzzle) -> list[str]:
        return shortest(position)

    def reading(self, position: Puzzle) -> str:
        return reading(position)
