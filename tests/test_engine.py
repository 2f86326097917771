"""The embedded engine against plain transformers, over real HTTP."""

import asyncio
import random
import socket

import msgspec
import pytest
import torch

from shared.engine_api import EngineClient, EngineError
from shared.types import Image, Sampling
from shared.vision import VisionSpec
from tests.support.engines import surprise_z
from tests.support.machine import until_async
from tests.support.tiny import draw_image, load_model, png, reference_logits, running_engine, tiny_tokenizer

SIZES = [(64, 64), (96, 64), (64, 64), (128, 128)]


@pytest.fixture(scope="module")
def spec(folder):
    return VisionSpec.load(folder)


@pytest.fixture
def engine(folder):
    with running_engine(folder, max_context=512) as (url, app):
        yield url, app


def expected_logprobs(model, spec, token_ids, images, temperature=1.0, banned=()):
    logits = reference_logits(model, token_ids, images, spec)
    logits[:, list(banned)] = -torch.inf
    return torch.log_softmax(logits / temperature, dim=-1)


async def play(client, spec, seed, turns=3, temperature=1.0, pause_s=0.0):
    """One episode of random observations; returns (compact ids, [(turn start, completion)], images)."""
    rng = random.Random(seed)
    ids, drawn_images, sampled = [rng.randrange(20, 200) for _ in range(rng.randint(1, 30))], [], []
    for _ in range(turns):
        for _ in range(rng.randint(0, 2)):
            drawn_images.append(draw_image(*rng.choice(SIZES), seed=rng.randrange(6)))
            ids += [21, spec.image_token_id, 22]
        ids += [rng.randrange(20, 200) for _ in range(rng.randint(1, 20))]
        images = [Image.of(png(p)) for p in drawn_images]
        sampling = Sampling(temperature=temperature, max_new_tokens=rng.randint(1, 12))
        out = await client.generate(ids, images, sampling, banned_ids=spec.banned_ids, seed=rng.randrange(1000))
        sampled.append((len(ids), out))
        ids = ids + list(out.token_ids)
        await asyncio.sleep(pause_s * rng.random())
    return ids, sampled, drawn_images


