"""The packed policy against transformers' own forward, and one learner step against arithmetic by hand."""

from __future__ import annotations

import base64
import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from episodes import on_policy, random_groups, random_trajectory
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from learner import dist
from learner.batch import EpisodeSettings, make_episode, make_episodes, pack
from learner.engine_link import call
from learner.model import load_policy, shard
from learner.pictures import Pictures
from learner.step import Trainer
from shared.config import LearnerConfig
from shared.types import Ending, Group, Image, Trajectory, Turn
from shared.vision import VisionSpec
from tiny import load_model, picture, png, reference_logits, running_engine, tiny_model_dir

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def spec(folder):
    return VisionSpec.load(folder, min_pixels=1024, max_pixels=1 << 20)


@pytest.fixture(scope="module")
def ranks():
    yield dist.init("cpu")
    dist.close()


@pytest.fixture
def policy(folder, spec):
    return load_policy(str(folder), spec)


def packed(policy, trajectories):
    pictures = Pictures(policy.spec)
    episodes = [make_episode(t, 0.0, pictures, EpisodeSettings()) for t in trajectories]
    return pack(episodes, pictures, CPU)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_logprobs_equal_a_plain_forward_with_vision_ids_banned(folder, spec, policy, temperature):
    trajectories = [random_trajectory(spec, seed, turns=1 + seed) for seed in range(3)]
    order = sorted(trajectories, key=lambda t: make_episode(t, 0.0, Pictures(spec), EpisodeSettings()).num_tokens)
    expected, model = [], load_model(folder)
    for t in order:
        images = [picture(*_size(image), seed) for image, seed in zip(t.images, _seeds(trajectories, t), strict=True)]
        logits = reference_logits(model, t.token_ids.tolist(), images, spec) / temperature
        logits[:, list(spec.banned_ids)] = float("-inf")
        places = np.flatnonzero(t.loss_mask)
        rows = logits.log_softmax(-1)[places - 1]
        expected.append(rows.gather(1, torch.from_numpy(t.token_ids[places]).long()[:, None])[:, 0])
    got = policy(packed(policy, trajectories), temperature).logprobs
    torch.testing.assert_close(got, torch.cat(expected), rtol=0, atol=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_behaviour_logprobs_of_the_engine_equal_the_learners(folder, spec, policy, temperature):
    images = [Image.of(png(picture(64, 96, 1))), Image.of(png(picture(96, 64, 2)))]
    ids, turns = [5, 6, 7], []
    logprobs, mask = [0.0] * 3, [0] * 3
    with running_engine(folder, min_pixels=1024, max_pixels=1 << 20) as (url, _):
        for count in (1, 2):
            observation = [8, spec.image_token_id, 9]
            ids, logprobs, mask = ids + observation, logprobs + [0.0] * 3, mask + [0] * 3
            sampling = {"temperature": temperature, "max_new_tokens": 12, "ignore_eos": True}
            sampling["logit_bias"] = {str(token): -100.0 for token in spec.banned_ids}
            data = [f"data:image/png;base64,{base64.b64encode(image.data).decode()}" for image in images[:count]]
            body = {"input_ids": ids, "image_data": data, "sampling_params": sampling, "return_logprob": True}
            sampled = call(url, "/generate", body, 30)["meta_info"]["output_token_logprobs"]
            turns.append(Turn(len(ids), len(ids) + len(sampled), 0.0))
            ids, mask = ids + [token for _, token, _ in sampled], mask + [1] * len(sampled)
            logprobs += [logprob for logprob, _, _ in sampled]
    loss_mask, behaviour = np.array(mask, dtype=np.uint8), np.array(logprobs, dtype=np.float32)
    played = Trajectory(
        token_ids=np.array(ids, dtype=np.int32),
        loss_mask=loss_mask,
        behaviour_logprobs=behaviour,
        policy_versions=np.where(loss_mask, 0, -1).astype(np.int32),
        turns=tuple(turns),
        reward=0.0,
        images=tuple(images),
        ending=Ending.COMPLETED,
    )
    batch = packed(policy, [random_trajectory(spec, 0, turns=1), played])  # the longer one comes last
    got = policy(batch, temperature).logprobs.detach()[-sum(mask) :]
    np.testing.assert_allclose(got, behaviour[loss_mask == 1], atol=1e-4)


def test_bfloat16_under_fsdp_stays_near_float32_and_keeps_float32_parameters(folder, spec, policy, ranks):
    trajectories = [random_trajectory(spec, seed) for seed in range(2)]
    half = load_policy(str(folder), spec)
    shard(half, ranks.mesh, torch.bfloat16)
    expected, got = (p(packed(p, trajectories), 1.0).logprobs for p in (policy, half))
    assert got.dtype == torch.float32 and (got - expected).abs().max() < 0.1
    config = LearnerConfig(lr=1e-3)
    metrics = Trainer(half, config, ranks).step(random_groups(spec, 2), version=0)
    assert np.isfinite(metrics["optim/grad_norm"]) and metrics["optim/skipped_steps"] == 0
    assert {p.dtype for p in half.parameters()} == {torch.float32}


def test_a_mixture_of_experts_model_trains(tmp_path, folder, spec, ranks):
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"] | {"model_type": "qwen3_vl_moe_text", "num_experts": 4, "num_experts_per_tok": 2}
    text |= {"moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": []}
    vision = config["vision_config"] | {"model_type": "qwen3_vl_moe_vision"}
    ids = {name: config[name] for name in config if name.endswith("token_id")}
    moe = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision, **ids))
    moe.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), spec)
    trajectory = random_trajectory(spec, 1, turns=2)
    trainer = Trainer(policy, LearnerConfig(lr=1e-3), ranks)
    before = on_policy(policy, trajectory)
    metrics = trainer.step([Group("g", "a", (before,))], version=0)
    assert metrics["behaviour/logprob_gap"] < 1e-4 and metrics["optim/grad_norm"] > 0


