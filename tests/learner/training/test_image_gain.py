"""Whether the policy looks: its words under their own images, and under another sample's."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from learner.batch.episodes import make_episodes
from learner.batch.image_decoder import ImageDecoder
from learner.batch.other_images import MEASURED, with_other_images
from learner.model.policy import load_policy
from learner.recording.recorded_columns import watch
from learner.training.trainer import Trainer
from shared.config.objective_section import ObjectiveConfig
from shared.config.sections import RecordConfig
from shared.types import Group
from tests.support.episodes import learner_config, packed, random_groups

EVERY_STEP = RecordConfig(every=1, groups=8)


def pairs_of(groups, spec, indices=range(100)):
    episodes = make_episodes(groups, ImageDecoder(spec), ObjectiveConfig())
    return with_other_images(episodes, indices)


def test_an_episode_is_paired_with_images_of_another_group_in_the_same_places(spec):
    groups = random_groups(spec, 3, group_size=2)
    pairs = pairs_of(groups, spec)
    assert pairs
    of_group = [{i.content_hash for t in group.trajectories for i in t.images} for group in groups]
    for own, other in zip(pairs[::2], pairs[1::2], strict=True):
        assert other.index == -2 - own.index and other.grids == own.grids and other.expanded is own.expanded
        assert not {i.content_hash for i in other.images} & of_group[own.group]


def test_at_most_so_many_and_only_of_those_that_are_recorded(spec):
    groups = random_groups(spec, 12, sides=(64,))
    assert len(pairs_of(groups, spec)) == 2 * MEASURED
    assert [e.index for e in pairs_of(groups, spec, {4, 7})[::2]] == [4, 7]


def test_without_images_or_another_group_of_their_size_there_is_no_pair(spec):
    assert pairs_of(random_groups(spec, 3, with_images=False), spec) == []
    assert pairs_of(random_groups(spec, 1, group_size=4), spec) == []
    small, large = random_groups(spec, 1, sides=(64,)), random_groups(spec, 1, seed=5, sides=(96,))
    assert pairs_of([*small, *large], spec) == []


@pytest.mark.slow
@pytest.mark.parametrize("microbatch_tokens", [100_000, 60])
def test_the_gain_is_the_difference_of_logprobs_computed_one_by_one(folder, spec, ranks, microbatch_tokens):
    groups = random_groups(spec, 4, group_size=2, sides=(64,), turns=2)
    trainer = Trainer(
        load_policy(str(folder), spec),
        learner_config(objective="grpo", microbatch_tokens=microbatch_tokens, lr=1e-9, warmup_steps=0),
        ranks,
    )
    pairs = pairs_of(groups, spec, range(8))
    trajectories = [t for group in groups for t in group.trajectories]
    total, count = 0.0, 0
    with torch.no_grad():
        for own, other in zip(pairs[::2], pairs[1::2], strict=True):
            played = trajectories[own.index]
            both = [
                trainer.policy(packed(trainer.policy, [t]), 1.0).logprobs
                for t in (played, replace(played, images=other.images))
            ]
            total += float((both[0] - both[1]).double().sum())
            count += len(both[0])
    assert total != 0.0
    metrics = trainer.step(groups, 0, watch(groups, 1, EVERY_STEP))
    assert metrics["vision/image_gain"] == pytest.approx(total / count, rel=1e-3, abs=1e-7)
    assert "vision/image_gain" not in trainer.step(groups, 0)


@pytest.mark.slow
def test_the_gain_of_a_policy_that_does_not_see_is_nothing(folder, spec, ranks):
    groups = random_groups(spec, 3, sides=(64,))
    policy = load_policy(str(folder), spec)
    with torch.no_grad():
        for name, parameter in policy.vlm.named_parameters():
            if "visual" in name:
                parameter.zero_()
    trainer = Trainer(policy, learner_config(lr=1e-9), ranks)
    assert trainer.step(groups, 0, watch(groups, 1, EVERY_STEP))["vision/image_gain"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
def test_measuring_changes_no_weight(folder, spec, ranks):
    groups = random_groups(spec, 3, sides=(64,))
    weights = []
    for recorded in (None, watch(groups, 1, EVERY_STEP)):
        trainer = Trainer(load_policy(str(folder), spec), learner_config(lr=1e-3), ranks)
        metrics = trainer.step(groups, 0, recorded)
        assert ("vision/image_gain" in metrics) == (recorded is not None)
        weights.append([p.detach().clone() for p in trainer.policy.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*weights, strict=True))


def test_an_episode_whose_images_another_group_shares_is_paired_with_a_third_one(spec):
    first, second, third = random_groups(spec, 3, sides=(64,))
    alike = Group("copy", "tester", (replace(second.trajectories[0], images=first.trajectories[0].images),))
    pairs = pairs_of([first, alike, third], spec, {0})
    assert pairs[1].images == third.trajectories[0].images
