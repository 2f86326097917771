"""What an engine did between a request and its answer, in a trace."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

from shared.clocks import clock_name
from shared.engine.engine_api import EngineClient
from shared.spans import Span, SpanBuffer, recorded_into
from shared.types import Sampling
from tests.support.engines import ask, false_engine, says
from tests.support.tiny import running_engine, tiny_model_dir

PARTS = ["queue", "prefill", "decode"]


def traced_call(url: str) -> list[Span]:
    """Return the spans of one request; the call itself is last but for the engine's."""
    buffer = SpanBuffer()

    async def generate(client: EngineClient) -> None:
        with recorded_into(buffer, "episode 0"):
            await client.generate([1, 2], [], Sampling(max_new_tokens=3))

    ask(url, generate)
    return buffer.spans


def answer(clock: Any) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": "stop", "matched": 7},
        "output_token_logprobs": [[-0.5, 5, None]],
        "completion_tokens": 1,
        "weight_version": "3",
        "clock": clock,
    }
    return {"meta_info": meta}


@pytest.mark.slow
def test_an_embedded_engines_parts_follow_each_other_within_the_call(tmp_path: Path) -> None:
    with running_engine(tiny_model_dir(tmp_path), weight_version="0") as (url, _):
        call, *parts = traced_call(url)
    assert (call.name, call.note, call.track) == ("engine call", url, "episode 0")
    assert [(part.name, part.place, part.track) for part in parts] == [
        (name, f"engine {url}", "episode 0") for name in PARTS
    ]
    times = [call.begin, *(edge for part in parts for edge in (part.begin, part.end)), call.end]
    assert times == sorted(times) and parts[1].begin == parts[0].end and parts[2].begin == parts[1].end


def test_the_times_of_an_engine_elsewhere_stand_in_the_middle_of_the_call() -> None:
    with false_engine({"/generate": says(answer(["elsewhere", 7e5, 7e5, 7e5, 7e5]))}) as (url, _):
        call, *parts = traced_call(url)
    assert [part.name for part in parts] == PARTS
    assert all(math.isclose(part.begin, (call.begin + call.end) / 2, abs_tol=1e-6) for part in parts)


@pytest.mark.parametrize(
    "clock",
    [
        None,  # as of SGLang
        "soon",
        [],
        ["elsewhere", 1.0],
        ["elsewhere", "1", "2", "3", "4"],
        ["elsewhere", 4.0, 3.0, 2.0, 1.0],
        ["elsewhere", 0.0, 1.0, 2.0, 1e9],  # longer than the call
        [clock_name(), 0.0, 0.0, 0.0, time.monotonic()],  # begins before it
    ],
)
def test_odd_times_leave_the_call_alone_and_the_answer_whole(clock: Any) -> None:
    with false_engine({"/generate": says(answer(clock))}) as (url, _):
        (call,) = traced_call(url)
        untraced = ask(url, lambda client: client.generate([1, 2], [], Sampling(max_new_tokens=3)))
    assert call.name == "engine call" and untraced.token_ids == (5,)
