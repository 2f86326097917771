"""Fixtures of many tests: a tiny model's folder, its vision settings, one learner rank in this process, and processes
that are forked instead of started; and the order and time limits of tests."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from subprocess import PIPE, STDOUT

import pytest
import torch

from launch.processes.children import cpu_env
from learner.distributed import close_ranks, init_ranks
from shared.vision import VisionSpec
from tests.support.forked import ForkingPopen, Seed, start_seed
from tests.support.paths import ROOT
from tests.support.runs import LEARNING_S
from tests.support.tiny import tiny_model_dir

gc.disable()  # until all is collected: what is imported stays, and is not looked through again and again

# Several tests run at a time, and products as small as theirs take longest where threads wait for one another.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that a test starts
os.environ["TORCH_WARM_POOL"] = "0"  # nothing is compiled for a GPU, for which torch.compile would start processes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files whose tests are all fast last, so that no worker is busy long after the others have ended. Give whole
    trainings more time than pyproject.toml does: they take three times as long on some machines as on others."""
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


@contextmanager
def forking(seed: Seed) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForkingPopen, "seed", seed, raising=False)
        patch.setattr(subprocess, "Popen", ForkingPopen)
        yield


@pytest.fixture
def forked_starts(seed: Seed) -> Iterator[None]:
    """Fork the programs of Pronk that the test starts, without importing torch and transformers again; see
    tests/support/forked.py."""
    with forking(seed):
        yield


@pytest.fixture(scope="module")
def all_starts_forked(seed: Seed) -> Iterator[None]:
    """Do as `forked_starts` for all tests and fixtures of a module."""
    with forking(seed):
        yield


@pytest.fixture(scope="session")
def run_ranks(seed: Seed) -> Callable[..., None]:
    """Run a module of tests/support that computes on ranks, with these arguments."""

    def run(module: str, *arguments: object) -> None:
        command = [sys.executable, "-m", f"tests.support.{module}", *map(str, arguments)]
        with forking(seed):
            ended = subprocess.run(command, cwd=ROOT, text=True, stdout=PIPE, stderr=STDOUT, timeout=280)
        assert ended.returncode == 0, ended.stdout[-3000:]

    return run
