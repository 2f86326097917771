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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from actor.agents.agent_endpoint import AgentEndpoint
from actor.agents.agent_episode import Agent, AgentPlayer
from actor.agents.agent_program import Program
from actor.custom_rollout import Rollout, RolloutContext, play_custom
from actor.descriptions import EnvMetrics, LeftOutLog, describable
from actor.engine_pool import EnginePool
from actor.env_threads import EnvCalls, EnvThreads, EnvTimeout
from actor.episode import EpisodeLimits, Stream, TurnTimings, cache_key, episode_seed, process_of
from actor.history import History, Shown
from actor.journal import EngineAnswer, Journal
from actor.render import Fragment, Renderer
from actor.rewards import BadReward, Reward, finite, rewarded
from actor.turn_sampler import EpisodeEnded, TurnPolicy, TurnSampler
from envs.base import Info, Played
from envs.env_calls import close_env, messages_of, reset_env, step_env
from envs.messages import split_images
from shared.engine.engine_api import EngineError
from shared.spans import ENVIRONMENTS, add_span, span
from shared.types import Completion, Ending, Image, Sample, Ticket, Trajectory, Turn
from shared.util.user_errors import TracebackLog, describe

log = logging.getLogger("actor")
BuildEnv = Callable[[Sample], Any]


class Player:
    """Plays episodes of tickets. `build_env(sample)` makes an environment; `reward_function` computes the episode's
    reward at the end (None: the sum of the turns' rewards). A `rollout` function, if there is one, plays the whole
    episode instead and gets `env_args`; with an `endpoint` an `agent` does so through it, or, without one, an agent
    elsewhere. Answers are recorded in the `journal`; those that it already holds are replayed first."""

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
        agent: Agent | Program | None = None,
        endpoint: AgentEndpoint | None = None,
    ) -> None:
        self.build_env = build_env
        self.renderer = renderer
        self.engines = engines
        self.limits = limits
        self.threads = threads
        self.reward_function = reward_function
        self.rollout = rollout
        self.env_args = env_args or {}
        self.journal = journal
        self.tracebacks = TracebackLog(log)
        self._left_out = LeftOutLog()
        self._agents: AgentPlayer | None = None
        if endpoint is not None:
            assert reward_function is not None
            self._agents = AgentPlayer(
                agent, endpoint, self.env_args, renderer, limits, threads, reward_function, self.tracebacks
            )

    async def play(self, ticket: Ticket, index: int = 0) -> Trajectory:
        """Play episode `index` of the ticket's group, on one engine from start to end, unless that engine fails."""
        self.engines.newest.update(ticket.version, process_of(ticket))
        try:
            async with self.engines.lease() as lease:
                if self.rollout is not None:
                    context = RolloutContext(
                        ticket.sample,
                        ticket.sampling,
                        episode_seed(ticket, index, 0) or 0,
                        lease,
                        self.renderer,
                        self.limits,
                        self.env_args,
                        self.threads,
                    )
                    lease.cache_key = cache_key(ticket, lease.client.weights)
                    trajectory = await play_custom(self.rollout, context, self.tracebacks)
                    metrics = EnvMetrics()
                    metrics.add(trajectory.metrics)
                    trajectory = replace(trajectory, metrics=metrics.values())
                elif self._agents is not None:
                    trajectory, metrics = await self._agents.play(lease, ticket, index)
                else:
                    sampler = TurnSampler(lease, ticket, index, self.renderer, self.limits)
                    episode = OpenEpisode(self, sampler, ticket, index)
                    trajectory, metrics = await episode.play(), episode.metrics
        except EngineError as error:  # no engine was available
            return Stream().trajectory((), Ending.ENGINE_ERROR, error=str(error))
        except Exception as error:
            # An episode's own failures are its endings: this is a value of the user's that nobody foresaw. It costs the
            # episode, not the actor with all its open episodes.
            log.exception("an episode of ticket %s broke off", ticket.id)
            return Stream().trajectory((), Ending.ENV_ERROR, error=describe(error))
        trajectory, left_out = describable(trajectory)
        left_out |= metrics.left_out
        self._left_out.add(left_out)
        described = {"engine_retries": float(lease.retries), "metrics_left_out": float(len(left_out))}
        return replace(trajectory, metrics=trajectory.metrics | described)


class Players:
    """Plays the episodes of several tasks, each sample's by its task's player. `players`: by name of the task; one
    without a name plays all; `endpoint`: what their agents call."""

    def __init__(self, players: Mapping[str, Player], endpoint: AgentEndpoint | None = None) -> None:
        self.players = players
        self._endpoint = endpoint

    async def play(self, ticket: Ticket, index: int = 0) -> Trajectory:
        """Play episode `index` of the ticket's group; one of an unknown task ends as `env_error`."""
        player = self.players.get("") or self.players.get(ticket.sample.task)
        if player is None:
            why = f"this actor has no task {ticket.sample.task!r}; start it with the learner's recipe"
            return Stream().trajectory((), Ending.ENV_ERROR, error=why)
        return await player.play(ticket, index)

    async def listen(self) -> None:
        """Begin to listen for agents elsewhere, if they play. Raise ValueError if the address cannot be had."""
        if self._endpoint is not None:
            await self._endpoint.listen()

    async def close(self, within_s: float) -> None:
        """Wait at most `within_s` for calls of cancelled episodes, and free what the rewards hold."""
        for threads in {id(player.threads): player.threads for player in self.players.values()}.values():
            await threads.settle(within_s)
        for player in self.players.values():
            if player.reward_function is not None:
                await player.reward_function.close()
        if self._endpoint is not None:
            await self._endpoint.close()


