"""A probe that cannot ask its server, since this process is in trouble."""

from __future__ import annotations

import asyncio
import errno
import threading

import pytest

from launch.engines.health_probe import HealthProbe
from tests.support.engines import false_engine
from tests.support.machine import until


def test_a_probe_that_cannot_ask_says_so_and_goes_on_asking(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full, new_event_loop = threading.Event(), asyncio.new_event_loop

    def new_loop() -> asyncio.AbstractEventLoop:
        if full.is_set():
            raise OSError(errno.EMFILE, "Too many open files")
        return new_event_loop()

    monkeypatch.setattr("asyncio.events.new_event_loop", new_loop)
    monkeypatch.setattr("launch.engines.health_probe.EVERY_S", 0.05)
    with false_engine({}) as (url, seen):
        probe = HealthProbe(url, first_s=60.0, silent_s=1.0)
        until(lambda: len(seen) > 1)  # so that the first answer has been heard
        full.set()
        until(lambda: probe.missing == "gave no answer for 1 s")
        assert f"{url} is not asked: OSError: [Errno {errno.EMFILE}] Too many open files" in caplog.text
        full.clear()
        until(lambda: not probe.missing)
        probe.stop()
