"""What an engine refuses, gives up and survives: updates out of order, an absent publisher, a model that fails."""

import asyncio

import pytest

from actor.client import EngineClient
from actor.http import HttpClient, HttpFailure
from shared.types import Sampling
from tests.support.engine_weights_rig import GROUP, Publisher, engine
from tests.support.machine import free_port
from tests.support.tiny import running_engine

__all__ = ["engine"]  # a fixture


def test_weights_outside_an_update_are_refused(folder, engine):
    url, _ = engine

    async def main():
        publisher = Publisher(url)
        await publisher.connect()
        body = {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]], "group_name": GROUP}
        failures = []
        for path, extra in [
            ("/update_weights_from_distributed", body | {"load_format": "flattened_bucket"}),
            ("/end_weight_update", {}),
            ("/begin_weight_update", {}),
            ("/begin_weight_update", {}),
            ("/update_weights_from_distributed", body),
            ("/update_weights_from_distributed", body | {"load_format": "flattened_bucket"}),
            ("/update_weights_from_distributed", body | {"load_format": "flattened_bucket", "group_name": "other"}),
        ]:
            try:
                await publisher.post(path, **extra)
                failures.append("")
            except HttpFailure as failure:
                assert failure.status == 400
                failures.append(str(failure))
        return failures

    failures = asyncio.run(main())
    words = [
        "between begin",
        "no update is open",
        "",
        "open already",
        "flattened_bucket",
        "no parameter 'x'",
        "no group",
    ]
    assert all(word in failure for word, failure in zip(words, failures, strict=True)), failures
    assert failures[2] == ""


def test_a_publisher_that_never_sends_is_given_up(folder):
    with running_engine(folder, update_timeout_s=0.5) as (url, _):

        async def main():
            publisher = Publisher(url)
            await publisher.connect()
            await publisher.post("/begin_weight_update")
            with pytest.raises(HttpFailure, match="the broadcast failed"):
                await publisher.post(
                    "/update_weights_from_distributed", names=["model.language_model.norm.weight"], dtypes=["float32"],
                    shapes=[[64]], group_name=GROUP, load_format="flattened_bucket",
                )  # fmt: skip
            assert await EngineClient(url).healthy()

        asyncio.run(main())


def test_a_group_that_nobody_hosts_is_given_up(folder):
    with running_engine(folder, update_timeout_s=0.5) as (url, _), pytest.raises(HttpFailure, match="cannot join"):
        asyncio.run(
            Publisher(url).post(
                "/init_weights_update_group", master_address="127.0.0.1", master_port=free_port(), rank_offset=1,
                world_size=2, group_name=GROUP, backend="gloo",
            )
        )  # fmt: skip


def test_a_request_that_waits_too_long_is_aborted(folder):
    with running_engine(folder, request_timeout_s=0.3) as (url, _):

        async def main():
            await HttpClient(url).request("POST", "/pause_generation", {"mode": "in_place"}, timeout_s=5)
            return await EngineClient(url).generate([30], [], Sampling())

        assert asyncio.run(main()).finish_reason == "abort"


def test_a_model_thread_that_fails_answers_what_is_open(folder, engine):
    url, app = engine

    def fail(rows):
        raise RuntimeError("out of memory")

    async def main():
        app.scheduler.runner.forward = fail
        client = EngineClient(url)
        first = await client.generate([30], [], Sampling())
        return first, app.scheduler.failed

    first, failed = asyncio.run(main())
    assert first.finish_reason == "abort" and str(failed) == "out of memory"
