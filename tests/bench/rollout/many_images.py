"""What an episode costs whose every turn shows one more screenshot: what goes to the engine, and CPU on both sides.

    python tests/bench/rollout/many_images.py [--turns 20] [--group 1] [--url http://HOST:PORT]

A group of episodes is played at once against the embedded engine as a process of its own, with a tiny model that sees
each image of 1920x1080 reduced to about 128 tokens. The first image is the same for all episodes of the group; every
turn's request is of the whole conversation so far. With --url another engine is measured, whose model must have the
vocabulary of tests/support/tiny.py. The last line is one JSON object: `sent_bytes` are those of the requests' bodies,
`image_bytes` those of the distinct files; `actor_cpu_s` is the CPU time of the client's process during the episodes,
`engine_cpu_s` that of the engine's, and `engine_text_cpu_s` that of as many turns of as many tokens without an image.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
from PIL import Image as PILImage
from PIL import ImageDraw

from shared.engine.engine_api import EngineClient
from shared.rgb_images import as_png
from shared.types import Image, Sampling
from shared.vision import VisionSpec
from tests.support.engines import engine_process
from tests.support.tiny import tiny_model_dir

SIZE = (1920, 1080)
PIXELS = 2**17  # to which the engine reduces an image
TEXT, ANSWER, CONTEXT = 16, 4, 8192  # tokens


def screenshot(number: int) -> Image:
    """Windows, text, and a photograph on a third of the screen."""
    rng = np.random.default_rng(number)
    image = PILImage.new("RGB", SIZE, tuple(rng.integers(200, 255, 3).tolist()))
    draw = ImageDraw.Draw(image)
    for line in range(250):
        x, y = rng.integers(0, SIZE[0] - 200), rng.integers(0, SIZE[1] - 40)
        draw.text((int(x), int(y)), f"line {line} of window {number}", fill=(0, 0, 0))
    noise = rng.normal(0, 1, (600, 1000, 3)).cumsum(0).cumsum(1)
    photo = ((noise - noise.min()) / np.ptp(noise) * 255).astype(np.uint8)
    image.paste(PILImage.fromarray(photo), (400, 200))
    return Image.of(as_png(image))


def counted(client: EngineClient) -> list[int]:
    """Grows by the bytes of each body that the client sends."""
    sizes: list[int] = []
    client._session = session = client._open()
    send: Callable[..., Any] = session.request

    def request(method: str, url: str, *, data: Any = None, **settings: Any) -> Any:
        sizes.append(len(data or b""))
        return send(method, url, data=data, **settings)

    session.request = request  # type: ignore[method-assign, assignment]
    return sizes


async def episode(client: EngineClient, images: list[Image | None], spec: VisionSpec, key: str) -> None:
    """One turn for each entry; where there is no image as many tokens of text come instead."""
    stream, shown = [int(token) for token in np.random.default_rng(7).integers(20, 100, TEXT)], list[Image]()
    visual = spec.num_tokens(spec.grid(*SIZE))
    for number, image in enumerate(images):
        stream += [30 + number % 50] * TEXT + ([40] * visual if image is None else [spec.image_token_id])
        shown += [] if image is None else [image]
        done = await client.generate(
            stream, shown, Sampling(0.0), banned_ids=spec.banned_ids, max_new_tokens=ANSWER, cache_key=key
        )
        stream += done.token_ids


def cpu_s(pid: int) -> float:
    """Of a process and all that it has started."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
            ticks[int(path.parent.name)] = int(fields[11]) + int(fields[12])
    family, found = {pid}, 0
    while len(family) > found:
        found = len(family)
        family |= {child for child, parent in parents.items() if parent in family}
    return sum(ticks.get(member, 0) for member in family) / os.sysconf("SC_CLK_TCK")


async def measure(url: str, pid: int, spec: VisionSpec, turns: int, group: int) -> dict[str, Any]:
    episodes = [[screenshot(0), *(screenshot(1 + turns * g + i) for i in range(turns - 1))] for g in range(group)]
    async with EngineClient(url) as client:
        sizes = counted(client)

        async def play(key: str, played: list[list[Any]]) -> tuple[int, float, float, float]:
            before, began, own, engine = sum(sizes), time.monotonic(), time.process_time(), cpu_s(pid)
            await asyncio.gather(*(episode(client, images, spec, key) for images in played))
            return (
                sum(sizes) - before,
                time.process_time() - own,
                cpu_s(pid) - engine,
                time.monotonic() - began,
            )

        await play("warm", [[screenshot(2**20), None]])
        text = await play("text", [[None] * turns] * group)
        sent, actor, engine, seconds = await play("images", episodes)
    files = {image.content_hash: len(image.data) for images in episodes for image in images}
    return {
        "turns": turns,
        "group": group,
        "image_bytes": sum(files.values()),
        "sent_bytes": sent,
        "actor_cpu_s": round(actor, 2),
        "engine_cpu_s": round(engine, 2),
        "engine_text_cpu_s": round(text[2], 2),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--group", type=int, default=1)
    parser.add_argument("--url", default="", help="of an engine that runs already")
    parser.add_argument("--pid", type=int, default=0, help="its process, with --url; its children count too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model_dir(folder)
        spec = VisionSpec.load(model, min_pixels=1024, max_pixels=PIXELS)
        told = (spec, options.turns, options.group)
        if options.url:
            row = asyncio.run(measure(options.url, options.pid or os.getpid(), *told))
        else:
            sizes = ("--max-context", str(CONTEXT), "--min-pixels", "1024", "--max-pixels", str(PIXELS))
            with engine_process(model, *sizes) as engine:
                row = asyncio.run(measure(engine.url, engine.process.pid, *told))
    print(json.dumps(row | {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}))


if __name__ == "__main__":
    main()
