"""One episode at a time: endings, limits and the shape of what is recorded.

The engine is a scripted one (a real client object whose answers are given), except in the last test.
"""

import asyncio
import math
import threading
import time

import numpy as np
import pytest
from msgspec.structs import replace

from actor.engine_pool import EnginePool
from actor.env_threads import EnvThreads, EnvTimeout
from actor.episode import EpisodeLimits, cache_key
from actor.rollout import Player
from shared.engine.engine_api import EngineClient, EngineError
from shared.types import Completion, Ending, Image, Sampling, Turn, VersionSpan
from tests.support.rollout_rig import SYSTEM, Counting, Scripted, check, completion, play, renderer, threads, ticket
from tests.support.tiny import running_engine

__all__ = ["renderer", "threads"]  # fixtures


def test_an_episode_is_recorded_token_by_token(renderer, threads):
    trajectory, engine = play(renderer, threads, ["up", "end"])
    env = Counting()
    messages = [SYSTEM, env.format_observation(env.look("begin"))]
    start = renderer.start(messages).token_ids
    first, second = completion("up").token_ids, completion("end").token_ids
    observed = renderer.observation(env.format_observation(env.look("go on"))).token_ids
    assert trajectory.ending is Ending.COMPLETED and trajectory.trainable and not trajectory.error
    assert trajectory.token_ids.tolist() == [*start, *first, *observed, *second]
    masks = [0] * len(start) + [1] * len(first) + [0] * len(observed) + [1] * len(second)
    assert trajectory.loss_mask.tolist() == masks
    assert trajectory.behaviour_logprobs.tolist() == [-0.5 * m for m in masks]
    versions = [-1] * len(start) + [1] * len(first) + [-1] * len(observed) + [2] * len(second)
    assert trajectory.policy_versions.tolist() == versions
    begin = len(start) + len(first) + len(observed)
    assert trajectory.turns == (Turn(len(start), len(start) + len(first), 2.0), Turn(begin, len(masks), 3.0))
    assert trajectory.reward == 5.0
    assert len(trajectory.images) == 2 and trajectory.images[0] == Image.of(trajectory.images[0].data)
    assert "Play." in trajectory.text and "go on" in trajectory.text
    # the second request is the first stream, what was sampled, and the new observation, nothing else
    assert engine.requests[1][0] == [*start, *first, *observed] and len(engine.requests[1][1]) == 2
    assert engine.requests[0][2]["banned_ids"] == renderer.banned_ids


def test_an_episode_says_whose_weights_sampled_it_and_shares_no_cache_with_those_of_a_dead_learner(renderer, threads):
    def of(process, text):
        made = completion(text)
        return replace(made, spans=(VersionSpan(1, 0, len(made.token_ids), process),))

    trajectory, _ = play(renderer, threads, [of("dead", "up"), of("mine", "end")])
    assert trajectory.weights == ("1-dead", "1-mine")
    assert play(renderer, threads, ["end"])[0].weights == ()  # an engine that names no process
    keys = {cache_key(replace(ticket(), id=f"{number}-{process}")) for number in range(2) for process in ("p", "q")}
    assert len(keys) == 2


def test_an_episode_shares_no_cache_with_those_that_older_weights_played_on_its_engine(renderer, threads):
    """Its ticket is of version 1, and the engine has sampled with version 3 already."""
    issued = replace(ticket(), id="5-p", version=1)
    assert cache_key(issued, (3, "p")) == cache_key(replace(issued, version=3)) != cache_key(issued)
    assert cache_key(issued, (0, "p")) == cache_key(issued, (3, "dead")) == cache_key(issued)
    _, engine = play(renderer, threads, ["up", "end"])
    engine.weights = (3, "")
    engine.answers = ["up", "end"]
    player = Player(Counting, renderer, EnginePool([engine]), EpisodeLimits(), threads)
    asyncio.run(player.play(ticket()))
    before, after = engine.requests[0][2]["cache_key"], engine.requests[2][2]["cache_key"]
    assert before != after == engine.requests[3][2]["cache_key"]


def test_metrics_of_turns_are_averaged_and_others_kept(renderer, threads):
    trajectory, _ = play(renderer, threads, ["up", "end"])
    assert trajectory.metrics["short"] == 0.5
    assert trajectory.metrics["turns_heard"] == 2.0
    assert trajectory.metrics["turns"] == 2.0
    assert trajectory.metrics["model_tokens"] == trajectory.loss_mask.sum()
    assert trajectory.metrics["expanded_tokens"] == len(trajectory.token_ids) + 2 * 3


