"""What many tests start from: a tiny model's folder, its vision settings, and one learner rank in this process."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Iterator

import pytest
import torch

from launch.processes.children import cpu_env
from learner.distributed import close_ranks, init_ranks
from shared.vision import VisionSpec
from tests.support.runs import LEARNING_S
from tests.support.starts.forked import ForkingPopen, Seed, start_seed
from tests.support.tiny import tiny_model_dir

gc.disable()  # until all is collected: what is imported stays, and is not looked through again and again

# Two tests run at a time, and products as small as theirs take longest where threads wait for one another.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that a test starts
os.environ["TORCH_WARM_POOL"] = "0"  # nothing is compiled for a GPU, for which torch.compile would start processes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of which all tests are fast come last, so that no worker is busy long after the other has ended. Whole
    trainings have more time than pyproject.toml gives: they take three times as long on some machines as on others."""
    for item in items:
        if item.get_closest_marker("learning"):
            item.add_marker(pytest.mark.timeout(LEARNING_S + 60))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries say at the end that they leak


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def spec(folder):
    return VisionSpec.load(folder, min_pixels=1024, max_pixels=1 << 20)


@pytest.fixture(scope="module")
def ranks():
    yield init_ranks("cpu")
    close_ranks()


@pytest.fixture(scope="session")
def seed() -> Iterator[Seed]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    seed, process = start_seed(env | cpu_env(1))
    yield seed
    seed.close()
    process.wait(60)


@pytest.fixture
def forked_starts(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test starts of Pronk need not import torch and transformers; see tests/support/starts/forked.py"""
    monkeypatch.setattr(ForkingPopen, "seed", seed, raising=False)
    monkeypatch.setattr(subprocess, "Popen", ForkingPopen)
