"""An evaluation is waited for as long as it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event

from learner.tickets.records import EvaluationResult
from learner.tickets.server import TicketServer

BEAT_S = 60.0  # between two calls of `goes_on`


def result_in_time(
    server: TicketServer, name: str, limit_s: float, shutdown: Event, goes_on: Callable[[], object]
) -> EvaluationResult:
    """TimeoutError for an evaluation that brings no episode for `limit_s`; otherwise what `evaluation_result` raises.
    `goes_on` is called now and then meanwhile."""
    left, since = -1, time.monotonic()
    while True:
        try:
            return server.evaluation_result(name, min(limit_s, BEAT_S), shutdown)
        except TimeoutError as error:
            before, left = left, server.evaluation_left(name)
            if left != before:
                since = time.monotonic()
            elif time.monotonic() - since >= limit_s:
                state = str(error).partition(": ")[2]
                raise TimeoutError(
                    f"evaluation {name!r} has brought nothing for {limit_s:g} s (learner.wait_timeout_s): {state}"
                ) from None
        goes_on()
