"""What the client makes of an engine's answers, good and bad. The engines here are small real servers."""

import asyncio
import json

import msgspec
import pytest

from actor.engine.http import HttpError, HttpServer
from actor.engine_pool import EnginePool
from shared.engine.engine_api import EngineClient, EngineError
from shared.engine.engine_messages import Generated, ServerInfo, completion_of
from shared.types import Completion, Sampling, VersionSpan
from tests.support.engines import ask, call, false_engine, hangs_up, redirects, says, talks_nonsense
from tests.support.machine import until_async
from tests.support.tiny import running_engine, tiny_model_dir

SPANS = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]


def answer(**changes):
    meta = {
        "finish_reason": {"type": "stop", "matched": 7},
        "output_token_logprobs": [[-0.5, 5, None], [-0.25, 6, None], [0.0, 7, None]],
        "completion_tokens": 3,
        "weight_versions": SPANS,
    }
    return {"meta_info": meta | changes}


def read(**changes):
    return completion_of(msgspec.convert(answer(**changes), Generated))


def generate(client):
    return client.generate([1], [], Sampling())


def test_an_answer_becomes_a_completion():
    assert read() == Completion((5, 6, 7), (-0.5, -0.25, 0.0), (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)), "stop")
    spans = [{"version": "3-0a1b", "start": 0, "end": 2}, {"version": "3-ffff", "start": 2, "end": 3}]
    assert read(weight_versions=spans).spans == (VersionSpan(3, 0, 2, "0a1b"), VersionSpan(3, 2, 3, "ffff"))
    unnamed = read(weight_versions=None, weight_version="default")  # weights that nobody updated
    assert unnamed.spans == (VersionSpan(0, 0, 3),)
    aborted = read(finish_reason={"type": "abort"}, output_token_logprobs=None, completion_tokens=0)
    assert aborted == Completion((), (), (), "abort")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (answer(output_token_logprobs=None), "no output_token_logprobs"),
        (answer(output_token_logprobs=[]), "no output_token_logprobs"),
        (answer(output_token_logprobs=[[None, 5, None]]), "got `null`"),
        (answer(output_token_logprobs=[[-0.5]]), "array. of length 3"),
        (answer(output_token_logprobs=[[float("nan"), 5, None]] * 3), "is not JSON"),
        (answer(output_token_logprobs=[[0.7, 5, None]] * 3), "<= 0.0001"),
        (answer(output_token_logprobs=[[-0.5, -1, None]] * 3), ">= 0"),
        (answer(output_token_logprobs=[[-0.5, 2**40, None]] * 3), "<= 2147483647"),
        (answer(output_token_logprobs=[[-0.5, 2**70, None]] * 3), "the answer is wrong"),
        (answer(output_token_logprobs={"a": 1}), "got `object`"),
        (answer(completion_tokens=4), "3 logprobs for 4 tokens"),
        (answer(finish_reason={"type": "bored"}), "'bored'"),
        (answer(finish_reason=None), "finish_reason"),
        (answer(weight_versions=SPANS[:1]), "do not cover"),
        (answer(weight_versions=[{"version": "3", "start": 1, "end": 3}]), "do not cover"),
        (answer(weight_versions=[{"version": "new", "start": 0, "end": 3}]), "weight version is 'new'"),
        (answer(weight_versions=[{"version": "9" * 5000, "start": 0, "end": 3}]), "weight version is '999"),
        (answer(weight_versions=[{"version": "3-", "start": 0, "end": 3}]), "weight version is '3-'"),
        (answer(weight_versions=[{"version": f"3-{'a' * 33}", "start": 0, "end": 3}]), "weight version is '3-aaa"),
        (answer(weight_versions=[{"start": 0}]), "missing required field `version`"),
        (answer(weight_versions=[{"version": "3", "start": 0, "end": 1e300}]), "the answer is wrong"),
        (answer(weight_versions=7), "got `int`"),
        ({}, "meta_info"),
        ([1, 2], "got `array`"),
        (b"", "is not JSON"),
        (b"\xff\xfe{", "is not JSON"),
        (b"[" * 100_000, "is not JSON|the answer is wrong"),
    ],
)
def test_an_invalid_answer_is_an_error_that_names_the_engine(content, words):
    with false_engine({"/generate": says(content)}) as (url, _), pytest.raises(EngineError, match=words) as error:
        ask(url, generate)
    assert url in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize("content", [b"[" * 100_000, b"7", b"[]", b"", b"null", b'{"ranks": 1}', b"\xff"])
