"""The learner's calls to engines, on a loop of their own."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from learner.weights.engine_link import EngineLink
from shared.log import get_logger


def test_a_loop_that_stands_still_is_no_reason_to_wait_for_ever(monkeypatch) -> None:
    monkeypatch.setattr("learner.weights.engine_link.STANDSTILL_S", 0.2)
    monkeypatch.setattr("learner.weights.engine_link.GIVE_UP_S", 1.0)
    link, free = EngineLink(), threading.Event()

    async def slow() -> int:
        await asyncio.sleep(0.7)
        return 3

    async def blocked() -> None:
        free.wait(30)

    assert link.run(slow()) == 3  # the loop runs, so that its coroutine may take its time
    with pytest.raises(TimeoutError, match=r"speaks with the engines has stood still .* in test_engine_link\.py"):
        link.run(blocked())
    free.set()
    link.close()


def test_a_loop_that_stands_still_for_a_while_is_named_and_no_reason_to_end(monkeypatch, caplog) -> None:
    monkeypatch.setattr("learner.weights.engine_link.STANDSTILL_S", 0.2)
    monkeypatch.setattr(get_logger("publisher"), "propagate", True)
    link = EngineLink()

    async def blocks_for_a_while() -> int:
        time.sleep(1.0)
        return 4

    assert link.run(blocks_for_a_while()) == 4
    assert "has stood still" in caplog.text and "blocks_for_a_while in test_engine_link.py" in caplog.text
    link.close()
