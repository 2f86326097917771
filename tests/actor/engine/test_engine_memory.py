"""What requests with the API key can make an engine hold, by its resident memory.

docs/explanation/security.md names each bound.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.engines import EngineProcess, call, engine_process
from tests.support.hostile.memory import MIB, forget_peak, growth_of, resident_bytes
from tests.support.machine import until

ONE = {"input_ids": [30], "sampling_params": {"max_new_tokens": 64, "ignore_eos": True}}
MILLION = 1_000_000
BODIES: dict[str, Callable[[], str]] = {
    "watched tokens": lambda: json.dumps(ONE | {"token_ids_logprob": [1] * (MILLION // 5)}),
    "numbers": lambda: '{"input_ids": [%s1]}' % ("1234567," * (7 * MILLION)),
    "texts": lambda: '{"input_ids": [30], "image_data": [%s""]}' % ('"xy",' * (12 * MILLION)),
    "biases": lambda: '{"input_ids": [30], "sampling_params": {"logit_bias": {B}}}'.replace("B", biases(4 * MILLION)),
    "a long name": lambda: json.dumps(ONE | {"rid": "x" * (60 * MIB)}),
    "a text of wide characters": lambda: json.dumps(ONE | {"image_data": "x" * (30 * MIB) + "\N{ROCKET}"}),
}


def biases(count: int) -> str:
    return ",".join(f'"{token}":1' for token in range(count))


@pytest.fixture(scope="module")
def engine(folder) -> Iterator[EngineProcess]:
    with engine_process(folder, "--max-context", "256") as process:
        call(process.url, "/generate", ONE)
        yield process


def post(engine: EngineProcess, body: bytes) -> int:
    connection = http.client.HTTPConnection(engine.url.removeprefix("http://"), timeout=120)
    try:
        connection.request("POST", "/generate", body, {"content-type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", BODIES)
def test_a_body_that_unpacks_to_many_times_its_size_is_refused_and_its_memory_given_back(
    engine: EngineProcess, kind: str
) -> None:
    body, pid = BODIES[kind]().encode(), engine.process.pid
    before = forget_peak(pid)
    assert post(engine, body) in (400, 413)
    most = 9 if "wide" in kind else 2.5
    assert resident_bytes(pid, "VmHWM") - before < most * len(body) + 24 * MIB
    until(lambda: resident_bytes(pid) - before < 16 * MIB)
    assert call(engine.url, "/generate", ONE)["output_ids"]


@pytest.mark.slow
def test_requests_that_are_refused_again_and_again_take_nothing(engine: EngineProcess) -> None:
    """Each is refused at another place: the key of a route, JSON, types, images, the context."""
    bodies = [
        b"[" * 100_000,
        b'{"input_ids": ["x"]}',
        json.dumps(ONE | {"image_data": "x" * MIB}).encode(),
        json.dumps(ONE | {"input_ids": [30] * 100_000}).encode(),
        json.dumps(ONE | {"rid": "x" * 1000}).encode(),
    ]
    for body in bodies:
        assert post(engine, body) == 400
    time.sleep(1.5)  # what that took is given back
    before = resident_bytes(engine.process.pid)
    for _ in range(100):
        for body in bodies:
            post(engine, body)
    until(lambda: resident_bytes(engine.process.pid) - before < 16 * MIB)


@pytest.mark.slow
def test_images_that_open_requests_hold_are_bounded() -> None:
    program = """
import base64, io
from PIL import Image as PILImage
from actor.engine import request_images
from actor.engine.http import HttpError
from shared.families.registry import FAMILIES
from shared.vision import VisionSpec

request_images.MAX_HELD_BYTES = 2**25

def uri(red):
    buffer = io.BytesIO()
    PILImage.new("RGB", (1024, 1024), (red, 0, 0)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()

cache = request_images.ImageCache(VisionSpec(7, FAMILIES["qwen3_vl"]), max_bytes=2**22)
get = lambda uri: cache.get([uri])[0][0]
uris = [uri(red) for red in range(50)]
held = [get(uri(255))]
---
for number, each in enumerate(uris):
    try:
        held.append(get(each))
    except HttpError as error:
        assert error.status == 503
assert len(held) == 10
assert get(uris[0]) is held[1]  # decoded once, though the cache has forgotten it
del held[1:5]
get(uris[40])
"""
    assert growth_of(program) < 60  # 150 without the bound


@pytest.mark.slow
def test_what_was_large_for_a_moment_goes_back_to_the_system() -> None:
    program = """
import time
from shared.util.process_memory import give_back_soon
from tests.support.hostile.memory import MIB, resident_bytes
before = resident_bytes()
pieces = [bytes(1000) for _ in range(100_000)]
last = bytes(1000)
del pieces
---
give_back_soon(100)
time.sleep(1.5)
assert resident_bytes() - before > 30 * MIB, "nothing needs to be given back here"
give_back_soon(2**20)
give_back_soon(2**20)
time.sleep(1.5)
assert resident_bytes() - before < 30 * MIB
"""
    if "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or ""):
        growth_of(program)


def test_what_other_threads_have_read_goes_back_too() -> None:
    program = """
import threading
from shared.util.process_memory import give_back_memory, use_one_heap
from tests.support.hostile.memory import MIB, resident_bytes
use_one_heap()

def read():
    large = b"x" * 2**24  # from now on glibc keeps such ones in its heaps
    del large
    messages = [b"x" * 2**20 for _ in range(50)]

before = resident_bytes()
---
thread = threading.Thread(target=read)
thread.start()
thread.join()
give_back_memory()
assert resident_bytes() - before < 16 * MIB
"""
    if "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or ""):
        growth_of(program)
