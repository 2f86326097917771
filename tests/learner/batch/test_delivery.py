"""Groups come to every rank without their images, and an image to the ranks alone that train on it, once a step."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace as changed
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from learner.batch.delivery import broadcast_groups, delivered_images
from learner.batch.image_decoder import AbsentImage, ImageDecoder
from learner.batch.packer import Packer
from learner.batch.step_plan import StepPlan, plan_step
from learner.distributed import Ranks, close_ranks, init_ranks, make_context
from learner.model.context_collectives import lowest
from shared.families.registry import FAMILIES
from shared.types import Ending, Group, Image
from shared.vision import VisionSpec
from shared.wire.codec import encode
from tests.support.episodes import learner_config, random_groups

SPEC = VisionSpec(image_token_id=600, family=FAMILIES["qwen3_vl"], min_pixels=1024, max_pixels=1 << 20)
NO_IMAGE = Image.of(b"no image")


def made() -> list[Group]:
    """Of two episodes each that share an image; one more has failed, and holds what is no image."""
    groups = []
    for group in random_groups(SPEC, 5, turns=2, group_size=2):
        first, second = group.trajectories
        shared = replace(second, images=(first.images[0], *second.images[1:]))
        groups.append(replace(group, trajectories=(first, shared)))
    failed = replace(groups[0].trajectories[0], ending=Ending.ENV_ERROR, images=(NO_IMAGE, NO_IMAGE))
    return [*groups, replace(groups[0], trajectories=(failed, *groups[1].trajectories))]


@contextmanager
def counted(decoder: ImageDecoder) -> Iterator[dict[str, int]]:
    """How many bytes are broadcast and sent or received, and how many images are decoded."""
    counts = {"broadcast": 0, "send": 0, "recv": 0, "decoded": 0}

    def counting(name: str, call: Any) -> Any:
        def count(first: Any, *rest: Any, **settings: Any) -> Any:
            counts[name] += 1 if name == "decoded" else first.numel() * first.element_size()
            return call(first, *rest, **settings)

        return count

    with ExitStack() as stack:
        for name in ("broadcast", "send", "recv"):
            stack.enter_context(patch.object(dist, name, counting(name, getattr(dist, name))))
        stack.enter_context(patch.object(decoder, "_decode", counting("decoded", decoder._decode)))
        yield counts


def planned(groups: list[Group], ranks: Ranks, decoder: ImageDecoder, **settings: int) -> tuple[StepPlan, Any]:
    """A step's plan, and what brings its images to their ranks."""
    config = learner_config(context=ranks.context.size, **settings)
    plan = plan_step(groups, decoder, config, ranks, None, seed=0)
    images_of = partial(plan.images_of, context_size=ranks.context.size, decoder=decoder)
    return plan, delivered_images(images_of, ranks, decoder)


def deliver(context: int, folder: str) -> None:
    """A step with two updates on the same episodes, on one rank."""
    ranks = init_ranks("cpu", timeout_s=60)
    ranks = changed(ranks, context=make_context(ranks.rank, ranks.size, context, timedelta(seconds=60)))
    decoder = ImageDecoder(SPEC)
    packer = Packer(decoder, (), ranks.device, ranks.context)
    with counted(decoder) as counts:
        groups = list(broadcast_groups(made() if ranks.is_main else None, ranks))
        plan, delivery = planned(groups, ranks, decoder, microbatch_tokens=90, passes=2)
        with delivery:
            batches = [packer.pack(episodes) for episodes in plan.updates[0].microbatches]
            files = {key: len(data) for key, data in decoder.files.items()}
        assert not decoder.files
    seen = {
        "counts": counts,
        "absent": [isinstance(i, AbsentImage) for g in groups for t in g.trajectories for i in t.images],
        "tokens": [[t.token_ids.tolist() for t in g.trajectories] for g in groups],
        "wanted": {
            image.content_hash for part in plan.parts for m in part.microbatches for e in m for image in e.images
        },
        "files": files,
        "patches": np.concatenate([batch.patches.numpy() for batch in batches if not batch.empty]),
        "num_distinct": sum(len(batch.image_lengths) for batch in batches if not batch.empty),
    }
    (Path(folder) / str(ranks.rank)).write_bytes(pickle.dumps(seen))
    close_ranks()


@pytest.fixture(scope="session")
def on_ranks(run_ranks: Callable[..., None]) -> Callable[..., None]:
    """Call a function of this module on so many ranks, with these arguments."""

    def run(function: str, size: int, *arguments: object) -> None:
        run_ranks("ranks.called", "tests.learner.batch.test_delivery", function, size, json.dumps(arguments))

    return run


@pytest.fixture(scope="module", params=[(1, 1), (3, 1), (4, 2)], ids=["alone", "three", "two pairs that share"])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, on_ranks: Callable[..., None]
) -> list[dict[str, Any]]:
    size, context = request.param
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks("deliver", size, context, str(folder))
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(size)]


def sizes() -> dict[str, int]:
    return {i.content_hash: len(i.data) for g in made() for t in g.trajectories if t.trainable for i in t.images}


