"""The next microbatch is packed by a thread while one is computed: the same results, and errors where they belong."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from queue import SimpleQueue

import msgspec
import pytest
import torch

from learner.batch.image_decoder import ImageDecoder
from learner.batch.prefetch import ahead
from learner.batch.step_plan import plan_step
from learner.batch.to_device import on
from learner.checkpoints.restoring import load_checkpoint
from learner.model.policy import load_policy
from learner.training.trainer import Trainer
from shared.util import threads as threads_of_guards
from shared.util.refusals import Refusals
from shared.vision import expand
from tests.support.checkpoints import config, recipe, save
from tests.support.episodes import random_groups

SETTINGS = {
    "microbatch_tokens": 90,
    "passes": 2,
    "minibatches": 2,
    "proximal": "learner",
    "max_kl": 0.0,
}


@pytest.fixture
def threads(monkeypatch):
    """How many of those that `ahead` has begun have not ended."""
    open_ones = []

    def begin(function):
        def counted():
            open_ones.append(1)
            try:
                function()
            finally:
                open_ones.pop()

        threads_of_guards.start_thread(counted)

    def count():
        for _ in range(100):  # one that has said so may still be on its way out
            if not open_ones:
                break
            time.sleep(0.05)
        return len(open_ones)

    monkeypatch.setattr("learner.batch.prefetch.start_thread", begin)
    return count


def test_items_are_made_in_their_order_by_another_thread_and_one_ahead_at_most(threads):
    made, second = [], threading.Event()

    def make(item: int) -> int:
        assert threading.current_thread() is not threading.main_thread()
        made.append(item)
        if item == 1:
            second.set()
        return item

    with ahead(make, range(5)) as results:
        assert next(results) == 0
        assert second.wait(30)  # made while the first is in use
        assert made == [0, 1]
        assert list(results) == [1, 2, 3, 4]
    assert made == [0, 1, 2, 3, 4] and not threads()
    with ahead(make, []) as results:
        assert list(results) == []


def test_what_the_thread_raises_is_raised_where_its_result_is_asked_for_and_the_thread_ends(threads):
    def make(item: int) -> int:
        if item == 2:
            raise ValueError("image 2 is no image")
        return item

    seen = []
    with pytest.raises(ValueError, match="image 2 is no image") as caught, ahead(make, range(5)) as results:
        seen.extend(iter(results))
    assert not seen or seen == [0, 1]
    assert [entry.name for entry in caught.traceback][-1] == "make"  # the cause is in the traceback
    assert not threads()


def test_a_step_that_fails_leaves_no_thread_and_makes_no_more_items(threads):
    made = []
    with pytest.raises(RuntimeError, match="out of memory"), ahead(made.append, range(100)) as results:
        next(results)
        raise RuntimeError("out of memory")
    assert len(made) <= 2 and not threads()


def test_a_thread_that_memory_runs_out_for_is_not_waited_for_for_ever(monkeypatch):
    """`threading.Thread.start` would wait for ever."""
    monkeypatch.setattr("learner.batch.prefetch.BEGIN_S", 0.1)
    monkeypatch.setattr("learner.batch.prefetch.LOOK_S", 0.1)
    with monkeypatch.context() as none:
        none.setattr("learner.batch.prefetch.start_thread", lambda function: None)
        with pytest.raises(MemoryError, match=r"has not begun within 0\.1 s"), ahead(str, [1]) as results:
            next(results)

    class Gone(SimpleQueue):
        def get(self):
            raise MemoryError

    monkeypatch.setattr("learner.batch.prefetch.SimpleQueue", Gone)
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    with pytest.raises(MemoryError, match="has ended before its work was done"), ahead(str, [1]) as results:
        next(results)


def test_episodes_are_expanded_when_they_are_packed_and_not_before(folder, spec, ranks, monkeypatch):
    """So that a rank expands its own alone."""
    expanded = []
    monkeypatch.setattr("learner.batch.episodes.expand", lambda *args: expanded.append(1) or expand(*args))
    trainer = Trainer(load_policy(str(folder), spec), config(microbatch_tokens=90), ranks)
    plan = plan_step(random_groups(spec, 4, turns=2), trainer.decoder, trainer.config, ranks, None, seed=0)
    microbatches = plan.updates[0].microbatches
    assert not expanded and len(microbatches) > 1
    trainer.packer.pack(microbatches[0])
    assert len(expanded) == len(microbatches[0]) < len(plan.episodes)


@contextmanager
def one_after_the_other(pack, microbatches, device):
    yield (on(pack(episodes), device) for episodes in microbatches)


@pytest.mark.slow
def test_steps_are_bit_for_bit_those_without_the_thread_a_resumed_one_too(folder, spec, ranks, tmp_path, monkeypatch):
    def fresh() -> tuple[Trainer, list[tuple[int, ...]]]:
        torch.manual_seed(0)
        trainer, order = Trainer(load_policy(str(folder), spec), config(**SETTINGS), ranks), []
        trainer.models.policy.register_forward_hook(
            lambda _module, inputs, _output: order.append(inputs[0].indices) if torch.is_grad_enabled() else None
        )
        return trainer, order

    def weights(trainer: Trainer) -> torch.Tensor:
        return torch.nn.utils.parameters_to_vector(trainer.policy.parameters()).detach().clone()

    batches = [random_groups(spec, 8, turns=2, seed=10 * step) for step in range(2)]
    trainer, order = fresh()
    trainer.step(batches[0], 0)
    path = save(trainer, ranks, tmp_path)
    trainer.step(batches[1], 0)
    resumed, order_of_resumed = fresh()
    load_checkpoint(path, resumed, ranks, recipe(**SETTINGS))
    resumed.step(batches[1], 0)
    monkeypatch.setattr("learner.training.trainer.prefetch", one_after_the_other)
    plain, order_of_plain = fresh()
    for groups in batches:
        plain.step(groups, 0)
    assert order == order_of_plain and len(order) > 8
    assert order[-len(order_of_resumed) :] == order_of_resumed
    assert torch.equal(weights(trainer), weights(plain)) and torch.equal(weights(resumed), weights(plain))


def decoding_only(first: int, error: Exception):
    """`ImageDecoder._decode` that raises `error` from the image of this number on, and what it was asked for."""
    decode, seen = ImageDecoder._decode, []

    def broken(self, image):
        seen.append(image)
        if len(seen) > first:
            raise error
        return decode(self, image)

    return broken, seen


@pytest.mark.slow
def test_what_fails_as_a_microbatch_is_packed_ends_the_step_with_its_cause(threads, folder, spec, ranks, monkeypatch):
    broken, _ = decoding_only(2, RuntimeError("no memory"))
    monkeypatch.setattr(ImageDecoder, "_decode", broken)
    trainer = Trainer(load_policy(str(folder), spec), config(microbatch_tokens=90), ranks)
    with pytest.raises(RuntimeError, match="no memory"):
        trainer.step(random_groups(spec, 4, turns=2), 0)
    assert not threads()


@pytest.mark.slow
def test_an_episode_with_an_image_that_cannot_be_decoded_trains_nothing(folder, spec, ranks, monkeypatch):
    """The weights are those of a step without it, whose advantages are not scaled by what it earned."""
    groups = random_groups(spec, 3, turns=2)
    bad = {image.content_hash for trajectory in groups[1].trajectories for image in trajectory.images}
    assert bad and not bad & {i.content_hash for g in (groups[0], groups[2]) for t in g.trajectories for i in t.images}
    decode = ImageDecoder._decode

    def broken(self, image):
        if image.content_hash in bad:
            raise ValueError("broken data stream")
        return decode(self, image)

    monkeypatch.setattr(ImageDecoder, "_decode", broken)

    def moved(chosen):
        settings = config(normalize_advantages=False, kl_coef=0.0, entropy_coef=0.1, advantage_floor=0.0)
        trainer = Trainer(load_policy(str(folder), spec), settings, ranks)
        before = torch.cat([p.detach().flatten() for p in trainer.policy.parameters()])
        trainer.step(chosen, 0)
        return torch.cat([p.detach().flatten() for p in trainer.policy.parameters()]) - before

    without, among = moved([groups[0], groups[2]]), moved(groups)
    assert float(without.abs().max()) > 0
    assert float((among - without).norm() / without.norm()) < 1e-3


@pytest.mark.slow
def test_an_image_that_cannot_be_decoded_is_left_blank_counted_and_kept(folder, spec, ranks, monkeypatch, tmp_path):
    broken, seen = decoding_only(2, ValueError("image 1 cannot be decoded: broken data stream"))
    monkeypatch.setattr(ImageDecoder, "_decode", broken)
    trainer = Trainer(load_policy(str(folder), spec), config(microbatch_tokens=90), ranks)
    trainer.decoder.refusals = Refusals("an image", logging.getLogger("test"), tmp_path)
    metrics = trainer.step(random_groups(spec, 4, turns=2), 0)
    count = len({image.content_hash for image in seen}) - 2  # the guard's forward shows some of them once more
    assert metrics["images/unreadable"] == count > 0 and metrics["optim/skipped_steps"] == 0
    assert trainer.decoder.refusals.counts == {"unreadable": count}
    kept = msgspec.msgpack.decode(min(tmp_path.glob("*.msgpack")).read_bytes())
    assert kept["frames"] == [bytes(seen[2].data)]
    assert trainer.step(random_groups(spec, 1, with_images=False), 0)["images/unreadable"] == 0
