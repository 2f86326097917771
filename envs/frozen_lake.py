"""FrozenLake over several turns, shown as an image or as text, on firm or slippery ice.

A sample's metadata holds {"seed": n, "split": "train" | "heldout" (optional)}, from which its lake is drawn. Settings
have Gymnasium's names where it has them.
"""

from __future__ import annotations

from random import Random
from typing import Any, Literal

from pydantic import Field

from envs.base import metadata_of, seed_of, setting
from envs.board_env import ANSWER_FORM, SIZE_TEXT, BoardEnv, BoardSettings, GridSize, sizes_of
from envs.board_env import random_response as random_response
from envs.boards.lake import TILES, Lake, LakeSpec, lake_of, make_lake, slipped
from envs.boards.lake_values import best_move, win_chance
from envs.boards.lake_words import reading
from envs.boards.walks import shortest_way
from envs.env_settings import read_settings
from envs.reasoning.board_facts import BoardFacts
from envs.reasoning.forms import form_words
from envs.reasoning.turns import Result, reasoned_step
from envs.reasoning.word_rewards import ReasoningSettings

SLIPPERY = "The ice is slippery: a move may take you to its left or right instead. "
SYSTEM_PROMPT = (
    "Cross the frozen lake: walk to the red flag. You are the green player. Who walks into a dark hole has lost. "
)
_SYMBOLS = "You are P. _ is ice. Who walks into a hole O has lost (X); √ is you at the goal. "
TEXT_PROMPT = f"Cross the frozen lake: walk to the goal G. {_SYMBOLS}"
KINDS = ("goal", "hole")  # of things that relations are told of


class FrozenLakeSettings(BoardSettings, ReasoningSettings):
    grid_size: GridSize = Field((4, 4), description=SIZE_TEXT)
    hole_chance: float = Field(0.2, ge=0, lt=1, description="of each cell but start and goal")
    start: Literal["random", "corner"] = Field(
        "random", description="start and goal: random cells, or the upper left and the lower right corner"
    )
    desc: tuple[str, ...] = Field(
        (), description='one map for all samples, in letters S, F, H and G, such as ["SFF", "FHF", "FFG"]'
    )
    is_slippery: bool = Field(False, description="whether a move may slide to either side")
    success_rate: float = Field(
        1 / 3,
        gt=0,
        le=1,
        description="slippery ice: how often a move goes where it should; each side has half of the rest",
    )
    reward_schedule: tuple[float, float, float] = Field(
        (1.0, 0.0, 0.0), description="rewards of reaching the goal, of falling into a hole, and of any other move"
    )

    def spec(self, split: str = "") -> LakeSpec:
        size, corners = sizes_of(self.grid_size), self.start == "corner"
        return LakeSpec(size, self.hole_chance, corners, self.min_solution, self.max_solution, split)


SETTINGS = FrozenLakeSettings


def system_prompt(args: Any = None) -> str:
    """Return the system prompt for the render mode, the ice and the form of answers in `args`."""
    is_text = setting(args, "render_mode", "vision") == "text"
    shown = f"{TEXT_PROMPT if is_text else SYSTEM_PROMPT}{SLIPPERY if setting(args, 'is_slippery', False) else ''}"
    if setting(args, "reasoning", "none") == "none":
        return f"{shown}{ANSWER_FORM}"
    settings = read_settings(FrozenLakeSettings, None, args)
    symbols = f"In symbols: the goal is G. {_SYMBOLS}" if settings.writes_grids else "The flag is the goal. "
    symbols = "" if is_text else symbols
    form = form_words(settings.reasoning, settings.state_language, settings.max_actions_per_step, KINDS)
    return f"{shown}{symbols.rstrip()}\n{form}"


def build_env(sample: Any = None, args: Any = None, **_: Any) -> FrozenLakeEnv:
    """Return the environment of a sample, or of seed 0 without a sample. Raise ValueError for settings that allow no
    lake, and for a sample without a seed."""
    settings = read_settings(FrozenLakeSettings, sample, args)
    seed, split = seed_of(sample), metadata_of(sample).get("split", settings.split)
    lake = lake_of(settings.desc) if settings.desc else make_lake(seed, settings.spec(split))
    return FrozenLakeEnv(lake, settings, seed)


def facts(lake: Lake) -> BoardFacts:
    """Return what a description of a lake is compared with."""
    goal, holes = divmod(lake.goal, lake.width), [divmod(cell, lake.width) for cell in lake.holes]
    symbols = "".join(TILES.symbols[code] for code in lake.codes())
    return BoardFacts.of(lake.width, symbols, divmod(lake.player, lake.width), {"goal": [goal], "hole": holes})


class FrozenLakeEnv(BoardEnv[Lake]):
    """One episode: it starts at `board`; `position` is the current lake. `seed` decides where moves slip."""

    settings: FrozenLakeSettings
    tiles = TILES

    def __init__(self, board: Lake, settings: FrozenLakeSettings, seed: int = 0) -> None:
        self.seed, self._rate = seed, settings.success_rate if settings.is_slippery else 1.0
        super().__init__(board, settings)

    def reset(self) -> Any:
        self._slips = Random(f"{self.seed} slips")
        return super().reset()

    def step(self, response_text: str) -> Result:
        return reasoned_step(response_text, super().step, lambda: facts(self.position), self.settings)[0]

    def move(self, move: str) -> float:
        if self.settings.is_slippery:
            move = slipped(self._slips, move, self._rate)
        self.position = self.position.moved(move)
        goal, hole, other = self.settings.reward_schedule
        return goal if self.position.solved else hole if self.position.over else other

    def solution(self, position: Lake) -> list[str]:
        return shortest_way(position)

    def reading(self, position: Lake) -> str:
        return reading(position)

    def best_response(self) -> str:
        """Return the best answer from here; on slippery ice one move of the best play in the moves that are left."""
        if not self.settings.is_slippery or self.position.over:
            return super().best_response()
        return f"<answer>{best_move(self.position, self._rate, self.settings.max_steps - self.num_steps)}</answer>"

    def _successes(self) -> dict[str, float]:
        """Return the success so far; with diagnostics on slippery ice also the best play's chance of it."""
        if not (self.settings.diagnostics and self.settings.is_slippery):
            return super()._successes()
        return super()._successes() | {"best_success": win_chance(self.board, self._rate, self.settings.max_steps)}
