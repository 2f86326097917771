"""Images on their way to one engine: each file goes once, and requests name it, where the engine takes names.

Every turn of an episode shows all images so far. The embedded engine keeps files by their SHA-256, which it computes
itself; a request that names one it has not (any more) is answered by the names, and the client sends those again.
Other engines have no such route, and are given the files in every request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from shared.engine_messages import Generated, data_uris
from shared.guards.kept import Kept
from shared.http_client import HttpFailure
from shared.types import Image

IMAGES_ROUTE = "/images"
MAX_NAME_BYTES = 2**22  # of names of what was sent
NAMED_TRIES = 2  # of a request that names its images: an engine may forget one meanwhile
NO_NAMES = frozenset({200, 400, 404, 405, 413, 415, 422, 500, 501})  # how engines answer that take none
AGAIN_S = 60.0  # until an engine that takes no names, or has not kept what it was sent, is tried again


class EngineImages:
    """Of one client. `send` gives the engine a file; false: it takes none. For one event loop."""

    def __init__(self, send: Callable[[Image], Awaitable[bool]], clock: Callable[[], float] = time.monotonic) -> None:
        self._send, self._clock = send, clock
        self._sent: Kept[str, bool] = Kept(MAX_NAME_BYTES, lambda name, _: 2 * len(name))
        self._under_way: dict[str, asyncio.Task[bool]] = {}  # episodes of a group show the same image at once
        self._not_before_s = 0.0

    async def shown(self, images: Sequence[Image], ask: Callable[[list[str]], Awaitable[Generated]]) -> Generated:
        """The answer to a request that shows these images, which `ask` is given as names or as data URIs."""
        for _ in range(NAMED_TRIES):
            if (names := await self._names(images)) is None:
                return await ask(data_uris(images))
            try:
                answer = await ask(names)
            except HttpFailure as error:
                if error.status not in NO_NAMES:
                    raise
                break  # of another engine than that which took them, or for another reason, which shows again
            if not answer.unknown_images:
                return answer
            for name in answer.unknown_images:
                self._sent.drop(name)
        answer = await ask(data_uris(images))
        self._not_before_s = self._clock() + AGAIN_S
        return answer

    async def _names(self, images: Sequence[Image]) -> list[str] | None:
        """The images' names, once the engine has them all; None: it takes no names now."""
        if not images or self._clock() < self._not_before_s:
            return None
        new = {image.name: image for image in images if not self._sent.find(image.name)}
        if all(await asyncio.gather(*map(self._bring, new.values()))):
            return [image.name for image in images]
        self._not_before_s = self._clock() + AGAIN_S
        return None

    async def _bring(self, image: Image) -> bool:
        if self._sent.find(image.name):  # meanwhile
            return True
        task = self._under_way.get(image.name)
        if task is None:
            task = self._under_way[image.name] = asyncio.create_task(self._bring_now(image))
        return await asyncio.shield(task)  # others may wait for it too

    async def _bring_now(self, image: Image) -> bool:
        try:
            taken = await self._send(image)
            if taken:
                self._sent.get(image.name, lambda: True)
            return taken
        finally:
            del self._under_way[image.name]
