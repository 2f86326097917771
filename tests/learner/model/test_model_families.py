"""Each family of models that the tasks name, small and random, but of the real classes: the packed policy against
transformers' own forward, and one step of training."""

from __future__ import annotations

import json
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import transformers

from actor.episode import Stream
from actor.render import Fragment
from learner.batch.episodes import make_episode
from learner.batch.image_decoder import ImageDecoder
from learner.batch.vision_inputs import window_lengths
from learner.checkpoints.restoring import load_checkpoint
from learner.model.policy import load_policy
from learner.training.trainer import Trainer
from shared.config.objective_section import ObjectiveConfig
from shared.families.qwen2_5_vl.qwen2_5_tower import windows_of
from shared.types import Ending, Group, Image, Sampling, Turn
from shared.vision import VisionSpec, pixel_values
from tests.support.checkpoints import config, recipe, save
from tests.support.engines import ask
from tests.support.episodes import (
    learner_config,
    on_policy,
    packed,
    plain_logprobs,
    random_groups,
    random_trajectory,
)
from tests.support.ranks.doubled import in_float64
from tests.support.small.families import FAMILIES as SMALL
from tests.support.tiny import draw_image, png, running_engine, tiny_model_dir


@pytest.fixture(scope="module", params=sorted({*SMALL} - {"Qwen3-VL"}))
def family(request, tmp_path_factory):
    make, kind, sides = SMALL[request.param]
    folder = make(tmp_path_factory.mktemp("model"))
    return folder, kind, sides


@pytest.mark.slow
def test_packed_logprobs_equal_transformers_own_forward(family):
    folder, kind, sides = family
    spec = VisionSpec.load(folder)
    policy, model = load_policy(str(folder), spec), kind.from_pretrained(folder, dtype=torch.float32).eval()
    trajectories = [random_trajectory(spec, seed, turns=2, sides=sides) for seed in range(3)]
    trajectories.sort(key=lambda t: sum(packed(policy, [t]).lengths))
    expected = torch.cat([plain_logprobs(model, t, spec) for t in trajectories])
    torch.testing.assert_close(policy(packed(policy, trajectories), 1.0).logprobs, expected, rtol=0, atol=5e-5)


def run(policy, batches):
    """Values and gradients of all parameters, the batches' outputs laid end to end."""
    policy.zero_grad()
    outputs = [policy(batch, 1.0) for batch in batches]
    sum((o.logprobs.sum() + o.values.square().sum() + o.entropies.sum()) for o in outputs).backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    return [torch.cat(x).detach() for x in zip(*(o[:3] for o in outputs), strict=True)], gradients


@pytest.mark.slow
@pytest.mark.parametrize(("double", "bound"), [(True, 1e-9), (False, 3e-5)])
def test_packed_equals_unpacked_in_values_and_gradients(family, double, bound):
    folder, _, sides = family
    spec = VisionSpec.load(folder)
    with in_float64() if double else nullcontext():
        policy = load_policy(str(folder), spec)
        if double:
            policy.vlm.set_experts_implementation("eager")  # torch's grouped product has no float64
        torch.nn.init.normal_(policy.value_head.weight)
        trajectories = [random_trajectory(spec, seed, turns=1 + seed, sides=sides) for seed in range(3)]
        trajectories.append(random_trajectory(spec, 9, turns=2, with_images=False))
        lengths = [sum(packed(policy, [t]).lengths) for t in trajectories]
        alone = [trajectories[i] for i in np.argsort(lengths, kind="stable")]
        got, gradients = run(policy, [packed(policy, trajectories)])
        expected, expected_gradients = run(policy, [packed(policy, [t]) for t in alone])
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        scale = 1 + gradient.abs().max().item()
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=bound * scale, msg=name)


@pytest.fixture
def seeing(family):
    """The same for families that take images."""
    if not VisionSpec.load(family[0]).takes_images:
        pytest.skip("a text model")
    return family


def test_the_positions_of_text_and_images_are_those_of_transformers(seeing):
    folder, kind, sides = seeing
    spec = VisionSpec.load(folder)
    model = kind.from_pretrained(folder, dtype=torch.float32)
    episode = make_episode(random_trajectory(spec, 5, sides=sides), 0.0, ImageDecoder(spec), ObjectiveConfig())
    expanded = episode.expanded()
    ids = torch.from_numpy(expanded.input_ids)[None]
    grids = torch.tensor([ImageDecoder(spec).grid(image) for image in episode.images])
    kinds = (ids == spec.image_token_id).int()
    positions, _ = model.model.get_rope_index(ids, image_grid_thw=grids, mm_token_type_ids=kinds)
    np.testing.assert_array_equal(expanded.position_ids[1:], positions[:, 0].numpy())


@pytest.mark.slow
def test_every_parameter_is_trained_and_the_step_is_on_policy(family, ranks):
    folder, _, sides = family
    spec = VisionSpec.load(folder)
    policy = load_policy(str(folder), spec)
    before = tuple(on_policy(policy, random_trajectory(spec, seed, turns=2, sides=sides)) for seed in (1, 2))
    old = {name: p.detach().clone() for name, p in policy.named_weights()}
    metrics = Trainer(policy, learner_config(lr=1e-3, weight_decay=0.0), ranks).step([Group("g", "a", before)], 0)
    assert metrics["behaviour/logprob_gap"] < 1e-4
    still = [name for name, p in policy.named_weights() if torch.equal(p, old[name])]
    assert [name for name in still if "deepstack_merger_list.1" not in name] == []  # added after the last of 2 layers


