"""Each image goes to an engine once, as its file; after that requests name it, as long as the engine has it."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actor.engine.app import EngineApp
from actor.engine.request_images import ImageCache
from shared.engine.engine_api import EngineClient
from shared.engine.engine_messages import Generated
from shared.engine.sent_images import AGAIN_S, IMAGES_ROUTE, EngineImages
from shared.types import Image, Sampling
from tests.support.engines import ask, false_engine, says
from tests.support.image_servers import Sent, post, raw_engine, relay
from tests.support.tiny import draw_image, png, running_engine, tiny_model_dir

PICTURES = [Image.of(png(draw_image(64, 64, seed))) for seed in range(6)]
PAD, TURNS = 19, 4
ANSWER = {
    "meta_info": {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-1.0, 30, None]],
        "weight_version": "0",
    }
}
NOT_FOUND = says({"detail": "Not Found"}, 404)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[tuple[str, EngineApp]]:
    with running_engine(folder, min_pixels=1024, max_pixels=4096) as (url, app):
        yield url, app


@pytest.fixture(autouse=True)
def emptied(request: pytest.FixtureRequest) -> None:
    """The engine keeps no image of an earlier test."""
    if "engine" in request.fixturenames:
        app = request.getfixturevalue("engine")[1]
        app.images = ImageCache(app.spec, app.settings.max_context)


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


def test_the_episodes_of_a_group_send_each_image_once_and_name_it_in_every_turn(engine: tuple[str, EngineApp]) -> None:
    url, app = engine

    async def group(client: EngineClient) -> Sent:
        sent = Sent(client)
        await asyncio.gather(*(episode(client, app, [PICTURES[0], *PICTURES[1 + g : 4 + g]]) for g in range(2)))
        return sent

    sent = ask(url, group)
    assert sorted(sent.files) == sorted(bytes(image.data) for image in PICTURES[:5])
    assert len(sent.shown) == 2 * TURNS and all(map(named, sent.shown))


def test_an_image_is_the_same_to_the_model_by_name_and_as_a_file(engine: tuple[str, EngineApp]) -> None:
    url, app = engine

    async def both(client: EngineClient) -> tuple[list[Any], list[Any]]:
        by_name = await episode(client, app, PICTURES[:3])
        app.images = ImageCache(app.spec)
        client._images._names_from_s = float("inf")
        return by_name, await episode(client, app, PICTURES[:3])

    by_name, whole = ask(url, both)
    assert [done.token_ids for done in by_name] == [done.token_ids for done in whole]


def test_an_image_that_the_engine_has_forgotten_is_sent_again_and_no_other(engine: tuple[str, EngineApp]) -> None:
    url, app = engine

    async def forgetting(client: EngineClient) -> Sent:
        await turn(client, app, PICTURES[:3])
        app.images._images.drop(PICTURES[1].name)
        app.images._held.pop(PICTURES[1].name, None)  # a request that has just ended may still hold it
        sent = Sent(client)
        await turn(client, app, PICTURES[:3])
        return sent

    sent = ask(url, forgetting)
    assert sent.files == [PICTURES[1].data] and list(map(named, sent.shown)) == [True, True]


def test_an_engine_that_keeps_too_little_is_sent_all_images_with_each_request(engine: tuple[str, EngineApp]) -> None:
    url, app = engine
    app.images = ImageCache(app.spec, max_bytes=1)

    async def thrice(client: EngineClient) -> tuple[Sent, Any]:
        sent = Sent(client)
        done = [await turn(client, app, PICTURES[:2]) for _ in range(3)]
        return sent, done

    sent, done = ask(url, thrice)
    assert [named(shown) for shown in sent.shown] == [True, True, False, False, False]  # names are left for a while
    assert len(sent.files) == 4 and all(answer.token_ids for answer in done)


# ------------------------------------------------------------------ other engines behind the same address


async def moved(client: EngineClient, app: EngineApp, targets: list[str], target: str) -> tuple[Sent, Any]:
    """A turn at one engine, and the next at another one with the same address."""
    await turn(client, app, PICTURES[:2])
    targets.append(target)
    await client.close()  # its connections; what it knows of the engine stays
    client._session = None
    sent = Sent(client)
    return sent, await turn(client, app, PICTURES[:3])


def test_an_engine_that_was_started_again_is_sent_all_images_anew(engine: tuple[str, EngineApp], folder: Path) -> None:
    url, app = engine
    with running_engine(folder, min_pixels=1024, max_pixels=4096) as (new_url, _), relay(targets := [url]) as address:
        sent, done = ask(address, lambda client: moved(client, app, targets, new_url))
    assert sorted(sent.files) == sorted(bytes(image.data) for image in PICTURES[:3])
    assert list(map(named, sent.shown)) == [True, True] and len(done.token_ids) == 2


def test_an_engine_of_another_kind_at_the_same_address_is_sent_data_uris(engine: tuple[str, EngineApp]) -> None:
    url, app = engine

    def generate(request: Any, body: dict[str, Any]) -> None:
        if named(body["image_data"]):
            says({"error": {"message": "Incorrect padding"}}, 400)(request, body)
        else:
            says(ANSWER)(request, body)

    with false_engine({"/generate": generate}) as (other, seen), relay(targets := [url]) as address:
        _, done = ask(address, lambda client: moved_twice(client, app, targets, other))
    assert done.token_ids == (30,)
    assert [named(body["image_data"]) for path, body in seen if path == "/generate"] == [True, False, False]


async def moved_twice(client: EngineClient, app: EngineApp, targets: list[str], target: str) -> tuple[Sent, Any]:
    await turn(client, app, PICTURES[:3])
    await moved(client, app, targets, target)
    return Sent(client), await turn(client, app, PICTURES[:3])


@pytest.mark.parametrize(
    "route",
    [NOT_FOUND, says({}, 405), says({"ok": True}), says(b"<html>"), says({"image": PICTURES[1].name})],
    ids=["not found", "not allowed", "other JSON", "a page", "the name of another image"],
)
def test_an_engine_without_the_route_is_sent_data_uris_and_is_not_asked_each_time(
    engine: tuple[str, EngineApp], route: Any
) -> None:
    answered = 0

    def images(request: Any, body: Any) -> None:
        nonlocal answered
        answered += 1
        route(request, body)

    with raw_engine({IMAGES_ROUTE: images, "/generate": says(ANSWER), "/server_info": says({})}) as url:

        async def twice(client: EngineClient) -> Sent:
            sent = Sent(client)
            for _ in range(2):
                await turn(client, engine[1], PICTURES[:1])
            return sent

        sent = ask(url, twice)
    uri = "data:image/png;base64," + base64.b64encode(PICTURES[0].data).decode()
    assert sent.shown == [[uri], [uri]] and answered == 1


# ------------------------------------------------------------------ what is not believed


def test_the_engine_names_an_image_by_its_own_hash_whatever_the_client_says(engine: tuple[str, EngineApp]) -> None:
    url, app = engine
    assert post(url, IMAGES_ROUTE, bytes(PICTURES[1].data)) == (200, {"image": PICTURES[1].name})
    body = {"input_ids": [30, app.spec.image_token_id, 40], "image_data": [PICTURES[0].name]}
    assert post(url, "/generate", json.dumps(body).encode()) == (200, {"unknown_images": [PICTURES[0].name]})
    assert not app.refusals.counts  # it is no mistake of the client's


@pytest.mark.parametrize("data", [b"", b"no image", bytes(PICTURES[0].data[:200])])
def test_what_is_no_image_is_refused_and_not_kept(engine: tuple[str, EngineApp], data: bytes) -> None:
    url, app = engine
    status, answer = post(url, IMAGES_ROUTE, data)
    assert status in (400, 413) and answer["error"]["message"]
    assert app.images.get([Image.of(data).name]) == ([], [Image.of(data).name])
    app.refusals.counts.clear()


def test_the_files_of_an_engine_are_bounded_by_their_bytes(engine: tuple[str, EngineApp]) -> None:
    app = engine[1]
    room = 3 * 64 * 64 * 3
    images = ImageCache(app.spec, max_bytes=room + 3 * 100)
    names = [images.add(bytes(image.data)) for image in PICTURES]
    assert [bool(images.get([name])[1]) for name in names] == [True] * 3 + [False] * 3


def test_a_client_remembers_so_many_names_and_tries_an_engine_that_takes_none_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shared.engine.sent_images.MAX_NAME_BYTES", 3 * 2 * len(PICTURES[0].name))
    sent, taken, now = [], True, 0.0
    by_hash = {image.data: image for image in PICTURES}

    class FalseEngine:
        async def ask(self, path: str, body: Any, timeout_s: float) -> Any:
            sent.append(by_hash[body])
            return {"image": by_hash[body].name if taken else ""}

        async def request(self, method: str, path: str, body: Any = None, *, timeout_s: float) -> Any:
            return {}

    async def answer(fields: dict[str, Any]) -> Generated:
        return msgspec.convert(ANSWER, Generated)

    images = EngineImages(FalseEngine(), lambda: now)
    show = lambda *shown: asyncio.run(images.shown(shown, answer))  # noqa: E731
    for image in (*PICTURES[:3], PICTURES[2], PICTURES[3], PICTURES[0]):
        show(image)
    assert sent == [*PICTURES[:4], PICTURES[0]]  # the first was forgotten for the fourth
    sent.clear()
    taken = False
    show(PICTURES[4], PICTURES[5])
    show(PICTURES[4])
    assert sent == PICTURES[4:6]
    now, taken = AGAIN_S, True
    show(PICTURES[4])
    assert sent == [*PICTURES[4:6], PICTURES[4]]


def test_an_image_that_requests_of_one_step_share_is_encoded_once(engine: tuple[str, EngineApp]) -> None:
    url, app = engine
    runner, encoded = app.scheduler.runner, []
    encode = runner.encode

    def noted(patches: Any, grids: Any) -> Any:
        encoded.append(len(patches))
        return encode(patches, grids)

    runner.encode = noted  # type: ignore[method-assign]

    async def group(client: EngineClient) -> None:
        await turn(client, app, PICTURES[5:])  # which the engine has then
        await client.post("/flush_cache", {})
        await client.pause("in_place")
        asked = [asyncio.create_task(turn(client, app, PICTURES[5:], cache_key=str(g))) for g in range(4)]
        while app.scheduler._inbox.qsize() + app.scheduler.num_open < 4:
            await asyncio.sleep(0.01)
        await client.resume()
        await asyncio.gather(*asked)

    try:
        ask(url, group)
    finally:
        runner.encode = encode  # type: ignore[method-assign]
    assert sum(encoded) == 2  # by the first request, and by the four together
