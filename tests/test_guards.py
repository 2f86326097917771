"""Guards of a run: what they count, when they speak, and what they stop."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from learner.guards.guards import Guards
from learner.guards.variance import VarianceGuard, varies
from shared.log import get_logger
from shared.types import Ending, Group, Turn
from tests.support.episodes import learner_config, random_trajectory
from tests.support.runs import command, metrics, places, refused


@pytest.fixture
def episode(spec):
    """One episode of a reward that is given, in one turn; `more` are fields of it."""
    base = random_trajectory(spec, 0, turns=1, with_images=False)

    def make(reward: float, **more):
        turns = tuple(Turn(turn.start, turn.end, reward) for turn in base.turns)
        return replace(base, reward=reward, turns=turns, **more)

    return make


def group(*episodes) -> Group:
    return Group("g", "a", episodes)


def test_with_one_episode_a_group_the_step_is_what_varies(episode) -> None:
    config = learner_config()
    assert varies([group(episode(1.0)), group(episode(0.0))], config)
    assert not varies([group(episode(1.0)), group(episode(1.0))], config)
    failed = episode(0.0, ending=Ending.ENV_ERROR)
    assert not varies([group(episode(1.0)), group(failed)], config)


@pytest.mark.parametrize("objective", ["vtrace", "grpo"])
def test_with_more_episodes_a_group_only_differences_inside_groups_count(episode, objective) -> None:
    config = learner_config(objective=objective, group_size=2)
    assert not varies([group(episode(1.0), episode(1.0)), group(episode(0.0), episode(0.0))], config)
    assert varies([group(episode(1.0), episode(1.0)), group(episode(0.0), episode(0.5))], config)


def test_rewards_of_turns_vary_for_a_critic_that_sees_them_and_penalties_too(spec, episode) -> None:
    first = random_trajectory(spec, 1, turns=2, with_images=False)
    rewards = [(1.0, 0.0), (0.0, 1.0)]
    turns = [tuple(Turn(t.start, t.end, r) for t, r in zip(first.turns, pair, strict=True)) for pair in rewards]
    pair = [group(replace(first, reward=1.0, turns=each)) for each in turns]
    assert varies(pair, learner_config(turn_rewards=True))
    assert not varies(pair, learner_config(turn_rewards=False))
    cut = [group(episode(1.0)), group(episode(1.0, ending=Ending.OUT_OF_TOKENS))]
    assert not varies(cut, learner_config())
    assert varies(cut, learner_config(overlong="penalise"))


def test_the_line_comes_once_and_again_every_20_steps_with_endings_and_an_example(episode) -> None:
    guard = VarianceGuard(learner_config())
    text = "x" * 500 + "\nthe model's\nlast words"
    same = [group(episode(0.25, text=text)), group(episode(0.25, ending=Ending.OUT_OF_TOKENS))]
    said = [guard.step(same) for _ in range(41)]
    assert [number for number, line in enumerate(said, 1) if line] == [20, 40]
    line = said[19]
    assert "\n" not in line and len(line) < 900
    for part in ("20 steps", "every reward was 0.25", "completed 50 %", "out_of_tokens 50 %", "the model's last words"):
        assert part in line
    assert guard.step([group(episode(0.0)), group(episode(1.0))]) == "" and guard.num_steps == 0
    assert [bool(guard.step(same)) for _ in range(20)] == [False] * 19 + [True]


def test_steps_of_one_episode_are_compared_with_one_another(episode) -> None:
    guard = VarianceGuard(learner_config())
    counts = []
    for reward in (1.0, 1.0, 0.0, 0.0):
        guard.step([group(episode(reward))])
        counts.append(guard.num_steps)
    assert counts == [1, 2, 0, 1]


def test_it_says_when_no_episode_could_be_trained_on(episode) -> None:
    guard = VarianceGuard(learner_config(stop_without_variance=1))
    line = guard.step([group(episode(0.0, ending=Ending.ENV_ERROR, error="the board is lost"))])
    assert "no episode could be trained on" in line and "env_error 100 %" in line and "the board is lost" in line


def test_the_run_ends_after_the_steps_that_the_recipe_names(episode) -> None:
    guards = Guards(learner_config(stop_without_variance=3), speaks=True)
    same = [group(episode(1.0))]
    assert [guards.after_step(same)["guard/steps_without_variance"] for _ in range(2)] == [1.0, 2.0]
    with pytest.raises(ValueError, match=r"for 3 steps.*learner.stop_without_variance = 3"):
        guards.after_step(same)


def test_only_one_rank_speaks(episode, caplog, monkeypatch) -> None:
    monkeypatch.setattr(get_logger("learner"), "propagate", True)
    for speaks in (True, False):
        guards = Guards(learner_config(), speaks=speaks)
        for _ in range(20):
            guards.after_step([group(episode(1.0))])
    assert len([record for record in caplog.records if "variance of reward" in record.message]) == 1


@pytest.mark.slow
def test_a_run_of_equal_rewards_ends_with_one_line_that_shows_an_example(tmp_path: Path) -> None:
    (tmp_path / "alike.py").write_text("def reward(played):\n    return 0.5\n")
    fields = {"env.reward": tmp_path / "alike.py:reward", "eval.samples": 0, "learner.stop_without_variance": 3}
    line, _ = refused(command("local", places(tmp_path, **fields)), codes=range(1, 256))
    assert "for 3 steps" in line and "every reward was 0.5" in line and " %; an example: " in line, line
    assert "colour" in line.partition("an example: ")[2].lower(), line
    assert [row["guard/steps_without_variance"] for row in metrics(tmp_path)] == [1.0, 2.0]
