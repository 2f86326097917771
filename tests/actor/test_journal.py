"""What an actor process that was killed leaves behind, and how the next one goes on from it."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actor.engine_pool import EnginePool
from actor.episode import EpisodeLimits
from actor.journal import MAX_TAKEN_OVER, EngineAnswer, Journal
from actor.rollout import Player
from shared.types import Ending, Image, Sample, Ticket, Trajectory
from tests.support.rollout_rig import SYSTEM, Counting, Scripted, completion, renderer, threads, ticket

__all__ = ["renderer", "threads"]  # fixtures

ROOM = 2**20
TEXTS = [completion("up", 1), completion("down", 4), completion("on", 5), completion("end", 6)]


class Killed(BaseException):
    """What nothing of ours catches: the process is gone."""


class Dying(Scripted):
    """Its process is killed while it waits for an answer after those given."""

    async def generate(self, *args: Any, **settings: Any) -> Any:
        if not self.answers:
            raise Killed
        return await super().generate(*args, **settings)


def answer(index: int, turn: int, text: str = "up") -> EngineAnswer:
    return EngineAnswer(index, turn, b"seen", completion(text))


def play(renderer, threads, journal: Journal | None, answers: list, env: Any = Counting) -> tuple[Trajectory, Scripted]:
    """The only episode of a ticket, in an actor process that ends when the answers do."""
    engine = Dying(answers)
    player = Player(env, renderer, EnginePool([engine]), EpisodeLimits(), threads, journal=journal)
    if journal:
        journal.begin(ticket(seed=5))
    return asyncio.run(player.play(ticket(seed=5))), engine


def killed(renderer, threads, folder: Path, answers: list, env: Any = Counting) -> None:
    with pytest.raises(Killed):
        play(renderer, threads, Journal(folder, ROOM), answers, env)


def equal(one: Trajectory, other: Trajectory) -> bool:
    arrays = ("token_ids", "loss_mask", "behaviour_logprobs", "policy_versions")
    same = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)
    return same and all(getattr(one, name) == getattr(other, name) for name in ("turns", "images", "reward", "ending"))


# ------------------------------------------------------------------ an episode goes on


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_an_episode_goes_on_after_its_last_answer(renderer, threads, tmp_path, turns) -> None:
    whole, _ = play(renderer, threads, None, TEXTS)
    killed(renderer, threads, tmp_path, TEXTS[:turns])
    trajectory, engine = play(renderer, threads, Journal(tmp_path, ROOM), TEXTS[turns:])
    assert equal(trajectory, whole)
    assert len(engine.requests) == 4 - turns
    assert (trajectory.metrics["replayed_turns"], trajectory.metrics["replay_differed"]) == (turns, 0.0)
    assert trajectory.metrics["short"] == whole.metrics["short"]


def test_an_episode_outlives_its_actor_at_every_turn(renderer, threads, tmp_path) -> None:
    whole, asked = play(renderer, threads, None, TEXTS)
    for text in TEXTS[:-1]:
        killed(renderer, threads, tmp_path, [text])
    trajectory, engine = play(renderer, threads, Journal(tmp_path, ROOM), TEXTS[-1:])
    assert equal(trajectory, whole)
    assert engine.requests == asked.requests[-1:]  # tokens, images, limits and seed


def test_an_episode_that_was_over_is_played_again_without_an_engine(renderer, threads, tmp_path) -> None:
    whole, _ = play(renderer, threads, Journal(tmp_path, ROOM), TEXTS)
    trajectory, engine = play(renderer, threads, Journal(tmp_path, ROOM), [])
    assert equal(trajectory, whole)
    assert not engine.requests


class Unsteady(Counting):
    """Says something else each time it is played, from its second observation on."""

    plays = itertools.count()

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.play = next(self.plays)

    def look(self, text: str) -> dict[str, Any]:
        return super().look(f"{text} {self.play}" if self.heard else text)


class Repainted(Unsteady):
    """Shows another picture each time, with the same text."""

    def look(self, text: str) -> dict[str, Any]:
        shown = Counting.look(self, text)
        if self.heard:
            shown["multi_modal_data"]["image"][0].putpixel((0, 0), (self.play, 1, 2))
        return shown


@pytest.mark.parametrize("env", [Unsteady, Repainted])
def test_what_was_recorded_after_another_observation_is_dropped_and_counted(renderer, threads, tmp_path, env) -> None:
    killed(renderer, threads, tmp_path, TEXTS[:3], env)
    trajectory, engine = play(renderer, threads, Journal(tmp_path, ROOM), TEXTS[1:], env)
    assert trajectory.ending is Ending.COMPLETED
    assert len(engine.requests) == 3  # only the first answer was given to what is shown now
    assert (trajectory.metrics["replayed_turns"], trajectory.metrics["replay_differed"]) == (1.0, 1.0)
    again, engine = play(renderer, threads, Journal(tmp_path, ROOM), TEXTS[1:], env)
    assert (len(engine.requests), again.metrics["replay_differed"]) == (3, 1.0)


def test_answers_that_are_left_when_the_environment_is_done_are_counted(renderer, threads, tmp_path) -> None:
    class Impatient(Counting):
        def step(self, text: str) -> Any:
            observation, _, info = super().step(text)
            return observation, True, info

    killed(renderer, threads, tmp_path, TEXTS[:3])
    trajectory, engine = play(renderer, threads, Journal(tmp_path, ROOM), [], lambda sample: Impatient())
    assert (trajectory.ending, len(trajectory.turns), engine.requests) == (Ending.COMPLETED, 1, [])
    assert trajectory.metrics["replay_differed"] == 1.0


# ------------------------------------------------------------------ the files


def opened(folder: Path, *tickets: Ticket, answers: int = 2, room: int = ROOM) -> Journal:
    journal = Journal(folder, room)
    for each in tickets:
        journal.begin(each)
        for turn in range(answers):
            journal.add(each.id, answer(0, turn))
    return journal


def test_a_journal_gives_back_tickets_with_their_samples_and_the_answers_of_each_episode(tmp_path) -> None:
    sample = Sample("s", (SYSTEM,), (Image.of(b"a picture"),), "label", {"seed": 7})
    first, second = ticket(id="eval/3-abc", sample=sample, group_size=2, evaluation="eval"), ticket(id="../0-b", seed=9)
    journal = opened(tmp_path, first, second, answers=0)
    for index, turn in ((0, 0), (1, 0), (0, 1)):
        journal.add(first.id, answer(index, turn, "up" * (index + 1)))
    found = Journal(tmp_path, ROOM)
    assert sorted(found.tickets(), key=str) == sorted((first, second), key=str)
    assert found.answers(first.id, 0) == [answer(0, 0), answer(0, 1)]
    assert found.answers(first.id, 1) == [answer(1, 0, "upup")]
    assert found.answers(second.id, 0) == found.answers("never heard of", 0) == []
    assert all(path.parent == tmp_path for path in tmp_path.rglob("*"))


def test_a_file_ends_with_its_ticket_and_all_of_them_with_the_actor(tmp_path) -> None:
    journal = opened(tmp_path, ticket(id="a"), ticket(id="b"), ticket(id="c"))
    journal.end(("a", "never heard of"))
    journal.add("a", answer(0, 2))  # of an episode that is just being stopped
    assert {each.id for each in Journal(tmp_path, ROOM).tickets()} == {"b", "c"}
    journal.close()
    assert not list(tmp_path.iterdir())


def test_a_ticket_that_ended_and_is_issued_again_starts_anew(tmp_path) -> None:
    opened(tmp_path, ticket())
    journal = Journal(tmp_path, ROOM)
    journal.end(("t",))
    journal.begin(ticket())
    assert journal.answers("t", 0) == Journal(tmp_path, ROOM).answers("t", 0) == []


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_record_that_was_cut_off_costs_itself_alone(tmp_path, cut) -> None:
    opened(tmp_path, ticket(), answers=3)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-cut])
    journal = Journal(tmp_path, ROOM)
    assert journal.answers("t", 0) == [answer(0, 0), answer(0, 1)]
    journal.add("t", answer(0, 2, "end"))
    assert Journal(tmp_path, ROOM).answers("t", 0) == [answer(0, 0), answer(0, 1), answer(0, 2, "end")]


@pytest.mark.parametrize("damage", [b"", b"no journal", b"\x01\x00\x00\x00", bytes(100)])
def test_a_file_that_is_no_journal_is_removed(tmp_path, damage) -> None:
    opened(tmp_path, ticket(id="good"))
    (tmp_path / "bad.open").write_bytes(damage)
    journal = Journal(tmp_path, ROOM)
    assert [each.id for each in journal.tickets()] == ["good"]
    assert len(list(tmp_path.iterdir())) == 1


def test_the_journal_has_a_bound_and_a_ticket_beyond_it_is_played_without(tmp_path) -> None:
    journal = opened(tmp_path, ticket(id="a"), answers=10, room=2000)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 1000 < size <= 2000
    for turn in range(10, 40):
        journal.add("a", answer(0, turn))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000
    assert not list(tmp_path.iterdir())
    journal.begin(ticket(id="b"))  # there is room again
    assert [each.id for each in Journal(tmp_path, 2000).tickets()] == ["b"]


def test_an_episode_goes_on_when_its_journal_cannot_be_written(renderer, threads, tmp_path) -> None:
    journal = Journal(tmp_path / "gone", ROOM)
    (tmp_path / "gone").rmdir()
    trajectory, _ = play(renderer, threads, journal, TEXTS)
    assert trajectory.ending is Ending.COMPLETED


def test_what_ends_its_actor_again_and_again_is_given_up(tmp_path) -> None:
    opened(tmp_path, ticket())
    for _ in range(MAX_TAKEN_OVER):
        assert len(Journal(tmp_path, ROOM).tickets()) == 1
    assert not Journal(tmp_path, ROOM).tickets()
    assert not list(tmp_path.iterdir())


def test_what_makes_a_turn_between_two_kills_is_not_given_up(tmp_path) -> None:
    opened(tmp_path, ticket(), answers=0)
    for turn in range(4 * MAX_TAKEN_OVER):
        journal = Journal(tmp_path, ROOM)
        assert len(journal.answers("t", 0)) == (turn + 1) // 2
        if turn % 2 == 0:
            journal.add("t", answer(0, turn // 2))


class Wavering(Counting):
    """Its second observation is another one in each play; all others are the same."""

    plays = itertools.count()

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.play = next(self.plays)

    def look(self, text: str) -> dict[str, Any]:
        return super().look(f"{text} {self.play}" if len(self.heard) == 1 else text)


def test_no_answer_counts_that_was_recorded_after_an_observation_that_differs(renderer, threads, tmp_path) -> None:
    """The third observation is what it was, but the answers before it are not."""
    killed(renderer, threads, tmp_path, TEXTS[:3], Wavering)
    trajectory, engine = play(renderer, threads, Journal(tmp_path, ROOM), TEXTS[1:], Wavering)
    assert (len(engine.requests), trajectory.metrics["replayed_turns"]) == (3, 1.0)


def test_an_aborted_answer_is_asked_for_again_after_a_restart(renderer, threads, tmp_path) -> None:
    aborted = completion("half", reason="abort")
    trajectory, _ = play(renderer, threads, Journal(tmp_path, ROOM), ["up", aborted, aborted, aborted])
    assert trajectory.ending is Ending.ABORTED
    again, engine = play(renderer, threads, Journal(tmp_path, ROOM), ["end"])
    assert (again.ending, len(engine.requests)) == (Ending.COMPLETED, 1)
