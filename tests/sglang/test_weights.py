"""Weights that change while SGLang's server generates: each token belongs to the weights that it names."""

from __future__ import annotations

import asyncio

import pytest
import torch

from launch.engines.probe import ModelFacts
from learner.model.policy import load_policy
from shared.engine.engine_api import EngineClient, EngineError
from shared.types import Image, Sampling
from shared.vision import VisionSpec
from tests.support.engines import ask, call
from tests.support.publishing import publish_settings, publishing
from tests.support.sglang_rig import ENDS, MODEL, TOLERANCE, move, vision_of
from tests.support.tiny import continued, draw_image, load_model, logprobs_under, png

SIZE = (64, 96)
BANNED = (*ENDS, *VisionSpec.load(MODEL).banned_ids)
UPDATE = {"names": ["x"], "dtypes": ["float32"], "shapes": [[2]], "group_name": "unknown", "weight_version": "99"}
PAUSED, BESIDE = 0, 1
"""The server that is paused for its weights, and the one that receives them beside generation."""


@pytest.fixture
def prompt(recipe):
    facts = ModelFacts.load(recipe.model.path, vision_of(recipe))
    return [40, 41, *facts.image_ids, 30, 31]


async def generate(url, prompt, num_tokens, meanwhile=None):
    """One completion; `meanwhile` runs in a thread once the engine has begun with it."""
    async with EngineClient(url, timeout_s=200) as client:
        images, sampling = [Image.of(png(draw_image(*SIZE)))], Sampling(max_new_tokens=num_tokens)
        task = asyncio.create_task(client.generate(prompt, images, sampling, banned_ids=BANNED))
        if meanwhile is not None:
            while not await running(client):
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.3)
            await asyncio.to_thread(meanwhile)
        return await task


async def running(client):
    loads = await client.request("GET", "/v1/loads", timeout_s=10.0)
    return any(load["num_running_reqs"] for load in loads["loads"])


def plain(model, spec, prompt, tokens):
    """The logprobs of all `tokens` by one forward of `model`."""
    return logprobs_under(model, spec, prompt, tokens, [draw_image(*SIZE)], BANNED)


@pytest.mark.parametrize(("engine", "mode"), [(PAUSED, "in_place"), (PAUSED, "retract"), (BESIDE, "in_place")])
def test_an_update_in_the_middle_of_a_request_yields_two_spans_of_two_weights(
    servers, recipe, ranks, prompt, engine, mode
):
    url, spec = servers.urls[engine], vision_of(recipe)
    policy = load_policy(recipe.model.path, spec)
    with publishing(policy, ranks, publish_settings(pause_mode=mode, timeout_s=20.0)) as publisher:
        assert publisher.publish(10, [url])["publish/engines"] == 1
        assert ask(url, lambda client: client.server_info()).beside_generation is (engine == BESIDE)
        old = load_model(recipe.model.path)
        move(policy, 1)
        out = asyncio.run(generate(url, prompt, 1500, lambda: publisher.publish(11, [url])))
    first, second = out.spans
    assert (first.version, second.version) == (10, 11)
    assert 0 < first.end == second.start < second.end == 1500
    new = load_model(recipe.model.path)
    with torch.no_grad():
        for parameter, moved in zip(new.parameters(), policy.vlm.parameters(), strict=True):
            parameter.copy_(moved)
    found, tokens = torch.tensor(out.logprobs), list(out.token_ids)
    by_old = plain(old, spec, prompt, tokens)
    by_new = plain(new, spec, prompt, tokens)
    if mode == "in_place":
        image = draw_image(*SIZE)
        by_new[first.end :] = continued(old, new, spec, prompt, tokens, first.end, image, BANNED)
    assert (found - by_old)[: first.end].abs().max() < TOLERANCE
    assert (found - by_new)[first.end :].abs().max() < TOLERANCE
    assert (found - by_old)[first.end :].abs().max() > 100 * TOLERANCE


def test_an_image_seen_before_an_update_is_not_served_from_old_embeddings(servers, recipe, policy, publisher, prompt):
    """sglang#36468. Another prefix, so that nothing of the prompt is cached but what is kept of the image alone."""
    url, spec = servers.urls[0], vision_of(recipe)
    publisher.publish(20, [url])
    asyncio.run(generate(url, [50, *prompt], 4))
    with torch.no_grad():
        for parameter in policy.vlm.model.visual.parameters():
            parameter.mul_(1.1)
    publisher.publish(21, [url])
    out = asyncio.run(generate(url, [51, *prompt], 8))
    model = load_model(recipe.model.path)
    stale = plain(model, spec, [51, *prompt], list(out.token_ids))
    with torch.no_grad():
        for parameter in model.model.visual.parameters():
            parameter.mul_(1.1)
    right = plain(model, spec, [51, *prompt], list(out.token_ids))
    assert (torch.tensor(out.logprobs) - right).abs().max() < TOLERANCE
    assert (stale - right).abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/update_weights_from_distributed", UPDATE, "there is no group"),
        ("/end_weight_update", {"weight_version": "99"}, "nothing to install"),
    ],
)
def test_weights_that_were_not_sent_are_not_installed(servers, path, body, reason):
    url = servers.urls[BESIDE]
    before = call(url, "/model_info")["weight_version"]
    call(url, "/begin_weight_update", {})
    with pytest.raises(EngineError, match=reason):
        call(url, path, body)
    if path != "/end_weight_update":
        with pytest.raises(EngineError, match=r"a bucket was refused, .*: there is no group 'unknown'"):
            call(url, "/end_weight_update", {"weight_version": "99"})
    with pytest.raises(EngineError, match="no update is open"):
        call(url, "/end_weight_update", {"weight_version": "99"})
    assert call(url, "/model_info")["weight_version"] == before
