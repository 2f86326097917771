"""Windows of history: what the model sees of earlier turns, in segments whose tokens are those that were sampled."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from actor.engine_pool import EnginePool
from actor.episode import EpisodeLimits
from actor.history import NO_LONGER, Window
from actor.rollout import Player
from shared.types import Ending
from tests.support.rollout_rig import SYSTEM, Brief, Counting, check, completion, play, renderer, threads, ticket
from tests.support.tiny import running_engine

__all__ = ["renderer", "threads"]  # fixtures


def windowed(renderer, threads, answers, window, **limits):
    return play(renderer, threads, answers, limits=EpisodeLimits(window=window, **limits))


def shown(turn):
    """The message that `Counting` shows before the answer of a turn, counted from 0."""
    env = Counting()
    env.heard = ["x"] * turn
    return env.format_observation(env.look("begin" if not turn else "go on"))


def test_without_a_window_nothing_differs(renderer, threads):
    answers = ["one", "two", "three", "end"]
    plain, engine = play(renderer, threads, answers)
    same, windowed_engine = windowed(renderer, threads, answers, Window(turns=9, images=9))
    assert plain.segments == same.segments == ()
    assert plain.token_ids.tolist() == same.token_ids.tolist() and plain.turns == same.turns
    assert [request[:2] for request in engine.requests] == [request[:2] for request in windowed_engine.requests]
    assert plain.metrics.keys() == same.metrics.keys()


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_window_shows_the_prompt_and_the_last_observations_with_the_very_tokens_of_the_answers(
    renderer, threads, turns
):
    answers = [*("abcdef"), "end"]
    trajectory, engine = windowed(renderer, threads, answers, Window(turns=turns))
    assert trajectory.ending is Ending.COMPLETED and len(trajectory.turns) == len(answers)
    assert len(trajectory.segments) == len(answers) - turns
    for number, (token_ids, images, _) in enumerate(engine.requests):
        first = max(0, number + 1 - turns)
        expected = [*renderer.start([SYSTEM, shown(first)]).token_ids]
        for later in range(first + 1, number + 1):
            expected += completion(answers[later - 1]).token_ids
            expected += renderer.observation(shown(later)).token_ids
        assert token_ids == expected
        assert len(images) == min(turns, number + 1)


def test_each_answer_is_trained_once_and_the_stream_is_what_the_engine_has_read(renderer, threads):
    answers = [*("abcdef"), "end"]
    trajectory, engine = windowed(renderer, threads, answers, Window(turns=2))
    sampled = [token for answer in answers for token in completion(answer).token_ids]
    assert trajectory.token_ids[trajectory.loss_mask == 1].tolist() == sampled
    assert (trajectory.behaviour_logprobs[trajectory.loss_mask == 0] == 0).all()
    assert len(trajectory.images) == sum(1 for token in trajectory.token_ids if token == renderer.image_id)
    for turn, (token_ids, images, _) in zip(trajectory.turns, engine.requests, strict=True):
        (start,) = [start for start, end in trajectory.bounds if start <= turn.start < end]
        assert trajectory.token_ids[start : turn.start].tolist() == token_ids
        before = np.count_nonzero(trajectory.token_ids[:start] == renderer.image_id)
        assert list(trajectory.images[before : before + len(images)]) == images
    assert trajectory.reward == sum(map(len, answers))


def test_a_hundred_turns_fit_in_the_context_of_three(renderer, threads):
    answers = ["abc"] * 99 + ["end"]
    everything, _ = windowed(renderer, threads, [*answers[:3], "end"], Window(), max_turns=200)
    room = int(everything.metrics["expanded_tokens"])
    played, engine = windowed(renderer, threads, answers, Window(turns=2), max_turns=200, max_context=room)
    assert played.ending is Ending.COMPLETED and len(played.turns) == 100
    assert max(end - start for start, end in played.bounds) <= room
    assert max(len(request[0]) for request in engine.requests) <= room
    full, _ = windowed(renderer, threads, answers, Window(), max_turns=200, max_context=room)
    assert full.ending is Ending.CONTEXT_FULL and len(full.turns) < 5


def test_only_the_last_images_are_kept_and_the_words_of_all_observations(renderer, threads):
    trajectory, engine = windowed(renderer, threads, ["a", "b", "c", "end"], Window(images=2))
    assert [len(request[1]) for request in engine.requests] == [1, 2, 2, 2]
    assert len(trajectory.segments) == 2
    last = renderer.transcript(engine.requests[-1][0])
    assert last.count(NO_LONGER) == 2 and last.count("go on") == 3 and last.count("begin") == 1
    assert list(engine.requests[-1][1]) == list(trajectory.images[-2:])


def test_an_answer_that_another_token_has_ended_is_followed_by_the_template_s_own_in_a_segment_too(renderer, threads):
    other = completion("b", reason="length")
    ended = type(other)(other.token_ids, other.logprobs, other.spans, "stop")
    _, engine = windowed(renderer, threads, ["a", ended, "c", "end"], Window(turns=3))
    tail = [*ended.token_ids, renderer.end_id]
    for token_ids, _, _ in engine.requests[2:]:
        assert any(token_ids[at : at + len(tail)] == tail for at in range(len(token_ids)))


@pytest.mark.slow
def test_a_real_engine_is_asked_for_windows_and_their_tokens_are_checked_on_the_wire(renderer, threads, folder):
    async def main(url):
        async with Brief(url) as client:
            limits = EpisodeLimits(max_turns=6, window=Window(turns=2))
            player = Player(Counting, renderer, EnginePool([client]), limits, threads)
            return await player.play(ticket(seed=1)), client

    with running_engine(folder) as (url, _):
        trajectory, client = asyncio.run(main(url))
    check(renderer, trajectory)
    assert trajectory.ending is Ending.MAX_TURNS, trajectory.error
    assert len(trajectory.segments) == 4 and len(client.requests) == 6
