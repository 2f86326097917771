"""What all games on a board keep: the contract, twins of image and text, seeds, the best play, measures, settings."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from envs import frozen_lake, maze, sliding_puzzle
from envs.check import check_env
from envs.loader import check_settings
from shared.types import Sample

GAMES: dict[str, Any] = {"envs.frozen_lake": frozen_lake, "envs.maze": maze, "envs.sliding_puzzle": sliding_puzzle}
VARIANTS = [
    ("envs.frozen_lake", {}),
    ("envs.frozen_lake", {"is_slippery": True, "diagnostics": True, "max_steps": 12}),
    ("envs.frozen_lake", {"desc": ["SFFF", "FHFH", "FFFH", "HFFG"]}),
    ("envs.maze", {}),
    ("envs.maze", {"walls": [1, 4], "grid_size": [[5, 7], [7, 5]], "step_reward": -0.01}),
    ("envs.sliding_puzzle", {}),
    ("envs.sliding_puzzle", {"grid_size": [2, 3], "scramble": [3, 30]}),
]
games = pytest.mark.parametrize("name", GAMES)
variants = pytest.mark.parametrize(("name", "args"), VARIANTS, ids=str)


def env_of(name: str, seed: int, **args: Any) -> Any:
    return GAMES[name].build_env(Sample(str(seed), metadata={"seed": seed}), args)


@variants
@pytest.mark.parametrize("mode", ["vision", "text"])
def test_a_game_keeps_the_contract(name: str, args: dict[str, Any], mode: str) -> None:
    for seed in range(3):
        check = check_env(name, {**args, "render_mode": mode, "max_turns": 8}, seed)
        assert check.problems == []
        assert not [note for note in check.notes if "SYSTEM_PROMPT" in note or "every reward is 0" in note]


@variants
def test_image_and_text_show_the_same_position_after_every_turn(name: str, args: dict[str, Any]) -> None:
    """Positions with the same text have the same picture, and the other way round."""
    texts: dict[bytes, str] = {}
    pictures: dict[str, bytes] = {}
    for seed in range(8):
        seen, told = (env_of(name, seed, **args, render_mode=mode, pixels_per_cell=16) for mode in ("vision", "text"))
        rng = Random(seed)
        shown, said = seen.reset()[0], told.reset()[0]
        for _ in range(6):
            assert seen.position == told.position
            (image,) = shown["multi_modal_data"]["image"]
            assert "multi_modal_data" not in said
            pixels, text = repr(image.size).encode() + image.tobytes(), said["obs_str"].split("\nValid")[0]
            assert texts.setdefault(pixels, text) == text
            assert pictures.setdefault(text, pixels) == pixels
            answer = GAMES[name].random_response(rng)
            (shown, done, _), (said, _, _) = seen.step(answer), told.step(answer)
            if done:
                break
    assert len(texts) > 4


@games
def test_the_best_response_wins_every_game(name: str) -> None:
    for seed in range(20):
        env = env_of(name, seed)
        turns, length = 0, len(env.solution(env.position))
        assert length > 0 and not env.success
        done = False
        while not done:
            _, done, info = env.step(env.best_response())
            turns += 1
        assert env.success and env.num_steps == length and turns == -(-length // 3)
        assert info["metrics"]["traj_metrics"]["success"] == 1.0


@games
def test_a_seed_gives_its_game_and_reset_begins_it_again(name: str) -> None:
    assert env_of(name, 5).board == env_of(name, 5).board
    assert len({env_of(name, seed).board for seed in range(40)}) > 30
    env = env_of(name, 1, render_mode="text")
    first = env.reset()
    answers = [GAMES[name].random_response(Random(seed)) for seed in range(4)]
    played = [env.step(answer) for answer in answers]
    assert env.reset() == first
    assert [env.step(answer) for answer in answers] == played


@games
def test_what_was_read_is_measured_with_diagnostics_alone(name: str) -> None:
    env = env_of(name, 3, diagnostics=True)
    right = f"<think> {env.reading(env.position)}</think><answer> up</answer>"
    metrics = env.step(right)[2]["metrics"]
    assert metrics["turn_metrics"]["read_accuracy"] is True
    assert any(metric.startswith("success_") for metric in metrics["traj_metrics"])
    assert env_of(name, 3, diagnostics=True).step("<think> 0</think>")[2]["metrics"]["turn_metrics"] == {
        "read_accuracy": False,
        "action_is_valid": False,
        "action_is_effective": False,
    }
    metrics = env_of(name, 3).step(right)[2]["metrics"]
    assert "read_accuracy" not in metrics["turn_metrics"]
    assert not any(metric.startswith("success_") for metric in metrics["traj_metrics"])


@games
def test_an_episode_ends_after_its_last_move(name: str) -> None:
    env = env_of(name, 3, max_steps=2, min_solution=4)
    best = env.best_response()
    _, done, info = env.step(best)
    assert done and env.num_steps == 2 and len(info["parsed_actions"]) == 3


@games
def test_the_prompt_fits_the_mode(name: str) -> None:
    drawn, told = (GAMES[name].system_prompt({"render_mode": mode}) for mode in ("vision", "text"))
    assert drawn != told and drawn.endswith("</answer>") and told.endswith("</answer>")


@pytest.mark.parametrize(
    ("name", "args", "word"),
    [
        *((name, {"render_mode": "video"}, "render_mode") for name in GAMES),
        *((name, {"pixels_per_cell": 1}, "pixels_per_cell") for name in GAMES),
        *((name, {"split": "test"}, "split") for name in GAMES),
        *((name, {"min_solution": 9, "max_solution": 3}, "min_solution = 9") for name in GAMES),
        *((name, {"min_solution": 900}, "relax size") for name in GAMES),
        *((name, {"grid_size": [1, 1]}, "grid_size 1x1") for name in GAMES),
        *((name, {"grid_size": []}, "grid_size") for name in GAMES),
        ("envs.frozen_lake", {"hole_chance": 1}, "hole_chance"),
        ("envs.frozen_lake", {"success_rate": 0}, "success_rate"),
        ("envs.frozen_lake", {"desc": ["SF", "FF"]}, "one S and one G"),
        ("envs.frozen_lake", {"reward_schedule": [1]}, "reward_schedule"),
        ("envs.maze", {"grid_size": [4, 5]}, "odd numbers"),
        ("envs.maze", {"walls": 0}, "the door is in the first"),
        ("envs.maze", {"walls": []}, "walls"),
        ("envs.sliding_puzzle", {"grid_size": [6, 6]}, "25 cells at most"),
        ("envs.sliding_puzzle", {"scramble": 0}, "scramble"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(name: str, args: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word) as caught:
        GAMES[name].build_env(None, args)
    assert "\n" not in str(caught.value)


@games
def test_a_setting_that_there_is_not_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ValueError, match="render_mod"):
        check_settings(GAMES[name], {"render_mod": "text"}, "--env.args")