@pytest.mark.slow
def test_a_resumed_model_goes_on_as_if_it_had_not_been_interrupted(family, ranks, tmp_path):
    folder, _, sides = family
    spec = VisionSpec.load(folder)

    def new_trainer():
        return Trainer(load_policy(str(folder), spec), config(), ranks)

    def train(trainer, seed):
        trainer.step(random_groups(spec, 2, seed=seed, turns=2, sides=sides), version=0)

    trainer, resumed = new_trainer(), new_trainer()
    train(trainer, 0)
    path = save(trainer, ranks, tmp_path)
    train(trainer, 1)
    load_checkpoint(path, resumed, ranks, recipe())
    train(resumed, 1)
    for (name, got), expected in zip(resumed.policy.named_parameters(), trainer.policy.parameters(), strict=True):
        assert torch.equal(got, expected), name


def test_a_blank_image_stands_in_where_an_episode_has_none(seeing):
    folder, _, _ = seeing
    spec = VisionSpec.load(folder)
    policy = load_policy(str(folder), spec)
    policy(packed(policy, [random_trajectory(spec, 2, with_images=False)]), 1.0).logprobs.sum().backward()
    assert all(p.grad is not None for p in policy.vlm.model.visual.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("size", [(50, 70), (300, 200), (37, 500), (28, 28), (1400, 900), (11, 40)])
def test_images_become_the_patches_of_the_image_processor(seeing, size):
    folder, _, _ = seeing
    spec = VisionSpec.load(folder)
    image = draw_image(*size, seed=3)
    expected = getattr(transformers, spec.family.image_processor).from_pretrained(folder)(image, return_tensors="np")
    prepared = ImageDecoder(spec).get(Image.of(png(image)))
    assert prepared.grid == tuple(expected["image_grid_thw"][0])
    got, wanted = pixel_values(prepared.patches, spec), expected["pixel_values"]
    if spec.resized(*size) == size[::-1]:
        np.testing.assert_allclose(got, wanted, atol=1e-5)
    else:  # resizing may round a channel differently by a step of 1/255
        assert np.abs(got - wanted).max() < 3 / 255 / min(spec.std)


@pytest.mark.parametrize(
    ("make", "temperature"),
    [
        (tiny_model_dir, 0.7),
        *((make, 1.0) for make, _, _ in SMALL.values()),
    ],
)
def test_behaviour_logprobs_of_the_embedded_engine_equal_the_learners(tmp_path, make, temperature):
    folder = make(tmp_path)
    spec = VisionSpec.load(folder)
    shown = [(Image.of(png(draw_image(*size, seed=n))),) for n, size in enumerate([(64, 96), (96, 64)], 1)]
    stream, turns, sampling = Stream(), [], Sampling(temperature, max_new_tokens=12)
    with running_engine(folder, min_pixels=1024, max_pixels=1 << 20) as (url, _):
        for seed, images in enumerate(shown):
            placed = Fragment((5, 6, 7, spec.image_token_id, 9), images)
            stream.observe(placed if spec.takes_images else Fragment((5, 6, 7, 8, 9)))
            start, options = len(stream.token_ids), {"banned_ids": spec.banned_ids, "seed": seed}
            stream.sample(ask(url, lambda c, o=options: c.generate(stream.token_ids, stream.images, sampling, **o)))
            turns.append(Turn(start, len(stream.token_ids), 0.0))
    played, policy = stream.trajectory(turns, Ending.COMPLETED), load_policy(str(folder), spec)
    both = [random_trajectory(spec, 0, turns=1), played]  # the longer one comes last
    got = policy(packed(policy, both), temperature).logprobs.detach()[-stream.num_sampled :]
    assert stream.num_sampled > 6
    np.testing.assert_allclose(got, played.behaviour_logprobs[played.loss_mask == 1], atol=1e-4)


def test_windows_are_cut_row_by_row_and_are_smaller_at_the_edges():
    lengths = window_lengths([(1, 6, 10), (1, 4, 4)], merge_size=2, window_tokens=2)
    assert lengths == (16, 16, 8, 8, 8, 4, 16)
    assert sum(lengths) == 6 * 10 + 4 * 4


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 8, 8), (1, 6, 10), (1, 26, 18), (1, 2, 50)])
def test_the_engine_cuts_the_windows_that_the_learner_cuts_and_lays_equal_ones_together(grid):
    order, windows = windows_of(grid, merge=2, side=4)
    lengths = [length for count, length in windows for _ in range(count)]
    assert sorted(lengths) == sorted(window_lengths([grid], merge_size=2, window_tokens=4))
    assert len(windows) <= 4 and sorted(order) == [*range(grid[1] * grid[2] // 4)]
    starts = np.cumsum([0, *lengths])[:-1] // 4
    rows, columns = order // (grid[2] // 2) // 4, order % (grid[2] // 2) // 4
    for cells in (rows, columns):
        np.testing.assert_array_equal(cells, np.repeat(cells[starts], np.array(lengths) // 4))


def test_both_engines_serve_each_family_that_is_trained_and_no_other(tmp_path):
    for said in ({"model_type": "internvl", "vision_config": {}, "image_token_id": 5}, {"model_type": "llama"}, {}):
        (tmp_path / "config.json").write_text(json.dumps(said))
        with pytest.raises(
            ValueError,
            match=r"qwen3_vl, .*, qwen3_5, qwen3_5_moe, .*; docs/how-to/extend.md#a-model-family tells .*$",
        ):
            VisionSpec.load(tmp_path)
