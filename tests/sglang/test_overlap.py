"""With the overlap scheduler, as on a GPU: a forward that is under way when weights change is named by the old ones."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
import torch

from launch.engines.network import free_port
from launch.engines.probe import ModelFacts
from learner.model.policy import load_policy
from shared.engine.engine_api import EngineClient
from shared.types import Image, Sampling
from tests.support.engines import call
from tests.support.publishing import publish_settings, publishing
from tests.support.sglang_rig import ENDS, START_S, TOLERANCE, Servers, move, recipe_of, vision_of
from tests.support.tiny import continued, draw_image, load_model, logprobs_under, png

SETTINGS = publish_settings(timeout_s=60.0, call_timeout_s=60.0, health_timeout_s=30.0)
SIZE = (64, 96)
LENGTHS = (840, 900, 960, 1020)


@pytest.fixture(scope="module")
def overlapping(tmp_path_factory):
    flags = json.dumps({"disable-overlap-schedule": False})
    fields = {"engine.flags": flags, "engine.count": 2, "engine.port": free_port(in_a_row=2)}
    fields["engine.start_timeout_s"] = START_S
    running = Servers.start(recipe_of(tmp_path_factory.mktemp("overlap"), **fields))
    yield running
    running.stop()


async def completions(url, prompts, lengths, banned, meanwhile):
    """Of all prompts at once; `meanwhile` runs in a thread once they are under way."""
    async with EngineClient(url, timeout_s=400) as client:
        asked = [asyncio.create_task(ask(client, *one, banned)) for one in zip(prompts, lengths, strict=True)]
        await until_running(client)
        await asyncio.to_thread(meanwhile)
        return await asyncio.gather(*asked)


async def completions_until(url, prompts, lengths, banned, meanwhile):
    """Of all prompts at once, each again and again until `meanwhile` ends in a thread: [(prompt's index, answer)]."""
    answers, ended = [], asyncio.Event()

    async def keep_asking(index):
        while not ended.is_set():
            answers.append((index, await ask(client, prompts[index], lengths[index], banned)))

    async with EngineClient(url, timeout_s=400) as client:
        asking = [asyncio.create_task(keep_asking(index)) for index in range(len(prompts))]
        await until_running(client)
        await asyncio.to_thread(meanwhile)
        ended.set()
        await asyncio.gather(*asking)
    return answers


async def ask(client, prompt, length, banned):
    images = [Image.of(png(draw_image(*SIZE)))]
    return await client.generate(prompt, images, Sampling(max_new_tokens=length), banned_ids=banned)


async def until_running(client):
    while not any(
        load["num_running_reqs"] for load in (await client.request("GET", "/v1/loads", timeout_s=30.0))["loads"]
    ):
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("engine", [0, 1])
def test_each_token_belongs_to_the_weights_that_it_names(overlapping, ranks, engine):
    url, recipe = overlapping.urls[engine], overlapping.recipe
    assert call(url, "/server_info")["disable_overlap_schedule"] is False
    spec = vision_of(recipe)
    facts, banned = ModelFacts.load(recipe.model.path, spec), (*ENDS, *spec.banned_ids)
    prompts = [[40 + i, 41, *facts.image_ids, 30, 31] for i in range(len(LENGTHS))]
    policy = load_policy(recipe.model.path, spec)
    with publishing(policy, ranks, SETTINGS) as publisher:
        assert publisher.publish(10, [url])["publish/engines"] == 1
        old = load_model(recipe.model.path)
        move(policy, 1)
        found = asyncio.run(completions(url, prompts, LENGTHS, banned, lambda: publisher.publish(11, [url])))
    new, image = load_model(recipe.model.path), draw_image(*SIZE)
    with torch.no_grad():
        for parameter, moved in zip(new.parameters(), policy.vlm.parameters(), strict=True):
            parameter.copy_(moved)
    for prompt, length, out in zip(prompts, LENGTHS, found, strict=True):
        first, second = out.spans
        assert (first.version, second.version, second.end) == (10, 11, length)
        told, tokens = torch.tensor(out.logprobs), list(out.token_ids)
        by_old = logprobs_under(old, spec, prompt, tokens, [image], banned)
        by_new = continued(old, new, spec, prompt, tokens, first.end, image, banned)
        assert (told - by_old)[: first.end].abs().max() < TOLERANCE
        assert (told[first.end :] - by_new).abs().max() < TOLERANCE


def test_no_request_is_lost_however_often_it_is_paused(overlapping, ranks):
    """Requests end, begin and go on at every pause."""
    chance, recipe = random.Random(0), overlapping.recipe
    spec = vision_of(recipe)
    facts, banned = ModelFacts.load(recipe.model.path, spec), (*ENDS, *spec.banned_ids)
    lengths = [chance.randint(1, 60) for _ in range(24)]
    prompts = [[40 + i, *[41] * chance.randint(1, 30), *facts.image_ids, 30] for i in range(24)]
    policy = load_policy(recipe.model.path, spec)
    with publishing(policy, ranks, SETTINGS) as publisher:
        for url in overlapping.urls:
            publisher.publish(20, [url])

            def meanwhile(url=url):
                for version in range(21, 27):
                    assert publisher.publish(version, [url])["publish/engines"] == 1

            found = asyncio.run(completions_until(url, prompts, lengths, banned, meanwhile))
            assert {index for index, _ in found} == set(range(24))
            assert all(len(out.token_ids) == lengths[index] for index, out in found)
            assert {out.finish_reason for _, out in found} == {"length"}
            assert {span.version for _, out in found for span in out.spans} >= {20, 26}
            assert any(len(out.spans) > 1 for _, out in found)
