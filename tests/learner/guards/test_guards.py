"""Guards of a run: what they count, when they speak, and what they stop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from learner.batch.episodes import has_variance
from learner.checkpoints.best_checkpoint import Best
from learner.guards.divergence import braked, kl_of_a_step
from learner.guards.guards import Guards
from learner.guards.variance import VarianceGuard
from learner.training.guard_state import GuardState
from shared.config.recipe import Recipe
from shared.config.sections import EnvConfig, ModelConfig
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
    assert has_variance([group(episode(1.0)), group(episode(0.0))], config)
    assert not has_variance([group(episode(1.0)), group(episode(1.0))], config)
    failed = episode(0.0, ending=Ending.ENV_ERROR)
    assert not has_variance([group(episode(1.0)), group(failed)], config)


@pytest.mark.parametrize("objective", ["vtrace", "grpo"])
def test_with_more_episodes_a_group_only_differences_inside_groups_count(episode, objective) -> None:
    config = learner_config(objective=objective, group_size=2)
    assert not has_variance([group(episode(1.0), episode(1.0)), group(episode(0.0), episode(0.0))], config)
    assert has_variance([group(episode(1.0), episode(1.0)), group(episode(0.0), episode(0.5))], config)


def test_rewards_of_turns_vary_for_a_critic_that_sees_them_and_penalties_too(spec, episode) -> None:
    first = random_trajectory(spec, 1, turns=2, with_images=False)
    rewards = [(1.0, 0.0), (0.0, 1.0)]
    turns = [tuple(Turn(t.start, t.end, r) for t, r in zip(first.turns, pair, strict=True)) for pair in rewards]
    pair = [group(replace(first, reward=1.0, turns=each)) for each in turns]
    assert has_variance(pair, learner_config(turn_rewards=True))
    assert not has_variance(pair, learner_config(turn_rewards=False))
    cut = [group(episode(1.0)), group(episode(1.0, ending=Ending.OUT_OF_TOKENS))]
    assert not has_variance(cut, learner_config())
    assert has_variance(cut, learner_config(overlong="penalise"))


def test_the_line_comes_once_and_again_every_20_steps_with_endings_and_an_example(episode) -> None:
    guard = VarianceGuard(learner_config(), GuardState())
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
    guard = VarianceGuard(learner_config(), GuardState())
    counts = []
    for reward in (1.0, 1.0, 0.0, 0.0):
        guard.step([group(episode(reward))])
        counts.append(guard.num_steps)
    assert counts == [1, 2, 0, 1]


def test_it_says_when_no_episode_could_be_trained_on(episode) -> None:
    guard = VarianceGuard(learner_config(stop_without_variance=1), GuardState())
    line = guard.step([group(episode(0.0, ending=Ending.ENV_ERROR, error="the board is lost"))])
    assert "no episode could be trained on" in line and "env_error 100 %" in line and "the board is lost" in line


class Parts:
    """Guards beside stand-ins for trainer and saver, which they tell what to do."""

    def __init__(self, tmp_path: Path, *, main: bool = True, **settings) -> None:
        self.trainer = SimpleNamespace(guard=GuardState(), num_steps=0, ranks=SimpleNamespace(is_main=main))
        self.saver = SimpleNamespace(wait=lambda: None, best=Best(tmp_path / "best.json"))
        recipe = Recipe(
            model=ModelConfig(path="none"), env=EnvConfig(module="none"), learner=learner_config(**settings)
        )
        self.guards = Guards(recipe, self.trainer, self.saver)  # type: ignore[arg-type]

    def step(self, groups: Sequence[Group] = (), **metrics: float) -> dict[str, float]:
        self.trainer.num_steps += 1
        named = {name.replace("__", "/"): value for name, value in metrics.items()}
        return self.guards.after_step(groups, named)


def test_the_run_ends_after_the_steps_that_the_recipe_names(episode, tmp_path) -> None:
    parts = Parts(tmp_path, stop_without_variance=3)
    same = [group(episode(1.0))]
    assert [parts.step(same)["guard/steps_without_variance"] for _ in range(2)] == [1.0, 2.0]
    with pytest.raises(ValueError, match=r"for 3 steps.*learner.stop_without_variance = 3"):
        parts.step(same)


def test_only_one_rank_speaks(episode, caplog, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(get_logger("learner"), "propagate", True)
    said = []
    for main in (True, False):
        parts = Parts(tmp_path, main=main)
        for _ in range(20):
            parts.step([group(episode(1.0))])
        said.append(len([record for record in caplog.records if "variance of reward" in record.message]))
    assert said[0] == said[1] > 0


def test_the_kl_of_a_step_is_read_from_older_behaviour_unless_it_was_measured() -> None:
    older = {"tokens/lag_0": 50.0, "behaviour/kl/lag_0": 9.0, "tokens/lag_1": 30.0, "behaviour/kl/lag_1": 0.2}
    older |= {"tokens/lag_2": 10.0, "behaviour/kl/lag_2": 0.6}
    assert kl_of_a_step(older, 1) == pytest.approx((30 * 0.2 + 10 * 0.6) / (30 * 1 + 10 * 2))
    assert kl_of_a_step(older, 4) == pytest.approx((30 * 0.2 + 10 * 0.6) / 4 / (30 * 1 + 10 * 2))
    assert kl_of_a_step(older | {"guard/kl_step": 0.5}, 4) == 0.5
    assert kl_of_a_step({"tokens/lag_0": 5.0, "behaviour/kl/lag_0": 9.0}, 1) is None


def test_the_brake_shortens_steps_by_what_the_kl_is_too_large_and_lets_go_slowly() -> None:
    state = GuardState()
    assert braked(state, 0.4, 0.1) == pytest.approx(0.5)  # KL is quadratic in the step
    assert braked(state, 1e6, 0.1) == 0.25
    assert braked(GuardState(brake=0.02), 1e6, 0.1) == 0.01
    assert braked(GuardState(brake=0.5), 0.05, 0.1) == 0.5
    assert braked(GuardState(brake=0.5), 0.01, 0.1) == pytest.approx(0.75)
    assert braked(GuardState(brake=0.24, ceiling=0.25), 0.0, 0.1) == 0.25
    assert braked(GuardState(brake=0.3), float("nan"), 0.1) == 0.3


def test_the_brake_is_said_once_until_it_was_free_again(caplog, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(get_logger("learner"), "propagate", True)
    parts = Parts(tmp_path)
    for kl in (0.05, 0.2, 0.2):
        values = parts.step(guard__kl_step=kl)
    assert values["guard/kl_step"] == 0.2 and values["guard/brake"] == pytest.approx(0.5)
    (line,) = {record.message for record in caplog.records if "max_kl" in record.message}
    assert "step 2: " in line and "learner.guard.max_kl = 0.1" in line and "now 0.707" in line
    assert Parts(tmp_path, max_kl=0.0).step(guard__kl_step=9.0)["guard/brake"] == 1.0


def test_entropy_above_its_bound_for_some_steps_stops_the_run_and_names_the_last_good_checkpoint(tmp_path) -> None:
    parts = Parts(tmp_path)
    for entropy in (0.36, 0.2, 0.5, 1.8, 1.34, 1.8, 5.9):
        parts.step(policy__entropy=entropy)
    with pytest.raises(
        ValueError, match=r"falls apart.*1.72, twice.*0.36, plus 1.*5.93.*step 8; there is no checkpoint"
    ):
        parts.step(policy__entropy=5.93)
    (tmp_path / "step_00000002").mkdir()
    (tmp_path / "step_00000002" / "meta.json").write_text("{}")
    parts.saver.best.good = (2,)
    with pytest.raises(ValueError, match=r"good checkpoint is .*step_00000002: .*--learner.resume .*on_entropy"):
        parts.step(policy__entropy=5.93)


def test_entropy_below_its_bound_stops_the_run_too_and_there_is_none_by_default(tmp_path) -> None:
    parts = Parts(tmp_path)
    assert [parts.step(policy__entropy=e)["guard/steps_outside_entropy"] for e in (0.5, 0.0, 0.0, 0.0)] == [0.0] * 4
    parts = Parts(tmp_path, entropy_min=0.1)
    for _ in range(2):
        parts.step(policy__entropy=0.05)
    with pytest.raises(ValueError, match=r"collapsed.*entropy_min = 0.1.*step 3"):
        parts.step(policy__entropy=0.05)


def test_steps_without_entropy_count_neither_way(tmp_path) -> None:
    parts = Parts(tmp_path, entropy_max=1.0)
    for values in ({"policy__entropy": 2.0}, {}, {"policy__entropy": float("nan")}, {"policy__entropy": 2.0}):
        found = parts.step(**values)
    assert found["guard/steps_outside_entropy"] == 2.0


def test_what_is_saved_half_way_to_the_bound_is_not_good(tmp_path) -> None:
    parts, good = Parts(tmp_path), []
    for entropy in (0.4, 1.0, 1.2, 0.9):  # the bound is 1.8
        parts.step(policy__entropy=entropy)
        good.append(parts.trainer.guard.good)
    assert good == [True, True, False, True]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_a_run_of_equal_rewards_ends_with_one_line_that_shows_an_example(tmp_path: Path) -> None:
    (tmp_path / "alike.py").write_text("def reward(played):\n    return 0.5\n")
    fields = {"env.reward": tmp_path / "alike.py:reward", "eval.samples": 0, "learner.stop_without_variance": 3}
    line, _ = refused(command("local", places(tmp_path, **fields)), codes=range(1, 256))
    assert "for 3 steps" in line and "every reward was 0.5" in line and " %; an example: " in line, line
    assert "colour" in line.partition("an example: ")[2].lower(), line
    assert [row["guard/steps_without_variance"] for row in metrics(tmp_path)] == [1.0, 2.0]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_starts")
def test_a_run_steps_back_three_times_with_half_the_rate_and_then_stops(tmp_path: Path) -> None:
    fields = {"learner.guard.on_entropy": "rewind", "learner.guard.entropy_max": 0.1}
    fields |= {"eval.samples": 0, "learner.total_steps": 20}
    line, log = refused(command("local", places(tmp_path, **fields)), codes=range(1, 256))
    assert "after 3 steps back" in line and "step 12" in line
    assert log.count("it steps back to") == 3 and "step_00000000" in line
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 12))
    assert [row["guard/rewinds"] for row in rows] == [0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    assert [row["policy_version"] for row in rows] == list(range(1, 12))
    assert rows[-1]["guard/brake"] <= 0.125 and rows[-1]["optim/lr"] <= 0.125 * 1e-3
