"""The C functions of a decoder layer compute what torch does, and the engine goes on without a compiler."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from actor.engine.layers import CpuLayer
from kernels.cpu import layer as cpu_layer
from kernels.cpu import library
from shared.vision import VisionSpec
from tests.support.engines import SIZES, check, play_at_once
from tests.support.small.families import FAMILIES
from tests.support.tiny import running_engine

COS_SIN = torch.cos, torch.sin
with_compiler = pytest.mark.skipif(library.library() is None, reason="no C compiler")
pytestmark = pytest.mark.usefixtures("anew")


@pytest.fixture
def anew() -> Iterator[None]:
    """The library is looked for again, before the test and after it."""
    library.library.cache_clear()
    yield
    library.library.cache_clear()


@with_compiler
@pytest.mark.parametrize("width", [1, 7, 32, 129])
def test_the_sum_and_its_norm_are_those_of_torch(width: int) -> None:
    hidden, delta, weight = torch.randn(5, width), torch.randn(5, width), torch.randn(width)
    total = hidden + delta
    normed = cpu_layer.add_rms_norm(hidden, delta, weight, 1e-6)
    torch.testing.assert_close(hidden, total, rtol=0, atol=0)
    torch.testing.assert_close(normed, F.rms_norm(total, (width,), weight, 1e-6))
    torch.testing.assert_close(cpu_layer.add_rms_norm(hidden, None, weight, 1e-6), normed, rtol=0, atol=0)


@with_compiler
@pytest.mark.parametrize("width", [1, 7, 384])
def test_swiglu_is_torchs_for_small_and_for_huge_gates(width: int) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(6, 2 * width) * torch.tensor([1e-3, 1, 10, 50, 200, 1e4])[:, None]
    gate, up = gate_up.double().chunk(2, dim=1)
    got = cpu_layer.silu_mul(*gate_up.chunk(2, dim=1))
    torch.testing.assert_close(got, (F.silu(gate) * up).float(), rtol=3e-6, atol=1e-28)


@with_compiler
@pytest.mark.parametrize(("num_heads", "num_kv", "size"), [(4, 2, 32), (2, 2, 16), (8, 1, 64), (3, 1, 24), (4, 4, 128)])
@pytest.mark.parametrize("normed", [True, False])
def test_rotated_heads_in_the_cache_are_attended_to_as_by_torch(
    num_heads: int, num_kv: int, size: int, normed: bool
) -> None:
    torch.manual_seed(0)
    slots, context = 3, 400
    cache = torch.randn(slots, num_kv, context, size), torch.randn(slots, num_kv, context, size)
    heads = torch.randn(4, num_heads + 2 * num_kv, size)
    norms = torch.randn(num_heads + num_kv, size) if normed else None
    angles = torch.randn(4, size // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    places = [(2, 0), (0, 129), (1, 399)]  # (slot, entries before): a single key, blocks and a rest, a full slot
    first = torch.tensor([slot * num_kv * context for slot, _ in places])
    past = torch.tensor([past for _, past in places])
    turned, values = expected_heads(heads, num_heads, num_kv, norms, cos, sin)
    kept = [store.clone() for store in cache]

    cpu_layer.rotate_and_store(heads, norms, 1e-6, (cos, sin), torch.cat((first + past, torch.tensor([-1]))), cache)
    out = torch.zeros(4, num_heads, size)
    cpu_layer.attend(heads, first, past + 1, cache, out)

    torch.testing.assert_close(heads[:, :num_heads], turned[:, :num_heads])
    for row, (slot, before) in enumerate(places):
        kept[0][slot, :, before], kept[1][slot, :, before] = turned[row, num_heads:], values[row]
        keys, seen = (store[slot, :, : before + 1].repeat_interleave(num_heads // num_kv, dim=0) for store in kept)
        expected = F.scaled_dot_product_attention(turned[row, :num_heads, None], keys, seen)[:, 0]
        torch.testing.assert_close(out[row], expected, rtol=1e-5, atol=1e-5)
    for store, expected in zip(cache, kept, strict=True):
        torch.testing.assert_close(store, expected)


def expected_heads(
    heads: torch.Tensor,
    num_heads: int,
    num_kv: int,
    norms: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(queries and keys as the cache wants them, values)."""
    size = heads.shape[-1]
    qk = heads[:, : num_heads + num_kv]
    if norms is not None:
        qk = F.rms_norm(qk, (size,), None, 1e-6) * norms
    turned = torch.cat((-qk[..., size // 2 :], qk[..., : size // 2]), dim=-1)
    return qk * cos[:, None] + turned * sin[:, None], heads[:, num_heads + num_kv :].clone()


@with_compiler
def test_heads_of_patches_are_turned_by_their_places_and_values_are_left() -> None:
    heads = torch.randn(2, 5, 6, 16)
    angles = torch.randn(5, 8).repeat(1, 2)
    turned, values = expected_heads(heads.view(10, 6, 16), 2, 2, None, *(f(angles).repeat(2, 1) for f in COS_SIN))
    cpu_layer.rotate_heads(heads, 4, (angles.cos(), angles.sin()))
    torch.testing.assert_close(heads.view(10, 6, 16), torch.cat((turned, values), dim=1))


@with_compiler
@pytest.mark.parametrize(("num_heads", "num_kv", "size"), [(4, 2, 32), (2, 2, 8), (8, 1, 64), (3, 1, 24), (4, 4, 128)])
@pytest.mark.parametrize(("tokens", "past"), [(2, 0), (16, 0), (70, 0), (150, 0), (3, 130), (33, 64), (70, 230)])
def test_tokens_of_one_sequence_attend_causally_as_by_torch(
    num_heads: int, num_kv: int, size: int, tokens: int, past: int
) -> None:
    heads = torch.randn(tokens, num_heads + 2 * num_kv, size)
    cache = torch.randn(2, num_kv, 300, size), torch.randn(2, num_kv, 300, size)
    out = torch.zeros(tokens, num_heads, size)
    cpu_layer.attend_causally(heads, 1, past, cache, out)
    keys, values = (store[1, :, : past + tokens].repeat_interleave(num_heads // num_kv, dim=0) for store in cache)
    mask = torch.ones(tokens, past + tokens, dtype=torch.bool).tril(past)
    expected = F.scaled_dot_product_attention(heads[:, :num_heads].transpose(0, 1), keys, values, mask)
    torch.testing.assert_close(out, expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


@with_compiler
@pytest.mark.parametrize("places", [1, 15, 64, 145])
def test_patches_attend_to_their_whole_image_as_by_torch(places: int) -> None:
    heads = torch.randn(places, 3 * 4, 16)
    query, key, value = (part.transpose(0, 1) for part in heads.chunk(3, dim=1))
    expected = F.scaled_dot_product_attention(query, key, value, scale=0.3)
    torch.testing.assert_close(cpu_layer.attend_all(heads, 0.3), expected.transpose(0, 1).flatten(1))


@with_compiler
@pytest.mark.parametrize("threads", [1, 2])
def test_scores_of_any_size_make_a_distribution_and_a_nan_stays_one(threads: int) -> None:
    context, size = 300, 32
    query = torch.randn(3, 3, size) * torch.tensor([1.0, 100.0, 1e-3])[:, None, None]
    cache = torch.randn(3, 1, context, size), torch.randn(3, 1, context, size)
    first, length = torch.arange(3) * context, torch.tensor([300, 300, 17])
    out = torch.zeros(3, 1, size)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cpu_layer.attend(query, first, length, cache, out)
        scores = torch.einsum("nd,njd->nj", query[:, 0].double(), cache[0][:, 0].double()) / math.sqrt(size)
        seen = torch.arange(context) < length[:, None]
        weights = scores.masked_fill(~seen, -math.inf).softmax(dim=1)
        expected = torch.einsum("nj,njd->nd", weights, cache[1][:, 0].double())
        torch.testing.assert_close(out[:, 0].double(), expected, rtol=1e-4, atol=1e-4)
        cache[0][1, 0, 250] = math.nan
        cpu_layer.attend(query, first, length, cache, out)
    finally:
        torch.set_num_threads(before)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_without_a_compiler_each_family_gives_the_same_logprobs_by_torch_and_one_line_says_so(
    tmp_path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    folder = FAMILIES[family][0](tmp_path / "model")
    spec = VisionSpec.load(folder, min_pixels=784)
    with (
        caplog.at_level(logging.INFO, logger="kernels"),
        running_engine(folder, max_context=512, min_pixels=784, max_batch=8) as (url, app),
    ):
        assert not any(isinstance(layer, CpuLayer) for layer in app.scheduler.runner.layers)
        sizes = [(56, 56), (112, 56)] if family == "Qwen2.5-VL" else SIZES
        check(folder, spec, play_at_once(url, spec, range(6), sizes=sizes, pause_s=0.02))
    assert [record.message for record in caplog.records if "C compiler" in record.message] == [
        "no C compiler (cc, gcc, clang): the CPU's layers are computed by torch alone, slower"
    ]


def test_a_compiler_that_fails_is_named_and_torch_computes(
    tmp_path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho no such target >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda _: str(broken))
    assert library.library() is None
    assert f"{broken} does not build kernels/cpu, torch computes instead, slower: no such target" in caplog.text


@with_compiler
def test_the_library_is_built_once_for_a_user_and_anew_with_other_options(tmp_path, monkeypatch) -> None:
    made_before = library.library()
    assert made_before is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.library.cache_clear()
    with monkeypatch.context() as quick:
        quick.setattr(library, "_compile", lambda _, made: shutil.copy(made_before._name, made))
        assert library.library() is not None
    built = list((tmp_path / "pronk").iterdir())
    library.library.cache_clear()
    monkeypatch.setattr(library, "_compile", lambda *_: pytest.fail("compiled again"))
    assert library.library() is not None
    assert list((tmp_path / "pronk").iterdir()) == built and built[0].suffix == ".so"
    library.library.cache_clear()
    asked: list[Path] = []
    monkeypatch.setattr(library, "_FLAGS", (*library._FLAGS, "-g"))
    monkeypatch.setattr(library, "_compile", lambda _, made: asked.append(made) or shutil.copy(built[0], made))
    assert library.library() is not None and asked[0].name != built[0].name


@with_compiler
def test_other_tensors_and_shapes_are_left_to_torch() -> None:
    x = torch.randn(3, 8)
    assert library.supports_layer(x, 4, 2, 32)
    assert not any(library.supports_layer(other, 4, 2, 32) for other in (x.bfloat16(), x.double(), x.to("meta")))
    assert not any(library.supports_layer(x, *shape) for shape in ((4, 2, 20), (4, 2, 264), (33, 1, 32)))


@with_compiler
def test_the_engine_of_a_small_float32_model_uses_it(folder) -> None:
    with running_engine(folder, max_context=128) as (_, app):
        assert {type(layer) for layer in app.scheduler.runner.layers} == {CpuLayer}