@pytest.mark.slow
def test_every_rank_has_the_tokens_of_all_episodes_and_only_rank_0_their_images(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        assert rank["tokens"] == [[t.token_ids.tolist() for t in g.trajectories] for g in made()]
        assert all(rank["absent"]) if number else not any(rank["absent"])


def test_no_image_is_broadcast(ranks: list[dict[str, Any]]) -> None:
    text = sum(len(f) for g in made() for f in encode(g)) - sum(len(i.data) for g in made() for i in distinct(g))
    for rank in ranks:
        assert (rank["counts"]["broadcast"] < text + 10_000) and sum(sizes().values()) > 50_000


def distinct(group: Group) -> set[Image]:
    return {image for t in group.trajectories for image in t.images}


def test_an_image_goes_once_a_step_to_each_rank_that_decodes_it_and_to_no_other(ranks: list[dict[str, Any]]) -> None:
    bytes_of, received = sizes(), 0
    for number, rank in enumerate(ranks):
        sizes_sent = 8 * len(rank["files"])
        assert rank["counts"]["recv"] == sum(rank["files"].values()) + sizes_sent  # for both updates together
        assert all(bytes_of[key] == size for key, size in rank["files"].items())
        assert rank["files"].keys() <= rank["wanted"] and (number or not rank["files"])
        received += rank["counts"]["recv"]
    assert ranks[0]["counts"]["send"] == received
    if len(ranks) == 3:  # each has microbatches of its own
        assert all(rank["files"].keys() == rank["wanted"] for rank in ranks[1:])
        assert received < sum(bytes_of.values()) * 3 / 2
    if len(ranks) == 4:  # a pair shares the images of its microbatches
        assert ranks[2]["files"].keys() | ranks[3]["files"].keys() == ranks[2]["wanted"] == ranks[3]["wanted"]


def test_a_rank_decodes_what_it_trains_on_and_rank_0_no_more(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert 0 < rank["counts"]["decoded"] <= rank["num_distinct"]
    total = sum(rank["counts"]["decoded"] for rank in ranks)
    assert total <= len(sizes()) * 3 / 2


def test_the_patches_of_all_ranks_are_those_of_one(ranks: list[dict[str, Any]]) -> None:
    images = {i.content_hash: i for g in made() for t in g.trajectories if t.trainable for i in t.images}
    expected = {p.tobytes() for image in images.values() for p in ImageDecoder(SPEC).get(image).patches}
    assert {p.tobytes() for rank in ranks for p in rank["patches"]} == expected


def pack_probes(context: int) -> None:
    """Steps of which a part is looked at once more: its images may be dealt to other ranks than those of the whole."""
    ranks = init_ranks("cpu", timeout_s=60)
    ranks = changed(ranks, context=make_context(ranks.rank, ranks.size, context, timedelta(seconds=60)))
    for seed in range(6):
        decoder = ImageDecoder(SPEC)
        packer = Packer(decoder, (), ranks.device, ranks.context)
        groups = random_groups(SPEC, 4, turns=3, group_size=1, seed=10 * seed) if ranks.is_main else None
        plan, delivery = planned(list(broadcast_groups(groups, ranks)), ranks, decoder, microbatch_tokens=400)
        (update,) = plan.updates
        last = update.microbatches[-1]
        assert update.probe == last[: -(-len(last) // 4)]
        with delivery:
            assert packer.pack(update.probe).num_tokens == sum(e.num_sampled for e in update.probe)
    plan, _ = planned([], ranks, decoder)
    assert [(update.microbatches, update.probe) for update in plan.updates] == [([], [])]
    close_ranks()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "context"), [(2, 2), (4, 2), (2, 1)])
def test_a_probe_of_a_microbatch_has_its_images_on_the_ranks_that_share_it(
    size: int, context: int, on_ranks: Callable[..., None]
) -> None:
    on_ranks("pack_probes", size, context)


def deliver_damaged() -> None:
    """Rank 1 asks for an image under another's name, which is what a damaged file looks like."""
    ranks, decoder = init_ranks("cpu", timeout_s=60), ImageDecoder(SPEC)
    image, other = (Image.of(data) for data in (b"some image", b"other"))
    wanted = {(image if ranks.is_main else other).content_hash: image}
    expected = nullcontext() if ranks.is_main else pytest.raises(RuntimeError, match="damaged on its way from rank 0")
    with expected, delivered_images(lambda rank: wanted, ranks, decoder):
        assert ranks.is_main
    close_ranks()


def test_an_image_that_was_damaged_on_its_way_is_named(on_ranks: Callable[..., None]) -> None:
    on_ranks("deliver_damaged", 2)


def deliver_twice() -> None:
    """Two steps that show the same image: it goes in both."""
    ranks, decoder = init_ranks("cpu", timeout_s=60), ImageDecoder(SPEC)
    image = Image.of(b"some image")
    for _step in range(2):
        with delivered_images(lambda rank: {image.content_hash: image}, ranks, decoder):
            assert [bytes(data) for data in decoder.files.values()] == ([] if ranks.is_main else [image.data])
        assert not decoder.files
    close_ranks()


def test_an_image_goes_again_in_the_next_step(on_ranks: Callable[..., None]) -> None:
    on_ranks("deliver_twice", 2)


def find_lowest() -> None:
    ranks = init_ranks("cpu", timeout_s=60)
    context = make_context(ranks.rank, 2, 2, timedelta(seconds=60))
    columns = (torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 0.0]))
    result = lowest(columns[ranks.rank], SimpleNamespace(context=context))  # type: ignore[arg-type]
    assert result.tolist() == [1.0, 0.0, 0.0]
    close_ranks()


def test_an_episode_that_one_rank_cannot_read_is_unreadable_for_all_that_share_it(
    on_ranks: Callable[..., None],
) -> None:
    on_ranks("find_lowest", 2)
