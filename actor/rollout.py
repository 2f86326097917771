"""One episode: environment and policy take turns until an ending.

    env ──message──▶ renderer ──tokens──▶ stream ──▶ engine ──sampled tokens──▶ stream
     ▲                                                  │
     └────────────────────── text ◀─────────────────────┘

What goes wrong in an episode is its ending and its `error`, never an exception. T = tokens of the compact stream.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from actor.client import EngineClient, EngineError, EnginePool
from actor.custom_rollout import Rollout, RolloutContext, play_custom
from actor.env_threads import EnvThreads, EnvTimeout
from actor.render import Fragment, Renderer
from actor.rewards import BadReward, Reward, finite
from actor.stream import Stream
from envs.base import Info, Played
from shared.types import Completion, Ending, Sample, Ticket, Trajectory, Turn

log = logging.getLogger("actor")
BuildEnv = Callable[[Sample], Any]


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """`max_tokens` and `turn_tokens` count sampled tokens, `max_context` all of them with images expanded."""

    max_turns: int = 8
    max_tokens: int = 1536
    turn_tokens: int = 256
    max_context: int = 2048
    env_timeout_s: float = 30.0
    rollout_timeout_s: float = 600.0  # of a rollout function of the user's own


class Player:
    """Plays episodes of tickets. `build_env(sample)` makes an environment; `judge` says at the end what the episode was
    worth (None: the sum of the turns' rewards). A `rollout` function plays it all by itself, and knows `env_args`."""

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
    ) -> None:
        self.build_env, self.renderer, self.engines = build_env, renderer, engines
        self.limits, self.threads, self.reward_function = limits, threads, reward_function
        self.rollout, self.env_args = rollout, env_args or {}

    async def play(self, ticket: Ticket, index: int = 0) -> Trajectory:
        """Episode `index` of the ticket's group, on one engine from start to end."""
        try:
            async with self.engines.lease() as client:
                if self.rollout is not None:
                    return await play_custom(self.rollout, self._context(client, ticket, index))
                return await _Episode(self, client, ticket, index).play()
        except EngineError as error:  # no engine to begin with
            return Stream().trajectory((), Ending.ENGINE_ERROR, error=str(error))

    def _context(self, client: EngineClient, ticket: Ticket, index: int) -> RolloutContext:
        return RolloutContext(
            sample=ticket.sample,
            sampling=ticket.sampling,
            seed=episode_seed(ticket, index, 0) or 0,
            engine=client,
            renderer=self.renderer,
            limits=self.limits,
            env_args=self.env_args,
            threads=self.threads,
        )


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
        self._answers: list[str] = []
        self._infos: list[Info] = []
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
        trajectory = self._trajectory(ending, error)
        if trajectory.trainable and self._player.reward_function is not None:
            try:
                trajectory = await self._rewarded(trajectory, self._player.reward_function)
            except _Stop as stop:
                trajectory = replace(trajectory, ending=stop.ending, error=stop.error)
        if not await self._close():
            trajectory = replace(trajectory, metrics=trajectory.metrics | {"close_failed": 1.0})
        return trajectory

    async def _turn(self) -> None:
        """The policy writes, the environment answers. Raises _Stop at the episode's end."""
        completion = await self._generate()
        start = len(self._stream.token_ids)
        self._stream.sample(completion)
        if completion.token_ids:
            self._turns.append(Turn(start, len(self._stream.token_ids), 0.0))
        self._answers.append(self._renderer.decode(completion.token_ids))
        if completion.finish_reason == "abort":
            raise _Stop(Ending.ABORTED, f"{self._client.url} aborted the request")
        if completion.finish_reason == "length":
            full = self._stream.num_expanded >= self._limits.max_context
            raise _Stop(Ending.CONTEXT_FULL if full else Ending.OUT_OF_TOKENS)
        text = self._answers[-1]
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
                seed=episode_seed(self._ticket, self._index, len(self._turns)),
                cache_key=f"version {self._ticket.version}",  # what older weights made of the same start is not used
            )
        except EngineError as error:
            raise _Stop(Ending.ENGINE_ERROR, str(error)) from error
        self._generate_s += time.monotonic() - began
        if not set(completion.token_ids).isdisjoint(self._renderer.banned_ids):
            raise _Stop(Ending.ENGINE_ERROR, f"{self._client.url} sampled a banned vision token")
        return completion

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
        reward = finite(info.get("reward", 0.0))
        self._infos.append(info)
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
        except BadReward as error:
            raise _Stop(Ending.REWARD_ERROR, str(error)) from error
        except Exception as error:
            raise _Stop(Ending.ENV_ERROR, f"{type(error).__name__}: {error}") from error
        finally:
            self._env_s += time.monotonic() - began

    async def _rewarded(self, trajectory: Trajectory, reward_function: Reward) -> Trajectory:
        """The trajectory with the judge's reward."""
        infos, answers = tuple(self._infos), tuple(self._answers)
        began = time.monotonic()
        try:
            reward = await reward_function(Played(self._ticket.sample, trajectory, answers, infos, self._env))
        except (EnvTimeout, TimeoutError) as error:
            raise _Stop(Ending.REWARD_TIMEOUT, str(error) or "the reward took too long") from error
        except Exception as error:
            raise _Stop(Ending.REWARD_ERROR, f"{type(error).__name__}: {error}") from error
        metrics = trajectory.metrics | {"reward_s": time.monotonic() - began}
        turns = trajectory.turns
        if reward_function.replaces_turns:
            turns = (*(replace(turn, reward=0.0) for turn in turns[:-1]), replace(turns[-1], reward=reward))
        return replace(trajectory, reward=reward, metrics=metrics, turns=turns)

    async def _close(self) -> bool:
        """Closes the environment; false if that failed."""
        close = getattr(self._env, "close", None)
        if close is None:
            return True
        try:
            await self._in_env(close)
        except _Stop as stop:
            log.warning("an environment's close failed: %s", stop.error)
            return False
        return True

    def _trajectory(self, ending: Ending, error: str) -> Trajectory:
        stream = self._stream
        reward = sum(turn.reward for turn in self._turns)
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


def episode_seed(ticket: Ticket, index: int, turn: int) -> int | None:
    """Own to each turn of each episode; None leaves it to the engine when the ticket has none."""
    return (ticket.seed * 1_000_003 + index * 1009 + turn) % 2**31 if ticket.seed else None
