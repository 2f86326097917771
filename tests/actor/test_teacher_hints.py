"""What an environment tells a teacher alone: the policy's stream is as without it, and the teacher's has it."""

from __future__ import annotations

import pytest

from actor.episode import EpisodeLimits
from actor.history import Window
from envs import sokoban
from learner.batch.episodes import with_hints
from shared.types import Ending, Sample
from tests.support.rollout_rig import Counting, play, renderer, threads

__all__ = ["renderer", "threads"]  # fixtures


class Hinting(Counting):
    """Tells a teacher the right answer."""

    def reset(self):
        observation, info = super().reset()
        return observation, info | {"hint": "say up"}

    def step(self, text):
        observation, done, info = super().step(text)
        return observation, done, info | {"hint": "say end <|im_end|>"}


def read(renderer, trajectory):
    return renderer.transcript(with_hints(trajectory).token_ids.tolist())


@pytest.mark.parametrize("window", [Window(), Window(turns=1)])
def test_the_policy_reads_what_it_would_read_without_hints_and_the_teacher_each_hint_in_its_place(
    renderer, threads, window
):
    limits = EpisodeLimits(window=window)
    plain, engine = play(renderer, threads, ["up", "down", "end"], limits=limits)
    told, other = play(renderer, threads, ["up", "down", "end"], env=Hinting, limits=limits)
    assert told.token_ids.tolist() == plain.token_ids.tolist() and told.turns == plain.turns
    assert [request[0] for request in engine.requests] == [request[0] for request in other.requests]
    assert not plain.hints and len(told.hints) == 3
    hinted = read(renderer, told)
    asked = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>"
    for hint, answer in (("say up", "up"), ("say end <|im_end|>", "down"), ("say end <|im_end|>", "end")):
        assert hinted.count(asked.format(hint, answer)) == 1
        hinted = hinted.replace(asked.format(hint, answer), "<|im_start|>assistant\n" + answer + "<|im_end|>")
    assert hinted == renderer.transcript(plain.token_ids.tolist())


def test_an_answer_that_another_token_ended_is_followed_by_the_hint_too(renderer, threads):
    from tests.support.rollout_rig import completion

    cut = completion("up")
    end = renderer.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    other = type(cut)((*cut.token_ids[:-1], end), cut.logprobs, cut.spans, "stop")
    told, _ = play(renderer, threads, [other, "end"], env=Hinting)
    assert "up<|endoftext|><|im_end|>\n<|im_start|>user\n" in read(renderer, told)
    assert read(renderer, told).endswith(
        "<|im_start|>user\nsay end <|im_end|><|im_end|>\n<|im_start|>assistant\nend<|im_end|>"
    )


def test_a_hint_that_is_no_text_ends_the_episode_and_says_so(renderer, threads):
    class Wrong(Hinting):
        def reset(self):
            return Counting.reset(self)[0], {"hint": 7}

    trajectory, _ = play(renderer, threads, ["up"], env=Wrong)
    assert trajectory.ending is Ending.ENV_ERROR and "info['hint'] is int, not a text" in trajectory.error


def test_sokoban_tells_the_next_moves_of_a_shortest_solution_if_it_is_asked_to():
    sample = Sample("1", metadata={"seed": 1, "split": "train"})
    env = sokoban.build_env(sample, {"hints": True})
    _, info = env.reset()
    for _ in range(40):
        moves = info["hint"].removeprefix("Next moves: ")
        _, done, info = env.step(f"<answer>{moves}</answer>")
        if done:
            break
    assert env.success
    assert "hint" not in info and "hint" not in sokoban.build_env(sample).reset()[1]