def check_episode(model, spec, episode, temperature=1.0):
    ids, sampled, images = episode
    logprobs = expected_logprobs(model, spec, ids, images, temperature, spec.banned_ids)
    for start, out in sampled:
        own = logprobs[torch.arange(start - 1, start - 1 + len(out.token_ids)), torch.tensor(out.token_ids)]
        torch.testing.assert_close(torch.tensor(out.logprobs), own, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_many_episodes_at_once_equal_a_plain_forward(folder, spec, engine, temperature):
    url, app = engine

    async def main():
        client = EngineClient(url)
        return await asyncio.gather(
            *(play(client, spec, seed, temperature=temperature, pause_s=0.02) for seed in range(20))
        )

    episodes = asyncio.run(main())
    model = load_model(folder)
    for episode in episodes:
        check_episode(model, spec, episode, temperature)
    assert app.scheduler.tokens_reused > app.scheduler.tokens_in / 4  # the second turn did not compute the first again


@pytest.mark.slow
def test_few_slots_change_nothing_but_speed(folder, spec):
    with running_engine(folder, max_context=512, max_batch=3, slots=3) as (url, _):

        async def main():
            client = EngineClient(url)
            return await asyncio.gather(*(play(client, spec, seed) for seed in range(8)))

        episodes = asyncio.run(main())
    model = load_model(folder)
    for episode in episodes:
        check_episode(model, spec, episode)


def test_the_same_seed_gives_the_same_tokens_whatever_else_runs(spec, engine):
    url, _ = engine

    async def main():
        client = EngineClient(url)
        alone = await play(client, spec, 5)
        crowd = await asyncio.gather(*(play(client, spec, seed) for seed in (5, 6, 7, 5)))
        return alone, crowd

    alone, crowd = asyncio.run(main())
    assert alone[0] == crowd[0][0] == crowd[3][0]
    assert alone[0] != crowd[1][0]


def test_zero_temperature_takes_the_likeliest_token(folder, spec, engine):
    url, _ = engine

    async def main():
        return await EngineClient(url).generate([30, 31, 32], [], Sampling(temperature=0.0, max_new_tokens=5))

    out = asyncio.run(main())
    logprobs = expected_logprobs(load_model(folder), spec, [30, 31, 32, *out.token_ids], [])
    assert logprobs[2:-1].argmax(-1).tolist() == list(out.token_ids)
    torch.testing.assert_close(torch.tensor(out.logprobs), logprobs[2:-1].max(-1).values, atol=1e-4, rtol=0)


def test_a_stop_token_ends_the_turn_and_is_part_of_it(spec, engine):
    url, _ = engine

    async def main():
        client = EngineClient(url)
        everything = await client.generate([30], [], Sampling(max_new_tokens=40), seed=3)
        third = everything.token_ids[2]
        return everything, await client.generate([30], [], Sampling(max_new_tokens=40), seed=3, stop_ids=[third])

    everything, stopped = asyncio.run(main())
    assert everything.finish_reason == "length" and stopped.finish_reason == "stop"
    assert stopped.token_ids == everything.token_ids[: everything.token_ids.index(stopped.token_ids[-1]) + 1]


def test_banned_ids_are_never_sampled(spec, engine):
    url, _ = engine
    allowed = {40, 41}
    banned = [token for token in range(640) if token not in allowed]

    async def main():
        return await EngineClient(url).generate([30], [], Sampling(max_new_tokens=30), banned_ids=banned)

    out = asyncio.run(main())
    assert set(out.token_ids) == allowed
    assert all(p <= 0 for p in out.logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_are_sampled_as_often_as_their_logprobs_say(folder, spec, engine, temperature):
    url, _ = engine

    async def z(sampling):
        client = EngineClient(url)
        requests = [client.generate([30 + i], [], sampling, banned_ids=spec.banned_ids, seed=i) for i in range(16)]
        rows, tokens = [], []
        for i, out in enumerate(await asyncio.gather(*requests)):
            ids = [30 + i, *out.token_ids]
            rows.append(expected_logprobs(model, spec, ids, [], temperature, spec.banned_ids)[:-1])
            tokens += out.token_ids
        return surprise_z(torch.cat(rows), torch.tensor(tokens))

    model = load_model(folder)
    assert abs(asyncio.run(z(Sampling(temperature, max_new_tokens=100)))) < 4
    assert asyncio.run(z(Sampling(temperature, top_p=0.8, max_new_tokens=100))) < -8  # and it would show


def test_top_k_and_top_p_narrow_the_choice_but_not_the_logprob(folder, spec, engine):
    url, _ = engine

    async def main():
        client = EngineClient(url)
        by_k = await client.generate([30], [], Sampling(top_k=3, max_new_tokens=20))
        by_p = await client.generate([30], [], Sampling(top_p=0.3, max_new_tokens=20))
        return by_k, by_p

    by_k, by_p = asyncio.run(main())
    model = load_model(folder)
    for out in (by_k, by_p):
        logprobs = expected_logprobs(model, spec, [30, *out.token_ids], [])[:-1]
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
    url, _ = engine
    with pytest.raises(EngineError, match=words) as failure:
        asyncio.run(EngineClient(url).request("POST", "/generate", body, timeout_s=10))
    assert failure.value.status == 400 and "\n" not in str(failure.value)


def test_as_many_images_as_placeholders_are_required(spec, engine):
    url, _ = engine
    with pytest.raises(EngineError, match="1 image placeholders but 0 images"):
        asyncio.run(EngineClient(url).generate([30, spec.image_token_id], [], Sampling()))


def test_the_context_bounds_a_long_answer(engine):
    url, _ = engine
    out = asyncio.run(EngineClient(url).generate([30] * 500, [], Sampling(max_new_tokens=100), banned_ids=[eos()]))
    assert (len(out.token_ids), out.finish_reason) == (12, "length")


def test_an_unknown_route_and_a_broken_body_are_told_apart(engine):
    url, _ = engine

    async def status(method, path, body=None):
        try:
            await EngineClient(url).request(method, path, body, timeout_s=10)
        except EngineError as failure:
            return failure.status
        return 200

    assert asyncio.run(status("GET", "/health")) == 200
    assert asyncio.run(status("GET", "/generate")) == 405
    assert asyncio.run(status("POST", "/nothing")) == 404
    assert asyncio.run(status("POST", "/generate", [1, 2])) == 400


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
        connection.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n\r\n")
        assert connection.recv(100).split()[1] == status


def test_a_client_that_hangs_up_ends_its_request_and_leaves_the_engine_alone(engine):
    url, app = engine

    async def main():
        client = EngineClient(url)
        task = asyncio.create_task(client.generate([30], [], Sampling(max_new_tokens=500), banned_ids=[eos()]))
        await until_async(lambda: app.scheduler.num_open == 1, 60.0)
        task.cancel()
        await until_async(lambda: app.scheduler.num_open == 0, 60.0)
        return await client.generate([30], [], Sampling(max_new_tokens=2))

    assert asyncio.run(main()).token_ids and app.scheduler.tokens_out < 400


def eos():
    return tiny_tokenizer().convert_tokens_to_ids("<|im_end|>")
