"""The embedded engine against plain transformers, over real HTTP."""

import asyncio
import socket

import msgspec
import pytest
import torch

from shared.engine.engine_api import EngineError
from shared.types import Sampling
from shared.vision import VisionSpec
from tests.support.engines import SIZES, ask, call, check, play_at_once, surprise_z
from tests.support.machine import until, until_async
from tests.support.small.families import FAMILIES
from tests.support.tiny import (
    load_model,
    reference_logits,
    running_engine,
    tiny_tokenizer,
)

WINDOWED = [(28, 28), (56, 56), (84, 84), (140, 56), (168, 112)]  # windows of 56: a part of one, one, six with edges


@pytest.fixture(scope="module")
def spec(folder):
    return VisionSpec.load(folder)


@pytest.fixture
def engine(folder):
    with running_engine(folder, max_context=512) as (url, app):
        yield url, app


def generate(engine, token_ids, sampling, **options):
    return ask(engine[0], lambda client: client.generate(token_ids, [], sampling, **options))


def expected_logprobs(model, spec, token_ids, images, temperature=1.0, banned=()):
    logits = reference_logits(model, token_ids, images, spec)
    logits[:, list(banned)] = -torch.inf
    return torch.log_softmax(logits / temperature, dim=-1)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_many_episodes_at_once_equal_a_plain_forward(folder, spec, engine, temperature):
    url, app = engine
    check(folder, spec, play_at_once(url, spec, range(20), temperature=temperature, pause_s=0.02), temperature)
    assert app.scheduler.tokens_reused > app.scheduler.tokens_in / 4  # the second turn did not compute the first again


@pytest.mark.slow
def test_few_slots_change_nothing_but_speed(folder, spec):
    with running_engine(folder, max_context=512, max_batch=3, slots=3) as (url, _):
        check(folder, spec, play_at_once(url, spec, range(8)))


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"Qwen3-VL"}))
def test_each_family_gives_the_logprobs_of_a_plain_forward_turn_after_turn(tmp_path, family):
    sizes = WINDOWED if family == "Qwen2.5-VL" else SIZES
    folder = FAMILIES[family][0](tmp_path / "model")
    spec = VisionSpec.load(folder, min_pixels=784)
    with running_engine(folder, max_context=512, min_pixels=784, max_batch=8) as (url, app):
        check(folder, spec, play_at_once(url, spec, range(10), sizes=sizes, pause_s=0.02))
        assert app.scheduler.tokens_reused > app.scheduler.tokens_in / 4


@pytest.mark.slow
def test_the_same_seed_gives_the_same_tokens_whatever_else_runs(spec, engine):
    (alone,), crowd = (play_at_once(engine[0], spec, seeds) for seeds in ((5,), (5, 6, 7, 5)))
    assert alone[0] == crowd[0][0] == crowd[3][0]
    assert alone[0] != crowd[1][0]


def test_zero_temperature_takes_the_likeliest_token(folder, spec, engine):
    out = generate(engine, [30, 31, 32], Sampling(temperature=0.0, max_new_tokens=5))
    logprobs = expected_logprobs(load_model(folder), spec, [30, 31, 32, *out.token_ids], [])
    assert logprobs[2:-1].argmax(-1).tolist() == list(out.token_ids)
    torch.testing.assert_close(torch.tensor(out.logprobs), logprobs[2:-1].max(-1).values, atol=1e-4, rtol=0)


def test_a_stop_token_ends_the_turn_and_is_part_of_it(spec, engine):
    everything = generate(engine, [30], Sampling(max_new_tokens=40), seed=3)
    stopped = generate(engine, [30], Sampling(max_new_tokens=40), seed=3, stop_ids=[everything.token_ids[2]])
    assert everything.finish_reason == "length" and stopped.finish_reason == "stop"
    assert stopped.token_ids == everything.token_ids[: everything.token_ids.index(stopped.token_ids[-1]) + 1]