def _size(image):
    import io

    from PIL import Image

    return Image.open(io.BytesIO(image.data)).size


def _seeds(trajectories, trajectory):
    seed = next(i for i, t in enumerate(trajectories) if t is trajectory)
    return [seed * 100 + turn for turn in range(len(trajectory.images))]


def test_packed_equals_unpacked_with_several_pictures_per_document_in_values_and_gradients(policy, spec):
    torch.nn.init.normal_(policy.value_head.weight)
    trajectories = [random_trajectory(spec, seed, turns=3) for seed in range(3)]
    trajectories.append(random_trajectory(spec, 9, turns=2, pictures=False))

    def run(batches):
        policy.zero_grad()
        outputs = [policy(batch, 1.0) for batch in batches]
        sum((o.logprobs.sum() + o.values.square().sum() + o.entropies.sum()) for o in outputs).backward()
        gradients = {name: p.grad.clone() for name, p in policy.named_parameters()}
        return [torch.cat(x).detach() for x in zip(*outputs, strict=True)], gradients

    lengths = [sum(packed(policy, [t]).lengths) for t in trajectories]
    alone = [trajectories[i] for i in np.argsort(lengths, kind="stable")]
    together, together_gradients = run([packed(policy, trajectories)])
    apart, apart_gradients = run([packed(policy, [t]) for t in alone])
    for got, expected in zip(together, apart, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for name, expected in apart_gradients.items():
        scale = expected.abs().max().item() + 1e-6
        torch.testing.assert_close(together_gradients[name], expected, rtol=0, atol=2e-5 * scale + 1e-5, msg=name)


def test_a_document_does_not_see_its_neighbours(policy, spec):
    first, second, other = (random_trajectory(spec, s, turns=2, sides=(64,), turn_tokens=(4, 5)) for s in (1, 2, 3))
    with torch.no_grad():
        a = policy(packed(policy, [first, second]), 1.0).logprobs
        b = policy(packed(policy, [other, second]), 1.0).logprobs
    half = len(a) // 2
    torch.testing.assert_close(a[half:], b[half:], rtol=0, atol=1e-6)
    assert (a[:half] - b[:half]).abs().max() > 1e-3


def test_every_parameter_takes_part_also_without_pictures(policy, spec):
    batch = packed(policy, [random_trajectory(spec, 0, pictures=False)])
    output = policy(batch, 1.0)
    (output.logprobs.sum() + output.values.sum()).backward()
    assert [name for name, p in policy.named_parameters() if p.grad is None] == []


def test_weights_carry_hugging_face_names_and_the_tied_head_is_left_out(policy, folder):
    names = dict(policy.named_weights())
    assert names.keys() == dict(load_model(folder).named_parameters()).keys()
    assert not any("lm_head" in name for name in names)


def test_one_sgd_step_gives_the_weights_computed_by_hand(policy, spec, ranks):
    config = LearnerConfig(
        value_lr=0.5, lr=0.5, weight_decay=0, max_grad_norm=1e9, normalize_advantages=False, gamma=0.9, lam=0.8,
        value_coef=0.25, entropy_coef=0.01, microbatch_tokens=100,
    )  # fmt: skip
    trainer = Trainer(policy, config, ranks)
    trainer.optimizer = torch.optim.SGD([{"params": list(policy.parameters()), "base_lr": 0.5}], lr=0.5)
    groups = random_groups(spec, 3, turns=2)
    groups = [Group(g.ticket_id, g.actor, (on_policy(policy, g.trajectories[0], noise=0.3),)) for g in groups]
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    expected = _gradient_by_hand(policy, [g.trajectories[0] for g in groups], gamma=0.9, lam=0.8, value_coef=0.25)
    trainer.step(groups, version=0)
    for name, p in policy.named_parameters():
        scale = expected[name].abs().max().item() + 1e-8
        moved = (before[name] - p.detach()) / 0.5
        torch.testing.assert_close(moved, expected[name], rtol=1e-3, atol=2e-4 * scale + 3e-7)


def _gradient_by_hand(policy, trajectories, *, gamma, lam, value_coef):
    """The loss written out token by token in plain Python, differentiated by autograd."""
    num_tokens = sum(int(t.loss_mask.sum()) for t in trajectories)
    total = torch.zeros(())
    for t in trajectories:
        output = policy(packed(policy, [t]), 1.0)
        places = np.flatnonzero(t.loss_mask)
        ends = {turn.end - 1: turn.reward for turn in t.turns}
        rhos = (output.logprobs.detach().numpy() - t.behaviour_logprobs[places]).clip(-50, 50)
        rhos, values = np.minimum(1.0, np.exp(rhos)), output.values.detach().numpy()
        error_next, value_next = 0.0, 0.0
        for k in reversed(range(len(places))):
            last, end = k == len(places) - 1, int(places[k]) in ends
            discount, lambda_ = (0.0 if last else gamma, lam) if end else (1.0, 1.0)
            reward = ends.get(int(places[k]), 0.0)
            advantage = reward + discount * (value_next + lambda_ * error_next) - values[k]
            delta = rhos[k] * (reward + discount * value_next - values[k])
            error = delta + discount * lambda_ * rhos[k] * error_next
            total = total - rhos[k] * advantage * output.logprobs[k] - 0.01 * output.entropies[k]
            total = total + value_coef * 0.5 * (output.values[k] - (values[k] + error)) ** 2
            error_next, value_next = error, values[k]
    policy.zero_grad()
    (total / num_tokens).backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters()}
    policy.zero_grad()
    return gradients


