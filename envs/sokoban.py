"""Sokoban over several turns, seen as an image or as text.

A sample's metadata holds either {"seed": n, "split": "train" | "heldout" (optional)} or {"env_config": {...}} with the
fields of the public dataset. Settings, from weak to strong: the defaults, `args`, the sample's env_config.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any, Literal

from pydantic import Field, model_validator

from envs.base import Env, Info, Observation, metadata_of, seed_of, setting
from envs.boards.board import MOVES, TARGET, Board, board_from_config
from envs.boards.generate import BoardSpec, make_board
from envs.boards.reading import moves_with_states, reading
from envs.boards.render import render
from envs.boards.solver import optimal_first_moves
from envs.settings import EnvSettings, read_settings

_RULES = (
    "You push a box by walking into it; you cannot pull, nor push two boxes or into a wall. "
    "Answer with your next moves like this: <answer>up, left</answer>"
)
SYSTEM_PROMPT = (
    "Solve Sokoban: push every yellow box onto a red target. You are the green player. Brown cells are walls, dark "
    f"cells are floor. {_RULES}"
)
TEXT_PROMPT = (
    "Solve Sokoban: push every box X onto a target O. You are P (S on a target). # is a wall, _ is floor, √ is a box "
    f"on a target. {_RULES}"
)
STEP_REWARD, BLOCKED_REWARD, ON_TARGET_REWARD, OFF_TARGET_REWARD, SUCCESS_BONUS = 0.01, -0.05, 1.0, -0.5, 5.0
LOST = 20  # moves that a position beyond rescue counts as
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_SEPARATORS = re.compile(r"[,;\s]+")


class SokobanSettings(EnvSettings):
    render_mode: Literal["vision", "text"] = Field("vision", description="how a board is shown: vision or text")
    pixels_per_cell: int = Field(64, description="side of a cell in the picture, 8 to 256")
    grid_size: int | tuple[int, int] | list[tuple[int, int]] = Field(
        (6, 6), description="rows and columns, one number for both, or a list of pairs, of which each board draws one"
    )
    num_boxes: int | list[int] = Field(1, description="or a list, of which each board draws one")
    wall_chance: float = Field(0.05, description="of each inner cell, from 0 to below 1")
    max_steps: int = Field(100, ge=1, description="moves of an episode")
    max_actions_per_step: int = Field(3, ge=1, description="moves of a turn; what an answer has beyond is not made")
    min_solution: int = Field(1, description="moves of the shortest solution, at least")
    max_solution: int = Field(1_000_000, description="the same, at most")
    split: Literal["", "train", "heldout"] = Field("", description="boards of that part; a sample's own goes before")
    diagnostics: bool = Field(
        False, description="also measures success by solution length, and what the model wrote about the board"
    )
    off_target_reward: float = Field(
        OFF_TARGET_REWARD,
        description="of a push that takes a box off its target; above -1, a box pushed off and on again pays each time",
    )
    progress_reward: float = Field(
        0.0, description="shaping: added to a turn's reward for each move that the shortest solution shrank by"
    )

    @model_validator(mode="after")
    def _fits(self) -> SokobanSettings:
        if self.grid_size == [] or self.num_boxes == []:
            raise ValueError("grid_size and num_boxes must not be empty")
        if self.min_solution > self.max_solution:
            raise ValueError(f"min_solution = {self.min_solution} is above max_solution = {self.max_solution}")
        return self

    def spec(self, split: str = "") -> BoardSpec:
        size, boxes = self.grid_size, self.num_boxes
        sizes = [(size, size)] if isinstance(size, int) else [size] if isinstance(size, tuple) else size
        numbers = (boxes,) if isinstance(boxes, int) else tuple(boxes)
        return BoardSpec(tuple(sizes), numbers, self.wall_chance, self.min_solution, self.max_solution, split)


SETTINGS = SokobanSettings


def system_prompt(args: Any = None) -> str:
    """The prompt of the chosen mode."""
    return TEXT_PROMPT if setting(args, "render_mode", "vision") == "text" else SYSTEM_PROMPT


def build_env(sample: Any = None, args: Any = None, **_: Any) -> SokobanEnv:
    """The environment of a sample; without a sample, that of seed 0. ValueError on settings that admit no board, and
    for a sample that has neither a seed nor a board."""
    metadata = metadata_of(sample)
    config = metadata.get("env_config") or {}
    settings = read_settings(SokobanSettings, sample, args)
    if config.get("initial_base_grid") is not None:
        return SokobanEnv(board_from_config(config), settings)
    spec = settings.spec(metadata.get("split", settings.split))
    return SokobanEnv(make_board(seed_of(sample), spec), settings)


def episode_reward(env: SokobanEnv) -> float:
    """Mean of the turns' rewards + 5 for success + how much nearer the boxes came to their targets."""
    mean = sum(env.turn_rewards) / len(env.turn_rewards) if env.turn_rewards else 0.0
    return mean + SUCCESS_BONUS * env.success + (env.start_distance - env.distance())


def parse_actions(text: str, limit: int) -> list[str]:
    """The first `limit` moves named in the first <answer> block, or in the whole text if there is none."""
    found = _ANSWER.search(text)
    words = _SEPARATORS.split((found.group(1) if found else text).lower())
    return [word for word in words if word in MOVES][:limit]