def test_banned_ids_are_never_sampled(spec, engine):
    allowed = {40, 41}
    out = generate(engine, [30], Sampling(max_new_tokens=30), banned_ids={*range(640)} - allowed)
    assert set(out.token_ids) == allowed
    assert all(p <= 0 for p in out.logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_are_sampled_as_often_as_their_logprobs_say(folder, spec, engine, temperature):
    async def sixteen(client, sampling):
        requests = [client.generate([30 + i], [], sampling, banned_ids=spec.banned_ids, seed=i) for i in range(16)]
        return await asyncio.gather(*requests)

    def z(sampling):
        rows, tokens = [], []
        for i, out in enumerate(ask(engine[0], lambda client: sixteen(client, sampling))):
            ids = [30 + i, *out.token_ids]
            rows.append(expected_logprobs(model, spec, ids, [], temperature, spec.banned_ids)[:-1])
            tokens += out.token_ids
        return surprise_z(torch.cat(rows), torch.tensor(tokens))

    model = load_model(folder)
    assert abs(z(Sampling(temperature, max_new_tokens=100))) < 4
    assert z(Sampling(temperature, top_p=0.8, max_new_tokens=100)) < -8  # and it would show


def test_top_k_and_top_p_narrow_the_choice_but_not_the_logprob(folder, spec, engine):
    by_k = generate(engine, [30], Sampling(top_k=3, max_new_tokens=20), banned_ids=spec.banned_ids)
    by_p = generate(engine, [30], Sampling(top_p=0.3, max_new_tokens=20), banned_ids=spec.banned_ids)
    model = load_model(folder)
    for out in (by_k, by_p):
        logprobs = expected_logprobs(model, spec, [30, *out.token_ids], [], banned=spec.banned_ids)[:-1]
        own = logprobs.gather(1, torch.tensor(out.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(out.logprobs), own, atol=1e-4, rtol=0)
        likelier = (logprobs > own[:, None]).sum(-1)
        mass_before = torch.where(logprobs > own[:, None], logprobs.exp(), 0.0).sum(-1)
        assert (likelier < 3).all() if out is by_k else (mass_before < 0.3).all()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "missing required field `input_ids`"),
        ({"input_ids": []}, "length >= 1"),
        ({"input_ids": [30, True]}, "Expected `int`, got `bool`"),
        ({"input_ids": [640]}, "input_ids holds 640: token ids are from 0 to 639"),
        ({"input_ids": [1] * 600}, "the context is 512"),
        ({"input_ids": [30], "image_data": ["data:image/png;base64,!!"]}, "no image"),
        ({"input_ids": [30], "image_data": "aGVsbG8="}, "no image"),
        ({"input_ids": [30], "token_ids_logprob": [640]}, "token_ids_logprob holds 640"),
        ({"input_ids": [30], "sampling_params": [1]}, "got `array`"),
        ({"input_ids": [30], "sampling_params": {"temperature": -1}}, ">= 0.0 - at .*temperature"),
        ({"input_ids": [30], "sampling_params": {"temperature": msgspec.Raw(b"NaN")}}, "malformed"),
        ({"input_ids": [30], "sampling_params": {"temperature": msgspec.Raw(b"Infinity")}}, "malformed"),
        ({"input_ids": [30], "sampling_params": {"temperature": 1e-46}}, "temperature is 1e-46: give 0 or at least"),
        ({"input_ids": [30], "sampling_params": {"temperature": 1e300}}, "<= 1000000.0"),
        ({"input_ids": [30], "sampling_params": {"top_p": 0}}, "at .*top_p"),
        ({"input_ids": [30], "sampling_params": {"logit_bias": {"999": -100}}}, "logit_bias holds 999"),
        ({"input_ids": [30], "sampling_params": {"logit_bias": {"9": msgspec.Raw(b"NaN")}}}, "malformed"),
        ({"input_ids": [30], "sampling_params": {"logit_bias": {"9": 1e300}}}, "<= 1000000.0"),
        ({"input_ids": [30], "sampling_params": {"logit_bias": {str(i): -100 for i in range(640)}}}, "bans all 640"),
    ],
)
def test_a_bad_request_is_refused_with_its_reason(engine, body, words):
    with pytest.raises(EngineError, match=words) as failure:
        call(engine[0], "/generate", body)
    assert failure.value.status == 400 and "\n" not in str(failure.value)


def test_as_many_images_as_placeholders_are_required(spec, engine):
    with pytest.raises(EngineError, match="1 image placeholders but 0 images"):
        generate(engine, [30, spec.image_token_id], Sampling())


def test_the_context_bounds_a_long_answer(engine):
    out = generate(engine, [30] * 500, Sampling(max_new_tokens=100), banned_ids=[eos()])
    assert (len(out.token_ids), out.finish_reason) == (12, "length")


def test_an_unknown_route_and_a_broken_body_are_told_apart(engine):
    for path, body, status in (("/generate", None, 405), ("/nothing", {}, 404), ("/generate", [1, 2], 400)):
        with pytest.raises(EngineError) as failure:
            call(engine[0], path, body)
        assert failure.value.status == status
    assert call(engine[0], "/health")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"content-length: 70000000", b"413"),
        (b"transfer-encoding: chunked", b"413"),
        (b"x: " + b"y" * 5000, b"400"),
        (b"\r\n".join(b"x%d: y" % i for i in range(100)), b"400"),
    ],
)
def test_what_is_beyond_the_limits_is_refused_unread(engine, head, status):
    port = int(engine[0].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nhost: localhost\r\n" + head + b"\r\n\r\n")
        assert connection.recv(100).split()[1] == status


@pytest.mark.parametrize(
    ("route", "head", "status"),
    [
        (b"GET /health", b"content-length: 4000000", b"200"),  # no body is waited for
        (b"POST /health", b"content-length: 70000000", b"413"),
        (b"POST /pause_generation", b"content-length: 5000000", b"413"),
        (b"POST /generate", b"origin: http://page.example\r\ncontent-length: 2", b"403"),
        (b"GET /model_info", b"origin: null", b"403"),
    ],
)
def test_a_body_that_nobody_needs_and_a_web_page_are_not_listened_to(engine, route, head, status):
    port = int(engine[0].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(route + b" HTTP/1.1\r\nhost: localhost\r\n" + head + b"\r\n\r\n")
        assert connection.recv(100).split()[1] == status


def test_bodies_that_are_read_at_once_are_bounded(engine, monkeypatch):
    monkeypatch.setattr("actor.engine.http.MAX_READING_BYTES", 1000)
    port = int(engine[0].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as slow:
        slow.sendall(b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 990\r\n\r\n")
        until(lambda: _answers(engine[0]) == 503)
    until(lambda: _answers(engine[0]) == 200)


def _answers(url):
    try:
        call(url, "/generate", {"input_ids": [30], "sampling_params": {"max_new_tokens": 1}})
    except EngineError as error:
        return error.status
    return 200


def test_a_client_that_hangs_up_ends_its_request_and_leaves_the_engine_alone(engine):
    url, app = engine

    async def use(client):
        task = asyncio.create_task(client.generate([30], [], Sampling(max_new_tokens=500), banned_ids=[eos()]))
        await until_async(lambda: app.scheduler.num_open == 1, 60.0)
        task.cancel()
        await until_async(lambda: app.scheduler.num_open == 0, 60.0)
        return await client.generate([30], [], Sampling(max_new_tokens=2))

    assert ask(url, use).token_ids and app.scheduler.tokens_out < 400


def eos():
    return tiny_tokenizer().convert_tokens_to_ids("<|im_end|>")
