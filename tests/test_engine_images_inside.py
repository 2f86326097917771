"""Small images go to an engine within the first request that shows them; after that requests name them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actor.engine.app import EngineApp
from actor.engine.images import ImageCache
from shared.engine_api import EngineClient
from tests.support.engines import ask
from tests.support.images.servers import Sent, relay
from tests.support.images.turns import PICTURES, TURNS, brought, episode, moved, turn
from tests.support.tiny import running_engine, tiny_model_dir


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


def test_a_small_image_goes_within_the_first_request_that_shows_it(engine: tuple[str, EngineApp]) -> None:
    url, app = engine

    async def one(client: EngineClient) -> Sent:
        sent = Sent(client)
        await episode(client, app, PICTURES[:TURNS])
        return sent

    sent = ask(url, one)
    assert sent.files == [PICTURES[0].data]  # by which it is seen that the engine takes names
    assert [brought(shown) for shown in sent.shown] == [[], *([image.data] for image in PICTURES[1:TURNS])]
    assert [len(shown) for shown in sent.shown] == [1, 2, 3, 4]


def test_a_large_image_goes_by_itself_beside_small_ones(
    engine: tuple[str, EngineApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, app = engine
    largest = max(PICTURES[1:4], key=lambda image: len(image.data))
    monkeypatch.setattr("shared.engines.images.INSIDE_BYTES", len(largest.data) - 1)

    async def two(client: EngineClient) -> Sent:
        await turn(client, app, PICTURES[:1])
        sent = Sent(client)
        await turn(client, app, PICTURES[:4])
        return sent

    sent = ask(url, two)
    large = [bytes(image.data) for image in PICTURES[1:4] if len(image.data) == len(largest.data)]
    assert sorted(sent.files) == sorted(large) and len(sent.shown) == 1
    assert brought(sent.shown[0]) == [image.data for image in PICTURES[1:4] if bytes(image.data) not in large]


def test_a_small_image_that_the_engine_has_forgotten_is_brought_again_and_no_other(
    engine: tuple[str, EngineApp],
) -> None:
    url, app = engine

    async def forgetting(client: EngineClient) -> tuple[Sent, Any]:
        await turn(client, app, PICTURES[:1])
        await turn(client, app, PICTURES[:3])
        app.images._images.drop(PICTURES[1].name)
        app.images._held.pop(PICTURES[1].name, None)
        sent = Sent(client)
        return sent, await turn(client, app, PICTURES[:4])

    sent, done = ask(url, forgetting)
    assert not sent.files and len(done.token_ids) == 2
    assert list(map(brought, sent.shown)) == [[PICTURES[3].data], [PICTURES[1].data, PICTURES[3].data]]


def test_an_engine_that_was_started_again_is_brought_all_small_images_anew(
    engine: tuple[str, EngineApp], folder: Path
) -> None:
    url, app = engine
    with running_engine(folder, min_pixels=1024, max_pixels=4096) as (new_url, _), relay(targets := [url]) as address:
        sent, done = ask(address, lambda client: moved(client, app, targets, new_url))
    assert not sent.files and len(done.token_ids) == 2
    assert brought(sent.shown[-1]) == [image.data for image in PICTURES[:3]]
