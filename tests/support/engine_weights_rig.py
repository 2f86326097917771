"""The other end of an engine's weight updates: a publisher in a few lines, and what a model says of sampled tokens."""

import asyncio

import pytest
import torch

from actor.engine.weight_loader import broadcast, join_group
from actor.http import HttpClient
from shared.vision import VisionSpec
from tests.support.machine import free_port, until_async
from tests.support.tiny import load_model, reference_logits, running_engine

GROUP = "weights"


@pytest.fixture(scope="module")
def spec(folder):
    return VisionSpec.load(folder)


@pytest.fixture
def engine(folder):
    with running_engine(folder, max_context=512, update_timeout_s=5.0) as (url, app):
        yield url, app


def other_weights(folder, seed=1):
    """The same model with every parameter moved."""
    model = load_model(folder)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return model


class Publisher:
    """Rank 0 of the group: what the learner does, in a few lines."""

    def __init__(self, url, join=join_group):
        self.http, self._join = HttpClient(url), join

    async def post(self, path, **body):
        return await self.http.request("POST", path, body, timeout_s=20)

    async def connect(self):
        port = free_port()
        own = asyncio.to_thread(
            self._join, address="127.0.0.1", port=port, rank=0, world_size=2, name=GROUP, backend="gloo", timeout_s=10
        )
        theirs = self.post(
            "/init_weights_update_group",
            master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2, group_name=GROUP, backend="gloo",
        )  # fmt: skip
        self.group, _ = await asyncio.gather(own, theirs)

    async def bucket(self, named, version, **extra):
        named = [(name, tensor.detach().contiguous()) for name, tensor in named]
        flat = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in named])
        answer = self.post(
            "/update_weights_from_distributed",
            names=[name for name, _ in named],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
            shapes=[list(tensor.shape) for _, tensor in named],
            group_name=GROUP, load_format="flattened_bucket", weight_version=version, **extra,
        )  # fmt: skip
        await asyncio.gather(answer, asyncio.to_thread(broadcast, self.group, flat, 10))

    async def publish(self, model, version, **extra):
        await self.post("/pause_generation", mode="in_place")
        await self.post("/begin_weight_update")
        named = list(model.named_parameters())
        for start in range(0, len(named), 20):
            await self.bucket(named[start : start + 20], version, **extra)
        await self.post("/end_weight_update")
        await self.post("/continue_generation")


async def until_sampled(app, count):
    wanted = app.scheduler.tokens_out + count
    await until_async(lambda: app.scheduler.tokens_out >= wanted, 60.0)


def logprobs_under(model, spec, prompt, sampled, images=(), banned=None):
    """What the model says of `sampled` after `prompt` when it may not sample `banned`: [len(sampled)]."""
    logits = reference_logits(model, [*prompt, *sampled], list(images), spec)
    logits[:, list(spec.banned_ids if banned is None else banned)] = -torch.inf
    logprobs = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(sampled)[:, None])[:, 0]
