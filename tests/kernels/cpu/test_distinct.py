"""Rows that are alike are found, all of them and no others, and patches that are alike are embedded once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kernels.cpu import library
from kernels.cpu.distinct import MIN_ROWS, distinct_rows
from learner.model import patch_embed
from shared.families import engine_tower
from shared.families.qwen3_vl.qwen3_tower import Qwen3Tower
from shared.vision import VisionSpec, pixel_values
from tests.support.tiny import load_model, tiny_model_dir

pytestmark = pytest.mark.skipif(library.library() is None, reason="no C compiler")


@pytest.mark.parametrize(("total", "different", "width"), [(64, 1, 768), (500, 250, 35), (3000, 21, 768), (70, 30, 1)])
def test_each_row_is_that_which_it_is_said_to_equal_and_the_first_of_each_kind_is_named(
    total: int, different: int, width: int
) -> None:
    rng = np.random.default_rng(total)
    kinds = rng.permutation(256)[:different, None] if width == 1 else rng.integers(0, 256, (different, width))
    of_rows = np.concatenate([np.arange(different), rng.integers(0, different, total - different)])
    rows = torch.from_numpy(kinds.astype(np.uint8)[rng.permutation(of_rows)])
    found = distinct_rows(rows)
    assert found is not None
    first, like = found
    assert torch.equal(rows[first][like], rows)
    assert len(first) == len(np.unique(rows.numpy(), axis=0)), "none is there twice"
    expected = [int((like == kind).nonzero()[0, 0]) for kind in range(len(first))]
    assert first.tolist() == expected == sorted(expected)


def test_nothing_is_found_where_more_than_half_are_different_or_rows_are_few_or_empty() -> None:
    rows = torch.arange(128, dtype=torch.uint8)[:, None].repeat(1, 40)
    assert distinct_rows(rows) is None
    assert distinct_rows(torch.cat([rows[:65], rows[:63]])) is None
    found = distinct_rows(torch.cat([rows[:64], rows[:64]]))
    assert found is not None and len(found[0]) == 64
    assert distinct_rows(torch.zeros(MIN_ROWS - 1, 8, dtype=torch.uint8)) is None
    assert distinct_rows(torch.zeros(MIN_ROWS, 0, dtype=torch.uint8)) is None


def test_rows_that_lie_apart_in_memory_are_read_as_they_are() -> None:
    rows = torch.arange(200, dtype=torch.uint8).view(100, 2).repeat(2, 1).repeat(1, 3)[:, ::3]
    found = distinct_rows(rows)
    assert found is not None and torch.equal(rows[found[0]][found[1]], rows)


def _digest(row: np.ndarray) -> int:
    """As distinct.c has it, of rows shorter than 32 bytes."""
    mask, sums = 2**64 - 1, [1, 2, 3, 4]

    def mixed(total: int, word: int) -> int:
        total = (total ^ word) * 0x9E3779B97F4A7C15 & mask
        return total ^ total >> 32

    for byte in row.tolist():
        sums[0] = mixed(sums[0], byte)
    return mixed(mixed(mixed(sums[0], sums[1]), sums[2]), sums[3])


def test_rows_are_told_apart_whichever_of_their_bytes_differs() -> None:
    for place in range(40):
        kinds = np.zeros((40, 768), dtype=np.uint8)
        kinds[:, 700 + place] = np.arange(40)
        found = distinct_rows(torch.from_numpy(np.tile(kinds, (5, 1))))
        assert found is not None and len(found[0]) == 40


def test_rows_chosen_to_share_a_place_are_told_apart_and_too_many_of_them_are_given_up() -> None:
    rng, places = np.random.default_rng(0), {}
    while not places or len(max(places.values(), key=len)) < 40:
        row = rng.integers(0, 256, 8, dtype=np.uint8)
        places.setdefault(_digest(row) & 255, []).append(row)  # of 160 rows
    crowd = np.stack(max(places.values(), key=len))
    for many, given_up in ((30, False), (40, True)):
        rows = torch.from_numpy(np.concatenate([crowd[:many], crowd[:many], np.repeat(crowd[:1], 160 - 2 * many, 0)]))
        found = distinct_rows(rows)
        assert (found is None) is given_up
        assert found is None or torch.equal(rows[found[0]][found[1]], rows)


def _board(kinds: int, total: int, spec: VisionSpec) -> np.ndarray:
    """Patches uint8 [total, 3, patch, patch], of so many kinds."""
    rng = np.random.default_rng(0)
    tiles = rng.integers(0, 256, (kinds, 3, spec.patch_size, spec.patch_size), dtype=np.uint8)
    return tiles[rng.integers(0, kinds, total)]


@pytest.mark.parametrize("kinds", [7, 1000])
def test_the_learners_embedding_and_its_gradients_are_the_towers_own_and_patches_that_are_alike_are_one_row(
    tmp_path, monkeypatch, kinds: int
) -> None:
    spec = VisionSpec.load(tiny_model_dir(tmp_path))
    patches = _board(kinds, 300, spec)
    proj = nn.Conv3d(3, 16, (spec.temporal_patch_size, spec.patch_size, spec.patch_size))
    plain = pixel_values(patches, spec).reshape(-1, 3, spec.temporal_patch_size, spec.patch_size, spec.patch_size)
    expected, grad = proj(torch.from_numpy(plain)).flatten(1), torch.randn(300, 16)
    wanted = torch.autograd.grad(expected, [*proj.parameters()], grad)
    rows, real = [], patch_embed.linear
    monkeypatch.setattr(patch_embed, "linear", lambda x, *own: rows.append(len(x)) or real(x, *own))
    found = patch_embed.StillPatchEmbed(proj, spec)(torch.from_numpy(patches))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(found, [*proj.parameters()], grad), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
    assert rows == [min(kinds, 300)]


def test_the_engines_tower_embeds_patches_that_are_alike_once_and_gives_the_same(tmp_path, monkeypatch) -> None:
    spec = VisionSpec.load(tiny_model_dir(tmp_path))
    tower = Qwen3Tower(load_model(tiny_model_dir(tmp_path)).model.visual, spec.mean, spec.std)
    images, grids = [*_board(9, 128, spec).reshape(2, 64, 3, spec.patch_size, spec.patch_size)], [(1, 8, 8)] * 2
    rows = []
    monkeypatch.setattr(engine_tower, "linear", lambda x, *own: rows.append(len(x)) or F.linear(x, *own))
    with torch.inference_mode():
        found = tower.encode(images, grids)
        monkeypatch.setattr(engine_tower, "distinct_rows", lambda _: None)
        plain = tower.encode(images, grids)
    assert rows == [16, 128], "of 9 kinds, padded"
    for ours, theirs in zip(found, plain, strict=True):
        for level, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(level, other, rtol=1e-4, atol=1e-5)
