"""Requests to an SGLang that keeps images by their hash leave out those that it was sent, and are understood alike."""

from __future__ import annotations

from typing import Any

from shared.engine.engine_api import EngineClient
from shared.types import Image, Sampling
from tests.support.engines import ask
from tests.support.image_servers import FalseSglang, raw_engine
from tests.support.tiny import draw_image, png

PICTURES = [Image.of(png(draw_image(64, 64, seed))) for seed in range(4)]
ANSWER = {
    "meta_info": {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-1.0, 30, None]],
        "weight_version": "0",
    }
}


async def turns(client: EngineClient, *counts: int) -> list[Any]:
    """Each of a conversation that shows so many images."""
    return [await client.generate([30] * 9, PICTURES[:count], Sampling()) for count in counts]


def test_each_turn_brings_only_the_files_that_are_new() -> None:
    server = FalseSglang(ANSWER)
    with raw_engine(server.answers) as url:
        done = ask(url, lambda client: turns(client, 1, 1, 2, 3, 4))
    assert [shown for shown, _ in server.seen] == [
        [True],  # before the client has asked whether files are kept
        [True],
        [False, True],
        [False, False, True],
        [False, False, False, True],
    ]
    assert not any(refused for _, refused in server.seen) and [c.token_ids for c in done] == [(30,)] * 5


def test_what_the_server_has_forgotten_is_sent_again_in_the_same_turn() -> None:
    server = FalseSglang(ANSWER)

    async def forgetting(client: EngineClient) -> Any:
        await turns(client, 1, 2)
        server.kept.clear()  # as at a publication
        return await turns(client, 2, 3)

    with raw_engine(server.answers) as url:
        done = ask(url, forgetting)
    assert server.seen[2:] == [([False, False], True), ([True, True], False), ([False, False, True], False)]
    assert [completion.token_ids for completion in done] == [(30,), (30,)]


def test_a_server_that_keeps_too_little_is_sent_all_files_with_each_request() -> None:
    server = FalseSglang(ANSWER)

    async def thrashing(client: EngineClient) -> Any:
        await turns(client, 1)
        for _ in range(4):
            server.kept.clear()
            await turns(client, 2)

    with raw_engine(server.answers) as url:
        ask(url, thrashing)
    assert [(all(shown), refused) for shown, refused in server.seen] == [
        (True, False),
        (True, False),
        *[(False, True), (True, False)] * 2,
        (True, False),  # left alone for a while
    ]


def test_a_server_that_keeps_nothing_is_sent_no_hashes() -> None:
    server = FalseSglang(ANSWER)
    server.answers["/server_info"] = server.answers["/images"]  # not found
    bodies: list[dict[str, Any]] = []
    generate = server.answers["/generate"]

    def noted(request: Any, body: dict[str, Any]) -> None:
        bodies.append(body)
        generate(request, body)

    server.answers["/generate"] = noted
    with raw_engine(server.answers) as url:
        ask(url, lambda client: turns(client, 1, 2, 3))
    assert all(all(shown) for shown, _ in server.seen) and not any("mm_content_hashes" in body for body in bodies)
