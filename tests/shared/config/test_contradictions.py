"""Settings of the objective that contradict one another are refused, naming the setting, the reason and the cure."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from shared.config.objective_section import ObjectiveConfig
from shared.config.recipe import Recipe
from shared.config.sections import EnvConfig, ModelConfig
from tests.support.episodes import learner_config

PROXIMAL = {"proximal": "learner"}
KL = {"kl_coef": 0.1, "kl_in_reward": True}
GRADED = {"overlong": "penalise", "overlong_tokens": 100, "overlong_buffer": 20}
FITTING = [
    {},
    PROXIMAL,
    {"name": "ppo", "passes": 4, "minibatches": 4, "proximal": "learner"},
    {"name": "ppo", "critic_width": 64, "rho_bar": None},
    {"passes": 2, "correction": "none", **PROXIMAL},
    {"minibatches": 2, "correction": "none"},
    {"rho_noise": 0.08, "mask_token_ratio": (0.5, 2.0), "mask_veto_ratio": 1e-4},
    KL,
    {"name": "gspo", **KL, "divide_by_std": False, "kl_reference_every": 50},
    GRADED,
    {**GRADED, "overlong_buffer": 100},
]
REFUSED = [
    ({"dynamic_sampling": True}, "dynamic_sampling = true is for group-relative objectives"),
    (
        {"name": "grpo", "critic_width": 8},
        "critic_width = 8: grpo trains no critic; set it to 0, or name to 'vtrace' or 'ppo'",
    ),
    ({"critic_width": 8, "value_coef": 0.0}, "critic_width = 8 with value_coef = 0"),
    ({"proximal": "learner", "vtrace_clip": False}, "vtrace clips nothing while vtrace_clip = false; set that to true"),
    ({"name": "cispo", "proximal": "learner"}, "cispo clips no gradient"),
    ({"passes": 2, "correction": "none"}, "passes = 2 with correction = 'none'"),
    ({"name": "ppo", "rho_noise": 0.1}, "rho_noise = 0.1 with name = 'ppo'"),
    ({"rho_noise": 0.1, "correction": "none"}, "only vtrace with importance correction has traces"),
    ({"mask_veto_ratio": 0.1, "correction": "none"}, "mask_veto_ratio = 0.1 with correction = 'none'"),
    ({"mask_token_ratio": (1.2, 2.0)}, r"mask_token_ratio = \(1.2, 2.0\).*set 0 < low < 1 < high"),
    ({"mask_sequence_ratio": (0.0, 2.0)}, r"mask_sequence_ratio = \(0.0, 2.0\)"),
    ({"overlong_tokens": 100, "overlong_buffer": 20}, "is of a penalty, and overlong = 'train'"),
    ({"overlong": "penalise", "overlong_buffer": 20}, "overlong_buffer = 20 with overlong_tokens = 0"),
    ({"overlong": "penalise", "overlong_tokens": 20}, "overlong_buffer = 0 with overlong_tokens = 20"),
    ({**GRADED, "overlong_buffer": 101}, "overlong_buffer = 101 with overlong_tokens = 100"),
    ({"kl_in_reward": True}, "kl_in_reward = True with kl_coef = 0"),
    ({"kl_reference_every": 5}, "kl_reference_every = 5 with kl_coef = 0"),
    ({"kl_max_entropy": 0.3}, "kl_max_entropy = 0.3 with kl_coef = 0"),
    ({"kl_coef": 0.1, "kl_max_entropy": 0.3, "passes": 2}, "kl_max_entropy = 0.3 needs the reference's entropies"),
    ({**KL, "kl_max_entropy": 0.3}, "kl_max_entropy = 0.3 needs the reference's entropies"),
    ({"name": "grpo", **KL}, "kl_in_reward = true with divide_by_std = true"),
]


@pytest.mark.parametrize("settings", FITTING, ids=str)
def test_settings_that_fit_together_are_taken(settings):
    ObjectiveConfig(**settings)


@pytest.mark.parametrize(("settings", "reason"), REFUSED, ids=lambda value: str(value)[:60])
def test_settings_that_contradict_one_another_are_refused_with_the_reason(settings, reason):
    with pytest.raises(ValidationError, match=reason) as refusal:
        ObjectiveConfig(**settings)
    (error,) = refusal.value.errors()
    assert (
        "learner.objective." in error["msg"]
        and any(f"{cure} " in error["msg"] for cure in ("set", "raise"))
        and "\n" not in error["msg"]
    )


def test_more_minibatches_than_episodes_are_refused():
    learner_config(groups_per_step=2, group_size=2, minibatches=4)
    with pytest.raises(ValidationError, match="minibatches = 5, but a step has 4 episodes"):
        learner_config(groups_per_step=2, group_size=2, minibatches=5)


def test_a_penalty_that_is_whole_only_beyond_the_limit_of_an_episode_is_refused():
    env, model = EnvConfig(module="envs.colour", max_tokens=90, turn_tokens=30), ModelConfig(path="m")
    with pytest.raises(ValidationError, match=r"overlong_tokens = 100: an episode is cut off at env\.max_tokens = 90"):
        Recipe(model=model, env=env, learner=learner_config(**GRADED))
    Recipe(model=model, env=env, learner=learner_config(**GRADED | {"overlong_tokens": 90}))