def test_the_turn_limit_ends_an_episode(renderer, threads):
    trajectory, engine = play(renderer, threads, ["a"] * 9, limits=EpisodeLimits(max_turns=3))
    assert trajectory.ending is Ending.MAX_TURNS and len(trajectory.turns) == 3 and len(engine.answers) == 6
    assert trajectory.loss_mask[-1] == 1  # no observation follows the last turn


def test_an_answer_cut_by_its_length_is_not_shown_to_the_environment(renderer, threads):
    envs = []

    def build(sample):
        envs.append(Counting())
        return envs[-1]

    trajectory, _ = play(renderer, threads, ["up", completion("<answer>up", reason="length")], env=build)
    assert trajectory.ending is Ending.OUT_OF_TOKENS and trajectory.trainable
    assert [turn.reward for turn in trajectory.turns] == [2.0, 0.0]
    assert envs[0].heard == ["up"] and envs[0].closed


def test_an_aborted_answer_is_not_shown_to_the_environment(renderer, threads):
    for answer in (Completion((), (), (), "abort"), completion("half", reason="abort")):
        trajectory, _ = play(renderer, threads, ["up", answer, answer, answer])
        assert trajectory.ending is Ending.ABORTED and not trajectory.trainable and "aborted" in trajectory.error


def test_the_token_budget_of_the_episode_bounds_each_turn(renderer, threads):
    limits = EpisodeLimits(max_tokens=10, turn_tokens=8)
    long = completion("a" * 4)
    used = len(long.token_ids)
    trajectory, engine = play(renderer, threads, [long] * 9, limits=limits)
    asked = [settings["max_new_tokens"] for _, _, settings in engine.requests]
    assert asked == [min(8, 10 - used * n) for n in range(len(asked))]
    assert trajectory.ending is Ending.OUT_OF_TOKENS


def test_an_observation_that_does_not_fit_is_not_begun(renderer, threads):
    """verl#4050: the tokens of what does not fit are left out and its image is not, which the learner dies of."""
    whole, _ = play(renderer, threads, ["up", "end"])
    needed = int(whole.metrics["expanded_tokens"]) - len(completion("end").token_ids)
    for room, fits in ((needed, False), (needed + 1, True)):
        trajectory, _ = play(renderer, threads, ["up", "end"], limits=EpisodeLimits(max_context=room))
        assert len(trajectory.images) == (2 if fits else 1)
        assert trajectory.ending is (Ending.COMPLETED if fits else Ending.CONTEXT_FULL)


def test_a_prompt_that_does_not_fit_is_no_training_data(renderer, threads):
    trajectory, engine = play(renderer, threads, ["up"], limits=EpisodeLimits(max_context=10))
    assert trajectory.ending is Ending.CONTEXT_FULL and not trajectory.trainable and not engine.requests


def test_engines_that_fail_three_times_at_one_turn_are_the_episodes_ending(renderer, threads):
    trajectory, _ = play(renderer, threads, ["up", *[EngineError("http://scripted:1", "no answer within 3 s")] * 3])
    assert trajectory.ending is Ending.ENGINE_ERROR and "no answer within 3 s" in trajectory.error
    assert trajectory.metrics["engine_retries"] == 2.0


def test_a_sampled_vision_token_is_the_engines_error(renderer, threads):
    bad = Completion((renderer.image_id,), (-1.0,), (VersionSpan(1, 0, 1),), "stop")
    trajectory, _ = play(renderer, threads, ["up", bad])
    assert trajectory.ending is Ending.ENGINE_ERROR and "banned" in trajectory.error


class Broken(Counting):
    def __init__(self, what):
        super().__init__()
        self.what = what
        if what == "cannot be built":
            raise OSError("no board")

    def step(self, text):
        match self.what:
            case "raises":
                raise KeyError("board")
            case "not a tuple":
                return None
            case "nan reward":
                return self.look("x"), False, {"reward": math.nan}
            case "hangs":
                time.sleep(1.5)
            case "times out itself":
                raise TimeoutError("inner")
        return super().step(text)


@pytest.mark.parametrize(
    ("what", "ending", "words"),
    [
        ("cannot be built", Ending.ENV_ERROR, "no board"),
        ("raises", Ending.ENV_ERROR, "KeyError: 'board'"),
        ("not a tuple", Ending.ENV_ERROR, "TypeError"),
        ("nan reward", Ending.REWARD_ERROR, "nan"),
        ("hangs", Ending.ENV_TIMEOUT, "no return within 0.5 s"),
        ("times out itself", Ending.ENV_ERROR, "inner"),
    ],
)
def test_a_broken_environment_is_the_episodes_ending(renderer, threads, what, ending, words):
    limits = EpisodeLimits(env_timeout_s=0.5 if what == "hangs" else 60.0)
    trajectory, _ = play(renderer, threads, ["up"], env=lambda sample: Broken(what), limits=limits)
    assert trajectory.ending is ending and words in trajectory.error and not trajectory.trainable
    assert bool(len(trajectory.token_ids)) == (what != "cannot be built")


