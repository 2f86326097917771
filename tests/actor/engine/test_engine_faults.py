"""What an engine refuses, gives up and survives: updates out of order, an absent publisher, a model that fails."""

import asyncio
import socket

import pytest
import torch

from actor.engine.weight_loader import broadcast
from launch.engines.network import free_port
from learner.weights.gathering import buckets
from shared.engine.engine_api import EngineError, bucket_content
from shared.types import Sampling
from tests.support.engine_weights_rig import GROUP, Publisher, engine
from tests.support.engines import ask, call
from tests.support.tiny import load_model, running_engine

__all__ = ["engine"]  # a fixture

BEGIN, END, UPDATE = "/begin_weight_update", "/end_weight_update", "/update_weights_from_distributed"
FLAT = {"load_format": "flattened_bucket", "group_name": GROUP}
ONE = {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]]}
NORM = {"names": ["model.language_model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]]}


def test_weights_outside_an_update_are_refused(engine):
    async def main():
        publisher = await Publisher.connected(engine[0])
        for path, body, words in [
            (UPDATE, ONE | FLAT, "between begin"),
            (END, {}, "no update is open"),
            (BEGIN, {}, ""),
            (BEGIN, {}, "open already"),
            (UPDATE, ONE, "missing required field `load_format`"),
            (UPDATE, ONE | FLAT, "no parameter 'x'"),
            (UPDATE, ONE | FLAT | {"group_name": "other"}, "no group"),
        ]:
            if not words:
                await publisher.engine.post(path, body)
                continue
            with pytest.raises(EngineError, match=words) as error:
                await publisher.engine.post(path, body)
            assert error.value.status == 400

    asyncio.run(main())


def test_a_publisher_that_never_sends_is_given_up(folder):
    with running_engine(folder, update_timeout_s=0.5) as (url, _):

        async def main():
            publisher = await Publisher.connected(url)
            await publisher.engine.begin_update()
            with pytest.raises(EngineError, match="the broadcast failed"):
                await publisher.engine.post(UPDATE, NORM | FLAT)
            await publisher.engine.health()

        asyncio.run(main())


def test_a_group_that_nobody_hosts_is_given_up(folder):
    group = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2, "backend": "gloo"}
    with running_engine(folder, update_timeout_s=0.5) as (url, _), pytest.raises(EngineError, match="cannot join"):
        ask(url, lambda client: client.join_group({**group, "group_name": GROUP}, 1, 20))


def test_a_request_that_waits_too_long_is_aborted(folder):
    with running_engine(folder, request_timeout_s=0.3) as (url, _):
        call(url, "/pause_generation", {"mode": "in_place"})
        assert ask(url, lambda client: client.generate([30], [], Sampling())).finish_reason == "abort"


def fail(rows):
    raise RuntimeError("out of memory")


def test_a_model_that_fails_again_and_again_answers_what_is_open_and_ends(engine, monkeypatch):
    monkeypatch.setattr("actor.engine.scheduler.MAX_FAILURES", 2)
    url, app = engine
    app.scheduler.runner.forward = fail
    for number in range(3):
        assert ask(url, lambda client: client.generate([30], [], Sampling())).finish_reason == "abort"
        assert (app.scheduler.failed is None) == (number < 2)
    assert str(app.scheduler.failed) == "out of memory"


def test_a_request_that_cannot_be_computed_ends_alone(engine):
    url, app = engine
    forward = app.scheduler.runner.forward
    app.scheduler.runner.forward = lambda rows: (fail if any(31 in row.token_ids for row in rows) else forward)(rows)

    async def use(client):
        sampling = Sampling(0.0, max_new_tokens=5)
        bans = {"banned_ids": [31]}
        alone = await client.generate([30], [], sampling, **bans)
        together = await asyncio.gather(*(client.generate([token], [], sampling, **bans) for token in (30, 31, 30)))
        return alone, together

    alone, (first, bad, last) = ask(url, use)
    assert bad.finish_reason == "abort"
    assert first.token_ids == last.token_ids == alone.token_ids
    assert app.scheduler.failed is None


def test_weights_that_make_no_distribution_abort_requests_and_the_next_weights_serve_again(engine):
    url, app = engine
    weight = app.scheduler.runner.text.norm.weight
    sound = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    for sampling in (Sampling(), Sampling(0.0), Sampling(top_p=0.5), Sampling(top_k=3)):
        out = ask(url, lambda client, sampling=sampling: client.generate([30], [], sampling))
        assert (out.finish_reason, out.token_ids) == ("abort", ())
    with torch.no_grad():
        weight.copy_(sound)
    assert ask(url, lambda client: client.generate([30], [], Sampling(max_new_tokens=2))).token_ids
    assert app.scheduler.failed is None


def test_what_belongs_to_another_update_is_refused_and_leaves_the_one_under_way_alone(engine):
    model = load_model(engine[1].settings.model_path)

    async def main():
        publisher = await Publisher.connected(engine[0])
        client = publisher.engine
        await client.begin_update(update="1-dead")
        await client.begin_update(update="2-alive")  # takes its place
        for path, body in [
            (UPDATE, NORM | FLAT | {"update": "1-dead"}),
            (UPDATE, {"names": 7, "update": "1-dead"}),
            (UPDATE, NORM | FLAT),
            (END, {"weight_version": "1-dead", "update": "1-dead"}),
            (END, {"discard": True, "update": "1-dead"}),
            (END, {}),
        ]:
            with pytest.raises(EngineError, match="the update under way is '2-alive', not") as error:
                await client.post(path, body)
            assert error.value.status == 400
        for bucket in buckets(model.named_parameters(), torch.float32, 200_000):
            named = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes, "group_name": GROUP}
            theirs = client.receive(bucket_content({**named, "update": "2-alive"}), 20)
            await asyncio.gather(theirs, asyncio.to_thread(broadcast, publisher.group, bucket.flat, 10))
        await client.end_update("2-alive", update="2-alive")
        assert await client.weight_version() == "2-alive"

    asyncio.run(main())


def test_what_is_no_request_or_a_wrong_one_is_counted_and_said_once_for_each_reason(folder, caplog):
    with running_engine(folder) as (url, _):
        port = int(url.rpartition(":")[2])
        for number in range(3):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nx: %s%d\r\n\r\n" % (b"y" * 5000, number))
                assert connection.recv(100).split()[1] == b"400"
            with pytest.raises(EngineError):
                call(url, "/generate", {"input_ids": []})
        refused = call(url, "/server_info")["refused"]
    assert refused["status_400"] == 3
    assert sorted(refused.values()) == [3, 3]  # the other is aiohttp's word for a long line
    lines = [record for record in caplog.records if "rejected a request" in record.getMessage()]
    assert len(lines) == 2
    assert not any(record.exc_info for record in caplog.records)