def test_no_route_lets_garbage_out_as_another_error(content):
    routes = ["/model_info", "/server_info", "/generate", "/tokenize", "/weights_checker", "/pause_generation"]
    calls = [
        lambda client: client.wait_ready(0.1),
        lambda client: client.weight_version(),
        lambda client: client.next_logprobs([1], [], [2], [], "", 5.0),
        lambda client: client.checksums([]),
        lambda client: client.warm_up([1], [], 5.0),
    ]
    with false_engine(dict.fromkeys(routes, says(content))) as (url, _):
        for use in calls:
            with pytest.raises(EngineError):
                ask(url, use)
        assert ask(url, lambda client: client.tokenize("a")) is None
        ask(url, lambda client: client.health())


@pytest.mark.parametrize("fault", [hangs_up, talks_nonsense, redirects("/model_info"), says(b"{" * 10**6, 500)])
def test_a_server_that_misbehaves_is_an_error_in_one_line(fault):
    with false_engine({"/generate": fault}) as (url, seen), pytest.raises(EngineError) as error:
        ask(url, generate)
    assert len(seen) == 1 and error.value.sent  # not asked again, nobody else asked
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


def test_answers_are_bounded(monkeypatch):
    monkeypatch.setattr("shared.engine.http_client.MAX_TYPED_BYTES", 1000)
    monkeypatch.setattr("shared.engine.http_client.MAX_ANSWER_BYTES", 500)
    large = says({"x": "y" * 2000})
    with false_engine({"/generate": large, "/model_info": large}) as (url, _):
        with pytest.raises(EngineError, match="more than 1000 bytes"):
            ask(url, generate)
        with pytest.raises(EngineError, match="more than 500 bytes"):
            ask(url, lambda client: client.model_info())


def test_more_tokens_than_were_asked_for_are_the_engines_fault():
    with false_engine({"/generate": says(answer())}) as (url, _), pytest.raises(EngineError, match="3 tokens, 2 were"):
        ask(url, lambda client: client.generate([1], [], Sampling(), max_new_tokens=2))


BAD_HOSTS = ["http://host..domain:30000", "http://.", f"http://{'a' * 64}.invalid:1", "http://no.such.host.invalid"]


@pytest.mark.parametrize("url", BAD_HOSTS)
def test_a_host_that_cannot_be_is_an_engine_that_cannot_be_reached(url):
    with pytest.raises(EngineError, match="cannot connect") as error:
        ask(url, lambda client: client.health(20.0))
    assert not error.value.sent


