"""What a step plans: which episodes count, how much a microbatch holds, what an episode costs, who decodes what."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from learner.batch.distinct_images import load_images
from learner.batch.episodes import check_layout, length_penalty, make_episodes
from learner.batch.image_decoder import ImageDecoder
from learner.batch.step_plan import plan_step
from learner.batch.update_plan import forward_costs
from learner.distributed import ALONE, Context
from learner.training.models import Beforehand
from shared.config.objective_section import ObjectiveConfig
from shared.types import Ending, Group
from tests.support.episodes import learner_config, random_groups, random_trajectory


def test_a_microbatch_that_ranks_share_holds_the_tokens_of_all_of_them(spec, ranks):
    groups, decoder = random_groups(spec, 8, turns=1), ImageDecoder(spec)
    config = learner_config(microbatch_tokens=100)
    alone = plan_step(groups, decoder, config, ranks, None, seed=0)
    shared = plan_step(groups, decoder, config, replace(ranks, size=2, context=Context(0, 2)), None, seed=0)
    most = {
        plan: max(sum(e.num_tokens for e in chosen) for chosen in plan.updates[0].microbatches)
        for plan in (alone, shared)
    }
    assert most[alone] <= 100 < most[shared] <= 200


def test_an_image_costs_its_encoding_where_it_is_seen_first(spec):
    sizes = SimpleNamespace(forward_flops=lambda documents, patches, rows: sum(patches))
    first = random_trajectory(spec, 0, turns=2)
    again = msgspec.structs.replace(random_trajectory(spec, 1, turns=2), images=first.images)
    episodes = make_episodes([Group("g", "a", (first, again))], ImageDecoder(spec), ObjectiveConfig())
    patches = [int(np.prod(grid)) for grid in episodes[0].grids]
    assert forward_costs(episodes, sizes) == [sum(patches), 0]


def test_episodes_after_a_failed_one_keep_their_index_among_all_trajectories(spec):
    failed = msgspec.structs.replace(random_trajectory(spec, 0), ending=Ending.ENV_ERROR)
    groups = [
        Group("a", "a", (failed, random_trajectory(spec, 1))),
        Group("b", "a", (random_trajectory(spec, 2), random_trajectory(spec, 3))),
    ]
    episodes = make_episodes(groups, ImageDecoder(spec), ObjectiveConfig())
    assert [(e.group, e.index) for e in episodes] == [(0, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize("ending", [Ending.OUT_OF_TOKENS, Ending.CONTEXT_FULL])
def test_every_token_limit_that_cuts_an_episode_off_masks_or_penalises_it(spec, ending):
    cut_off = msgspec.structs.replace(random_trajectory(spec, 0), ending=ending)
    group = Group("g", "a", (cut_off, random_trajectory(spec, 1)))
    assert len(make_episodes([group], ImageDecoder(spec), ObjectiveConfig(name="grpo", overlong="mask"))) == 1
    assert length_penalty(cut_off, ObjectiveConfig(overlong="penalise", overlong_penalty=0.5)) == 0.5


def test_the_length_penalty_is_scaled_as_the_rewards_are(spec):
    cut_off = msgspec.structs.replace(random_trajectory(spec, 0), ending=Ending.OUT_OF_TOKENS)
    made = {}
    for scale in (1.0, 10.0):
        settings = {"overlong": "penalise", "overlong_penalty": 0.5, "reward_scale": scale}
        (episode,) = make_episodes([Group("g", "a", (cut_off,))], ImageDecoder(spec), ObjectiveConfig(**settings))
        made[scale] = episode.rewards
    np.testing.assert_allclose(made[10.0], 10 * made[1.0], rtol=1e-6)


def test_a_sampled_placeholder_is_refused(spec):
    trajectory = random_trajectory(spec, 0, turns=1)
    placeholder = int(np.flatnonzero(trajectory.token_ids == spec.image_token_id)[0])
    mask = trajectory.loss_mask.copy()
    mask[placeholder] = 1
    with pytest.raises(ValueError, match="none of which is an image's placeholder"):
        check_layout(msgspec.structs.replace(trajectory, loss_mask=mask), spec)


def test_an_episode_with_one_unreadable_image_of_several_is_unreadable(spec, monkeypatch):
    episodes = [random_trajectory(spec, seed, turns=3).images for seed in range(2)]
    bad, decode = episodes[0][1].content_hash, ImageDecoder._decode

    def broken(self, image):
        if image.content_hash == bad:
            raise ValueError("broken data stream")
        return decode(self, image)

    monkeypatch.setattr(ImageDecoder, "_decode", broken)
    assert load_images(episodes, ImageDecoder(spec), ALONE, pin=False).readable.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "policy", "reference"),
    [
        ({}, False, False),
        ({"kl_coef": 0.1}, False, False),  # the reference's forward is part of the only update
        ({"kl_coef": 0.1, "minibatches": 2}, False, False),
        ({"kl_coef": 0.1, "passes": 2}, False, True),  # one forward serves both passes
        ({"passes": 2}, False, False),
        ({"proximal": "learner"}, False, False),  # the policy is still what it was
        ({"proximal": "learner", "minibatches": 2}, True, False),
        ({"kl_coef": 0.1, "kl_in_reward": True, "divide_by_std": False}, True, True),
    ],
)
def test_logprobs_are_computed_beforehand_only_where_an_update_cannot_have_them(settings, policy, reference):
    assert Beforehand.needed_by(ObjectiveConfig(name="grpo", **settings)) == Beforehand(policy, reference)
