"""Posts over kept connections: every form of an answer is read, whatever else comes is an error, and nothing waits."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from shared import http_client
from shared.engine_api import EngineClient, EngineError, bucket_content

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 16\r\n\r\n" + b'{"success":true}'
CHUNKED = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7\r\n{"succe\r\n9;x=1\r\nss":true}\r\n0\r\n\r\n'
UNTIL_CLOSED = b'HTTP/1.1 200 OK\r\n\r\n{"success":true}'
OLD = b'HTTP/1.0 200 OK\r\ncontent-length: 16\r\n\r\n{"success":true}'
CLOSING = OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


class Server:
    """Answers every request with the same pieces; `seen` are heads and bodies, one list a connection."""

    def __init__(self, *pieces: bytes, hangs_up: bool = False) -> None:
        self.pieces, self.hangs_up, self.seen = pieces, hangs_up, []

    async def __call__(self, reader, writer):
        mine = []
        self.seen.append(mine)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                mine.append((head, await reader.readexactly(length)))
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01 if len(self.pieces) > 1 else 0)
                if self.hangs_up:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def client_of(server: Server, **options):
    serving = await asyncio.start_server(server, "127.0.0.1", 0)
    async with EngineClient(f"http://127.0.0.1:{serving.sockets[0].getsockname()[1]}", **options) as client:
        yield client
    serving.close()


async def receive(server: Server, count: int = 1, timeout_s: float = 5.0, **options) -> None:
    async with client_of(server, **options) as client:
        for _ in range(count):
            await client.receive(bucket_content({"names": ["a"]}), timeout_s)


def test_one_connection_carries_one_post_after_another_with_the_key():
    server = Server(OK)
    asyncio.run(receive(server, 5, api_key="secret"))
    ((head, body), *others) = server.seen[0]
    assert len(server.seen) == 1 and others == [(head, body)] * 4
    assert head.startswith(b"POST /update_weights_from_distributed HTTP/1.1\r\n")
    assert b"\r\nauthorization: Bearer secret\r\n" in head and b"\r\nhost: 127.0.0.1:" in head
    assert body == b'{"names":["a"],"load_format":"flattened_bucket"}'


def test_posts_at_once_have_a_connection_each():
    async def both() -> None:
        async with client_of(server) as client:
            await asyncio.gather(*(client.receive(b"{}", 5.0) for _ in range(3)))
            await client.receive(b"{}", 5.0)

    server = Server(OK)
    asyncio.run(both())
    assert sorted(len(posts) for posts in server.seen) == [1, 1, 2]


@pytest.mark.parametrize(
    "pieces", [(OK,), (CHUNKED,), (OK[:9], OK[9:50], OK[50:]), tuple(CHUNKED[i : i + 1] for i in range(len(CHUNKED)))]
)
def test_an_answer_is_read_in_any_form_and_in_any_pieces(pieces):
    server = Server(*pieces)
    asyncio.run(receive(server, 2))
    assert [len(posts) for posts in server.seen] == [2]


@pytest.mark.parametrize("answer", [UNTIL_CLOSED, OLD, CLOSING])
def test_a_server_that_closes_after_each_answer_gets_a_new_connection(answer):
    server = Server(answer, hangs_up=True)
    asyncio.run(receive(server, 2))
    assert [len(posts) for posts in server.seen] == [1, 1]


def test_a_connection_that_a_server_may_have_closed_by_now_is_not_used(monkeypatch):
    monkeypatch.setattr(http_client, "KEEP_ALIVE_S", 0.0)
    server = Server(OK)
    asyncio.run(receive(server, 2))
    assert [len(posts) for posts in server.seen] == [1, 1]


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ((b'HTTP/1.1 400 Bad\r\ncontent-length: 13\r\n\r\n{"error":"x"}',), "HTTP 400: x"),
        ((OK.replace(b"true", b"fals"), b"e}"), "not JSON"),
        ((b'HTTP/1.1 200 OK\r\ncontent-length: 17\r\n\r\n{"success":false}',), "failed: None"),
        ((b"\x00\xff garbage\r\n\r\n",), "broke"),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",), "broke"),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n",), "broke"),
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nfffffff\r\n",), "broke"),
        ((b"x" * 50_000,), "broke"),
        ((OK[:30],), "no answer within 0.3 s"),
        ((), "no answer within 0.3 s"),
    ],
)
def test_whatever_else_comes_is_the_engines_error(pieces, said):
    with pytest.raises(EngineError, match=said):
        asyncio.run(receive(Server(*pieces), timeout_s=0.3))


def test_a_server_that_hangs_up_or_is_not_there_is_an_error():
    with pytest.raises(EngineError, match="broke: the server hung up") as told:
        asyncio.run(receive(Server(OK[:30], hangs_up=True)))
    assert told.value.sent

    async def nobody() -> None:
        async with EngineClient("http://127.0.0.1:9") as client:
            await client.receive(b"{}", 5.0)

    with pytest.raises(EngineError, match="cannot connect") as told:
        asyncio.run(nobody())
    assert not told.value.sent


def test_after_a_silent_server_the_next_post_has_a_connection_of_its_own():
    async def twice() -> None:
        async with client_of(server) as client:
            with pytest.raises(EngineError, match="no answer"):
                await client.receive(b"{}", 0.2)
            server.pieces = (OK,)
            await client.receive(b"{}", 5.0)

    server = Server()
    asyncio.run(twice())
    assert [len(posts) for posts in server.seen] == [1, 1]
