"""Episodes that an agent of the user's plays: a function (`rollout.agent`) or a program (`rollout.command`) that gets
the base URL of an endpoint with OpenAI's API and Anthropic's, calls the policy there as often as it likes, and returns
the episode's reward."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from actor.agents.agent_endpoint import AgentEndpoint, secret_of
from actor.agents.agent_program import Program, ProgramCall
from actor.agents.agent_session import AgentSession
from actor.agents.agent_thread import AgentThread
from actor.agents.branches import AgentTurn
from actor.agents.remote_agents import AgentFailed, RemoteCall, Reported
from actor.descriptions import EnvMetrics
from actor.engine_pool import EngineLease
from actor.env_threads import EnvThreads
from actor.episode import EpisodeLimits, Stream
from actor.render import Renderer
from actor.rewards import BadReward, Graded, Reward, number_or_turns, rewarded
from actor.turn_sampler import EpisodeEnded, TurnSampler
from envs.base import Info, Played
from envs.messages import split_images
from shared.types import TRAINABLE_ENDINGS, Ending, Ticket, Trajectory, Turn, TurnNote
from shared.util.user_errors import TracebackLog, describe, text_of

Agent = Callable[[str, Any, dict[str, Any]], Any]
"""`run(base_url, sample, args)`, plain or async; returns the episode's reward, a list with one for each answer of the
policy, or None."""


@dataclass(frozen=True, slots=True)
class Returned:
    """What an agent returned: its reward, or those of the turns, if it gave any; `why` not, if it did not. `is_cut`: a
    limit of the episode ended it before it could."""

    reward: float | tuple[float, ...] | None = None
    is_cut: bool = False
    metrics: Mapping[str, Any] = field(default_factory=dict)
    why: str = "the agent returned None"


class AgentReward(Reward):
    """The reward that an agent returned; without one, that of `other`. `is_judged`: a judge grades the
    episode besides, so that it needs no other reward."""

    replaces_turns = True

    def __init__(self, other: Reward | None, *, is_judged: bool = False) -> None:
        self._other, self._is_judged = other, is_judged

    async def __call__(self, played: Played) -> float | Graded:
        returned = played.env
        assert isinstance(returned, Returned)
        if isinstance(returned.reward, tuple):
            return Graded(sum(returned.reward), returned.reward, {})
        if returned.reward is not None:
            return returned.reward
        if self._other is not None:
            graded = await self._other(replace(played, env=None))
            assert isinstance(graded, float)
            return graded
        if self._is_judged or returned.is_cut:
            return 0.0
        raise BadReward(
            f"{returned.why}, and the recipe names no other reward: give a number at the end, or set env.reward"
        )

    async def close(self) -> None:
        if self._other is not None:
            await self._other.close()


@dataclass(frozen=True, slots=True)
class AgentPlayer:
    """Plays the episodes of one task with the agent's function or program `run`, which gets `args`; None: with agents
    elsewhere, of the endpoint."""

    run: Agent | Program | None
    endpoint: AgentEndpoint
    args: dict[str, Any]
    renderer: Renderer
    limits: EpisodeLimits
    threads: EnvThreads
    reward: Reward
    tracebacks: TracebackLog

    async def play(self, lease: EngineLease, ticket: Ticket, index: int) -> tuple[Trajectory, EnvMetrics]:
        """Play episode `index` of the ticket; return it and the metrics that its agent has given. A failure is its
        ending, never an exception."""
        sampler = TurnSampler(lease, ticket, index, self.renderer, self.limits)
        session = AgentSession(sampler, self.renderer, self.limits)
        base_url = await self.endpoint.open(session)
        returned, end = Returned(), EpisodeEnded(Ending.COMPLETED)
        try:
            returned = await self._returned(base_url, session, ticket)
            end = session.failure or end
        except EpisodeEnded as failure:
            end = failure
            returned = Returned(is_cut=end.ending in TRAINABLE_ENDINGS)
        finally:
            self.endpoint.end(base_url)
        if end.ending in TRAINABLE_ENDINGS and not len(session.branches):
            refused = f"; its last request was refused: {session.last_refusal}" if session.last_refusal else ""
            end = EpisodeEnded(Ending.ENV_ERROR, f"the agent returned without an answer of the model's{refused}")
        metrics = EnvMetrics()
        metrics.add(returned.metrics)
        trajectory = await self.threads.to_its_end(self._finished(session, ticket, returned, end))
        return msgspec.structs.replace(trajectory, metrics=metrics.values() | trajectory.metrics), metrics

    async def _returned(self, base_url: str, session: AgentSession, ticket: Ticket) -> Returned:
        """Call the agent and return its result. Raise EpisodeEnded if it fails, or takes too long."""
        call = self._call(base_url, ticket)
        try:
            if isinstance(call, RemoteCall):
                await self._leased(call, session)
            await self._wait(call, session)
        except BaseException as error:
            session.close()
            call.give_up()
            if isinstance(call, ProgramCall) and isinstance(error, EpisodeEnded):
                raise EpisodeEnded(error.ending, f"{error.error}{await call.last_words()}") from None
            raise
        try:
            value = call.waiting.result()
        except Exception as error:
            if session.failure is not None:  # most agents leave a limit's error to whoever has called them
                raise session.failure from error
            if isinstance(call, ProgramCall) and isinstance(error, BadReward):
                raise EpisodeEnded(Ending.REWARD_ERROR, text_of(error)) from error
            if not isinstance(call, RemoteCall):
                self.tracebacks.add("the agent", error)
            words = text_of(error) if isinstance(error, AgentFailed) else describe(error)
            raise EpisodeEnded(Ending.ENV_ERROR, words) from error
        if isinstance(value, Reported):
            return Returned(value.reward, metrics=value.metrics, why=value.why)
        if value is None:
            return Returned()
        try:
            return Returned(number_or_turns(value))
        except BadReward as error:
            raise EpisodeEnded(Ending.REWARD_ERROR, f"{error}; the agent has to return one, or None") from error

    def _call(self, base_url: str, ticket: Ticket) -> AgentThread | ProgramCall | RemoteCall:
        run, secret = self.run, secret_of(base_url)
        if isinstance(run, Program):
            assert self.endpoint.results is not None
            return ProgramCall(run, base_url, ticket, self.args, self.endpoint.results.expect(secret))
        if run is not None:
            return AgentThread(lambda: run(base_url, ticket.sample, self.args), self.threads)
        assert self.endpoint.remote is not None
        return self.endpoint.remote.offer(secret, ticket, self.args)

    async def _leased(self, call: RemoteCall, session: AgentSession) -> None:
        """Wait until an agent elsewhere has leased the episode. Raise EpisodeEnded if none does in time."""
        within_s = self.limits.rollout_timeout_s
        try:
            async with asyncio.timeout(within_s):
                await call.leased.wait()
        except TimeoutError:
            words = f"no agent elsewhere asked for an episode within {within_s:g} s: are any running?"
            raise EpisodeEnded(Ending.AGENT_GONE, words) from None
        session.begin()

    async def _wait(self, call: AgentThread | ProgramCall | RemoteCall, session: AgentSession) -> None:
        """Wait until the function has returned, the program has ended, or the agent has posted its result. Raise
        EpisodeEnded if that does not happen within the episode's time, or if the agent neither ends nor calls the model
        for the time that an environment has for a step."""
        whole_s, quiet_s = self.limits.rollout_timeout_s, self.limits.env_timeout_s
        while True:
            now = time.monotonic()
            left_s = session.began + whole_s - now
            left_quiet_s = session.quiet_since + quiet_s - now if session.is_quiet else quiet_s
            if left_s <= 0:
                raise EpisodeEnded(Ending.ENV_TIMEOUT, f"the agent did not return within {whole_s:g} s")
            if left_quiet_s <= 0 and isinstance(call, RemoteCall):
                words = f"the agent neither called nor posted its result within {quiet_s:g} s: its lease ran out"
                raise EpisodeEnded(Ending.AGENT_GONE, words)
            if left_quiet_s <= 0:
                words = f"the agent neither called the model nor returned within {quiet_s:g} s"
                raise EpisodeEnded(Ending.ENV_TIMEOUT, words)
            if (await asyncio.wait([call.waiting], timeout=min(left_s, left_quiet_s)))[0]:
                return

    async def _finished(
        self, session: AgentSession, ticket: Ticket, returned: Returned, end: EpisodeEnded
    ) -> Trajectory:
        """Return the episode with its reward."""
        trajectory = self._trajectory(session, end)
        if not trajectory.trainable:
            return trajectory
        turns = [turn for branch in session.branches for turn in branch.turns]
        if isinstance(returned.reward, tuple):
            if len(returned.reward) != len(turns):
                words = f"{len(returned.reward)} rewards for {len(turns)} answers: give one for each, or one number"
                return msgspec.structs.replace(trajectory, ending=Ending.REWARD_ERROR, error=words)
            asked = dict(zip(sorted(turn.number for turn in turns), returned.reward, strict=True))
            returned = replace(returned, reward=tuple(asked[turn.number] for turn in turns))
        shown = [split_images([message.shown for message in turn.observed], iter(()))[0] for turn in turns]
        images = tuple(image for turn in turns for image in turn.images)
        answers = tuple(turn.text for turn in turns)
        infos: tuple[Info, ...] = tuple({} for _ in turns)
        played = Played(ticket.sample, trajectory, answers, infos, returned, tuple(map(tuple, shown)), images)
        return await rewarded(trajectory, played, self.reward, self.tracebacks)

    def _trajectory(self, session: AgentSession, end: EpisodeEnded) -> Trajectory:
        branches = [*session.branches]
        stream = Stream.of_segments([branch.stream for branch in branches])
        turns: list[Turn] = []
        for start, branch in zip((0, *stream.segments), branches, strict=False):
            turns += [Turn(start + turn.start, start + turn.end, 0.0) for turn in branch.turns]
        played_s = time.monotonic() - session.began
        metrics = {
            "turns": float(len(turns)),
            "model_tokens": float(stream.num_sampled),
            "expanded_tokens": float(stream.all_expanded),
            "generate_s": session.generate_s,
            "env_s": max(0.0, played_s - session.generate_s),
            "agent_segments": float(len(branches)),
            "agent_refused": float(session.num_refused),
        }
        text = self.renderer.transcript(stream.token_ids)
        trajectory = stream.trajectory(turns, end.ending, metrics=metrics, text=text, error=end.error)
        notes = notes_of([turn for branch in branches for turn in branch.turns], played_s)
        return msgspec.structs.replace(trajectory, notes=notes, started=session.started)


def notes_of(turns: list[AgentTurn], played_s: float) -> tuple[TurnNote, ...]:
    """Return where the time of each turn went: the agent's is that until the next turn is asked for, or the end."""
    begins = sorted(turn.begin_s for turn in turns)
    notes = []
    for turn in turns:
        answered = turn.begin_s + turn.generate_s
        after = next((begin for begin in begins if begin >= answered), max(played_s, answered))
        notes.append(TurnNote(turn.begin_s, turn.generate_s, 0.0, after - answered))
    return tuple(notes)