def test_microbatches_change_nothing_but_rounding(folder, spec, ranks):
    groups = random_groups(spec, 4, turns=2, group_size=2)
    after = []
    for budget in (10_000, 60):
        policy = load_policy(str(folder), spec)
        config = LearnerConfig(lr=1e-3, microbatch_tokens=budget)
        Trainer(policy, config, ranks).step(groups, version=0)
        after.append(policy.state_dict())
    for name, value in after[0].items():
        torch.testing.assert_close(after[1][name], value, rtol=0, atol=2e-4)


def test_equal_rewards_change_nothing_under_grpo_and_cost_no_microbatch(policy, spec, ranks):
    trainer = Trainer(policy, LearnerConfig(objective="grpo", lr=1.0, weight_decay=0.0), ranks)
    same = [dataclasses.replace(t, reward=0.9) for t in random_groups(spec, 1, group_size=4)[0].trajectories]
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    metrics = trainer.step([Group("g", "a", tuple(same))], version=0)
    assert metrics["optim/grad_norm"] == 0.0
    assert all(torch.equal(before[name], p) for name, p in policy.named_parameters())


def test_grpo_raises_the_logprob_of_what_was_rewarded(policy, spec, ranks):
    trainer = Trainer(policy, LearnerConfig(objective="grpo", lr=3e-3, weight_decay=0.0), ranks)
    group = random_groups(spec, 1, group_size=4, turns=1)[0]
    played = [dataclasses.replace(on_policy(policy, t), reward=0.0) for t in group.trajectories]
    played[0] = dataclasses.replace(played[0], reward=1.0)
    for _ in range(3):
        trainer.step([Group("g", "a", tuple(played))], version=0)
    after = on_policy(policy, played[0])
    assert after.behaviour_logprobs.sum() > played[0].behaviour_logprobs.sum() + 0.5


