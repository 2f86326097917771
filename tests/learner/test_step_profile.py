"""A profile of a step: only when asked for, once, and at no cost to the step."""

from __future__ import annotations

import gzip
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from learner import profile_request
from learner.distributed import Ranks
from learner.step_profile import KEPT, profiled


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    profile_request.heed()
    yield
    signal.signal(signal.SIGUSR1, before)


def ask() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def make_step(tmp_path: Path, ranks: Ranks, step: int) -> None:
    with profiled(tmp_path, step, ranks):
        torch.ones(3, 4) @ torch.ones(4, 5)


def test_two_requests_give_one_profile_of_the_next_step(tmp_path: Path, ranks: Ranks) -> None:
    make_step(tmp_path, ranks, 1)
    assert not (tmp_path / "profiles").exists()
    ask()
    ask()
    make_step(tmp_path, ranks, 2)
    make_step(tmp_path, ranks, 3)
    (path,) = (tmp_path / "profiles").iterdir()
    assert path.name == "step_00000002_rank_0.json.gz"
    (product,) = [e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e["name"] == "aten::mm"]
    assert product["args"]["Input Dims"] == [[3, 4], [4, 5]]


def test_the_oldest_profiles_go_and_those_of_other_ranks_stay(tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "profiles").mkdir()
    for rank in (0, 1, 10):
        for step in range(KEPT):
            (tmp_path / "profiles" / f"step_{step:08d}_rank_{rank}.json.gz").touch()
    ask()
    make_step(tmp_path, ranks, 90)
    names = {path.name for path in (tmp_path / "profiles").iterdir()}
    assert len(names) == 3 * KEPT and "step_00000090_rank_0.json.gz" in names
    assert "step_00000000_rank_0.json.gz" not in names and "step_00000000_rank_1.json.gz" in names


def test_a_disk_that_refuses_costs_the_profile_alone(tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "profiles").write_text("a file is in the way")
    ask()
    make_step(tmp_path, ranks, 1)
    assert (tmp_path / "profiles").is_file()


def test_an_error_of_the_step_is_that_of_the_step(tmp_path: Path, ranks: Ranks) -> None:
    ask()
    with pytest.raises(KeyError), profiled(tmp_path, 1, ranks):
        raise KeyError
    assert not list(tmp_path.iterdir())
