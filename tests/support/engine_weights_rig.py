"""The sender of an engine's weight updates: a minimal publisher, and a model with other weights."""

import asyncio

import pytest
import torch

from actor.engine.weight_loader import broadcast, join_group
from launch.engines.network import free_port
from learner.weights.gathering import buckets
from shared.engine.engine_api import EngineClient, bucket_content
from shared.vision import VisionSpec
from tests.support.machine import until_async
from tests.support.tiny import load_model, running_engine

GROUP = "weights"


@pytest.fixture(scope="module")
def spec(folder):
    return VisionSpec.load(folder)


@pytest.fixture
def engine(folder):
    with running_engine(folder, max_context=512, update_timeout_s=5.0) as (url, app):
        yield url, app


def other_weights(folder):
    """Return the same model with every parameter changed."""
    model = load_model(folder)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return model


class Publisher:
    """Rank 0 of the weight group: a minimal version of the learner's publisher."""

    def __init__(self, url):
        self.engine = EngineClient(url)

    @staticmethod
    async def connected(url, join=join_group):
        self = Publisher(url)
        place = {"master_address": "127.0.0.1", "master_port": free_port(), "backend": "gloo"}
        theirs = self.engine.join_group({**place, "group_name": GROUP, "world_size": 2}, 1, 20)
        own = asyncio.to_thread(
            join, address="127.0.0.1", port=place["master_port"], rank=0, world_size=2, name=GROUP,
            backend="gloo", timeout_s=10,
        )  # fmt: skip
        self.group, _ = await asyncio.gather(own, theirs)
        return self

    async def publish(self, model, version, **extra):
        await self.engine.pause("in_place")
        await self.engine.begin_update()
        for bucket in buckets(model.named_parameters(), torch.float32, 200_000):
            named = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes, "group_name": GROUP}
            theirs = self.engine.receive(bucket_content({**named, "weight_version": version, **extra}), 20)
            await asyncio.gather(theirs, asyncio.to_thread(broadcast, self.group, bucket.flat, 10))
        await self.engine.end_update(version)
        await self.engine.resume()


async def until_sampled(app, count):
    wanted = app.scheduler.tokens_out + count
    await until_async(lambda: app.scheduler.tokens_out >= wanted, 60.0)