def test_the_episode_reward_is_asked_once_at_the_end(renderer, threads):
    trajectory, _ = play(renderer, threads, ["up", "end"], episode_reward=lambda env: 10.0 * len(env.heard))
    assert trajectory.reward == 20.0 and [turn.reward for turn in trajectory.turns] == [2.0, 3.0]


@pytest.mark.parametrize(
    ("reward_function", "ending"),
    [
        (lambda env: 1 / 0, Ending.REWARD_ERROR),
        (lambda env: math.inf, Ending.REWARD_ERROR),
        (lambda env: time.sleep(1.5), Ending.REWARD_TIMEOUT),
    ],
)
def test_a_broken_reward_is_told_apart(renderer, threads, reward_function, ending):
    limits = EpisodeLimits(env_timeout_s=0.5 if ending is Ending.REWARD_TIMEOUT else 60.0)
    trajectory, _ = play(renderer, threads, ["end"], episode_reward=reward_function, limits=limits)
    assert trajectory.ending is ending and not trajectory.trainable


def test_a_turn_ended_by_another_stop_token_is_closed_for_the_policy(renderer, threads):
    other = Completion((40, 0), (-0.5, -0.5), (VersionSpan(1, 0, 2),), "stop")
    trajectory, engine = play(renderer, threads, [other, "end"])
    stream = engine.requests[1][0]
    end = len(engine.requests[0][0]) + 2
    assert stream[end] == renderer.end_id and trajectory.loss_mask[end] == 0


def test_seeds_differ_between_episodes_and_turns_and_repeat_with_the_ticket(renderer, threads):
    def seeds(seed, index):
        engine = Scripted(["a", "b", "end"])
        player = Player(Counting, renderer, EnginePool([engine]), EpisodeLimits(), threads)
        asyncio.run(player.play(ticket(seed=seed), index))
        return [settings["seed"] for _, _, settings in engine.requests]

    assert seeds(0, 0) == [None] * 3
    assert seeds(7, 0) == seeds(7, 0) and len({*seeds(7, 0), *seeds(7, 1), *seeds(8, 0)}) == 9


def test_a_call_that_hangs_costs_its_thread_and_no_other_call():
    async def main():
        pool = EnvThreads(1)
        release = threading.Event()
        with pytest.raises(EnvTimeout):
            await pool.run(release.wait, 0.05)
        assert await pool.run(lambda: 7, 5.0) == 7
        assert pool.num_lost == 1
        release.set()
        assert await pool.run(lambda: 8, 5.0) == 8
        pool.close()

    asyncio.run(main())


def test_waiting_for_a_free_thread_does_not_count_as_the_calls_time():
    async def main():
        pool = EnvThreads(1)
        answers = await asyncio.gather(*(pool.run(lambda: time.sleep(0.2) or 1, 1.2) for _ in range(8)))
        pool.close()
        return answers

    assert asyncio.run(main()) == [1] * 8


def test_an_episode_with_the_embedded_engine_keeps_the_contract(folder, renderer, threads):
    with running_engine(folder, max_context=1024) as (url, _):

        async def main():
            pool = EnginePool([EngineClient(url)])
            limits = EpisodeLimits(max_turns=3, turn_tokens=40, max_context=400)
            player = Player(Counting, renderer, pool, limits, threads)
            return await asyncio.gather(*(player.play(ticket(seed=1), index) for index in range(6)))

        for trajectory in asyncio.run(main()):
            check(renderer, trajectory)
            assert trajectory.ending in (Ending.OUT_OF_TOKENS, Ending.MAX_TURNS, Ending.CONTEXT_FULL)
            assert trajectory.turns and np.isfinite(trajectory.behaviour_logprobs).all()


def test_a_turn_has_no_more_tokens_than_its_ticket_allows(renderer, threads):
    _, engine = play(renderer, threads, ["up", "end"], sampling=Sampling(max_new_tokens=5))
    assert [settings["max_new_tokens"] for _, _, settings in engine.requests] == [5, 5]


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
@pytest.mark.parametrize("earlier", [[], ["up"]])
def test_an_answer_without_a_token_is_an_ending_and_no_exception(renderer, threads, reason, earlier):
    trajectory, _ = play(renderer, threads, [*earlier, *[Completion((), (), (), reason)] * 5])
    endings = {"stop": Ending.ENGINE_ERROR, "length": Ending.OUT_OF_TOKENS, "abort": Ending.ABORTED}
    assert trajectory.ending is endings[reason]
    assert len(trajectory.turns) == len(earlier)