def move_reward(before: Board, after: Board, off_target: float = OFF_TARGET_REWARD) -> float:
    """Of a walk, a push, or a move that led nowhere."""
    if after is before:
        return BLOCKED_REWARD
    reward = STEP_REWARD
    if after.boxes is not before.boxes:  # the box was where the player is now
        (pushed,) = set(after.boxes) - set(before.boxes)
        reward += ON_TARGET_REWARD * (after.cells[pushed] == TARGET)
        reward += off_target * (after.cells[after.player] == TARGET)
    return reward


def length_classes(moves: int) -> tuple[str, ...]:
    """The classes of boards whose shortest solution has `moves` moves."""
    if moves <= 3:
        return ("1_3",)
    return ("4_6" if moves <= 6 else "7_9" if moves <= 9 else "10_up", "long")


def random_response(rng: Random) -> str:
    """What a policy that knows only the format would answer."""
    moves = [MOVES[rng.randrange(4)] for _ in range(rng.randint(1, 3))]
    return f"<answer>{', '.join(moves)}</answer>"


class SokobanEnv(Env):
    """One episode, which starts at `board` and has come to `position`."""

    def __init__(self, board: Board, settings: SokobanSettings) -> None:
        self.board, self.settings = board, settings
        self._classes = length_classes(len(optimal_first_moves(board))) if settings.diagnostics else ()
        self.reset()

    def reset(self) -> tuple[Observation, Info]:
        self.position = self.board
        self.num_steps = 0
        self.turn_rewards: list[float] = []
        self.success = self.board.solved
        self.start_distance = self.distance()
        return self._observation([]), {"distance": self.start_distance}

    def step(self, response_text: str) -> tuple[Observation, bool, Info]:
        actions = parse_actions(response_text, self.settings.max_actions_per_step)
        reward, moved, done, before = 0.0, 0, False, self._moves_left()
        turn_metrics = self._accuracies(response_text, actions) if self.settings.diagnostics else {}
        for action in actions:
            gained, effective = self._move(action)
            reward += gained
            moved += effective
            self.num_steps += 1
            done = self.success or self.num_steps >= self.settings.max_steps
            if done:
                break
        self.turn_rewards.append(reward)
        turn_metrics |= {"action_is_valid": bool(actions), "action_is_effective": moved > 0}
        traj_metrics = {"success": self.success} | {f"success_{name}": self.success for name in self._classes}
        info = {
            "raw_action": response_text,
            "parsed_actions": actions,
            "reward": reward + self.settings.progress_reward * (before - self._moves_left()),
            "metrics": {"turn_metrics": turn_metrics, "traj_metrics": traj_metrics},
        }
        return self._observation(actions), done, info

    def distance(self) -> float:
        """Sum over the boxes of the Manhattan distance to the nearest target not yet taken by an earlier box.

        Between equally near targets the iteration order of the set decides, as in the recorded episodes; for tuples of
        integers that order is the same in every process.
        """
        width = self.board.width
        free = {divmod(target, width) for target in self.board.targets}
        total = 0
        for box in self.position.boxes:
            row, column = divmod(box, width)
            gap, nearest = min(
                ((abs(row - target[0]) + abs(column - target[1]), target) for target in free), key=lambda pair: pair[0]
            )
            total += gap
            if len(free) > 1:
                free.remove(nearest)
        return float(total)

    def _moves_left(self) -> int:
        """Length of the shortest solution from here, at most LOST; LOST where there is none. 0 without shaping."""
        if not self.settings.progress_reward or self.success:
            return 0
        return min(len(optimal_first_moves(self.position)) or LOST, LOST)

    def _move(self, move: str) -> tuple[float, bool]:
        """Walk or push; the reward and whether anything moved."""
        before, self.position = self.position, self.position.moved(move)
        self.success = self.position.solved
        return move_reward(before, self.position, self.settings.off_target_reward), self.position is not before

    def _accuracies(self, response: str, actions: list[str]) -> dict[str, bool]:
        """Whether <think> tells the board as it is, and <answer> what its moves lead to; to be called before them."""
        thought, answer = _THOUGHT.search(response), _ANSWER.search(response)
        seen = thought is not None and thought.group(1).split() == reading(self.position).split()
        told = moves_with_states(self.position, actions)
        foreseen = answer is not None and answer.group(1).split() == told.split()
        turn = len(self.turn_rewards) + 1
        return {"read_accuracy": seen, f"read_accuracy_turn_{turn}": seen, "foresight_accuracy": foreseen}

    def _observation(self, actions: list[str]) -> Observation:
        images, board = self.settings.render_mode == "vision", self.position
        grid = "(Refer to the image for the grid layout.)" if images else board.text()
        last = ", ".join(actions) or "None"
        ask = "Provide your next move(s) using Up, Down, Left, Right."
        text = f"[Observation]\n{grid}\nValid last actions: {last}\n{ask}"
        if not images:
            return {"obs_str": text}
        image = render(board.codes(), board.height, board.width, self.settings.pixels_per_cell)
        return {"obs_str": text, "multi_modal_data": {"image": [image]}}
