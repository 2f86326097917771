"""What runs on one NVIDIA GPU: make test-gpu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from learner.distributed import Ranks, close_ranks, init_ranks


def pytest_runtest_setup() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """One rank on the GPU."""
    yield init_ranks("cuda")
    close_ranks()


@pytest.fixture(scope="module")
def on_cpu(ranks: Ranks) -> Ranks:
    """The same rank, computing on the CPU."""
    return replace(ranks, device=torch.device("cpu"), mesh=init_device_mesh("cpu", (1,)))
