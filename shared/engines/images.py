"""Images on their way to one engine: each file goes once, and requests name it, where the engine allows it.

Every turn of an episode shows all images so far. The embedded engine takes files by a route of their own and keeps them
by their SHA-256, which it computes itself; a request that names one it has not (any more) is answered by the names, and
the client sends those again. SGLang takes files within requests alone; where it keeps them by their SHA-256
(`--mm-preprocess-cache-size-mb`, `--trust-mm-content-hashes`), a request may leave out those that it has. One that it
has not makes the request fail, as does a file with another hash than is said. Any other engine is given all files in
every request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from shared.engine_messages import Generated, data_uris
from shared.guards.kept import Kept
from shared.http_client import HttpFailure
from shared.types import Image

IMAGES_ROUTE = "/images"
LEFT_OUT = "data:,"  # in the place of a file
MAX_NAME_BYTES = 2**22  # of names of what was sent
NAMED_TRIES = 2  # of a request that names its images: an engine may forget one meanwhile
NO_NAMES = frozenset({200, 400, 404, 405, 413, 415, 422, 500, 501})  # how engines answer that take none, or miss a file
MISSED_S = 10.0  # between two files that an SGLang has not kept, at least
AGAIN_S = 60.0  # until an engine that takes no names, or does not keep what it was sent, is tried again
SEND_S = 30.0
Ask = Callable[[dict[str, Any]], Awaitable[Generated]]
"""Asks for a generation, with these fields of the body."""


class Engine(Protocol):
    """Both raise HttpFailure."""

    async def request(self, method: str, path: str, body: Any = None, *, timeout_s: float) -> Any: ...
    async def ask(self, path: str, body: Any, timeout_s: float) -> Any: ...


class EngineImages:
    """Of one client. For one event loop."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._sent = _names()
        self._under_way: dict[str, asyncio.Task[bool]] = {}  # episodes of a group show the same image at once
        self._names_from_s = 0.0  # when names are used again
        self._leaves_out = False  # whether it is an SGLang that keeps files
        self._missed_s = float("-inf")  # when that last had not kept one

    async def shown(self, images: Sequence[Image], ask: Ask) -> Generated:
        """The answer to a request that shows these images."""
        if not images:
            return await ask({})
        for _ in range(NAMED_TRIES):
            if self._leaves_out:
                return await self._in_part(images, ask)
            if not await self._has(images):
                break
            try:
                answer = await ask({"image_data": [image.name for image in images]})
            except HttpFailure as error:
                if error.status not in NO_NAMES:
                    raise
                break  # of another engine than that which took them, or for another reason, which shows again
            if not answer.unknown_images:
                return answer
            for name in answer.unknown_images:
                self._sent.drop(name)
        answer = await ask(whole(images))
        if self._clock() >= self._names_from_s:
            self._names_from_s = self._clock() + AGAIN_S
        return answer

    async def _has(self, images: Sequence[Image]) -> bool:
        """Whether a request may name the images: the engine has them all, and those that are new are sent to it."""
        if self._clock() < self._names_from_s:
            return False
        new = {image.name: image for image in images if not self._sent.find(image.name)}
        if all(await asyncio.gather(*map(self._bring, new.values()))):
            return True
        self._names_from_s = self._clock() + AGAIN_S
        self._leaves_out = await self._keeps_files()
        return False

    async def _bring(self, image: Image) -> bool:
        if self._sent.find(image.name):  # meanwhile
            return True
        task = self._under_way.get(image.name)
        if task is None:
            task = self._under_way[image.name] = asyncio.create_task(self._send(image))
        return await asyncio.shield(task)  # others may wait for it too

    async def _send(self, image: Image) -> bool:
        """Gives the engine the file; false if it takes none."""
        try:
            answer = await self._engine.ask(IMAGES_ROUTE, image.data, SEND_S)
        except HttpFailure as error:
            if error.status not in NO_NAMES:
                raise
            return False
        finally:
            del self._under_way[image.name]
        taken = isinstance(answer, dict) and answer.get("image") == image.name
        if taken:
            self._sent.get(image.name, lambda: True)
        return taken

    # -------------------------------------------------------------- SGLang

    async def _keeps_files(self) -> bool:
        try:
            info = await self._engine.request("GET", "/server_info", timeout_s=SEND_S)
        except HttpFailure:
            return False
        if not isinstance(info, dict) or info.get("trust_mm_content_hashes") is not True:
            return False
        return isinstance(size := info.get("mm_preprocess_cache_size_mb"), int) and size > 0

    async def _in_part(self, images: Sequence[Image], ask: Ask) -> Generated:
        """Leaves out what was sent before; not for a while, if the engine does not keep it (a publication, which makes
        it forget all, comes less often than every `MISSED_S`)."""
        began, hashes = self._clock(), {"mm_content_hashes": [image.name for image in images]}
        known = [bool(self._sent.find(image.name)) for image in images]
        files = iter(data_uris([image for image, has in zip(images, known, strict=True) if not has]))
        try:
            answer = await ask({"image_data": [LEFT_OUT if has else next(files) for has in known]} | hashes)
        except HttpFailure as error:
            if error.status not in NO_NAMES or not any(known):
                raise
            answer = await ask(whole(images) | hashes)
            if began > self._missed_s:  # else that is known already
                self._leaves_out, self._missed_s = began - self._missed_s > MISSED_S, self._clock()
                self._names_from_s, self._sent = self._missed_s + AGAIN_S, _names()
        for image in images:
            self._sent.get(image.name, lambda: True)
        return answer


def _names() -> Kept[str, bool]:
    return Kept(MAX_NAME_BYTES, lambda name, _: 2 * len(name))


def whole(images: Sequence[Image]) -> dict[str, Any]:
    """As every engine takes them."""
    return {"image_data": data_uris(images)}