def test_a_non_finite_loss_skips_the_step_and_is_counted(policy, spec, ranks):
    trainer = Trainer(policy, LearnerConfig(lr=1.0), ranks)
    group = random_groups(spec, 1)[0]
    first = group.trajectories[0]
    bad = dataclasses.replace(first, turns=(dataclasses.replace(first.turns[0], reward=float("nan")),))
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    metrics = trainer.step([Group("g", "a", (bad,))], version=0)
    assert metrics["optim/skipped_steps"] == 1.0
    assert all(torch.equal(before[name], p) for name, p in policy.named_parameters())
    metrics = trainer.step([group], version=0)
    assert metrics["optim/skipped_steps"] == 1.0 and np.isfinite(metrics["optim/grad_norm"])


def test_a_step_without_any_trainable_episode_is_skipped(policy, ranks):
    metrics = Trainer(policy, LearnerConfig(), ranks).step([], version=0)
    assert metrics["optim/skipped_steps"] == 1.0 and metrics["batch/episodes"] == 0.0


def test_metrics_are_split_by_version_lag(policy, spec, ranks):
    groups = [random_groups(spec, 1, seed=s, version=v)[0] for s, v in ((0, 5), (1, 4), (2, 4))]
    groups = [Group(g.ticket_id, g.actor, (on_policy(policy, g.trajectories[0]),)) for g in groups]
    metrics = Trainer(policy, LearnerConfig(), ranks).step(groups, version=5)
    tokens = metrics["tokens/lag_0"] + metrics["tokens/lag_1"]
    assert tokens == metrics["batch/sampled_tokens"] and "tokens/lag_2" not in metrics
    assert metrics["behaviour/logprob_gap"] < 1e-4
    assert metrics["behaviour/ess"] == pytest.approx(1.0, abs=1e-4)


def test_temperature_zero_cannot_be_trained_on(policy, ranks):
    with pytest.raises(ValueError, match=r"sampling\.temperature = 0"):
        Trainer(policy, LearnerConfig(), ranks, temperature=0.0)


def test_a_path_without_config_and_a_model_of_another_kind_are_one_line(tmp_path, folder, spec):
    with pytest.raises(ValueError, match=r"holds no readable config\.json"):
        load_policy(str(tmp_path), spec)
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="is a 'llama' model"):
        load_policy(str(other), spec)


def test_episodes_can_be_made_from_what_the_test_helper_draws(spec):
    assert len(make_episodes(random_groups(spec, 2, group_size=2), Pictures(spec), EpisodeSettings())) == 4
