"""Where a microbatch's forward, loss and backward wait for a GPU, counted on a CPU as if all tensors lay on one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kernels.row_records import RowsWithGradient
from learner.batch.episodes import make_episodes
from learner.batch.microbatch import Microbatch
from learner.metrics.throughput import Clock
from learner.metrics.token_metrics import TokenStats
from learner.model import forwards
from learner.model.policy import load_policy
from learner.objective.advantages import Scaling
from learner.training.precomputed import PrecomputedColumns
from learner.training.step_totals import StepTotals
from learner.training.trainer import Trainer
from learner.training.update import accumulate_gradient
from shared.vision import VisionSpec
from tests.support.episodes import learner_config, random_groups, siblings
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
    assert all(where.startswith("tests/learner/training/test_host_syncs.py:") for _, where in found.callers)


@pytest.fixture(params=FAMILIES)
def model(request, tmp_path, monkeypatch):
    """As a GPU computes it: nothing in C, the last layer's queries are all places', the scan is a kernel, and nobody
    asks whether the entropies' gradient is zero."""
    monkeypatch.setattr("kernels.cpu.library.library", lambda: None)
    monkeypatch.setattr(sys.modules["kernels.linear_logprob"], "_is_zero", lambda grad_N: False)
    monkeypatch.setattr(forwards, "_needs_all_queries", lambda x: True)
    monkeypatch.setattr("learner.vtrace.reverse_scan", reverse_scan)
    make, _, sides = FAMILIES[request.param]
    return make(tmp_path), sides


def reverse_scan(decay_TB: Tensor, delta_TB: Tensor) -> Tensor:
    found = delta_TB.clone()
    for t in range(len(found) - 2, -1, -1):
        found[t] += decay_TB[t] * found[t + 1]
    return found


@pytest.mark.slow
def test_a_microbatch_of_any_family_waits_once_and_not_for_what_is_under_way(model, ranks):
    """Which rows have a gradient: on a GPU the answer is waited for while the head's first slice is computed."""
    folder, sides = model
    said = {(name, kind): str(found) for name, kind, found in waits(folder, sides, ranks)}
    one = "1 in all\n   1 event at kernels/upstream.py"
    assert said == {(name, kind): one for name in SETTINGS for kind in ("images", "text", "begun alike")}


def waits(folder, sides, ranks) -> Iterator[tuple[str, str, HostSyncs]]:
    spec = VisionSpec.load(folder, min_pixels=1024, max_pixels=1 << 20)
    for name, changes in SETTINGS.items():
        config = learner_config(microbatch_tokens=1 << 20, **changes)
        policy = load_policy(str(folder), spec, config.objective.critic_width)
        reference = load_policy(str(folder), spec) if config.objective.has_reference else None
        trainer = Trainer(policy, config, ranks, reference=reference)
        for kind in ("images", "text", "begun alike"):
            how = {"sides": sides, "with_images": kind != "text"}
            groups = random_groups(spec, 2, group_size=config.group_size, **how)
            if kind == "begun alike":
                groups = [siblings(spec, 3, seed=seed, **how) for seed in range(2)]
            episodes = make_episodes(groups, trainer.decoder, config.objective)
            batch = trainer.packer.pack(episodes)
            assert (batch.packing.prefixes is not None) == (kind == "begun alike")
            totals = StepTotals(1, Scaling(), Clock(CPU), TokenStats(CPU), TokenStats(CPU), PrecomputedColumns())
            with counted() as found, answers_travel(found):
                found.keep(staying(batch))
                accumulate_gradient(batch, 10, trainer.models, totals, last=True)
            yield name, kind, found


@contextmanager
def answers_travel(found: HostSyncs) -> Iterator[None]:
    """Which rows have a gradient comes to the host's memory, and an event is waited for."""
    rows = RowsWithGradient.rows

    def arrived(self: RowsWithGradient) -> Tensor | None:
        found.callers["event", "kernels/upstream.py"] += 1
        found.keep([self._has_N])
        return rows(self)

    with patch.object(RowsWithGradient, "rows", arrived):
        yield


def staying(batch: Microbatch) -> list[Tensor]:
    return [batch.target_ids, batch.asked_ids]