@pytest.mark.parametrize("url", ["localhost:31000", "http://[::1", "http://h:port", "ftp://h:1", "http://"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="http://host:port"):
        EngineClient(url)


def test_a_proxy_of_the_environment_is_not_used(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with false_engine({"/generate": says(answer())}) as (url, _):
        assert ask(url, generate).finish_reason == "stop"


async def serving(routes, use, timeout_s=60.0):
    server = HttpServer(routes)
    port = await server.start("127.0.0.1", 0)
    try:
        async with EngineClient(f"http://127.0.0.1:{port}", timeout_s=timeout_s, connections=4) as client:
            return await use(client, server)
    finally:
        server.close()


def test_a_full_engine_is_asked_again():
    calls = []

    async def busy_once(body):
        calls.append(body)
        if len(calls) == 1:
            raise HttpError(503, "full")
        return answer()

    out = asyncio.run(serving({"POST /generate": busy_once}, lambda client, _: generate(client)))
    assert out.finish_reason == "stop" and len(calls) == 2


def test_a_request_that_may_have_been_seen_is_not_sent_twice():
    calls = []

    async def broken(body):
        calls.append(body)
        raise RuntimeError("boom")

    with pytest.raises(EngineError, match="/generate: HTTP 500: RuntimeError: boom"):
        asyncio.run(serving({"POST /generate": broken}, lambda client, _: generate(client)))
    assert len(calls) == 1


def test_a_silent_engine_is_given_up_after_the_time_limit():
    async def silent(body):
        await asyncio.sleep(60)

    with pytest.raises(EngineError, match=r"no answer within 0\.5 s"):
        asyncio.run(serving({"POST /generate": silent}, lambda client, _: generate(client), timeout_s=0.5))


def test_nobody_at_the_address_is_an_error_after_a_few_tries():
    with pytest.raises(EngineError, match="cannot connect"):
        ask("http://127.0.0.1:9", generate)


def test_what_is_asked_of_the_engine_is_sglangs_form():
    sampling = Sampling(0.7, 0.9, 5, 64)
    with false_engine({"/generate": says(answer())}) as (url, seen):
        ask(
            url,
            lambda client: client.generate(
                [1, 2], [], sampling, banned_ids=[9], stop_ids=[7], max_new_tokens=8, seed=3, cache_key="version 1"
            ),
        )
    ((_, body),) = seen
    settings = body.pop("sampling_params")
    assert body == {"input_ids": [1, 2], "return_logprob": True, "extra_key": "version 1"}
    assert settings["logit_bias"] == {"9": -100.0}
    assert settings["stop_token_ids"] == [7] and settings["max_new_tokens"] == 8 and settings["sampling_seed"] == 3
    assert (settings["temperature"], settings["top_p"], settings["top_k"]) == (0.7, 0.9, 5)


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"tp_size": 2, "pp_size": 2}, "has pp_size = 2: weights cannot be sent"),
        ({"dp_size": 2}, "has dp_size = 2: weights cannot be sent"),
        ({"quantization": "fp8"}, "is quantized .fp8."),
    ],
)
def test_a_server_that_would_take_no_new_weights_says_so(info, words):
    with false_engine({"/server_info": says(info)}) as (url, _), pytest.raises(EngineError, match=words):
        ask(url, lambda client: client.server_info())
    with false_engine({"/server_info": says({"tp_size": 2, "pp_size": 1, "dp_size": 1, "quantization": None})}) as (
        url,
        _,
    ):
        assert ask(url, lambda client: client.server_info()).num_ranks == 2


def test_only_a_server_without_that_route_is_taken_for_an_older_one():
    with false_engine({"/server_info": says({}, 404)}) as (url, _):
        assert ask(url, lambda client: client.server_info()) == ServerInfo()
    with false_engine({"/server_info": says({}, 503)}) as (url, _), pytest.raises(EngineError, match="503"):
        ask(url, lambda client: client.server_info())
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9: cannot connect"):
        ask("http://127.0.0.1:9", lambda client: client.server_info())


def test_connections_are_kept_and_used_again():
    opened = set()

    async def pong(body):
        return {"n": body["n"]}

    async def use(client, server):
        for _ in range(3):
            calls = (client.request("POST", "/ping", {"n": n}, timeout_s=5) for n in range(20))
            assert [a["n"] for a in await asyncio.gather(*calls)] == list(range(20))
            opened.update(server.connections)
        return len(opened)

    assert asyncio.run(serving({"POST /ping": pong}, use)) == 4


def test_a_chunked_answer_is_read():
    def chunked(request, body):
        request.send_response(200)
        request.send_header("transfer-encoding", "chunked")
        request.end_headers()
        content = json.dumps({"ok": True}).encode()
        for part in (content[:4], content[4:], b""):
            request.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))

    with false_engine({"/x": chunked}) as (url, _):
        assert call(url, "/x") == {"ok": True}


def test_an_episode_goes_to_the_engine_with_the_fewest():
    async def main():
        pool = EnginePool([EngineClient("http://a:1"), EngineClient("http://b:1")])
        async with pool.lease() as first, pool.lease() as second, pool.lease():
            assert {first.url, second.url} == {"http://a:1", "http://b:1"}
            assert sorted(c.num_open for c in pool.clients) == [1, 2]
        assert [c.num_open for c in pool.clients] == [0, 0]

    asyncio.run(main())


def test_a_cancelled_request_is_given_up_by_the_engine(tmp_path):
    async def use(client):
        task = asyncio.create_task(client.generate([30], [], Sampling(max_new_tokens=2000), banned_ids=range(8)))
        await until_async(lambda: app.scheduler.num_open)
        task.cancel()
        await until_async(lambda: not app.scheduler.num_open)

    with running_engine(tiny_model_dir(tmp_path), max_context=2048) as (url, app):
        ask(url, use)
