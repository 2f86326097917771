"""The learner's calls to engines, on a loop of their own."""

from __future__ import annotations

import asyncio
import threading

import pytest

from learner.weights.link import EngineLink


def test_a_loop_that_stands_still_is_no_reason_to_wait_for_ever(monkeypatch) -> None:
    monkeypatch.setattr("learner.weights.link.STANDSTILL_S", 0.2)
    link, free = EngineLink(), threading.Event()

    async def slow() -> int:
        await asyncio.sleep(0.7)
        return 3

    async def blocked() -> None:
        free.wait(30)

    assert link.run(slow()) == 3  # the loop runs, so that its coroutine may take its time
    with pytest.raises(TimeoutError, match="speaks with the engines has stood still"):
        link.run(blocked())
    free.set()
    link.close()
