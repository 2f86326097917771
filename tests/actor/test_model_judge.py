"""A judge behind a server with OpenAI's API: what it is sent, what its score becomes, and how its failures end."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from actor import model_judge as judge_module
from actor.engine_pool import EnginePool
from actor.episode import EpisodeLimits
from actor.history import Window
from actor.model_judge import JudgeReward, ModelJudge, score_in
from actor.rewards import FunctionReward, HttpReward, Reward
from actor.rollout import Player
from actor.worker import make_reward
from shared.config.recipe import Recipe
from shared.config.reward_section import JudgeConfig
from shared.engine.http_client import JsonClient
from shared.types import Ending, Image, Sample, Trajectory
from tests.support.machine import LocalServer, QuietHandler
from tests.support.rollout_rig import SYSTEM, Counting, Scripted, completion, renderer, threads, ticket

__all__ = ["renderer", "threads"]  # fixtures

SAMPLE = Sample("row-7", (SYSTEM,), label="42")
KEY = "test-key-0123456789abcdef"


def says(content: Any, finish_reason: str = "stop") -> tuple[int, bytes]:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}
    return 200, json.dumps({"choices": [choice], "usage": {"total_tokens": 100}}).encode()


class OpenAI(LocalServer):
    """A server with the answers that are given, the last one again and again: (status, body, headers) or seconds of
    silence."""

    def __init__(self, answers: list[Any]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.paths: list[str] = []
        self.open = self.most_open = 0
        self.pause_s = 0.0
        outer, waiting, lock = self, list(answers), threading.Lock()

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    outer.paths.append(self.path)
                    outer.headers.append(self.headers)
                    outer.bodies.append(body)
                    outer.open += 1
                    outer.most_open = max(outer.most_open, outer.open)
                    answer = waiting.pop(0) if len(waiting) > 1 else waiting[0]
                time.sleep(answer if isinstance(answer, float) else outer.pause_s)
                with lock:
                    outer.open -= 1
                answer = says("Score: 0") if isinstance(answer, float) else answer
                self.reply(answer[1], answer[0], answer[2] if len(answer) > 2 else None)

        super().__init__(Handler)
        self.url += "/v1"


@pytest.fixture
def serve() -> Iterator[Any]:
    with ExitStack() as servers:
        yield lambda *answers: servers.enter_context(closing(OpenAI(list(answers))))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_module, "FIRST_PAUSE_S", 0.01)


def judging(url: str, base: Reward | None = None, timeout_s: float = 20.0, **settings: Any) -> JudgeReward:
    config = JudgeConfig(url=url, model="judge-1", rubric="Is it polite?", **settings)
    http = JsonClient(config.url, connections=config.concurrency)
    return JudgeReward(ModelJudge(config, config.rubric_text(), timeout_s, http), base)


def play(renderer: Any, threads: Any, reward: JudgeReward, *episodes: Any) -> list[Trajectory]:
    """Play episodes at once, each with its answers."""

    async def main() -> list[Trajectory]:
        players = [
            Player(Counting, renderer, EnginePool([Scripted(answers)]), EpisodeLimits(), threads, reward)
            for answers in episodes or [("up", "end")]
        ]
        try:
            return await asyncio.gather(*(player.play(ticket(sample=SAMPLE)) for player in players))
        finally:
            await reward.close()

    return asyncio.run(main())


def test_a_judge_reads_the_episode_by_the_rubric_and_its_score_is_the_reward(
    renderer: Any, threads: Any, serve: Any
) -> None:
    server = serve(says("It is polite.\nScore: 0.25"))
    (trajectory,) = play(renderer, threads, judging(server.url))
    assert (trajectory.ending, trajectory.reward) == (Ending.COMPLETED, 0.25)
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.25]
    assert server.paths == ["/v1/chat/completions"] and "authorization" not in server.headers[0]
    (body,) = server.bodies
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge-1", 0.0, 1024)
    system, user = body["messages"]
    assert "Is it polite?" in system["content"] and "from 0 to 1" in system["content"]
    for words in (
        "Play.",
        "begin",
        "(an image)",
        "go on",
        "answer 1 of 2\nup",
        "answer 2 of 2\nend",
        "Reference answer\n42",
    ):
        assert words in user["content"]
    assert user["content"].index("begin") < user["content"].index("\nup") < user["content"].index("go on")
    metrics = trajectory.metrics
    assert (metrics["judge_score"], metrics["judge_requests"], metrics["judge_tokens"]) == (0.25, 1.0, 100.0)
    assert metrics["judge_disagreement"] == 0.75  # the environment's reward of 5 counts as 1
    assert metrics["judge_s"] > 0 and metrics["judge_retries"] == metrics["judge_cached"] == 0.0


def test_the_scores_of_turns_are_the_turns_rewards(renderer: Any, threads: Any, serve: Any) -> None:
    server = serve(says("Score: 1"), says("Score: 0.5"))
    (trajectory,) = play(renderer, threads, judging(server.url, per="turn", concurrency=1))
    assert sorted(turn.reward for turn in trajectory.turns) == [0.5, 1.0]
    assert trajectory.reward == 0.75
    first, second = sorted(body["messages"][1]["content"] for body in server.bodies)[:2]
    texts = {first.count("The player's answer"), second.count("The player's answer")}
    assert texts == {1, 2}
    assert "last answer alone" in server.bodies[0]["messages"][0]["content"]


def test_the_judges_share_is_its_weight(renderer: Any, threads: Any, serve: Any) -> None:
    server = serve(says("Score: 1"))
    (mixed,) = play(renderer, threads, judging(server.url, weight=0.25))
    assert [turn.reward for turn in mixed.turns] == [0.75 * 2.0, 0.75 * 3.0 + 0.25]
    assert mixed.reward == pytest.approx(0.75 * 5.0 + 0.25)
    (measured,) = play(renderer, threads, judging(server.url, weight=0.0))
    assert [turn.reward for turn in measured.turns] == [2.0, 3.0] and measured.reward == 5.0
    assert measured.metrics["judge_score"] == 1.0
    own = FunctionReward(lambda played: 0.5, threads, 5.0)
    (function,) = play(renderer, threads, judging(server.url, own, weight=0.5))
    assert function.reward == 0.75 and [turn.reward for turn in function.turns] == [0.0, 0.75]
    assert function.metrics["judge_disagreement"] == 0.5


def test_a_scale_of_the_judges_own_becomes_0_to_1(renderer: Any, threads: Any, serve: Any) -> None:
    server = serve(says("Score: 7/10"))
    (trajectory,) = play(renderer, threads, judging(server.url, scale=(1, 10)))
    assert trajectory.reward == pytest.approx(6 / 9)
    assert "from 1 to 10" in server.bodies[0]["messages"][0]["content"]


@pytest.mark.parametrize(("which", "sent"), [("first", [0]), ("last", [1]), ("all", [0, 1])])
def test_the_judge_sees_the_images_that_it_is_to_see(
    renderer: Any, threads: Any, serve: Any, which: str, sent: list[int]
) -> None:
    server = serve(says("Score: 1"))
    (trajectory,) = play(renderer, threads, judging(server.url, images=which))
    parts = server.bodies[0]["messages"][1]["content"]
    uris = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    files = [base64.b64decode(uri.removeprefix("data:image/png;base64,")) for uri in uris]
    assert files == [bytes(trajectory.images[number].data) for number in sent]
    assert sum(part["text"].count("(an image)") for part in parts if part["type"] == "text") == 2 - len(sent)


@pytest.mark.parametrize(
    ("answers", "ending", "words", "asked"),
    [
        ([(500, b"oh")], Ending.REWARD_ERROR, "HTTP 500", 4),
        ([(400, b'{"error": {"message": "no such model"}}')], Ending.REWARD_ERROR, "no such model", 1),
        ([(200, b"<html>")], Ending.REWARD_ERROR, "not JSON", 1),
        ([(200, b'{"choices": []}')], Ending.REWARD_ERROR, "no chat completion", 1),
        ([(200, b"[1]")], Ending.REWARD_ERROR, "no chat completion", 1),
        ([says("I cannot tell.")], Ending.REWARD_ERROR, "has no score: 'I cannot tell.'", 1),
        ([says(None)], Ending.REWARD_ERROR, "has no score", 1),
        ([says([1])], Ending.REWARD_ERROR, "no chat completion", 1),
        ([says("Let me think", "length")], Ending.REWARD_ERROR, "cut off before its score (reward.judge.max_tokens", 1),
        ([says("Score: 11")], Ending.REWARD_ERROR, "score 11 is not from 0 to 1", 1),
        ([(429, b"", {"Retry-After": "9999"})], Ending.REWARD_ERROR, "HTTP 429", 1),
        ([1.5], Ending.REWARD_TIMEOUT, "no answer within 0.2 s", 4),
    ],
)
def test_a_judge_that_fails_is_the_episodes_ending_and_no_reward(
    renderer: Any, threads: Any, serve: Any, answers: Any, ending: Ending, words: str, asked: int
) -> None:
    server = serve(*answers)
    timeout_s = 0.2 if ending is Ending.REWARD_TIMEOUT else 20.0
    (trajectory,) = play(renderer, threads, judging(server.url, timeout_s=timeout_s))
    assert trajectory.ending is ending and words in trajectory.error
    assert not trajectory.trainable and len(server.bodies) == asked


def test_a_judge_that_is_not_there_is_the_episodes_ending(renderer: Any, threads: Any, serve: Any) -> None:
    server = serve(says("Score: 1"))
    server.close()
    (trajectory,) = play(renderer, threads, judging(server.url))
    assert trajectory.ending is Ending.REWARD_ERROR and "cannot connect" in trajectory.error


def test_a_busy_judge_is_asked_again_when_it_says(renderer: Any, threads: Any, serve: Any) -> None:
    server = serve((429, b"", {"Retry-After": "0.2"}), (503, b""), says("Score: 1"))
    began = time.monotonic()
    (trajectory,) = play(renderer, threads, judging(server.url))
    assert trajectory.reward == 1.0 and time.monotonic() - began > 0.2
    assert (trajectory.metrics["judge_requests"], trajectory.metrics["judge_retries"]) == (3.0, 2.0)


def test_the_same_episode_is_judged_once(renderer: Any, threads: Any, serve: Any) -> None:
    server = serve(says("Score: 0.5"))
    server.pause_s = 0.2
    played = play(renderer, threads, judging(server.url), *[("up", "end")] * 4, ("down", "end"))
    assert [trajectory.reward for trajectory in played] == [0.5] * 5
    assert len(server.bodies) == 2
    assert sum(trajectory.metrics["judge_cached"] for trajectory in played) == 3.0


def test_a_failure_is_not_remembered_and_a_cache_of_0_remembers_nothing(
    renderer: Any, threads: Any, serve: Any
) -> None:
    async def twice(reward: JudgeReward) -> list[Ending]:
        endings = []
        for _ in range(2):
            player = Player(Counting, renderer, EnginePool([Scripted(["end"])]), EpisodeLimits(), threads, reward)
            endings.append((await player.play(ticket(sample=SAMPLE))).ending)
        await reward.close()
        return endings

    failing = serve(says("no"), says("Score: 1"))
    assert asyncio.run(twice(judging(failing.url))) == [Ending.REWARD_ERROR, Ending.COMPLETED]
    sound = serve(says("Score: 1"))
    assert asyncio.run(twice(judging(sound.url, cache_mb=0))) == [Ending.COMPLETED] * 2
    assert len(sound.bodies) == 2


def test_no_more_requests_are_open_at_once_than_the_recipe_allows(renderer: Any, threads: Any, serve: Any) -> None:
    server = serve(says("Score: 0.5"))
    server.pause_s = 0.05
    episodes = [(f"word {number}", "end") for number in range(8)]
    played = play(renderer, threads, judging(server.url, concurrency=2), *episodes)
    assert all(trajectory.reward == 0.5 for trajectory in played)
    assert len(server.bodies) == 8 and server.most_open <= 2


def test_a_request_that_gets_no_place_ends_its_episode(
    renderer: Any, threads: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_module, "WAIT_FACTOR", 0.1)
    server = serve(says("Score: 0.5"))
    server.pause_s = 0.9
    played = play(renderer, threads, judging(server.url, concurrency=1, timeout_s=1.0), ("a", "end"), ("b", "end"))
    assert sorted(trajectory.ending for trajectory in played) == [Ending.COMPLETED, Ending.REWARD_TIMEOUT]
    assert any("no free place within 0.1 s (reward.judge.concurrency = 1)" in each.error for each in played)


def test_an_answer_that_was_cut_off_is_judged_too(renderer: Any, threads: Any, serve: Any) -> None:
    server = serve(says("Score: 0.5"))
    (trajectory,) = play(
        renderer, threads, judging(server.url, per="turn"), ["up", completion("half", reason="length")]
    )
    assert trajectory.reward == 0.5 and len(server.bodies) == 2
    assert any("The episode ended: out_of_tokens" in body["messages"][1]["content"] for body in server.bodies)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 0.5", 0.5), ("The score is 0.25.", 0.25), ("**Score:** 1", 1.0), ("Score: **0.75**", 0.75),
        ("0.5", 0.5),
        ("  `1`\n", 1.0), ('{"reason": "good", "score": 0.3}', 0.3), ("Score: .5", 0.5), ("score = -1", -1.0),
        ("Score: 0.1\nNo, better.\nScore: 0.9", 0.9), ("<think>Score: 0</think>Score: 1", 1.0), ("3/10", 3.0),
        ("It has 2 errors.", None), ("", None), ("Score: high", None), ("Score: X", None), ("1 or 0", None),
    ],
)  # fmt: skip
def test_a_score_is_read_as_judges_write_it(text: str, score: float | None) -> None:
    assert score_in(text) == score


def recipe(**judge: Any) -> Recipe:
    return Recipe.model_validate({"model": {"path": "m"}, "env": {"module": "envs.colour"}, "reward": {"judge": judge}})


def test_the_key_comes_from_a_file_or_a_variable_and_is_never_shown(
    renderer: Any, threads: Any, serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o600)
    monkeypatch.setenv("OUR_JUDGE_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    for given in ({"api_key_file": str(tmp_path / "key")}, {"api_key_env": "OUR_JUDGE_KEY"}):
        server = serve((401, b"no"))
        made = recipe(url=server.url, model="m", rubric="r", **given)
        reward = make_reward(made, threads)
        assert isinstance(reward, JudgeReward)
        (trajectory,) = play(renderer, threads, reward)
        assert server.headers[0]["authorization"] == f"Bearer {KEY}"
        assert KEY not in trajectory.error + caplog.text + json.dumps(made.model_dump(mode="json"))
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(ValueError, match=r"is open to others .*chmod 600"):
        make_reward(recipe(url=server.url, model="m", rubric="r", api_key_file=str(tmp_path / "key")), threads)
    with pytest.raises(ValueError, match="'NO_SUCH': there is no such environment variable"):
        make_reward(recipe(url=server.url, model="m", rubric="r", api_key_env="NO_SUCH"), threads)


def test_a_rubric_may_be_a_file(tmp_path: Path, threads: Any) -> None:
    (tmp_path / "rubric.md").write_text("Is it\nkind?\n")
    made = recipe(url="http://h/v1", model="m", rubric=str(tmp_path / "rubric.md"))
    assert made.reward.judge.rubric_text() == "Is it\nkind?"
    for rubric, words in (
        (str(tmp_path / "none.md"), "the file cannot be read: No such file"),
        ("x" * 30_000, "30000 characters"),
    ):
        with pytest.raises(ValueError, match=words) as refused:
            make_reward(recipe(url="http://h/v1", model="m", rubric=rubric), threads)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("judge", "words"),
    [
        ({"model": "m"}, "reward.judge.model without reward.judge.url"),
        ({"url": "http://h/v1", "rubric": "r"}, "without reward.judge.model: give the model's name"),
        ({"url": "http://h/v1", "model": "m"}, "without reward.judge.rubric: give what to score"),
        ({"url": "h:80", "model": "m", "rubric": "r"}, "write it as http://host:port/v1"),
        ({"url": "http://h", "model": "m", "rubric": "r", "scale": [5, 1]}, "the first is to be below the second"),
        (
            {"url": "http://h", "model": "m", "rubric": "r", "api_key_file": "a", "api_key_env": "b"},
            "leave one of them",
        ),
        ({"url": "http://h", "model": "m", "rubric": "r", "weight": 2}, "less than or equal to 1"),
    ],
)
def test_a_judge_that_is_not_whole_is_refused(judge: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        recipe(**judge)


def test_with_a_window_of_history_each_image_is_sent_once_in_its_place(renderer: Any, threads: Any, serve: Any) -> None:
    server = serve(says("Score: 1"))
    reward = judging(server.url, images="all")

    async def main() -> Trajectory:
        limits = EpisodeLimits(window=Window(turns=2))
        player = Player(Counting, renderer, EnginePool([Scripted(["a", "b", "c", "end"])]), limits, threads, reward)
        trajectory = await player.play(ticket(sample=SAMPLE))
        await reward.close()
        return trajectory

    trajectory = asyncio.run(main())
    parts = server.bodies[0]["messages"][1]["content"]
    files = [base64.b64decode(part["image_url"]["url"][22:]) for part in parts if part["type"] == "image_url"]
    assert len(trajectory.segments) == 2 and len(trajectory.images) > 4
    drawn = [Image.of(renderer.observation(shown_by(turn)).images[0].data).data for turn in range(4)]
    assert files == drawn


def shown_by(turn: int) -> dict[str, Any]:
    """The message that `Counting` shows before the answer of a turn, counted from 0."""
    env = Counting()
    env.heard = ["x"] * turn
    return env.format_observation(env.look("?"))


class Grader(LocalServer):
    """A reward server that keeps what it is sent."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        outer = self

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                outer.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self.reply(b"1")

        super().__init__(Handler)


def test_a_reward_server_gets_observations_and_images_if_it_asks(renderer: Any, threads: Any) -> None:
    with closing(Grader()) as server:
        for send in ((), ("observations", "images")):
            reward: Any = HttpReward(server.url, 5.0, send)
            (trajectory,) = play(renderer, threads, reward)
            assert trajectory.reward == 1.0
    plain, whole = server.bodies
    assert not {"observations", "images"} & plain.keys()
    assert [messages[-1]["content"] for messages in whole["observations"]] == [
        [{"type": "image"}, {"type": "text", "text": "begin"}],
        [{"type": "image"}, {"type": "text", "text": "go on"}],
    ]
    assert whole["observations"][0][0] == SYSTEM
    files = [base64.b64decode(uri.removeprefix("data:image/png;base64,")) for uri in whole["images"]]
    assert files == [bytes(image.data) for image in trajectory.images]
