"""What the client makes of an engine's answers, good and bad. The engines here are small real servers."""

import asyncio
import json

import pytest

from actor.client import EngineClient, EngineError, EnginePool, parse_completion
from actor.engine.http import HttpError, HttpServer
from actor.http import HttpClient, HttpFailure
from shared.types import Completion, Sampling, VersionSpan
from tests.support.tiny import running_engine, tiny_model_dir


def answer(**changes):
    meta = {
        "finish_reason": {"type": "stop", "matched": 7},
        "output_token_logprobs": [[-0.5, 5, None], [-0.25, 6, None], [0.0, 7, None]],
        "completion_tokens": 3,
        "weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}],
    }
    return {"meta_info": meta | changes}


def test_an_answer_becomes_a_completion():
    assert parse_completion(answer(), "u") == Completion(
        (5, 6, 7), (-0.5, -0.25, 0.0), (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)), "stop"
    )


def test_weights_that_nobody_updated_are_version_0():
    spans = parse_completion(answer(weight_versions=None, weight_version="default"), "u").spans
    assert spans == (VersionSpan(0, 0, 3),)


def test_an_abort_without_tokens_is_a_completion():
    out = parse_completion(answer(finish_reason={"type": "abort"}, output_token_logprobs=None), "u")
    assert out == Completion((), (), (), "abort")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"output_token_logprobs": None}, "no output_token_logprobs"),
        ({"output_token_logprobs": []}, "no output_token_logprobs"),
        ({"output_token_logprobs": [[None, 5, None]]}, "no pairs"),
        ({"output_token_logprobs": [[float("nan"), 5, None]] * 3}, "not a finite number"),
        ({"output_token_logprobs": [[0.7, 5, None]] * 3}, "at most 0"),
        ({"completion_tokens": 4}, "3 logprobs for 4 tokens"),
        ({"finish_reason": {"type": "bored"}}, "finish reason is 'bored'"),
        ({"finish_reason": None}, "finish reason is None"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 2}]}, "do not cover"),
        ({"weight_versions": [{"version": "3", "start": 1, "end": 3}]}, "do not cover"),
        ({"weight_versions": [{"version": "new", "start": 0, "end": 3}]}, "weight version is 'new'"),
    ],
)
def test_an_invalid_answer_is_an_error_that_names_the_engine(changes, words):
    with pytest.raises(EngineError, match=words) as error:
        parse_completion(answer(**changes), "http://engine")
    assert "http://engine" in str(error.value)


async def serving(routes, use):
    server = HttpServer(routes)
    port = await server.start("127.0.0.1", 0)
    try:
        return await use(f"http://127.0.0.1:{port}")
    finally:
        server.close()


def generate(client):
    return client.generate([1], [], Sampling())


def test_a_full_engine_is_asked_again():
    calls = []

    async def busy_once(body):
        calls.append(body)
        if len(calls) == 1:
            raise HttpError(503, "full")
        return answer()

    out = asyncio.run(serving({"POST /generate": busy_once}, lambda url: generate(EngineClient(url))))
    assert out.finish_reason == "stop" and len(calls) == 2


def test_a_request_that_may_have_been_seen_is_not_sent_twice():
    calls = []

    async def broken(body):
        calls.append(body)
        raise RuntimeError("boom")

    with pytest.raises(EngineError, match="HTTP 500: RuntimeError: boom"):
        asyncio.run(serving({"POST /generate": broken}, lambda url: generate(EngineClient(url))))
    assert len(calls) == 1


def test_a_silent_engine_is_given_up_after_the_time_limit():
    async def silent(body):
        await asyncio.sleep(60)

    with pytest.raises(EngineError, match=r"no answer within 0\.2 s"):
        asyncio.run(serving({"POST /generate": silent}, lambda url: generate(EngineClient(url, timeout_s=0.2))))


def test_nobody_at_the_address_is_an_error_after_a_few_tries():
    with pytest.raises(EngineError, match="cannot connect"):
        asyncio.run(generate(EngineClient("http://127.0.0.1:9")))


def test_an_address_that_is_none_is_refused():
    with pytest.raises(ValueError, match="http://host:port"):
        EngineClient("localhost:31000")


def test_what_is_asked_of_the_engine_is_sglangs_form():
    seen = {}

    async def record(body):
        seen.update(body)
        return answer()

    async def use(url):
        client = EngineClient(url)
        await client.generate(
            [1, 2], [], Sampling(0.7, 0.9, 5, 64), banned_ids=[9], stop_ids=[7], max_new_tokens=8, seed=3
        )

    asyncio.run(serving({"POST /generate": record}, use))
    settings = seen.pop("sampling_params")
    assert seen == {"input_ids": [1, 2], "return_logprob": True}
    assert settings["logit_bias"] == {"9": -100.0}
    assert settings["stop_token_ids"] == [7] and settings["max_new_tokens"] == 8 and settings["sampling_seed"] == 3
    assert (settings["temperature"], settings["top_p"], settings["top_k"]) == (0.7, 0.9, 5)


def test_connections_are_kept_and_used_again():
    async def main():
        async def pong(body):
            return {"n": body["n"]}

        async def use(url):
            server_connections = set()
            client = HttpClient(url, connections=4)
            for _ in range(3):
                answers = await asyncio.gather(
                    *(client.request("POST", "/ping", {"n": n}, timeout_s=5) for n in range(20))
                )
                assert [a["n"] for a in answers] == list(range(20))
                server_connections.add(len(client._idle))
            client.close()
            return server_connections

        return await serving({"POST /ping": pong}, use)

    assert asyncio.run(main()) == {4}


def test_a_chunked_answer_is_read():
    async def main():
        async def talk(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            body = json.dumps({"ok": True}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for part in (body[:4], body[4:]):
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            writer.write(b"0\r\n\r\n")
            await writer.drain()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await HttpClient(f"http://127.0.0.1:{port}").request("GET", "/x", timeout_s=5)
        finally:
            server.close()

    assert asyncio.run(main()) == {"ok": True}


def test_a_connection_that_breaks_in_the_answer_is_an_error():
    async def main():
        async def talk(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
            writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            await HttpClient(f"http://127.0.0.1:{port}").request("GET", "/x", timeout_s=5)
        finally:
            server.close()

    with pytest.raises(HttpFailure, match="the connection broke") as failure:
        asyncio.run(main())
    assert failure.value.sent


def test_an_episode_goes_to_the_engine_with_the_fewest():
    async def main():
        pool = EnginePool([EngineClient("http://a:1"), EngineClient("http://b:1")])
        async with pool.lease() as first, pool.lease() as second, pool.lease():
            assert {first.url, second.url} == {"http://a:1", "http://b:1"}
            assert sorted(c.num_open for c in pool.clients) == [1, 2]
        assert [c.num_open for c in pool.clients] == [0, 0]

    asyncio.run(main())


def test_a_cancelled_request_is_given_up_by_the_engine(tmp_path):
    with running_engine(tiny_model_dir(tmp_path), max_context=2048) as (url, app):

        async def main():
            client = EngineClient(url)
            task = asyncio.create_task(client.generate([30], [], Sampling(max_new_tokens=2000), banned_ids=range(8)))
            while not app.scheduler.num_open:
                await asyncio.sleep(0.01)
            task.cancel()
            for _ in range(500):
                if not app.scheduler.num_open:
                    return
                await asyncio.sleep(0.01)
            raise AssertionError("the engine went on")

        asyncio.run(main())
