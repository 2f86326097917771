"""A ticket is played by its sample's task: with that environment, those limits and that reward."""

from __future__ import annotations

import asyncio

import pytest

from actor.engine_pool import EnginePool
from actor.worker import make_players
from shared.config.recipe import Recipe
from shared.types import Ending, Sample
from tests.support.mixtures import LIMITS
from tests.support.rollout_rig import Scripted, renderer, ticket

__all__ = ["renderer"]  # a fixture

ENV = """
class Env:
    def __init__(self, args):
        self.args = args

    def reset(self):
        return {{"obs_str": "go"}}, {{}}

    def step(self, response_text):
        return {{"obs_str": "on"}}, False, {{"reward": {reward}, "metrics": {{"size": self.args["size"]}}}}


def build_env(sample=None, args=None, **_):
    return Env(args)


def episode_reward(env):
    return {whole}
"""


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_each_task_is_played_with_its_own_environment_limits_and_reward(renderer, tmp_path, isolation):
    (tmp_path / "one.py").write_text(ENV.format(reward=1.0, whole=10.0))
    (tmp_path / "two.py").write_text(ENV.format(reward=2.0, whole=20.0))
    (tmp_path / "three.py").write_text("def score(played):\n    return 300.0\n")
    own = {"max_tokens": 60, "turn_tokens": 20}
    tasks = [
        {"name": "one", "module": str(tmp_path / "one.py"), "args": {"size": 1}, **own},
        {"name": "two", "module": str(tmp_path / "two.py"), "args": {"size": 2}, "max_turns": 2, **own},
        {**own, "name": "three", "module": str(tmp_path / "one.py"), "args": {"size": 3}},
    ]
    tasks[2]["reward"] = f"{tmp_path}/three.py:score"
    values = {"model": {"path": "m"}, "env": LIMITS | {"isolation": isolation}, "tasks": tasks}

    async def main():
        engine = Scripted(["ok"] * 9)
        players, processes = make_players(Recipe.model_validate(values), renderer, EnginePool([engine]))
        names = ("one", "two", "three", "four")
        try:
            return [await players.play(ticket(sample=Sample("s", task=name))) for name in names]
        finally:
            await players.close(1.0)
            for each in processes:
                each.close()

    one, two, three, four = asyncio.run(main())
    assert (len(one.turns), one.reward, one.metrics["size"]) == (1, 10.0, 1.0), one.error
    assert (len(two.turns), two.reward, two.metrics["size"]) == (2, 20.0, 2.0), two.error
    assert (len(three.turns), three.reward, three.metrics["size"]) == (1, 300.0, 3.0), three.error
    assert four.ending is Ending.ENV_ERROR and "no task 'four'" in four.error
