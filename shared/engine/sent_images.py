"""Sending images to one engine: where the engine allows it, each file is sent once, and requests refer to it by name.

Every turn of an episode needs all images so far. There are three kinds of engines:
The embedded engine has its own route for files and keeps them by their SHA-256, which it computes itself. If a request
names files that it does not have (any more), the answer lists them, and the client sends those again.
SGLang takes files only within requests. If it keeps them by their SHA-256 (`--mm-preprocess-cache-size-mb`,
`--trust-mm-content-hashes`), a request may leave out files that it has; the request fails if it does not have one, or
if a file does not match the given hash.
Any other engine is sent all files in every request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from shared.engine.engine_messages import Generated, data_uris
from shared.engine.http_client import HttpFailure
from shared.types import Image
from shared.util.lru_cache import LruCache

IMAGES_ROUTE = "/images"
LEFT_OUT = "data:,"  # stands for a file that is left out
MAX_NAME_BYTES = 2**22  # memory for the names of files sent
NAMED_TRIES = 2  # tries of a request that names images; an engine may forget one meanwhile
# Status codes of engines that do not take names, or lack a file.
NO_NAMES = frozenset({200, 400, 404, 405, 413, 415, 422, 500, 501})
MISSED_S = 10.0  # if an SGLang loses files more often than this, leaving out is switched off
AGAIN_S = 60.0  # until names are tried again with an engine that takes none, or does not keep files
SEND_S = 30.0
Ask = Callable[[dict[str, Any]], Awaitable[Generated]]
"""Asks for a generation, with these fields of the body."""


class ImageEngine(Protocol):
    """The part of an engine's client that sending images needs; both methods raise HttpFailure."""

    async def request(self, method: str, path: str, body: Any = None, *, timeout_s: float) -> Any: ...
    async def ask(self, path: str, body: Any, timeout_s: float) -> Any: ...


class EngineImages:
    """The images that one client has sent to its engine. For one event loop."""

    def __init__(self, engine: ImageEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._sent = _name_cache()
        self._under_way: dict[str, asyncio.Task[bool]] = {}  # uploads; a group's episodes share them
        self._names_from_s = 0.0  # names are not used before this time
        self._leaves_out = False  # it is an SGLang that keeps files, so that requests may leave them out
        self._missed_s = float("-inf")  # when it last lacked a file

    async def shown(self, images: Sequence[Image], ask: Ask) -> Generated:
        """Send the request `ask` with these images; return its answer."""
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
                # This is a different engine from the one that took the files, or the request fails for another reason,
                # which will show again below.
                break
            if not answer.unknown_images:
                return answer
            for name in answer.unknown_images:
                self._sent.drop(name)
        answer = await ask(all_files(images))
        if self._clock() >= self._names_from_s:
            self._names_from_s = self._clock() + AGAIN_S
        return answer

    async def _has(self, images: Sequence[Image]) -> bool:
        """Send the engine the images that it does not have yet; tell whether it has them all now, so that a request may
        name them."""
        if self._clock() < self._names_from_s:
            return False
        new = {image.name: image for image in images if not self._sent.find(image.name)}
        if all(await asyncio.gather(*map(self._bring, new.values()))):
            return True
        self._names_from_s = self._clock() + AGAIN_S
        self._leaves_out = await self._keeps_files()
        return False

    async def _bring(self, image: Image) -> bool:
        if self._sent.find(image.name):  # sent meanwhile
            return True
        task = self._under_way.get(image.name)
        if task is None:
            task = self._under_way[image.name] = asyncio.create_task(self._send(image))
        return await asyncio.shield(task)  # other requests may wait for the same upload

    async def _send(self, image: Image) -> bool:
        """Send the engine the file; return False if it takes no files."""
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
        """Send the request without the files that were sent before; if the engine lacks one, send all. An engine that
        lacks files twice within `MISSED_S` does not keep them, and gets all files for a while. (A publication makes an
        engine forget all files, but comes less often than that.)"""
        began, hashes = self._clock(), {"mm_content_hashes": [image.name for image in images]}
        was_sent = [bool(self._sent.find(image.name)) for image in images]
        files = iter(data_uris([image for image, has in zip(images, was_sent, strict=True) if not has]))
        try:
            answer = await ask({"image_data": [LEFT_OUT if has else next(files) for has in was_sent]} | hashes)
        except HttpFailure as error:
            if error.status not in NO_NAMES or not any(was_sent):
                raise
            answer = await ask(all_files(images) | hashes)
            if began > self._missed_s:  # else a request that began earlier has already handled this
                self._leaves_out, self._missed_s = began - self._missed_s > MISSED_S, self._clock()
                self._names_from_s, self._sent = self._missed_s + AGAIN_S, _name_cache()
        for image in images:
            self._sent.get(image.name, lambda: True)
        return answer


def _name_cache() -> LruCache[str, bool]:
    return LruCache(MAX_NAME_BYTES, lambda name, _: 2 * len(name))


def all_files(images: Sequence[Image]) -> dict[str, Any]:
    """Return the field of a request that holds all files, which every engine takes."""
    return {"image_data": data_uris(images)}
