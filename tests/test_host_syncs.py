"""A microbatch's forward, loss and backward do not wait for a GPU, counted on a CPU as if all tensors lay on one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from learner.advantages import Scaling
from learner.batch import Microbatch, make_episodes
from learner.metrics.throughput import Clock
from learner.metrics.tokens import TokenStats
from learner.metrics.work import Work
from learner.model import last_layer
from learner.model.policy import load_policy
from learner.trainer import Trainer
from shared.vision import VisionSpec
from tests.support.episodes import learner_config, random_groups
from tests.support.gpu.host_syncs import HostSyncs, counted
from tests.support.small.families import FAMILIES

CPU = torch.device("cpu")
SETTINGS = {
    "turns": {"vtrace_level": "turn"},
    "tokens": {"vtrace_level": "token", "mask_veto_ratio": 1e-4, "critic_width": 16},
    "groups": {"objective": "grpo", "aggregation": "sequence_mean", "kl_coef": 0.1},
}


def test_what_would_wait_for_a_gpu_is_counted_with_its_line_and_what_stays_on_the_host_is_not():
    x, mask, at_home = torch.arange(4.0), torch.tensor([True, False, True, True]), torch.arange(3)
    with counted() as found:
        found.keep([at_home])
        assert bool((at_home * 2 < 5).all()) and len(at_home.nonzero()) == 2 and at_home.tolist() == [0, 1, 2]
        assert found.total == 0
        for wait in (
            lambda: x.sum().item(),
            lambda: bool(x[0] > 1),
            lambda: mask.nonzero(),
            lambda: x[mask],
            lambda: x.tolist(),
            lambda: x.numpy(),
            lambda: x.repeat_interleave(mask.long()),
            lambda: torch.tensor([1, 2]),
            lambda: x[[0, 1]],
        ):
            before = found.total
            wait()
            assert found.total == before + 1
        y = torch.arange(4.0, requires_grad=True)
        before = found.total
        y[mask].sum().backward()  # the gradient is written where the mask is true
        assert found.total == before + 2
    assert all(where.startswith("tests/test_host_syncs.py:") for _, where in found.callers)


@pytest.fixture(params=FAMILIES)
def model(request, tmp_path, monkeypatch):
    """As a GPU computes it: the last layer's queries are all places', and the scan is a kernel."""
    monkeypatch.setattr(last_layer, "_takes_all_queries", lambda x: True)
    monkeypatch.setattr("learner.vtrace.reverse_scan", reverse_scan)
    make, _, sides = FAMILIES[request.param]
    return make(tmp_path), sides


def reverse_scan(decay_TB: Tensor, delta_TB: Tensor) -> Tensor:
    found = delta_TB.clone()
    for t in range(len(found) - 2, -1, -1):
        found[t] += decay_TB[t] * found[t + 1]
    return found


@pytest.mark.slow
def test_a_microbatch_of_any_family_never_waits(model, ranks):
    folder, sides = model
    said = {(name, kind): str(found) for name, kind, found in waits(folder, sides, ranks)}
    assert said == {(name, kind): "0 in all" for name in SETTINGS for kind in ("images", "text")}


def waits(folder, sides, ranks) -> Iterator[tuple[str, str, HostSyncs]]:
    spec = VisionSpec.load(folder, min_pixels=1024, max_pixels=1 << 20)
    for name, changes in SETTINGS.items():
        config = learner_config(microbatch_tokens=1 << 20, **changes)
        policy = load_policy(str(folder), spec, config.objective.critic_width)
        reference = load_policy(str(folder), spec) if config.objective.has_reference else None
        trainer = Trainer(policy, config, ranks, reference=reference)
        for kind, with_images in (("images", True), ("text", False)):
            groups = random_groups(spec, 2, group_size=config.group_size, sides=sides, with_images=with_images)
            episodes = make_episodes(groups, trainer.decoder, config.objective)
            batch = trainer.packer.pack(episodes)
            work = Work(1, Scaling(), Clock(CPU), TokenStats(CPU))
            with counted() as found:
                found.keep(staying(batch))
                trainer._accumulate(batch, 10, work, last=True)
            yield name, kind, found


def staying(batch: Microbatch) -> list[Tensor]:
    return [batch.target_ids, batch.asked_ids]
