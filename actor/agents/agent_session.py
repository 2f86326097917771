"""One episode's conversations with the policy: each call is placed in a branch, sampled within the episode's limits,
and kept as it was sampled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass

import msgspec

from actor.agents.branches import AgentTurn, Branches, Place, Prompt
from actor.agents.dialogues import ChatRequest, ReadRequest, Refused, SentImages
from actor.agents.said import Spoken, spoken
from actor.episode import EpisodeLimits, Stream, TurnTimings
from actor.render import Renderer
from actor.turn_sampler import EpisodeEnded, TurnSampler
from shared.types import Completion, Ending, VersionSpan
from shared.util.threads import in_thread
from shared.util.user_errors import describe

MAX_OPEN = 64  # calls of one session at once
STATUS = {  # of the answer to a call that meets a limit or a failure of the engine
    Ending.MAX_TURNS: (400, "max_turns", "the episode has had its env.max_turns"),
    Ending.OUT_OF_TOKENS: (400, "max_tokens", "the episode has had its env.max_tokens"),
    Ending.CONTEXT_FULL: (400, "context_length_exceeded", "the conversation does not fit in model.max_context"),
    Ending.ABORTED: (503, "engine_aborted", "the engine aborted the request"),
    Ending.ENGINE_ERROR: (503, "engine_error", "the engine has failed"),
}


@dataclass(frozen=True, slots=True)
class ChatReply:
    """An answer for the client. `tokens` are what was sampled, each as text with its log-probability."""

    number: int
    answer: Spoken
    finish_reason: str  # stop, length or tool_calls
    stopped_by: str  # the client's text before which the answer ends; "" if none of them ended it
    prompt_tokens: int
    tokens: tuple[tuple[str, float], ...]


class AgentSession:
    """The calls of one episode. `failure` is what the last call met, a limit or the engine's failure: the episode's
    ending, if no other call follows."""

    def __init__(self, sampler: TurnSampler, renderer: Renderer, limits: EpisodeLimits) -> None:
        self._sampler, self._renderer, self.limits = sampler, renderer, limits
        self._images = SentImages()
        self.branches = Branches(renderer)
        self.failure: EpisodeEnded | None = None
        self.num_refused = 0
        self.last_refusal = ""
        self.generate_s = 0.0
        self.began = self.quiet_since = time.monotonic()
        self.started = TurnTimings().started
        self._num_asked = self._num_turns = self._num_sampled = self._reserved = 0
        self._changed = asyncio.Condition()
        self._open: set[asyncio.Task[ChatReply]] = set()
        self._num_open = 0
        self._context = copy_context()  # of the episode, whose spans these calls are
        self.closed = False

    def renew(self) -> None:
        """Count the time in which the agent is quiet from now on."""
        self.quiet_since = time.monotonic()

    def begin(self) -> None:
        """Count all of the episode's time from now on: an agent has begun to play it."""
        self.began, self.started = time.monotonic(), TurnTimings().started
        self.renew()

    @property
    def is_quiet(self) -> bool:
        """True while no call is open, since `quiet_since`."""
        return not self._num_open

    async def answer(self, body: bytes, read: ReadRequest) -> tuple[ChatRequest, ChatReply]:
        """Return the policy's answer to a request, whose body is of the form that `read` reads. Raise Refused for one
        that cannot be served; nothing of it is kept then."""
        with self._counted():
            request = await in_thread(lambda: read(body, self._images))
            self._check_open()
            task = asyncio.create_task(self._answer(request), context=self._context)
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            try:
                return request, await task
            except EpisodeEnded as end:
                raise self._met(end) from end
            except asyncio.CancelledError:
                if self.closed and task.cancelled():
                    self._check_open()
                raise

    def close(self) -> None:
        """End the session, and the calls that are open."""
        self.closed = True
        for task in self._open:
            task.cancel()

    def refused(self, refusal: Refused) -> None:
        """Count a request that was answered with an error."""
        self.num_refused += 1
        self.last_refusal = str(refusal)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count an open call, for the time of which the agent is not quiet."""
        self._check_open()
        if self._num_open >= MAX_OPEN:
            raise Refused(429, "too_many_calls", f"{MAX_OPEN} calls of this episode are open: wait for one of them")
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            self.renew()

    def _check_open(self) -> None:
        if self.closed:
            raise ended()

    def _met(self, end: EpisodeEnded) -> Refused:
        """Note what a call has met; return the answer to it."""
        self.failure = end
        status, code, words = STATUS[end.ending]
        return Refused(status, code, end.error or words)

    async def _answer(self, request: ChatRequest) -> ChatReply:
        place = self.branches.place(request.dialogue)
        if self._num_turns >= self.limits.max_turns:
            raise EpisodeEnded(Ending.MAX_TURNS)
        # From here to the answer nobody else goes on with this branch, and no one else gets this turn.
        turn, self._num_asked = self._num_asked, self._num_asked + 1
        self._num_turns += 1
        place.branch.busy = True
        try:
            prompt = await self._prompt(place)
            return await self._sampled(request, place, prompt, turn)
        except BaseException:
            self._num_turns -= 1
            raise
        finally:
            place.branch.busy = False

    async def _prompt(self, place: Place) -> Prompt:
        try:
            return await in_thread(lambda: self.branches.prompt(place))
        except Exception as error:  # a chat template may raise anything
            words = str(error) if isinstance(error, ValueError) else describe(error)
            raise Refused(400, "invalid_messages", f"the messages cannot be shown to the model: {words}") from error

    async def _sampled(self, request: ChatRequest, place: Place, prompt: Prompt, turn: int) -> ChatReply:
        stream = prompt.stream
        most = await self._reserve(stream, request.most)
        try:
            asked = time.monotonic()
            completion = await self._sampler.generate(stream, turn, most)
            took = time.monotonic() - asked
            self.generate_s += took
            text = self._sampler.text(completion)
            if not completion.token_ids or completion.finish_reason == "abort":
                self._sampler.check_finish(completion, stream)
                raise EpisodeEnded(Ending.ENGINE_ERROR, "the engine answered without a token")
            completion, shown, stop = stopped(completion, text, request.stop, self._sampler.text)
            text = self._sampler.text(completion)
            prompt_tokens, start = stream.num_expanded, len(stream.token_ids)
            stream.sample(completion)
            answer = spoken(completion.token_ids, text, shown, with_tools=bool(request.dialogue.tools))
            end = len(stream.token_ids)
            begin = asked - self.began
            new = AgentTurn(turn, start, end, text, prompt.observed, prompt.images, begin, took)
            self.branches.commit(place, stream, answer, new)
            self._num_sampled += len(completion.token_ids)
            self._note_finish(completion, stream, is_clients=most == request.most)
        finally:
            self._reserved -= most
            async with self._changed:
                self._changed.notify_all()
        reason = "tool_calls" if answer.calls and completion.finish_reason == "stop" else completion.finish_reason
        tokens = self._tokens(completion) if request.logprobs else ()
        return ChatReply(turn, answer, reason, stop, prompt_tokens, tokens)

    async def _reserve(self, stream: Stream, wanted: int | None) -> int:
        """Return how many tokens the answer may have, and take them out of the episode's budget until it is there. Wait
        for answers that are being sampled, if their reservations leave less."""
        async with self._changed:
            while True:
                most = self._sampler.most_tokens(stream, self._num_sampled)
                most = most if wanted is None else min(most, wanted)
                if not self._reserved or self._num_sampled + self._reserved + most <= self.limits.max_tokens:
                    self._reserved += most
                    return most
                await self._changed.wait()

    def _note_finish(self, completion: Completion, stream: Stream, *, is_clients: bool) -> None:
        """Note whether a limit has cut off the answer: one of the episode's, not the client's own."""
        self.failure = None
        if completion.finish_reason == "length" and not is_clients:
            try:
                self._sampler.check_finish(completion, stream)
            except EpisodeEnded as end:
                self.failure = end

    def _tokens(self, completion: Completion) -> tuple[tuple[str, float], ...]:
        words = [self._renderer.transcript([token]) for token in completion.token_ids]
        return tuple(zip(words, completion.logprobs, strict=True))


def ended() -> Refused:
    """Return the refusal of a call after the episode's end."""
    return Refused(410, "session_ended", "this episode has ended: a call after its end is not answered")


def stopped(
    completion: Completion, text: str, stops: tuple[str, ...], text_of: Callable[[Completion], str]
) -> tuple[Completion, str, str]:
    """Return the answer up to the token that completes the first of `stops`, its text before that, and that stop; ""
    if there is none. The policy has sampled what is kept in the same way, whether or not it went on."""
    if not any(stop in text for stop in stops):
        return completion, text, ""
    low, high = 1, len(completion.token_ids)  # of so many tokens the text has one: the least number
    while low < high:
        middle = (low + high) // 2
        if any(stop in text_of(first(completion, middle)) for stop in stops):
            high = middle
        else:
            low = middle + 1
    kept = first(completion, low)
    words = text_of(kept)
    at, stop = min((words.find(stop), stop) for stop in stops if stop in words)
    return kept, words[:at], stop


def first(completion: Completion, count: int) -> Completion:
    """Return the first tokens of an answer, as one that ended there."""
    spans = [VersionSpan(s.version, s.start, min(s.end, count), s.process) for s in completion.spans if s.start < count]
    return msgspec.structs.replace(
        completion,
        token_ids=completion.token_ids[:count],
        logprobs=completion.logprobs[:count],
        spans=tuple(spans),
        finish_reason="stop",
    )
