"""What a hostile engine sends neither holds up the loop that reads it nor takes memory: every byte is bounded."""

from __future__ import annotations

import asyncio
import time

import pytest

from shared.engine import http_client
from shared.engine.engine_api import EngineClient, EngineError
from shared.types import Sampling
from tests.support.hostile.engine_server import CONTENT, WIRE, HostileEngine
from tests.support.hostile.memory import resident_bytes

LIMIT_S = 1.5
ENDLESS = [name for name in WIRE if name.startswith("endless") or name == "tiny chunks"]


async def longest_pause(done: asyncio.Event) -> float:
    """Return the longest time for which the loop stood still until `done`."""
    longest = 0.0
    while not done.is_set():
        began = time.monotonic()
        await asyncio.sleep(0.01)
        longest = max(longest, time.monotonic() - began)
    return longest


@pytest.mark.parametrize("fault", WIRE)
def test_no_answer_holds_up_the_loop_or_outlasts_the_limit(fault: str) -> None:
    async def main(url: str) -> tuple[float, float]:
        done = asyncio.Event()
        watch = asyncio.create_task(longest_pause(done))
        async with EngineClient(url) as client:
            began = time.monotonic()
            with pytest.raises(EngineError, match=url):
                await client.request("GET", "/model_info", timeout_s=LIMIT_S)
            took = time.monotonic() - began
            await client.request("GET", "/server_info", timeout_s=20)  # the client is well
        done.set()
        return took, await watch

    with HostileEngine() as engine:
        engine.spoil("/model_info", fault)
        took, pause = asyncio.run(main(engine.url))
    assert took < LIMIT_S + 5 and pause < 5


@pytest.mark.parametrize("fault", ENDLESS)
def test_an_endless_answer_is_refused_by_its_bytes_long_before_the_time_limit(monkeypatch, fault: str) -> None:
    monkeypatch.setattr(http_client, "MAX_ANSWER_BYTES", 2**16)

    async def main(url: str) -> int:
        async with EngineClient(url) as client:
            before = resident_bytes()
            for _ in range(3):
                with pytest.raises(EngineError, match=r"broke|more than 65536 bytes"):
                    await client.request("GET", "/model_info", timeout_s=60)
            return resident_bytes() - before

    with HostileEngine() as engine:
        engine.spoil("/model_info", fault)
        assert asyncio.run(main(engine.url)) < 40 * 2**20


@pytest.mark.parametrize("size", [10, 2**16 - 2, 2**20, 30 * 2**20])
@pytest.mark.parametrize("chunk", [0, 1000])
def test_a_sound_answer_of_any_size_is_read(size: int, chunk: int) -> None:
    content = b'"' + b"x" * size + b'"'

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if chunk:
            parts = (content[at : at + chunk] for at in range(0, len(content), chunk))
            sent = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + sent)
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
        await writer.drain()
        writer.close()

    async def main() -> str:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
            found = await client.request("GET", "/x", timeout_s=60, answer=str)
        server.close()
        return found

    assert len(asyncio.run(main())) == size


@pytest.mark.parametrize("fault", [name for name in CONTENT if name != "another canary"])
def test_an_answer_that_no_engine_gives_is_the_engines_fault(fault: str) -> None:
    async def main(url: str) -> None:
        async with EngineClient(url, vocab_size=640) as client:
            client.newest.update(1, "")
            assert (await client.generate([1], [], Sampling(max_new_tokens=8))).token_ids == (5, 6, 7)
            engine.spoil("/generate", fault)
            with pytest.raises(EngineError, match=url) as error:
                await client.generate([1], [], Sampling(max_new_tokens=8))
            assert "\n" not in str(error.value) and client.suspect
            with pytest.raises(EngineError, match="not healthy"):  # health alone does not make it well
                await client.wait_ready(0.4)
            engine.spoil("/generate", "")
            await client.wait_ready(20)
            assert not client.suspect

    with HostileEngine() as engine:
        asyncio.run(main(engine.url))
