"""Small problems with known answers: every objective reaches them with its defaults, and nothing moves what no reward
tells apart. The bench tests/bench/stability.py does the same for ten seeds, for older episodes too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.config.objective_specs import objective_spec
from tests.support.small.problems import PROBLEMS, UNTEACHABLE
from tests.support.small.runs import OBJECTIVES, drift, learn

STEPS = 250
SEED = 3


pytestmark = [pytest.mark.slow, pytest.mark.learning]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_objective_reaches_the_optimum_with_its_defaults(problem, objective, ranks) -> None:
    found = learn(PROBLEMS[problem], ranks, seed=SEED, steps=STEPS, lag=1, stop=True, **OBJECTIVES[objective])
    assert found.reached is not None


@pytest.mark.parametrize("shift", [5.0, 20.0, 100.0])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_constant_added_to_all_rewards_costs_no_step(objective, shift, ranks) -> None:
    settings = {"seed": SEED, "steps": STEPS, "lag": 1, "stop": True, **OBJECTIVES[objective]}
    for problem in (PROBLEMS["two_arms"], PROBLEMS["lock"]):
        plain, shifted = (learn(each, ranks, **settings).reached for each in (problem, replace(problem, shift=shift)))
        assert plain is not None and shifted is not None and abs(shifted - plain) <= 10


@pytest.mark.parametrize("term", [{"entropy_coef": 1e-4}, {"entropy_coef": 1e-4, "aggregation": "sequence_mean"}])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_with_a_constant_reward_no_other_term_moves_the_policy(objective, term, ranks) -> None:
    implied = objective_spec(OBJECTIVES[objective]["objective"]).implied  # dr_grpo has an aggregation of its own
    settings = {"seed": SEED, "steps": 30, "lag": 1, **OBJECTIVES[objective], **term, **implied}
    assert drift(UNTEACHABLE["constant"], ranks, **settings) == 0.0
    assert drift(UNTEACHABLE["constant"], ranks, **settings, advantage_floor=0.0) > 1e-3


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_objective_loses_the_optimum_again(objective, ranks) -> None:
    for problem in ("corridor", "lock"):
        found = learn(PROBLEMS[problem], ranks, seed=SEED, steps=STEPS, lag=1, **OBJECTIVES[objective])
        assert found.reached is not None and found.kept, problem


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_constant_reward_moves_the_policy_nowhere(objective, ranks) -> None:
    assert drift(UNTEACHABLE["constant"], ranks, seed=SEED, steps=500, lag=1, **OBJECTIVES[objective]) == 0.0


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_noise_of_the_reward_is_not_blown_up_and_drift_has_a_bound(objective, ranks) -> None:
    settings = {"seed": SEED, "steps": 200, "lag": 1, **OBJECTIVES[objective]}
    assert drift(UNTEACHABLE["nearly_constant"], ranks, **settings) < 0.01
    assert drift(UNTEACHABLE["noise"], ranks, **settings, lr=2e-4) < 0.2  # a random walk; no scaling ends it


def test_without_the_floor_a_constant_reward_does_move_the_policy(ranks) -> None:
    """The control: the tests above can fail."""
    assert drift(UNTEACHABLE["constant"], ranks, seed=SEED, steps=60, lag=1, advantage_floor=0.0) > 1e-3


@pytest.mark.parametrize("objective", ["vtrace", "grpo"])
def test_with_thirty_times_the_rate_only_the_bound_on_the_kl_saves_the_run(objective, ranks) -> None:
    settings = {"seed": SEED, "steps": 100, "lag": 1, "lr": 0.03, **OBJECTIVES[objective]}
    assert learn(PROBLEMS["lock"], ranks, stop=True, **settings).reached is not None
    assert learn(PROBLEMS["lock"], ranks, max_kl=0.0, **settings).reached is None


@pytest.mark.parametrize("lag", [2, 4])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_episodes_of_older_policies_teach_the_same(objective, lag, ranks) -> None:
    found = learn(PROBLEMS["lock"], ranks, seed=SEED, steps=STEPS, lag=lag, **OBJECTIVES[objective])
    assert found.reached is not None and found.kept
