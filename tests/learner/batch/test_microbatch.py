"""Groups become episodes, episodes become balanced packed microbatches."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from PIL import Image as PILImage

from learner.batch.binning import MOST_EXTRA, assign_microbatches, assign_neighbours
from learner.batch.episodes import check_group, make_episode, make_episodes
from learner.batch.image_decoder import ImageDecoder
from learner.batch.packer import empty_microbatch, pack
from shared.config.objective_section import ObjectiveConfig
from shared.families.registry import FAMILIES
from shared.types import Ending, Group, Image
from shared.vision import VisionSpec
from tests.support.episodes import random_groups, random_trajectory
from tests.support.tiny import draw_image, png

SPEC = VisionSpec(image_token_id=600, family=FAMILIES["qwen3_vl"], min_pixels=1024, max_pixels=1 << 20)
CPU = torch.device("cpu")


@pytest.mark.parametrize("place", [assign_microbatches, assign_neighbours])
@given(lengths=st.lists(st.integers(1, 50), max_size=40), num_ranks=st.integers(1, 4), budget=st.integers(1, 120))
def test_a_plan_places_every_episode_once_within_the_budget_on_every_rank_alike(place, lengths, num_ranks, budget):
    assert_sound(place(lengths, num_ranks, budget), lengths, num_ranks, budget)
    assert_sound(place(lengths, num_ranks, budget, [n * n % 37 for n in lengths]), lengths, num_ranks, budget)


def assert_sound(planned: list[list[list[int]]], lengths: list[int], num_ranks: int, budget: int) -> None:
    assert len(planned) == num_ranks
    assert len({len(microbatches) for microbatches in planned}) == 1
    chosen = [chosen for microbatches in planned for chosen in microbatches]
    assert sorted(i for c in chosen for i in c) == list(range(len(lengths)))
    assert all(len(c) <= 1 or sum(lengths[i] for i in c) <= budget for c in chosen)


def fewest(lengths: list[int], budget: int) -> int:
    """How many bins are needed, by trying all: (bins, tokens of the last) of each subset of the episodes."""
    least = [(1, 0)]
    for chosen in range(1, 1 << len(lengths)):
        found = []
        for i, length in enumerate(lengths):
            if chosen >> i & 1:
                bins, held = least[chosen & ~(1 << i)]
                found.append((bins, held + length) if held + length <= budget else (bins + 1, length))
        least.append(min(found))
    return least[-1][0]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    num_ranks=st.integers(1, 3),
    budget=st.integers(60, 120),
)
def test_a_plan_takes_at_most_half_as_many_microbatches_again_as_are_needed(lengths, num_ranks, budget):
    needed = fewest(lengths, budget)
    packed, together = (len(place(lengths, num_ranks, budget)[0]) for place in (assign_microbatches, assign_neighbours))
    assert packed <= -(-(needed * 3 // 2) // num_ranks)
    assert together <= (1 + MOST_EXTRA) * packed


@pytest.mark.parametrize("num_ranks", [1, 8])
@pytest.mark.parametrize("place", [assign_microbatches, assign_neighbours])
def test_thousands_of_episodes_of_mixed_lengths_fill_their_microbatches_and_no_rank_waits(place, num_ranks):
    """Cut into equal stretches, these took 1.9 times as many as their tokens need."""
    lengths = np.clip(np.random.default_rng(0).lognormal(7.5, 1.0, 4096), 100, 16000).astype(int)
    planned = place(lengths.tolist(), num_ranks, 16384)
    held = np.array([[lengths[chosen].sum() for chosen in rank] for rank in planned])  # [rank, microbatch]
    assert held.size <= -(-lengths.sum() // 16384) * 1.02 + num_ranks
    assert held.max(0).sum() * num_ranks < 1.02 * lengths.sum()


def test_the_same_lengths_are_placed_alike():
    lengths = np.random.default_rng(1).integers(1, 50, 200).tolist()
    for place in (assign_microbatches, assign_neighbours):
        assert place(lengths, 3, 60) == place(list(lengths), 3, 60)


def test_a_plan_is_balanced():
    lengths = np.random.default_rng(0).integers(50, 400, 64).tolist()
    sums = [sum(lengths[i] for c in rank for i in c) for rank in assign_microbatches(lengths, 4, 4096)]
    assert max(sums) < 1.05 * min(sums)


@pytest.mark.parametrize(("place", "most"), [(assign_microbatches, 1.02), (assign_neighbours, 1.1)])
def test_ranks_wait_less_where_a_plan_knows_what_episodes_cost(place, most):
    """Attention grows with the square of the length. By tokens alone they waited for 1.35 and 1.49 times the mean of
    the ranks."""
    lengths = np.clip(np.random.default_rng(0).lognormal(7.5, 1.0, 512), 100, 16000)
    costs = lengths + lengths**2 / 2000

    def waited(*known: list[float]) -> float:
        planned = place(lengths.astype(int).tolist(), 8, 32768, *known)
        spent = np.array([[costs[chosen].sum() for chosen in rank] for rank in planned])
        return float(spent.max(0).sum() * 8 / spent.sum())

    assert waited(costs.tolist()) < min(waited(), most)


def test_episodes_of_a_group_stay_together_and_ranks_are_even_up_to_one_episode():
    lengths = np.random.default_rng(0).integers(50, 400, 64).tolist()
    planned = assign_neighbours(lengths, 4, 4096)
    assert [i for rank in planned for chosen in rank for i in chosen] == list(range(64))
    sums = [sum(lengths[i] for c in rank for i in c) for rank in planned]
    assert max(sums) - min(sums) <= 400


def test_a_turns_reward_stands_at_its_last_sampled_token():
    trajectory = random_trajectory(SPEC, 3, turns=3)
    episode = make_episode(trajectory, 0.0, ImageDecoder(SPEC), ObjectiveConfig(reward_scale=2.0))
    assert episode.turn_end.sum() == 3 and episode.turn_end[-1]
    assert episode.rewards[episode.turn_end] == pytest.approx([2 * turn.reward for turn in trajectory.turns])
    assert not episode.rewards[~episode.turn_end].any()
    lengths = np.diff([0, *(np.flatnonzero(episode.turn_end) + 1)])
    assert lengths.tolist() == [turn.end - turn.start for turn in trajectory.turns]


def test_the_episodes_reward_alone_stands_at_the_end_when_turns_have_none():
    trajectory = random_trajectory(SPEC, 3, turns=3)
    episode = make_episode(trajectory, 0.0, ImageDecoder(SPEC), ObjectiveConfig(turn_rewards=False))
    assert episode.rewards[-1] == np.float32(trajectory.reward) and not episode.rewards[:-1].any()


def test_placeholders_become_as_many_tokens_as_their_images_have():
    trajectory = random_trajectory(SPEC, 1, turns=2)
    decoder = ImageDecoder(SPEC)
    episode = make_episode(trajectory, 0.0, decoder, ObjectiveConfig())
    visual = sum(len(decoder.get(image).patches) // 4 for image in trajectory.images)
    expanded = episode.expanded()
    assert (expanded.input_ids == SPEC.image_token_id).sum() == visual
    assert episode.num_tokens == len(trajectory.token_ids) - 2 + visual == len(expanded.input_ids)
    sampled = trajectory.loss_mask.astype(bool)
    assert expanded.input_ids[expanded.targets].tolist() == trajectory.token_ids[sampled].tolist()


def test_failed_episodes_are_not_trained_on_and_do_not_count_in_their_group():
    good, other, bad = (random_trajectory(SPEC, seed, turns=1) for seed in range(3))
    good, other = replace(good, reward=1.0), replace(other, reward=1.0)
    bad = replace(bad, reward=-5.0, ending=Ending.ENV_ERROR)
    episodes = make_episodes([Group("g", "a", (good, other, bad))], ImageDecoder(SPEC), ObjectiveConfig())
    assert [e.advantage for e in episodes] == [0.0, 0.0]


def test_an_image_seen_twice_is_packed_once():
    trajectory = random_trajectory(SPEC, 1, turns=3, sides=(64,))
    same = replace(trajectory, images=(trajectory.images[0],) * 3)
    decoder = ImageDecoder(SPEC)
    episode = make_episode(same, 0.0, decoder, ObjectiveConfig())
    batch = pack([episode, episode], decoder, CPU, share_prefixes=False)
    assert batch.image_lengths == (16,) and batch.patches.shape == (16, 3, 16, 16)
    assert batch.visual_rows.tolist() == [0, 1, 2, 3] * 6
    assert (batch.input_ids[0, batch.visual_positions] == SPEC.image_token_id).all()


def test_packing_keeps_every_episodes_tokens_and_ends():
    decoder = ImageDecoder(SPEC)
    episodes = make_episodes(random_groups(SPEC, 5), decoder, ObjectiveConfig())
    batch = pack(episodes, decoder, CPU)
    assert sum(batch.lengths) == batch.input_ids.shape[1] == batch.position_ids.shape[2]
    assert batch.position_ids.shape[:2] == (4, 1)
    starts = np.cumsum([0, *batch.lengths[:-1]])
    assert (batch.position_ids[:, 0, starts] == 0).all()
    assert batch.episode_end.sum() == 5 and batch.episode_end[-1]
    assert (batch.input_ids[0, batch.predictors + 1] == batch.target_ids).all()
    assert (batch.turn_end | ~batch.episode_end).all()


def test_an_image_is_resized_as_the_image_processor_of_transformers_does():
    from transformers import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        patch_size=16, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3, min_pixels=4096, max_pixels=20000
    )
    spec = dataclasses.replace(SPEC, min_pixels=4096, max_pixels=20000)
    for width, height in ((64, 96), (50, 70), (20, 30), (300, 200)):
        expected = processor([draw_image(width, height)], return_tensors="np")
        got = ImageDecoder(spec).get(Image.of(png(draw_image(width, height))))
        assert got.grid == tuple(expected["image_grid_thw"][0])
        still = expected["pixel_values"].reshape(len(got.patches), 3, 2, 16, 16)[:, :, 0]
        np.testing.assert_allclose(got.patches / 127.5 - 1, still, atol=1e-5)


def test_what_is_no_image_or_too_large_is_one_clear_error():
    with pytest.raises(ValueError, match="is refused: no image file"):
        ImageDecoder(SPEC).grid(Image.of(b"hello"))
    with pytest.raises(ValueError, match="cannot be decoded"):
        ImageDecoder(SPEC).get(Image.of(png(draw_image(64, 64))[:2000]))
    buffer = io.BytesIO()
    PILImage.new("1", (9000, 8000)).save(buffer, "PNG")
    with pytest.raises(ValueError, match="9000x8000 pixels is above"):
        ImageDecoder(SPEC).get(Image.of(buffer.getvalue()))


def test_a_group_with_an_image_that_breaks_off_is_found_before_it_reaches_a_step():
    group = random_groups(SPEC, 1, group_size=2)[0]
    check_group(group, ImageDecoder(SPEC))
    first = group.trajectories[0]
    cut = Image.of(first.images[0].data[:200])
    spoiled = replace(first, images=(cut, *first.images[1:]))
    with pytest.raises(ValueError, match="is refused: a PNG of 200 bytes breaks off"):
        check_group(replace(group, trajectories=(spoiled, group.trajectories[1])), ImageDecoder(SPEC))
    with pytest.raises(ValueError, match="3 image placeholders but 1 images"):
        spoiled = replace(first, images=first.images[:1])
        check_group(replace(group, trajectories=(spoiled,)), ImageDecoder(SPEC))


def test_old_images_are_forgotten_beyond_the_limit():
    decoder = ImageDecoder(SPEC, max_bytes=3 * 16 * 768)
    images = [Image.of(png(draw_image(64, 64, seed))) for seed in range(6)]
    first = decoder.get(images[0])
    for image in images:
        decoder.get(image)
    assert decoder.get(images[0]) is not first
    assert decoder.get(images[5]) is decoder.get(images[5])


def test_an_episode_that_starts_with_a_sampled_token_is_refused():
    trajectory = random_trajectory(SPEC, 1, prompt_tokens=0, turns=1, with_images=False)
    mask = np.ones_like(trajectory.loss_mask)
    with pytest.raises(ValueError, match="needs a prompt"):
        make_episode(replace(trajectory, loss_mask=mask), 0.0, ImageDecoder(SPEC), ObjectiveConfig())


def test_the_stand_in_for_a_rank_without_episodes_counts_no_token():
    batch = empty_microbatch(ImageDecoder(SPEC), 0)
    assert batch.empty and batch.num_tokens == 0 and batch.target_ids.tolist() == [0]
