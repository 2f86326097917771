"""What an engine refuses, gives up and survives: updates out of order, an absent publisher, a model that fails."""

import asyncio

import pytest

from shared.engine_api import EngineError
from shared.types import Sampling
from tests.support.engine_weights_rig import GROUP, Publisher, engine
from tests.support.engines import ask, call
from tests.support.machine import free_port
from tests.support.tiny import running_engine

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


def test_a_model_thread_that_fails_answers_what_is_open(folder, engine):
    url, app = engine

    def fail(rows):
        raise RuntimeError("out of memory")

    app.scheduler.runner.forward = fail
    assert ask(url, lambda client: client.generate([30], [], Sampling())).finish_reason == "abort"
    assert str(app.scheduler.failed) == "out of memory"
