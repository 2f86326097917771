"""Turns at an engine that show pictures."""

from __future__ import annotations

import base64
from typing import Any

from actor.engine.app import EngineApp
from shared.engine_api import EngineClient
from shared.types import Image, Sampling
from tests.support.images.servers import Sent
from tests.support.tiny import draw_image, png

PICTURES = [Image.of(png(draw_image(64, 64, seed))) for seed in range(6)]
TURNS = 4


def turn(client: EngineClient, app: EngineApp, images: list[Image], **settings: Any) -> Any:
    stream = [30]
    for number in range(len(images)):
        stream += [app.spec.image_token_id, 40 + number]
    return client.generate(
        stream, images, Sampling(0.0), banned_ids=app.spec.banned_ids, **{"max_new_tokens": 2} | settings
    )


async def episode(client: EngineClient, app: EngineApp, images: list[Image]) -> list[Any]:
    return [await turn(client, app, images[: number + 1]) for number in range(len(images))]


def named(shown: list[str]) -> bool:
    return all(item.startswith("sha256:") for item in shown)


def brought(shown: list[str]) -> list[bytes]:
    """The files within a request."""
    return [base64.b64decode(item.partition(",")[2]) for item in shown if item.startswith("data:")]


async def moved(client: EngineClient, app: EngineApp, targets: list[str], target: str) -> tuple[Sent, Any]:
    """A turn at one engine, and the next at another one with the same address."""
    await turn(client, app, PICTURES[:2])
    targets.append(target)
    await client.close()  # its connections; what it knows of the engine stays
    client._session = None
    sent = Sent(client)
    return sent, await turn(client, app, PICTURES[:3])
