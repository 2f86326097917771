"""A maze with a key and a door over several turns, shown as an image or as text.

A sample's metadata holds {"seed": n, "split": "train" | "heldout" (optional)}, from which its maze is drawn.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from envs.base import Info, Observation, metadata_of, seed_of, setting
from envs.board_env import ANSWER_FORM, SIZE_TEXT, BoardEnv, BoardSettings, GridSize, sizes_of
from envs.board_env import random_response as random_response
from envs.boards.maze_board import DOOR, TILES, MazeBoard, MazeSpec, make_maze
from envs.boards.maze_words import reading
from envs.boards.walks import shortest_way
from envs.env_settings import read_settings

_RULES = f"Walk onto the key to take it; with it you can walk through the door. {ANSWER_FORM}"
SYSTEM_PROMPT = (
    "Find the way through the maze: take the golden key, pass the brown door, walk to the red flag. You are the green "
    f"player. Grey cells are walls. {_RULES}"
)
TEXT_PROMPT = (
    "Find the way through the maze: take the key K, pass the door D, walk to the goal G. You are P, and H with the "
    f"key. # is a wall, _ is floor, √ is you at the goal. {_RULES}"
)


class MazeSettings(BoardSettings):
    grid_size: GridSize = Field((5, 5), description=f"odd numbers: {SIZE_TEXT}")
    walls: int | list[int] = Field(
        2,
        description="walls that divide the maze, with one gap each, the first with the door; or a list, of which each "
        "maze draws one; many make corridors everywhere",
    )
    goal_reward: float = Field(1.0, description="of reaching the goal")
    stage_reward: float = Field(0.2, description="of taking the key, and of the first step into the door")
    step_reward: float = Field(0.0, description="of each move; below 0 it makes long ways cost")

    def spec(self, split: str = "") -> MazeSpec:
        walls = (self.walls,) if isinstance(self.walls, int) else tuple(self.walls)
        return MazeSpec(sizes_of(self.grid_size), walls, self.min_solution, self.max_solution, split)


SETTINGS = MazeSettings


def system_prompt(args: Any = None) -> str:
    """Return the system prompt for the render mode in `args`."""
    return TEXT_PROMPT if setting(args, "render_mode", "vision") == "text" else SYSTEM_PROMPT


def build_env(sample: Any = None, args: Any = None, **_: Any) -> MazeEnv:
    """Return the environment of a sample, or of seed 0 without a sample. Raise ValueError for settings that allow no
    maze, and for a sample without a seed."""
    settings = read_settings(MazeSettings, sample, args)
    split = metadata_of(sample).get("split", settings.split)
    return MazeEnv(make_maze(seed_of(sample), settings.spec(split)), settings)


class MazeEnv(BoardEnv[MazeBoard]):
    """One episode: it starts at `board`; `position` is the current maze."""

    settings: MazeSettings
    tiles = TILES

    def reset(self) -> tuple[Observation, Info]:
        self.has_passed = False
        return super().reset()

    def move(self, move: str) -> float:
        before, self.position = self.position, self.position.moved(move)
        stages = self.position.has_key - before.has_key
        if self.position.cells[self.position.player] == DOOR and not self.has_passed:
            self.has_passed = True
            stages += 1
        reward = self.settings.step_reward + self.settings.stage_reward * stages
        return reward + self.settings.goal_reward * self.success

    def solution(self, position: MazeBoard) -> list[str]:
        return shortest_way(position)

    def reading(self, position: MazeBoard) -> str:
        return reading(position)

    def _successes(self) -> dict[str, float]:
        """Return the success so far, and the stages: key taken, door passed."""
        return super()._successes() | {"has_key": float(self.position.has_key), "has_passed": float(self.has_passed)}
