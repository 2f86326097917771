"""The hash that SGLang's server computes of a parameter on a GPU, on our side, and engines that tell it."""

from __future__ import annotations

import pytest
import torch

from actor.engine import weight_routes
from learner.weights import gpu_hash as module
from learner.weights.gpu_hash import TILE, gpu_hash
from learner.weights.verify import WeightVerifier, WrongWeights
from shared.weights.checksums import engine_name, part_of
from shared.weights.layout import Layout
from tests.support.publishing import FAST, move, policy, publishing
from tests.support.tiny import running_engine

__all__ = ["policy"]  # a fixture
KNOWN = [
    (3, torch.uint8, "0a97cf45c78490e5"),
    (999, torch.bfloat16, "2865c66c5b474945"),
    (8193, torch.float32, "abb71edcb8f1a2dc"),
]
"""Of `ramp`, as SGLang 0.5.23's kernels hash it."""
LOST = "model.language_model.layers.1.self_attn.k_proj.weight"


def ramp(size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(size) % 251).to(dtype)


@pytest.mark.parametrize(("size", "dtype", "known"), KNOWN)
def test_the_hash_is_what_sglangs_kernels_computed(size, dtype, known):
    assert gpu_hash(ramp(size, dtype)) == known


@pytest.mark.parametrize("size", [0, 1, 4 * TILE - 1, 4 * TILE, 4 * TILE + 1, 12 * TILE, 20 * TILE + 7])
def test_the_hash_is_the_same_whatever_is_computed_at_once(monkeypatch, size):
    values = ramp(size, torch.uint8)
    whole = gpu_hash(values)
    monkeypatch.setattr(module, "_SPAN", TILE)
    assert gpu_hash(values) == whole
    assert gpu_hash(torch.cat([values.new_zeros(1), values])[1:]) == whole  # at an odd address
    assert size == 0 or gpu_hash(torch.cat([values[:-1], values[-1:] + 1])) != whole


def test_a_parameter_that_is_not_contiguous_is_hashed_as_if_it_were():
    values = ramp(63, torch.bfloat16).view(7, 9)
    assert gpu_hash(values.mT) == gpu_hash(values.mT.contiguous()) != gpu_hash(values)


@pytest.fixture
def on_gpu(monkeypatch):
    """The embedded engine tells checksums as SGLang's server on a GPU does."""

    def told(weights):
        parts = {}
        for name, data in weights:
            parts.setdefault(engine_name(name), []).append(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return {name: gpu_hash(torch.cat(part)) for name, part in parts.items()}

    monkeypatch.setattr(weight_routes, "checksums", told)
    monkeypatch.setattr("shared.engine_messages.layout_of", lambda info, ranks: Layout("on a GPU", "gpu"))


def test_a_server_on_a_gpu_is_compared_by_its_own_hash(folder, policy, ranks, on_gpu):
    verifier = WeightVerifier(policy, str(folder), ranks)
    with running_engine(folder) as (url, app), publishing(policy, ranks, FAST, verifier) as publisher:
        real, broken = app.updates.loader.load, []

        def load(flat, entries):
            kept = app.updates.loader._parameters[LOST].detach().clone()
            real(flat, entries)
            if broken:
                app.updates.loader._parameters[LOST].data.copy_(kept)

        app.updates.loader.load = load
        for version in range(len(verifier._parts)):
            move(policy, 1e-6)
            assert publisher.publish(version, [url])["publish/checksum_skipped"] == 0
        broken.append(True)
        verifier._turn = verifier._parts.index(part_of(LOST))
        move(policy, 1e-6)
        with pytest.raises(WrongWeights, match=f"{url}, version .*other values of {engine_name(LOST)} than it was"):
            publisher.publish(99, [url])
