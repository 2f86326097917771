"""The Sokoban environment against recorded episodes, and on its own."""

from __future__ import annotations

import json
from random import Random

import pytest

from envs import sokoban
from envs.board_env import parse_actions, random_response
from envs.boards.solver import optimal_first_moves
from envs.sokoban import LOST, STEP_REWARD, build_env, episode_reward
from shared.types import Sample
from tests.support.paths import DATA

EPISODES = [json.loads(line) for line in (DATA / "sokoban.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("episode", EPISODES, ids=lambda episode: str(episode["id"]))
def test_every_recorded_episode_is_replayed_to_the_letter(episode):
    env = build_env(Sample("x", metadata={"env_config": episode["env_config"]}), {"pixels_per_cell": 16})
    observation, _ = env.reset()
    assert env.start_distance == episode["dist0"]
    assert observation["obs_str"] == episode["initial_obs"]
    assert env.position.text() == episode["initial_text"]
    for turn in episode["turns"]:
        observation, done, info = env.step(turn["response"])
        assert info["parsed_actions"] == turn["parsed_actions"]
        assert info["reward"] == pytest.approx(turn["reward"], abs=1e-12)
        assert (done, env.success) == (turn["done"], turn["success"])
        metrics = info["metrics"]
        assert metrics["traj_metrics"]["success"] == turn["success"]
        assert metrics["turn_metrics"]["action_is_valid"] == turn["valid"]
        assert metrics["turn_metrics"]["action_is_effective"] == turn["effective"]
        assert env.position.env_config()["initial_player"] == list(turn["player"])
        assert env.position.env_config()["initial_boxes"] == sorted(map(list, turn["boxes"]))
        assert observation["obs_str"] == turn["obs_str"]
        assert len(observation.get("multi_modal_data", {}).get("image", [])) == turn["images"]
    assert env.position.text() == episode["final_text"]
    assert env.distance() == episode["dist1"]
    assert episode_reward(env) == pytest.approx(episode["total_reward"], abs=1e-9)


def test_the_same_seed_gives_the_same_board_and_another_seed_another():
    def board(seed):
        return build_env(Sample("x", metadata={"seed": seed})).board

    assert board(5) == board(5)
    assert len({board(seed) for seed in range(50)}) > 45


def test_reset_starts_the_same_episode_again():
    env = build_env(Sample("x", metadata={"seed": 1}), {"render_mode": "text"})
    first, _ = env.reset()
    for _ in range(5):
        env.step(random_response(Random(0)))
    again, _ = env.reset()
    assert again == first
    assert env.turn_rewards == []


def test_images_have_the_asked_size_and_the_stated_colours_and_show_each_move():
    env = build_env(Sample("x", metadata={"seed": 3}), {"pixels_per_cell": 32, "grid_size": [6, 8]})
    observation, _ = env.reset()
    message = env.format_observation(observation)
    assert message["role"] == "user"
    assert [part["type"] for part in message["content"]] == ["image", "text"]
    before = observation["multi_modal_data"]["image"][0]
    assert (before.mode, before.size) == ("P", (8 * 32, 6 * 32))
    seen = [before.convert("RGB")]
    assert seen[0].getpixel((2, 2)) == (176, 80, 50)
    assert {(8, 8, 8), (233, 184, 47)} <= {colour for _, colour in seen[0].getcolors()}
    for move in ("up", "down", "left", "right"):
        observation, _, info = env.step(f"<answer>{move}</answer>")
        if info["metrics"]["turn_metrics"]["action_is_effective"]:
            seen.append(observation["multi_modal_data"]["image"][0].convert("RGB"))
            assert seen[-1].tobytes() != seen[-2].tobytes()
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ({"render_mode": "video"}, "render_mode"),
        ({"grid_size": [3, 3]}, "grid_size"),
        ({"pixels_per_cell": 1}, "pixels"),
        ({"split": "test"}, "split"),
        ({"num_boxes": 0}, "num_boxes"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(args, word):
    with pytest.raises(ValueError, match=word) as caught:
        build_env(None, args)
    assert "\n" not in str(caught.value)


def test_the_prompt_fits_the_mode():
    assert "green" in sokoban.system_prompt({})
    assert "√" in sokoban.system_prompt({"render_mode": "text"})


def test_only_the_first_answer_block_counts():
    assert parse_actions("<answer>up</answer><answer>down</answer>", 3) == ["up"]
    assert parse_actions("<answer>\nUP;down left right</answer>", 3) == ["up", "down", "left"]


def test_the_progress_reward_pays_for_each_move_that_the_solution_shrank_and_nothing_else_changes() -> None:
    sample = Sample("x", metadata={"seed": 5})
    plain, shaped = build_env(sample, {}), build_env(sample, {"progress_reward": 0.1})
    rng = Random(0)
    for _ in range(8):
        before = len(optimal_first_moves(shaped.position)) or LOST
        response = random_response(rng)
        _, _, plain_info = plain.step(response)
        _, _, info = shaped.step(response)
        after = 0 if shaped.success else len(optimal_first_moves(shaped.position)) or LOST
        assert info["reward"] == pytest.approx(plain_info["reward"] + 0.1 * (before - after))
    assert episode_reward(plain) == episode_reward(shaped)


@pytest.mark.parametrize(("args", "pays"), [({}, True), ({"off_target_reward": -1.0}, False)])
def test_a_box_that_is_pushed_off_its_target_and_on_again_pays_where_that_costs_less_than_it_brings(args, pays) -> None:
    """Two boxes, one of which goes down on its target, to and fro; the other is never touched."""
    grid = [[0, 0, 0, 0, 0], [0, 1, 1, 1, 0], [0, 1, 2, 1, 0], [0, 1, 1, 2, 0], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0]]
    config = {"initial_base_grid": grid, "initial_boxes": [(2, 2), (2, 3)], "initial_player": (1, 2)}
    env = build_env(Sample("x", metadata={"env_config": config}), args)
    walk = sum(env.step(move)[2]["reward"] for move in ("down", "left", "down", "down", "right", "up"))
    assert env.position.boxes == env.board.boxes and not env.success
    assert (walk > 6 * STEP_REWARD + 0.1) == pays
