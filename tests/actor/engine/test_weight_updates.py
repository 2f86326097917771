"""Weights that change under running requests: versions per token, and each token by the weights that it names."""

import asyncio
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper

from actor.engine.weight_loader import parse_entries, unflatten
from shared.engine.engine_api import EngineClient, EngineError
from shared.types import Image, Sampling
from tests.support.engine_weights_rig import Publisher, engine, other_weights, spec, until_sampled
from tests.support.tiny import continued, draw_image, load_model, logprobs_under, png

__all__ = ["engine", "spec"]  # fixtures

LONG = Sampling(max_new_tokens=300)


@pytest.mark.slow
def test_an_update_in_the_middle_of_a_request_shows_as_two_spans(folder, spec, engine):
    url, app = engine
    drawn = draw_image(64, 64, 1)
    prompt = [30, 21, spec.image_token_id, 22, 31]
    new, banned = other_weights(folder), [*spec.banned_ids, *app.eos_ids]

    async def main():
        publisher = await Publisher.connected(url)
        client = EngineClient(url)
        images = [Image.of(png(drawn))]
        task = asyncio.create_task(client.generate(prompt, images, LONG, banned_ids=banned))
        await until_sampled(app, 20)
        await publisher.publish(new, "7", flush_cache=False)
        mixed = await task
        fresh = await client.generate([50, *prompt], images, Sampling(max_new_tokens=20), banned_ids=spec.banned_ids)
        return mixed, fresh

    mixed, fresh = asyncio.run(main())
    first, second = mixed.spans
    assert (first.version, second.version) == (0, 7)
    assert 20 <= first.end == second.start < second.end == len(mixed.token_ids)
    # the first part is the old weights' own
    old = load_model(folder)
    expected = logprobs_under(old, spec, prompt, mixed.token_ids, [drawn], banned)
    own = torch.tensor(mixed.logprobs)
    torch.testing.assert_close(own[: first.end], expected[: first.end], atol=1e-4, rtol=0)
    assert (own[first.end :] - expected[first.end :]).abs().max() > 0.01
    # the second part is the new weights' over keys and values that the old ones left in place
    expected = continued(old, new, spec, prompt, list(mixed.token_ids), first.end, drawn, banned)
    torch.testing.assert_close(own[first.end :], expected, atol=1e-4, rtol=0)
    # a new request sees nothing of the old weights
    expected = logprobs_under(new, spec, [50, *prompt], fresh.token_ids, [drawn])
    assert {span.version for span in fresh.spans} == {7}
    torch.testing.assert_close(torch.tensor(fresh.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("flush", [True, False])
def test_flushing_with_the_update_forgets_what_the_old_weights_computed(folder, spec, engine, flush):
    url, app = engine
    new = other_weights(folder)
    prompt = list(range(30, 60))

    async def main():
        publisher = await Publisher.connected(url)
        client = EngineClient(url)
        first = await client.generate(prompt, [], Sampling(max_new_tokens=30), banned_ids=spec.banned_ids)
        await publisher.publish(new, "1", flush_cache=flush)
        longer = [*prompt, *first.token_ids, 40, 41]
        reused = app.scheduler.tokens_reused
        second = await client.generate(longer, [], Sampling(max_new_tokens=30), banned_ids=spec.banned_ids)
        return longer, second, app.scheduler.tokens_reused - reused

    longer, second, reused = asyncio.run(main())
    expected = logprobs_under(new, spec, longer, second.token_ids)
    gap = (torch.tensor(second.logprobs) - expected).abs().max()
    assert (reused == 0 and gap < 1e-4) if flush else (reused == len(longer) - 3 and gap > 1e-3)


def test_torchs_own_group_constructor_meets_the_engine(folder, engine):
    """The other end may be built as SGLang builds it, from torch's helper beside a default group."""
    url, app = engine

    def join(*, address, port, rank, world_size, name, backend, timeout_s):
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(address, port, world_size, rank == 0, timeout, wait_for_workers=False)
        group, _ = _new_process_group_helper(
            world_size, rank, [], dist.Backend(backend), dist.PrefixStore(name, store), group_name=name, timeout=timeout
        )
        return group

    async def main():
        publisher = await Publisher.connected(url, join)
        await publisher.publish(other_weights(folder), "3")
        return await publisher.engine.post("/get_weights_by_name", {"name": "model.language_model.norm.weight"})

    values = asyncio.run(main())
    expected = dict(other_weights(folder).named_parameters())["model.language_model.norm.weight"]
    torch.testing.assert_close(torch.tensor(values), expected[: len(values)].detach())
    assert app.scheduler.weight_version == "3"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_pausing_stops_generation_and_continuing_resumes_it(folder, spec, engine, mode):
    url, app = engine

    async def main():
        client = EngineClient(url)
        banned = [*spec.banned_ids, *app.eos_ids]
        tasks = [
            asyncio.create_task(client.generate([30 + n], [], Sampling(max_new_tokens=200), banned_ids=banned))
            for n in range(3)
        ]
        await until_sampled(app, 60)
        await client.pause(mode)
        steps = app.scheduler.steps
        late = asyncio.create_task(client.generate([40], [], Sampling(max_new_tokens=3), banned_ids=banned))
        await asyncio.sleep(0.1)
        assert app.scheduler.steps == steps and not late.done()
        assert all(task.done() == (mode == "abort") for task in tasks)
        await client.resume()
        return await asyncio.gather(*tasks), await late

    outs, late = asyncio.run(main())
    assert len(late.token_ids) == 3
    if mode == "abort":
        assert {out.finish_reason for out in outs} == {"abort"} and all(out.token_ids for out in outs)
        return
    model = load_model(folder)
    for n, out in enumerate(outs):
        assert len(out.token_ids) == 200
        expected = logprobs_under(model, spec, [30 + n], out.token_ids, banned=[*spec.banned_ids, *app.eos_ids])
        torch.testing.assert_close(torch.tensor(out.logprobs), expected, atol=1e-4, rtol=0)


def test_a_bucket_is_cut_into_its_parameters_even_unaligned():
    entries = parse_entries(["a", "b", "c"], ["uint8", "torch.float32", "bfloat16"], [[3], [2, 2], [1]])
    parts = [torch.arange(3, dtype=torch.uint8), torch.randn(2, 2), torch.ones(1, dtype=torch.bfloat16)]
    flat = torch.cat([part.flatten().view(torch.uint8) for part in parts])
    for (name, tensor), expected in zip(unflatten(flat, entries), parts, strict=True):
        assert torch.equal(tensor, expected), name
    with pytest.raises(ValueError, match="unknown dtype"):
        parse_entries(["a"], ["float12"], [[1]])
    with pytest.raises(ValueError, match="1, 2 and 1 entries"):
        parse_entries(["a"], ["int8", "int8"], [[1]])


def test_an_update_that_is_not_finite_is_refused_and_leaves_no_trace(folder, engine):
    url, app = engine
    spoilt = other_weights(folder)
    with torch.no_grad():
        spoilt.model.language_model.norm.weight[-1] = float("nan")

    async def main():
        publisher = await Publisher.connected(url)
        await publisher.publish(other_weights(folder), "3")
        with pytest.raises(
            EngineError, match=r"norm.weight holds what is no finite number: the update is not installed"
        ):
            await publisher.publish(spoilt, "4")
        with pytest.raises(EngineError, match="the update failed and is discarded; the weights are 3"):
            await publisher.engine.end_update("4")
        await publisher.publish(other_weights(folder), "5")

    asyncio.run(main())
    assert app.scheduler.weight_version == "5"
    assert all(torch.isfinite(p).all() for p in app.updates.loader._parameters.values())
