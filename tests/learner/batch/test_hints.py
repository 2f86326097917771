"""Hints stand in the stream that a teacher reads, and in no other; its log-probabilities are of the policy's tokens."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from learner.batch.episodes import with_hints
from learner.batch.step_plan import plan_step
from learner.model.policy import load_policy
from learner.training.trainer import Trainer
from shared.types import Group, Hint
from shared.wire.codec import TokenRules, WireError, check_trajectory, decode, encode
from tests.support.episodes import joined, learner_config, plain_logprobs, random_groups, random_trajectory
from tests.support.tiny import load_model


def hinted(trajectory, seed=0):
    """The trajectory with a hint in what is shown before each turn."""
    draw = np.random.default_rng(seed)
    hints = [Hint(turn.start - 1, tuple(draw.integers(1, 300, 4).tolist())) for turn in trajectory.turns]
    return replace(trajectory, hints=tuple(hints))


def test_a_teachers_stream_is_the_policys_with_the_hints_in_their_places(spec):
    plain = hinted(joined([random_trajectory(spec, seed, turns=2) for seed in range(2)]))
    read = with_hints(plain)
    ids = plain.token_ids.tolist()
    for hint in reversed(plain.hints):
        ids[hint.at : hint.at] = hint.token_ids
    assert read.token_ids.tolist() == ids and read.token_ids.dtype == np.int32 and not read.hints
    for name in ("token_ids", "behaviour_logprobs", "policy_versions"):
        mine, its = getattr(plain, name)[plain.loss_mask == 1], getattr(read, name)[read.loss_mask == 1]
        assert np.array_equal(mine, its)
    for before, after in zip(plain.turns, read.turns, strict=True):
        assert read.token_ids[after.start : after.end].tolist() == plain.token_ids[before.start : before.end].tolist()
        assert read.loss_mask[after.start : after.end].all() and after.reward == before.reward
    first, second = (plain.token_ids[a:b] for a, b in plain.bounds)
    assert [len(read.token_ids[a:b]) for a, b in read.bounds] == [len(first) + 8, len(second) + 8]
    check_trajectory(read, TokenRules(spec.image_token_id, spec.banned_ids, 400))


def test_a_trajectory_without_hints_is_left_as_it_is(spec):
    plain = random_trajectory(spec, 0)
    assert with_hints(plain) is plain


def test_the_policy_does_not_read_what_its_teacher_is_told(folder, spec, ranks):
    groups = random_groups(spec, 2, group_size=2)
    told = [replace(g, trajectories=tuple(hinted(t) for t in g.trajectories)) for g in groups]
    config = learner_config(objective="grpo", teacher="self", reward_weight=0.0, lr=1e-12)
    policy = load_policy(str(folder), spec)
    trainer = Trainer(policy, config, ranks, teacher=policy)
    without = trainer.step(groups, version=0)
    with_hint = trainer.step(told, version=0)
    assert without["teacher/kl"] == pytest.approx(0.0, abs=1e-6) and without["teacher/hinted"] == 0.0
    assert with_hint["teacher/hinted"] == 1.0
    model, gaps = load_model(folder).double(), []
    for group in told:
        for t in group.trajectories:
            gaps.append(plain_logprobs(model, t, spec) - plain_logprobs(model, with_hints(t), spec))
    mean = float(sum(gap.sum() for gap in gaps) / sum(map(len, gaps)))
    assert with_hint["teacher/kl"] == pytest.approx(mean, rel=1e-4) and abs(mean) > 1e-3
    assert with_hint["policy/entropy"] == pytest.approx(without["policy/entropy"], rel=1e-6)
    plan = plan_step(told, trainer.decoder, config, ranks, None, seed=0, taught=True)
    assert plan.taught is not None
    (read,), (own,) = plan.taught.microbatches, plan.updates[0].microbatches
    assert sum(e.num_tokens for e in read) == sum(e.num_tokens for e in own) + 4 * 4 * 3
    assert [e.num_sampled for e in read] == [e.num_sampled for e in own]


@pytest.mark.parametrize("what", ["beyond the end", "twice at one place", "no word", "within a turn", "an image"])
def test_hints_that_break_the_contract_are_refused(spec, what):
    plain = random_trajectory(spec, 0)
    rules = TokenRules(spec.image_token_id, spec.banned_ids, 400)
    hints = {
        "beyond the end": (Hint(10_000, (1,)),),
        "twice at one place": (Hint(5, (1,)), Hint(5, (2,))),
        "no word": (Hint(5, (399_999,)),),
        "within a turn": (Hint(plain.turns[0].start + 1, (1,)),),
        "an image": (Hint(5, (spec.image_token_id,)),),
    }[what]
    with pytest.raises(WireError, match="hint"):
        check_trajectory(replace(plain, hints=hints), rules)
    check_trajectory(replace(plain, hints=(Hint(5, (1,)),)), rules)


def test_hints_travel(spec):
    group = Group("g", "a", (hinted(random_trajectory(spec, 0)),))
    assert decode(encode(group)).trajectories[0].hints == group.trajectories[0].hints
