"""One episode: environment and policy take turns until an ending.

    env ──message──▶ renderer ──tokens──▶ stream ──▶ engine ──sampled tokens──▶ stream
     ▲                                                  │
     └────────────────────── text ◀─────────────────────┘

What goes wrong in an episode is its ending and its `error`, never an exception. T = tokens of the compact stream.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from actor.client import EngineClient, EngineError, EnginePool
from actor.env_threads import EnvThreads, EnvTimeout
from actor.render import Fragment, Renderer
from actor.stream import Stream
from shared.types import TRAINABLE_ENDINGS, Completion, Ending, Sample, Ticket, Trajectory, Turn

BuildEnv = Callable[[Sample], Any]
EpisodeReward = Callable[[Any], float]


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """`max_tokens` and `turn_tokens` count sampled tokens, `max_context` all of them with pictures expanded."""

    max_turns: int = 8
    max_tokens: int = 1536
    turn_tokens: int = 256
    max_context: int = 2048
    env_timeout_s: float = 30.0


class Player:
    """Plays episodes of tickets. `build_env(sample)` makes an environment; `episode_reward(env)` judges it at the end
    (None: the sum of the turns' rewards)."""

    def __init__(
        self,
        build_env: BuildEnv,
        renderer: Renderer,
        engines: EnginePool,
        limits: EpisodeLimits,
        threads: EnvThreads,
        episode_reward: EpisodeReward | None = None,
    ) -> None:
        self.build_env, self.renderer, self.engines = build_env, renderer, engines
        self.limits, self.threads, self.episode_reward = limits, threads, episode_reward

    async def play(self, ticket: Ticket, index: int = 0) -> Trajectory:
        """Episode `index` of the ticket's group, on one engine from start to end."""
        try:
            async with self.engines.lease() as client:
                return await _Episode(self, client, ticket, index).play()
        except EngineError as error:  # no engine to begin with
            return Stream().trajectory((), Ending.ENGINE_ERROR, error=str(error))


class _Stop(Exception):
    """Ends an episode."""

    def __init__(self, ending: Ending, error: str = "") -> None:
        super().__init__(error)
        self.ending, self.error = ending, error


class _Episode:
    """The state of one episode while it is played."""

    def __init__(self, player: Player, client: EngineClient, ticket: Ticket, index: int) -> None:
        self._player, self._client, self._ticket, self._index = player, client, ticket, index
        self._renderer, self._limits = player.renderer, player.limits
        self._stream = Stream()
        self._env: Any = None
        self._turns: list[Turn] = []
        self._turn_metrics: dict[str, list[float]] = {}
        self._last_metrics: dict[str, float] = {}
        self._generate_s = self._env_s = 0.0

    async def play(self) -> Trajectory:
        try:
            self._stream.observe(await self._in_env(self._start))
            while True:
                await self._turn()
        except _Stop as stop:
            ending, error = stop.ending, stop.error
        reward = sum(turn.reward for turn in self._turns)
        if ending in TRAINABLE_ENDINGS and self._player.episode_reward is not None:
            try:
                reward = await self._judge(self._player.episode_reward)
            except _Stop as stop:
                ending, error = stop.ending, stop.error
        await self._close()
        return self._trajectory(ending, error, reward)

    async def _turn(self) -> None:
        """The policy writes, the environment answers. Raises _Stop at the episode's end."""
        completion = await self._generate()
        start = len(self._stream.token_ids)
        self._stream.sample(completion)
        if completion.token_ids:
            self._turns.append(Turn(start, len(self._stream.token_ids), 0.0))
        if completion.finish_reason == "abort":
            raise _Stop(Ending.ABORTED, f"{self._client.url} aborted the request")
        if completion.finish_reason == "length":
            full = self._stream.num_expanded >= self._limits.max_context
            raise _Stop(Ending.CONTEXT_FULL if full else Ending.OUT_OF_TOKENS)
        text = self._renderer.decode(completion.token_ids)
        fragment, reward = await self._in_env(lambda: self._step(text))
        self._turns[-1] = Turn(start, len(self._stream.token_ids), reward)
        if fragment is None:
            raise _Stop(Ending.COMPLETED)
        if len(self._turns) >= self._limits.max_turns:
            raise _Stop(Ending.MAX_TURNS)
        if completion.token_ids[-1] != self._renderer.end_id:  # another stop token: the template's own is owed
            fragment = Fragment((self._renderer.end_id, *fragment.token_ids), fragment.images, fragment.image_tokens)
        if self._stream.num_expanded + fragment.num_expanded >= self._limits.max_context:
            raise _Stop(Ending.CONTEXT_FULL)
        self._stream.observe(fragment)

    async def _generate(self) -> Completion:
        limits, sampling = self._limits, self._ticket.sampling
        if self._stream.num_expanded >= limits.max_context:
            raise _Stop(Ending.CONTEXT_FULL)
        budget = limits.max_tokens - self._stream.num_sampled
        if budget < 1:
            raise _Stop(Ending.OUT_OF_TOKENS)
        room = limits.max_context - self._stream.num_expanded
        began = time.monotonic()
        try:
            completion = await self._client.generate(
                self._stream.token_ids,
                self._stream.images,
                sampling,
                banned_ids=self._renderer.banned_ids,
                stop_ids=(self._renderer.end_id,),
                max_new_tokens=min(room, budget, limits.turn_tokens, sampling.max_new_tokens),
                seed=self._seed(),
            )
        except EngineError as error:
            raise _Stop(Ending.ENGINE_ERROR, str(error)) from error
        self._generate_s += time.monotonic() - began
        if not set(completion.token_ids).isdisjoint(self._renderer.banned_ids):
            raise _Stop(Ending.ENGINE_ERROR, f"{self._client.url} sampled a banned vision token")
        return completion

    def _seed(self) -> int | None:
        """Own to each turn; None leaves it to the engine when the ticket has none."""
        if not self._ticket.seed:
            return None
        return (self._ticket.seed * 1_000_003 + self._index * 1009 + len(self._turns)) % 2**31

    # ------------------------------------------------------------------ in an environment's thread

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
        reward = _finite(info.get("reward", 0.0))
        self._note(info.get("metrics") or {})
        if done:
            return None, reward
        return self._renderer.observation(self._env.format_observation(observation)), reward

    def _note(self, metrics: Mapping[str, Any]) -> None:
        """`turn_metrics` are averaged over the turns; of all others the last value counts."""
        for name, value in metrics.items():
            if name == "turn_metrics":
                for key, number in value.items():
                    self._turn_metrics.setdefault(key, []).append(float(number))
            elif isinstance(value, Mapping):
                self._last_metrics.update({key: float(number) for key, number in value.items()})
            else:
                self._last_metrics[name] = float(value)

    # ------------------------------------------------------------------ around the environment

    async def _in_env(self, function: Callable[[], Any]) -> Any:
        began = time.monotonic()
        try:
            return await self._player.threads.run(function, self._limits.env_timeout_s)
        except EnvTimeout as error:
            raise _Stop(Ending.ENV_TIMEOUT, str(error)) from error
        except _BadReward as error:
            raise _Stop(Ending.REWARD_ERROR, str(error)) from error
        except Exception as error:
            raise _Stop(Ending.ENV_ERROR, f"{type(error).__name__}: {error}") from error
        finally:
            self._env_s += time.monotonic() - began

    async def _judge(self, episode_reward: EpisodeReward) -> float:
        try:
            return await self._player.threads.run(
                lambda: _finite(episode_reward(self._env)), self._limits.env_timeout_s
            )
        except (EnvTimeout, TimeoutError) as error:
            raise _Stop(Ending.REWARD_TIMEOUT, str(error)) from error
        except Exception as error:
            raise _Stop(Ending.REWARD_ERROR, f"{type(error).__name__}: {error}") from error

    async def _close(self) -> None:
        close = getattr(self._env, "close", None)
        if close is not None:
            try:
                await self._in_env(close)
            except _Stop as stop:
                self._last_metrics["close_failed"] = 1.0 if stop.error else 0.0

    def _trajectory(self, ending: Ending, error: str, reward: float) -> Trajectory:
        stream = self._stream
        metrics = {name: sum(values) / len(values) for name, values in self._turn_metrics.items()}
        metrics |= self._last_metrics
        metrics |= {
            "turns": float(len(self._turns)),
            "model_tokens": float(stream.num_sampled),
            "expanded_tokens": float(stream.num_expanded),
            "generate_s": self._generate_s,
            "env_s": self._env_s,
        }
        text = self._renderer.transcript(stream.token_ids)
        return stream.trajectory(self._turns, ending, reward=reward, metrics=metrics, text=text, error=error)


class _BadReward(ValueError):
    """A reward that is no finite number."""


def _finite(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise _BadReward(f"the reward is {value!r}, not a finite number")
    return number