def hint_in(info: Any) -> str:
    """Return what an environment's info tells a teacher alone. Raise ValueError for another thing than a text."""
    hint = info.get("hint", "") if isinstance(info, Mapping) else ""
    if not isinstance(hint, str):
        raise ValueError(f"info['hint'] is {type(hint).__name__}, not a text")
    return hint


class OpenEpisode:
    """The state of one episode while it is played. Its methods raise `EpisodeEnded` when the episode is over."""

    def __init__(self, player: Player, sampler: TurnPolicy, ticket: Ticket, index: int) -> None:
        self._player = player
        self._ticket = ticket
        self._index = index
        self._renderer = player.renderer
        self._limits = player.limits
        self._sampler = sampler
        self._stream = Stream()
        self._history = History(player.renderer, ticket.sample, player.limits.window)
        self._env: Any = None
        self._calls = EnvCalls(self._close_env)
        self._turns: list[Turn] = []
        self._state = ""  # key of the environment's state
        self._answers: list[str] = []
        self._observations: list[tuple[dict[str, Any], ...]] = []
        self._images: list[tuple[Image, ...]] = []  # of each observation
        self._infos: list[Info] = []
        self.metrics = EnvMetrics()
        self._generate_s = self._env_s = 0.0
        self._timings = TurnTimings()
        # The next one is last, for pop().
        self._recorded_answers = player.journal.answers(ticket.id, index)[::-1] if player.journal else []
        self._replayed, self._differed = 0, False

    async def play(self) -> Trajectory:
        """Play the turns (see the diagram at the top), then compute the reward of the whole episode."""
        try:
            shown = await self._in_env(self._start)
            while True:
                with span("turn", note=f"{len(self._answers) + 1}"):
                    self._show(shown)
                    completion = self._replay(shown.fragment) or await self._generate(shown.fragment)
                    text = self._sample(completion)
                    shown = await self._answer(text, completion)
        except EpisodeEnded as end:
            trajectory = self._trajectory(end)
        except asyncio.CancelledError:
            if self._calls.give_up():
                self._player.threads.run_unwatched(self._close_env, self._limits.env_timeout_s)
            raise
        return await self._player.threads.to_its_end(self._finish(trajectory))

    # ------------------------------------------------------------------ one turn

    def _show(self, shown: Shown) -> None:
        self._images.append(shown.fragment.images)
        if shown.segment:
            self._stream.begin_segment()
        for part in shown.parts:
            self._stream.observe(part)

    def _replay(self, fragment: Fragment) -> Completion | None:
        """Return the engine's answer recorded before this actor was restarted, as long as the environment shows the
        same as then. At the first difference, drop the remaining recorded answers and return None."""
        if not self._recorded_answers:
            return None
        answer = self._recorded_answers.pop()
        if answer.seen == fragment.digest:
            self._replayed += 1
            return answer.completion
        self._differed = True
        self._recorded_answers.clear()
        return None

    async def _generate(self, fragment: Fragment) -> Completion:
        """Return the policy's answer to `fragment`, within the limits of turn, episode and context."""
        most = self._sampler.most_tokens(self._stream, self._stream.num_sampled)
        began = time.monotonic()
        completion = await self._sampler.generate(self._stream, len(self._turns), most)
        answered = time.monotonic()
        self._generate_s += answered - began
        self._timings.record_answer(began, answered)
        if self._player.journal and completion.finish_reason != "abort":
            answer = EngineAnswer(self._index, len(self._answers), fragment.digest, completion)
            self._player.journal.add(self._ticket.id, answer)
        return completion

    def _sample(self, completion: Completion) -> str:
        """Append the policy's answer to the stream; return its text. Raise `EpisodeEnded` if the answer was cut off or
        aborted."""
        start = len(self._stream.token_ids)
        self._stream.sample(completion)
        if completion.token_ids:
            self._turns.append(Turn(start, len(self._stream.token_ids), 0.0, self._state))
            self._timings.record_turn()
        self._answers.append(self._sampler.text(completion))
        self._sampler.check_finish(completion, self._stream)
        return self._answers[-1]

    async def _answer(self, text: str, completion: Completion) -> Shown:
        """Return the environment's reply to `text`, as what the model is shown next."""
        shown, reward = await self._in_env(lambda: self._step(text, completion.token_ids))
        self._turns[-1] = replace(self._turns[-1], reward=reward)
        if shown is None:
            raise EpisodeEnded(Ending.COMPLETED)
        if len(self._turns) >= self._limits.max_turns:
            raise EpisodeEnded(Ending.MAX_TURNS)
        read = 0 if shown.segment else self._stream.num_expanded
        if read + sum(part.num_expanded for part in shown.parts) >= self._limits.max_context:
            raise EpisodeEnded(Ending.CONTEXT_FULL)
        return shown

    # ------------------------------------------------------------------ in an environment's thread

    async def _in_env(self, function: Callable[[], Any]) -> Any:
        """Run a function of the environment in a thread; a failure ends the episode."""
        began = time.monotonic()
        try:
            call = self._calls.guarded(self._timings.timed(function))
            return await self._player.threads.run(call, self._limits.env_timeout_s)
        except EnvTimeout as error:
            raise EpisodeEnded(Ending.ENV_TIMEOUT, str(error)) from error
        except BadReward as error:
            raise EpisodeEnded(Ending.REWARD_ERROR, str(error)) from error
        except Exception as error:
            self._player.tracebacks.add("an environment", error)
            raise EpisodeEnded(Ending.ENV_ERROR, describe(error)) from error
        finally:
            returned = time.monotonic()
            self._env_s += returned - began
            entered = self._timings.record_call(began, returned)
            add_span("wait for a thread", began, entered)
            name = "environment step" if self._turns else "environment reset"
            add_span(name, entered, returned, place=ENVIRONMENTS)

    def _start(self) -> Shown:
        sample = self._ticket.sample
        self._env = self._player.build_env(sample)
        observation, info = reset_env(self._env)
        if isinstance(info, Mapping):
            self.metrics.add(info.get("metrics"), is_turn=False)
            self._state = info.get("state", "")
        messages = messages_of(self._env, observation) if observation else []
        self._keep([*sample.prompt, *messages], sample.images)
        self._sampler.shown(messages)
        return self._history.start(messages, hint_in(info))

    def _step(self, text: str, answer: Sequence[int]) -> tuple[Shown | None, float]:
        """Return the next observation (None = the episode is over) and the turn's reward."""
        observation, done, info = step_env(self._env, text)
        reward = finite(info.get("reward", 0.0))
        self._infos.append(info)
        self._state = info.get("state", "")
        self.metrics.add(info.get("metrics"))
        if done:
            return None, reward
        messages = messages_of(self._env, observation)
        self._keep(messages)
        self._sampler.shown(messages)
        return self._history.observe(answer, messages, hint_in(info)), reward

    def _keep(self, messages: Sequence[dict[str, Any]], images: Sequence[Image] = ()) -> None:
        """Keep the texts of an observation, for the reward."""
        plain, _ = split_images(messages, iter(images))
        self._observations.append(tuple(plain))

    # ------------------------------------------------------------------ after the last turn

    def _trajectory(self, end: EpisodeEnded) -> Trajectory:
        stream = self._stream
        metrics = self.metrics.values() | {
            "turns": float(len(self._turns)),
            "model_tokens": float(stream.num_sampled),
            "expanded_tokens": float(stream.all_expanded),
            "generate_s": self._generate_s,
            "env_s": self._env_s,
            "replayed_turns": float(self._replayed),
            "replay_differed": float(self._differed or bool(self._recorded_answers)),
        }
        reward, text = sum(turn.reward for turn in self._turns), self._renderer.transcript(stream.token_ids)
        trajectory = stream.trajectory(self._turns, end.ending, reward=reward, metrics=metrics, text=text)
        notes = self._timings.notes(self._infos)
        return replace(trajectory, error=end.error, notes=notes, started=self._timings.started)

    async def _finish(self, trajectory: Trajectory) -> Trajectory:
        """Compute the reward of the whole episode, which may use the environment, then close the environment."""
        if trajectory.trainable and self._player.reward_function is not None:
            trajectory = await self._rewarded(trajectory, self._player.reward_function)
        if not await self._close():
            trajectory = replace(trajectory, metrics=trajectory.metrics | {"close_failed": 1.0})
        return trajectory

    async def _rewarded(self, trajectory: Trajectory, reward_function: Reward) -> Trajectory:
        """Return the trajectory with the reward of `reward_function`; a failure of that function becomes the ending."""
        infos, answers = tuple(self._infos), tuple(self._answers)
        shown = tuple(self._observations[: len(answers)])
        images = tuple(image for images in self._images[: len(answers)] for image in images)
        played = Played(self._ticket.sample, trajectory, answers, infos, self._env, shown, images)
        with span("reward"):
            return await rewarded(trajectory, played, reward_function, self._player.tracebacks)

    async def _close(self) -> bool:
        """Close the environment, unless it is still being built; return False if that failed."""
        building = self._env is None and not self._calls.give_up()
        if building or self._env is None:
            return True
        try:
            await self._player.threads.run(self._close_env, self._limits.env_timeout_s)
        except Exception as error:  # noqa: BLE001 - whatever the user's function raises
            log.warning("an environment's close failed: %s", describe(error))
            return False
        return True

    def _close_env(self) -> None:
        env, self._env = self._env, None
        close_env(env)
