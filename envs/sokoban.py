"""Sokoban over several turns, shown as an image or as text.

A sample's metadata holds either {"seed": n, "split": "train" | "heldout" (optional)} or {"env_config": {...}} with the
fields of the public dataset. Settings: the defaults, overridden by `args`, overridden by the sample's env_config.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from envs.answer_tags import answer_in, thinks
from envs.base import Env, Info, Observation, metadata_of, seed_of, setting
from envs.board_env import ANSWER_FORM, SIZE_TEXT, GridSize, length_classes, observation_of, parse_actions, sizes_of
from envs.board_env import random_response as random_response
from envs.boards.board import SYMBOLS, TARGET, Board, board_from_config
from envs.boards.board_images import TILES
from envs.boards.board_words import moves_with_states, reading
from envs.boards.generate import BoardSpec, make_board
from envs.boards.solver import optimal_first_moves, solve
from envs.env_settings import read_settings
from envs.reasoning.board_facts import BoardFacts
from envs.reasoning.forms import form_words
from envs.reasoning.turns import reasoned_step
from envs.reasoning.word_rewards import ReasoningSettings

_PICTURE = (
    "Solve Sokoban: push every yellow box onto a red target. You are the green player. Brown cells are walls, dark "
    "cells are floor."
)
_SYMBOLS = "You are P (S on a target). # is a wall, _ is floor, √ is a box on a target."
_TEXT = f"Solve Sokoban: push every box X onto a target O. {_SYMBOLS}"
_RULES = "You push a box by walking into it; you cannot pull, nor push two boxes or into a wall."
SYSTEM_PROMPT = f"{_PICTURE} {_RULES} {ANSWER_FORM}"
TEXT_PROMPT = f"{_TEXT} {_RULES} {ANSWER_FORM}"
KINDS = ("box", "target")  # of things that relations are told of
STEP_REWARD, BLOCKED_REWARD, ON_TARGET_REWARD, OFF_TARGET_REWARD, SUCCESS_BONUS = 0.01, -0.05, 1.0, -0.5, 5.0
LOST = 20  # moves counted for a position without a solution


class SokobanSettings(ReasoningSettings):
    render_mode: Literal["vision", "text"] = Field("vision", description="how a board is shown: vision or text")
    pixels_per_cell: int = Field(64, description="side of a cell in the picture, 8 to 256")
    grid_size: GridSize = Field((6, 6), description=SIZE_TEXT)
    num_boxes: int | list[int] = Field(1, description="or a list, of which each board draws one")
    boards: Literal["random", "reverse_played"] = Field(
        "random",
        description=(
            "how boards are drawn from seeds: things at random cells, or as gym-sokoban draws them, by playing "
            "backwards from the solution in a carved room"
        ),
    )
    wall_chance: float = Field(0.05, description="random boards: of each inner cell, from 0 to below 1")
    max_steps: int = Field(100, ge=1, description="moves of an episode")
    max_actions_per_step: int = Field(3, ge=1, description="moves of one turn; further moves in an answer are ignored")
    min_solution: int = Field(1, description="moves of the shortest solution, at least")
    max_solution: int = Field(1_000_000, description="the same, at most")
    split: Literal["", "train", "heldout"] = Field(
        "", description="which part the boards come from; a sample's own split overrides it"
    )
    diagnostics: bool = Field(
        False, description="also measures success by solution length, and what the model wrote about the board"
    )
    hints: bool = Field(False, description="a teacher is told the next moves of a shortest solution")
    off_target_reward: float = Field(
        OFF_TARGET_REWARD,
        description=(
            "reward of a push that moves a box off its target; above -1, pushing a box off and on again pays each time"
        ),
    )
    rewards: Literal["shaped", "outcome"] = Field(
        "shaped",
        description="shaped: of moves, success and the boxes' distances; outcome: 1 in the turn of the success",
    )
    progress_reward: float = Field(
        0.0,
        json_schema_extra={"turn_rewards": True},
        description="vtrace, ppo: shaping: added to a turn's reward for each move that the shortest solution shrank by",
    )

    @model_validator(mode="after")
    def _fits(self) -> SokobanSettings:
        if self.grid_size == [] or self.num_boxes == []:
            raise ValueError("grid_size and num_boxes must not be empty")
        if self.min_solution > self.max_solution:
            raise ValueError(f"min_solution = {self.min_solution} is above max_solution = {self.max_solution}")
        return self

    def spec(self, split: str = "") -> BoardSpec:
        boxes = self.num_boxes
        numbers = (boxes,) if isinstance(boxes, int) else tuple(boxes)
        lengths, backwards = (self.min_solution, self.max_solution), self.boards == "reverse_played"
        return BoardSpec(sizes_of(self.grid_size), numbers, self.wall_chance, *lengths, split, backwards)


SETTINGS = SokobanSettings


def system_prompt(args: Any = None) -> str:
    """Return the system prompt for the render mode and the form of answers in `args`."""
    is_text = setting(args, "render_mode", "vision") == "text"
    if setting(args, "reasoning", "none") == "none":
        return TEXT_PROMPT if is_text else SYSTEM_PROMPT
    settings = read_settings(SokobanSettings, None, args)
    symbols = f" In symbols: a box is X, a target O. {_SYMBOLS}" if settings.writes_grids else ""
    form = form_words(settings.reasoning, settings.state_language, settings.max_actions_per_step, KINDS)
    return f"{_TEXT if is_text else _PICTURE + symbols} {_RULES}\n{form}"


def build_env(sample: Any = None, args: Any = None, **_: Any) -> SokobanEnv:
    """Return the environment of a sample, or of seed 0 without a sample. Raise ValueError for settings that allow no
    board, and for a sample with neither a seed nor a board."""
    metadata = metadata_of(sample)
    config = metadata.get("env_config") or {}
    settings = read_settings(SokobanSettings, sample, args)
    if config.get("initial_base_grid") is not None:
        return SokobanEnv(board_from_config(config), settings)
    spec = settings.spec(metadata.get("split", settings.split))
    return SokobanEnv(make_board(seed_of(sample), spec), settings)


def episode_reward(env: SokobanEnv) -> float:
    """Return the mean of the turns' rewards + 5 for success + the decrease of the boxes' distance to their targets, or
    with rewards = "outcome" 1 for success; and the rewards of what was written."""
    if env.settings.rewards == "outcome":
        return float(env.success) + env.words_reward
    mean = sum(env.turn_rewards) / len(env.turn_rewards) if env.turn_rewards else 0.0
    return mean + SUCCESS_BONUS * env.success + (env.start_distance - env.distance()) + env.words_reward


def facts(board: Board) -> BoardFacts:
    """Return what a description of a board is compared with."""
    boxes, targets = ([divmod(cell, board.width) for cell in cells] for cells in (board.boxes, board.targets))
    rows = "".join(SYMBOLS[code] for code in board.codes())
    return BoardFacts.of(board.width, rows, divmod(board.player, board.width), {"box": boxes, "target": targets})


def move_reward(before: Board, after: Board, off_target: float = OFF_TARGET_REWARD) -> float:
    """Return the reward of one move: a walk, a push, or a blocked move."""
    if after is before:
        return BLOCKED_REWARD
    reward = STEP_REWARD
    if after.boxes is not before.boxes:  # a push: the box was where the player is now
        (pushed,) = set(after.boxes) - set(before.boxes)
        reward += ON_TARGET_REWARD * (after.cells[pushed] == TARGET)
        reward += off_target * (after.cells[after.player] == TARGET)
    return reward


class SokobanEnv(Env):
    """One episode: it starts at `board`; `position` is the current board."""

    def __init__(self, board: Board, settings: SokobanSettings) -> None:
        self.board, self.settings = board, settings
        self._classes = length_classes(len(optimal_first_moves(board))) if settings.diagnostics else ()
        self.reset()

    def reset(self) -> tuple[Observation, Info]:
        self.position = self.board
        self.num_steps = 0
        self.turn_rewards: list[float] = []  # of the moves
        self.words_reward = 0.0
        self.success = self.board.solved
        self.start_distance = self.distance()
        return self._observation([]), {
            "distance": self.start_distance,
            "metrics": self._successes(),
            "state": (self.position.player, self.position.boxes),
        } | self._hint()

    def step(self, response_text: str) -> tuple[Observation, bool, Info]:
        result, gained = reasoned_step(response_text, self._step, lambda: facts(self.position), self.settings)
        self.words_reward += gained
        return result

    def _step(self, response_text: str) -> tuple[Observation, bool, Info]:
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
        if self.settings.rewards == "outcome":
            reward = float(self.success)
        self.turn_rewards.append(reward)
        turn_metrics |= {"action_is_valid": bool(actions), "action_is_effective": moved > 0}
        info = {
            "raw_action": response_text,
            "parsed_actions": actions,
            "reward": reward + self.settings.progress_reward * (before - self._moves_left()),
            "metrics": {"turn_metrics": turn_metrics, "traj_metrics": self._successes()},
            "state": (self.position.player, self.position.boxes),
        }
        return self._observation(actions), done, info | self._hint()

    def _hint(self) -> dict[str, str]:
        """Return the info's hint: the next moves of a shortest solution; nothing without one."""
        moves = optimal_first_moves(self.position) if self.settings.hints else []
        return {"hint": f"Next moves: {', '.join(moves[: self.settings.max_actions_per_step])}"} if moves else {}

    def best_response(self) -> str:
        """Return an answer with the next moves of the solver's."""
        moves = optimal_first_moves(self.position) or solve(self.position) or []
        return f"<answer>{', '.join(moves[: self.settings.max_actions_per_step])}</answer>"

    def _successes(self) -> dict[str, bool]:
        """Return the success so far, also by the classes of the board's length."""
        return {"success": self.success} | {f"success_{name}": self.success for name in self._classes}

    def distance(self) -> float:
        """Return the sum, over the boxes, of the Manhattan distance to the nearest target that no earlier box has
        taken. Between equally near targets the iteration order of the set decides, as in the recorded episodes; for
        tuples of integers this order is the same in every process.
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
        """Return the length of the shortest solution from here, at most LOST; LOST if there is none. 0 without
        shaping."""
        if not self.settings.progress_reward or self.success:
            return 0
        return min(len(optimal_first_moves(self.position)) or LOST, LOST)

    def _move(self, move: str) -> tuple[float, bool]:
        """Make a move; return its reward and whether anything moved."""
        before, self.position = self.position, self.position.moved(move)
        self.success = self.position.solved
        return move_reward(before, self.position, self.settings.off_target_reward), self.position is not before

    def _accuracies(self, response: str, actions: list[str]) -> dict[str, bool]:
        """Return whether <think> describes the board correctly, and whether <answer> describes the states that its
        moves lead to. Call it before the moves are made."""
        seen, answer = thinks(response, reading(self.position)), answer_in(response)
        expected = moves_with_states(self.position, actions)
        foreseen = answer is not None and answer.split() == expected.split()
        turn = len(self.turn_rewards) + 1
        return {"read_accuracy": seen, f"read_accuracy_turn_{turn}": seen, "foresight_accuracy": foreseen}

    def _observation(self, actions: list[str]) -> Observation:
        board = self.position
        if self.settings.render_mode == "text":
            return observation_of(board.text(), actions)
        return observation_of(TILES.render(board, self.settings.pixels_per_cell), actions)
