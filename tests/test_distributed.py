"""Ranks that torchrun has started again find each other, and not those that are dead."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import Store, TCPStore

from learner.distributed import store_of_attempt


def store_of(monkeypatch: pytest.MonkeyPatch, port: int, rank: int, attempt: int, hosts: int = 1) -> Store:
    """As a rank of two under torchrun opens it."""
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True, "RANK": rank}
    environ |= {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2 // hosts, "TORCHELASTIC_RESTART_COUNT": attempt}
    for name, value in environ.items():
        monkeypatch.setenv(name, str(value))
    return store_of_attempt(timedelta(seconds=20))


def test_ranks_of_one_attempt_share_their_addresses_and_no_other_attempt_sees_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agents = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store_of(monkeypatch, agents.port, 1, attempt=0).set("address of rank 1", "dead")
    assert store_of(monkeypatch, agents.port, 0, attempt=0).get("address of rank 1") == b"dead"
    assert not store_of(monkeypatch, agents.port, 0, attempt=1).check(["address of rank 1"])


def test_hosts_that_count_their_restarts_differently_still_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store_of(monkeypatch, agents.port, 1, attempt=1, hosts=2).set("address of rank 1", "here")
    assert store_of(monkeypatch, agents.port, 0, attempt=0, hosts=2).get("address of rank 1") == b"here"
