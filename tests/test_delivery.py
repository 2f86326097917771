"""Groups come to every rank without their images, and an image to the ranks alone that train on it, once a step."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace as changed
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist
from msgspec.structs import replace

from learner.batch import make_episodes
from learner.distributed import close_ranks, init_ranks, make_context
from learner.images import AbsentImage, ImageDecoder
from learner.parallel.delivery import broadcast_groups
from learner.parallel.packer import Packer
from shared.codec import encode
from shared.settings.objective import ObjectiveConfig
from shared.types import Ending, Group, Image
from shared.vision import VisionSpec
from tests.support.episodes import learner_config, random_groups
from tests.support.ranks.processes import in_processes

SPEC = VisionSpec(image_token_id=600, min_pixels=1024, max_pixels=1 << 20)
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


def deliver(context: int, folder: Path) -> None:
    """A step with two updates on the same episodes, on one rank."""
    ranks = init_ranks("cpu", timeout_s=60)
    ranks = changed(ranks, context=make_context(ranks.rank, ranks.size, context, timedelta(seconds=60)))
    decoder = ImageDecoder(SPEC)
    packer = Packer(learner_config(microbatch_tokens=90, context=context), ranks, decoder, None, ())
    with counted(decoder) as counts:
        groups = broadcast_groups(made() if ranks.is_main else None, ranks)
        episodes = make_episodes(groups, decoder, ObjectiveConfig())
        chosen = packer.plan(episodes)
        once = dict(counts)
        packer.plan(episodes)
        batches = [packer.pack([episodes[i] for i in numbers]) for numbers in chosen]
    seen = {
        "counts": counts,
        "once": once,
        "absent": [isinstance(i, AbsentImage) for g in groups for t in g.trajectories for i in t.images],
        "tokens": [[t.token_ids.tolist() for t in g.trajectories] for g in groups],
        "wanted": {image.content_hash for numbers in chosen for i in numbers for image in episodes[i].images},
        "files": {key: len(data) for key, data in decoder.files.items()},
        "patches": np.concatenate([batch.patches.numpy() for batch in batches if not batch.empty]),
        "num_distinct": sum(len(batch.image_lengths) for batch in batches if not batch.empty),
    }
    (folder / str(ranks.rank)).write_bytes(pickle.dumps(seen))
    packer.delivery.forget()
    assert not decoder.files
    close_ranks()


@pytest.fixture(scope="module", params=[(1, 1), (3, 1), (4, 2)], ids=["alone", "three", "two pairs that share"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    size, context = request.param
    folder = tmp_path_factory.mktemp("ranks")
    assert in_processes([[size]], deliver, context, folder) == 0
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(size)]


def sizes() -> dict[str, int]:
    return {i.content_hash: len(i.data) for g in made() for t in g.trajectories if t.trainable for i in t.images}


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
        assert rank["counts"] | {"decoded": 0} == rank["once"]  # the second update brought nothing
        told = 8 * len(rank["files"])
        assert rank["counts"]["recv"] == sum(rank["files"].values()) + told
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


def pack_parts(context: int) -> None:
    """Steps of which a part is looked at once more: it may be dealt to others than the whole."""
    ranks = init_ranks("cpu", timeout_s=60)
    ranks = changed(ranks, context=make_context(ranks.rank, ranks.size, context, timedelta(seconds=60)))
    for seed in range(6):
        decoder = ImageDecoder(SPEC)
        packer = Packer(learner_config(microbatch_tokens=400, context=context), ranks, decoder, None, ())
        groups = random_groups(SPEC, 4, turns=3, group_size=1, seed=10 * seed) if ranks.is_main else None
        episodes = make_episodes(broadcast_groups(groups, ranks), decoder, ObjectiveConfig())
        chosen = packer.plan(episodes)
        parts = packer.parts_of_last(episodes)
        assert parts is not None and len(parts) == ranks.size // context
        assert parts[ranks.rank // context] == [episodes[i] for i in chosen[-1][: -(-len(chosen[-1]) // 4)]]
        batch = packer.packed_part(parts)
        assert batch.num_tokens == sum(e.num_sampled for e in parts[ranks.rank // context])
        packer.delivery.forget()
    assert packer.plan([]) == [] and packer.parts_of_last([]) is None
    close_ranks()


@pytest.mark.parametrize(("size", "context"), [(2, 2), (4, 2), (2, 1)])
def test_a_part_of_a_microbatch_has_its_images_on_the_ranks_that_share_it(size: int, context: int) -> None:
    assert in_processes([[size]], pack_parts, context) == 0
