"""One episode: environment and policy take turns until an ending.

    env ──message──▶ renderer ──tokens──▶ stream ──▶ engine ──sampled tokens──▶ stream
     ▲                                                  │
     └────────────────────── text ◀─────────────────────┘

A failure in an episode is recorded as its ending and its `error`; it is never raised. T = tokens of the compact stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from actor.custom_rollout import Rollout, RolloutContext, play_custom
from actor.engine_pool import EnginePool, Seat
from actor.env_threads import EnvCalls, EnvThreads, EnvTimeout
from actor.journal import Answer, Journal
from actor.limits import EpisodeLimits
from actor.notes import EnvMetrics, Notes
from actor.render import Fragment, Renderer
from actor.rewards import BadReward, Reward, finite
from actor.stream import Stream
from actor.ticket_keys import cache_key, episode_seed
from envs.base import Info, Played
from shared.engine_api import EngineError
from shared.types import Completion, Ending, Sample, Ticket, Trajectory, Turn

log = logging.getLogger("actor")
BuildEnv = Callable[[Sample], Any]


class Player:
    """Plays episodes of tickets. `build_env(sample)` makes an environment; `reward_function` says at the end what the
    episode was worth (None: the sum of the turns' rewards). A `rollout` function plays the whole episode instead, and
    is given `env_args`. Answers go into the `journal`, and those found there are played again first."""

    def __init__(
        self,
        build_env: BuildEnv,
        renderer: Renderer,
        engines: EnginePool,
        limits: EpisodeLimits,
        threads: EnvThreads,
        reward_function: Reward | None = None,
        rollout: Rollout | None = None,
        env_args: dict[str, Any] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.build_env, self.renderer, self.engines = build_env, renderer, engines
        self.limits, self.threads, self.reward_function = limits, threads, reward_function
        self.rollout, self.env_args, self.journal = rollout, env_args or {}, journal

    async def play(self, ticket: Ticket, index: int = 0) -> Trajectory:
        """Episode `index` of the ticket's group, on one engine from start to end unless that fails."""
        try:
            async with self.engines.lease() as seat:
                if self.rollout is not None:
                    seed, own = episode_seed(ticket, index, 0) or 0, (self.limits, self.env_args, self.threads)
                    context = RolloutContext(ticket.sample, ticket.sampling, seed, seat, self.renderer, *own)
                    seat.cache_key = cache_key(ticket, seat.client.weights)
                    trajectory = await play_custom(self.rollout, context)
                else:
                    trajectory = await _Episode(self, seat, ticket, index).play()
        except EngineError as error:  # no engine to begin with
            return Stream().trajectory((), Ending.ENGINE_ERROR, error=str(error))
        return replace(trajectory, metrics=trajectory.metrics | {"engine_retries": float(seat.retries)})


class _Ended(Exception):
    """The episode is over."""

    def __init__(self, ending: Ending, error: str = "") -> None:
        super().__init__(error)
        self.ending, self.error = ending, error


class _Episode:
    """The state of one episode while it is played. Its methods raise `_Ended` when the episode is over."""

    def __init__(self, player: Player, seat: Seat, ticket: Ticket, index: int) -> None:
        self._player, self._seat, self._ticket, self._index = player, seat, ticket, index
        self._renderer, self._limits = player.renderer, player.limits
        self._stream = Stream()
        self._env: Any = None
        self._calls = EnvCalls(self._close_here)
        self._turns: list[Turn] = []
        self._answers: list[str] = []
        self._infos: list[Info] = []
        self._metrics = EnvMetrics()
        self._generate_s = self._env_s = 0.0
        self._notes = Notes()
        self._recorded = player.journal.answers(ticket.id, index)[::-1] if player.journal else []  # the next one last
        self._replayed, self._differed = 0, False

    async def play(self) -> Trajectory:
        """The picture above, then the reward of the whole episode."""
        try:
            fragment = await self._in_env(self._start)
            while True:
                self._stream.observe(fragment)
                completion = self._replay(fragment) or await self._generate(fragment)
                text = self._sample(completion)
                fragment = await self._answer(text, completion)
        except _Ended as end:
            trajectory = self._trajectory(end)
        except asyncio.CancelledError:
            if self._calls.give_up():
                self._player.threads.run_unwatched(self._close_here, self._limits.env_timeout_s)
            raise
        return await self._player.threads.to_its_end(self._finish(trajectory))

    # ------------------------------------------------------------------ one turn

    def _replay(self, fragment: Fragment) -> Completion | None:
        """What an engine answered before this actor was started again, as long as the environment shows the same; what
        was recorded after something else is dropped."""
        if not self._recorded:
            return None
        answer = self._recorded.pop()
        if answer.seen == fragment.digest:
            self._replayed += 1
            return answer.completion
        self._differed = True
        self._recorded.clear()
        return None

    async def _generate(self, fragment: Fragment) -> Completion:
        """What the policy writes after `fragment`, within the limits of turn, episode and context."""
        limits, sampling = self._limits, self._ticket.sampling
        room = limits.max_context - self._stream.num_expanded
        budget = limits.max_tokens - self._stream.num_sampled
        if room < 1:
            raise _Ended(Ending.CONTEXT_FULL)
        if budget < 1:
            raise _Ended(Ending.OUT_OF_TOKENS)
        began = time.monotonic()
        self._seat.cache_key = self._seat.cache_key or cache_key(self._ticket, self._seat.client.weights)
        try:
            completion = await self._seat.generate(
                self._stream.token_ids,
                self._stream.images,
                sampling,
                banned_ids=self._renderer.banned_ids,
                stop_ids=(self._renderer.end_id,),
                max_new_tokens=min(room, budget, limits.turn_tokens, sampling.max_new_tokens),
                seed=episode_seed(self._ticket, self._index, len(self._turns)),
            )
        except EngineError as error:
            raise _Ended(Ending.ENGINE_ERROR, str(error)) from error
        answered = time.monotonic()
        self._generate_s += answered - began
        self._notes.generated(began, answered)
        if not set(completion.token_ids).isdisjoint(self._renderer.banned_ids):
            raise _Ended(Ending.ENGINE_ERROR, f"{self._seat.url} sampled a banned vision token")
        if self._player.journal and completion.finish_reason != "abort":
            answer = Answer(self._index, len(self._answers), fragment.digest, completion)
            self._player.journal.add(self._ticket.id, answer)
        return completion

    def _sample(self, completion: Completion) -> str:
        """Appends what the policy wrote to the stream; returns its text, unless it was cut off."""
        start = len(self._stream.token_ids)
        self._stream.sample(completion)
        if completion.token_ids:
            self._turns.append(Turn(start, len(self._stream.token_ids), 0.0))
            self._notes.turn()
        try:
            self._answers.append(self._renderer.decode(completion.token_ids))
        except Exception as error:  # of tokens that the tokenizer does not know
            words = f"{self._seat.url} sampled tokens that are no text: {type(error).__name__}: {error}"
            raise _Ended(Ending.ENGINE_ERROR, words) from error
        if completion.finish_reason == "abort":
            raise _Ended(Ending.ABORTED, f"{self._seat.url} aborted the request")
        if completion.finish_reason == "length":
            full = self._stream.num_expanded >= self._limits.max_context
            raise _Ended(Ending.CONTEXT_FULL if full else Ending.OUT_OF_TOKENS)
        return self._answers[-1]

    async def _answer(self, text: str, completion: Completion) -> Fragment:
        """What the environment answers to `text`, as the tokens that the stream needs next."""
        fragment, reward = await self._in_env(lambda: self._step(text))
        self._turns[-1] = replace(self._turns[-1], reward=reward)
        if fragment is None:
            raise _Ended(Ending.COMPLETED)
        if len(self._turns) >= self._limits.max_turns:
            raise _Ended(Ending.MAX_TURNS)
        if completion.token_ids[-1] != self._renderer.end_id:  # another stop token: the template's own is owed
            fragment = Fragment((self._renderer.end_id, *fragment.token_ids), fragment.images, fragment.image_tokens)
        if self._stream.num_expanded + fragment.num_expanded >= self._limits.max_context:
            raise _Ended(Ending.CONTEXT_FULL)
        return fragment

    # ------------------------------------------------------------------ in an environment's thread

    async def _in_env(self, function: Callable[[], Any]) -> Any:
        """Runs a function of the environment in a thread; its failure is the episode's ending."""
        began = time.monotonic()
        try:
            call = self._calls.guarded(self._notes.timed(function))
            return await self._player.threads.run(call, self._limits.env_timeout_s)
        except EnvTimeout as error:
            raise _Ended(Ending.ENV_TIMEOUT, str(error)) from error
        except BadReward as error:
            raise _Ended(Ending.REWARD_ERROR, str(error)) from error
        except Exception as error:
            raise _Ended(Ending.ENV_ERROR, f"{type(error).__name__}: {error}") from error
        finally:
            returned = time.monotonic()
            self._env_s += returned - began
            self._notes.called(began, returned)

    def _start(self) -> Fragment:
        sample = self._ticket.sample
        self._env = self._player.build_env(sample)
        observation, _ = self._env.reset()
        messages = list(sample.prompt)
        if observation:
            messages.append(self._env.format_observation(observation))
        return self._renderer.start(messages, sample.images)

    def _step(self, text: str) -> tuple[Fragment | None, float]:
        """What the model sees next (None = done) and the turn's reward."""
        observation, done, info = self._env.step(text)
        reward = finite(info.get("reward", 0.0))
        self._infos.append(info)
        self._metrics.note(info.get("metrics") or {})
        if done:
            return None, reward
        return self._renderer.observation(self._env.format_observation(observation)), reward

    # ------------------------------------------------------------------ after the last turn

    def _trajectory(self, end: _Ended) -> Trajectory:
        stream = self._stream
        metrics = self._metrics.values() | {
            "turns": float(len(self._turns)),
            "model_tokens": float(stream.num_sampled),
            "expanded_tokens": float(stream.num_expanded),
            "generate_s": self._generate_s,
            "env_s": self._env_s,
            "replayed_turns": float(self._replayed),
            "replay_differed": float(self._differed or bool(self._recorded)),
        }
        reward, text = sum(turn.reward for turn in self._turns), self._renderer.transcript(stream.token_ids)
        trajectory = stream.trajectory(self._turns, end.ending, reward=reward, metrics=metrics, text=text)
        notes = self._notes.of_turns(self._infos)
        return replace(trajectory, error=end.error, notes=notes, started=self._notes.started)

    async def _finish(self, trajectory: Trajectory) -> Trajectory:
        """The reward of the whole episode, which may use the environment, and then the environment's end."""
        if trajectory.trainable and self._player.reward_function is not None:
            trajectory = await self._rewarded(trajectory, self._player.reward_function)
        if not await self._close():
            trajectory = replace(trajectory, metrics=trajectory.metrics | {"close_failed": 1.0})
        return trajectory

    async def _rewarded(self, trajectory: Trajectory, reward_function: Reward) -> Trajectory:
        """The trajectory with the reward of `reward_function`, whose failure is the episode's ending."""
        infos, answers = tuple(self._infos), tuple(self._answers)
        began = time.monotonic()
        try:
            reward = await reward_function(Played(self._ticket.sample, trajectory, answers, infos, self._env))
        except (EnvTimeout, TimeoutError) as error:
            return replace(trajectory, ending=Ending.REWARD_TIMEOUT, error=str(error) or "the reward took too long")
        except Exception as error:  # noqa: BLE001 - whatever the user's function raises ends this episode alone
            return replace(trajectory, ending=Ending.REWARD_ERROR, error=f"{type(error).__name__}: {error}")
        metrics = trajectory.metrics | {"reward_s": time.monotonic() - began}
        turns = trajectory.turns
        if reward_function.replaces_turns:
            turns = (*(replace(turn, reward=0.0) for turn in turns[:-1]), replace(turns[-1], reward=reward))
        return replace(trajectory, reward=reward, metrics=metrics, turns=turns)

    async def _close(self) -> bool:
        """Closes the environment, unless it is still being built; false if that failed."""
        building = self._env is None and not self._calls.give_up()
        if building or not hasattr(self._env, "close"):
            return True
        try:
            await self._player.threads.run(self._close_here, self._limits.env_timeout_s)
        except Exception as error:  # noqa: BLE001 - whatever the user's function raises
            log.warning("an environment's close failed: %s: %s", type(error).__name__, error)
            return False
        return True

    def _close_here(self) -> None:
        env, self._env = self._env, None
        if hasattr(env, "close"):
            env.close()
