"""One engine as a shared processor, in virtual time: the tokens that each running request has been given so far.

All running requests get a token in each step, so virtual time runs at one token in `step_s(running)` seconds, and a
request that joined at v with k tokens to sample leaves at v + k, whatever joins or leaves meanwhile.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Generic, TypeVar

from tests.bench.scale.draws import TurnSize
from tests.bench.scale.sim_records import EngineSpeed

Owner = TypeVar("Owner")


@dataclass(slots=True)
class Sampled(Generic[Owner]):
    """A request that is done: how many of its tokens each version sampled."""

    owner: Owner
    tokens_by_version: list[tuple[int, float]]  # oldest first


class SharedEngine(Generic[Owner]):
    """Its methods are called in the order of time; `changed` tells one prediction of `next_end` from the next."""

    def __init__(self, speed: EngineSpeed) -> None:
        self.changed = 0
        self.busy_s = self.running_s = 0.0  # with requests; and these seconds times requests
        self._speed = speed
        self._v = self._at = 0.0
        self._stands_until = 0.0  # nothing is sampled before
        self._paused_with: float | None = None  # seconds for which it would still have stood
        self._weights = [(0.0, 0)]  # from which virtual time on, version
        self._running: list[tuple[float, int, float, int, Owner]] = []  # end, order, start, index of weights, whose
        self._waiting: deque[tuple[TurnSize, Owner]] = deque()
        self._count = 0

    def submit(self, turn: TurnSize, owner: Owner, now: float) -> None:
        self._waiting.append((turn, owner))
        self._advance(now)
        self._admit(now)

    def pause(self, now: float) -> None:
        self._advance(now)
        self._paused_with = max(0.0, self._stands_until - now)
        self.changed += 1

    def load(self, version: int, load_s: float, now: float) -> None:
        """New weights: what is sampled from now on is of `version`. It stands for `load_s`, and any pause is over."""
        self._advance(now)
        self._weights.append((self._v, version))
        left = max(0.0, self._stands_until - now) if self._paused_with is None else self._paused_with
        self._paused_with = None
        self._stands_until = now + left + load_s
        self._admit(now)

    def next_end(self) -> float | None:
        """When the next request will be done, if nothing changes before."""
        if not self._running or self._paused_with is not None:
            return None
        left = max(0.0, self._running[0][0] - self._v)
        return max(self._at, self._stands_until) + left * self._speed.step_s(len(self._running))

    def finish(self, now: float) -> list[Sampled[Owner]]:
        """At the time that `next_end` told: what is done."""
        self._advance(now)
        self._v = max(self._v, self._running[0][0])
        done = []
        while self._running and self._running[0][0] <= self._v + 1e-9:
            end, _, start, weights, owner = heappop(self._running)
            done.append(Sampled(owner, self._split(start, end, weights)))
        self._admit(now)
        return done

    def _advance(self, now: float) -> None:
        if self._running and self._paused_with is None:
            count, span = len(self._running), now - self._at
            self.busy_s += span
            self.running_s += span * count
            self._v += max(0.0, now - max(self._at, self._stands_until)) / self._speed.step_s(count)
        self._at = now

    def _admit(self, now: float) -> None:
        self.changed += 1
        if self._paused_with is not None:
            return
        while self._waiting and len(self._running) < self._speed.max_batch:
            turn, owner = self._waiting.popleft()
            reading = turn.prompt_tokens * self._speed.prefill_s + self._speed.turn_s
            self._stands_until = max(self._stands_until, now) + reading
            self._count += 1
            entry = (self._v + turn.tokens, self._count, self._v, len(self._weights) - 1, owner)
            heappush(self._running, entry)

    def _split(self, start: float, end: float, weights: int) -> list[tuple[int, float]]:
        """Tokens (start, end] by version, where the first was sampled by the weights of that index or later."""
        parts, (_, version) = list[tuple[int, float]](), self._weights[weights]
        for at, newer in self._weights[weights + 1 :]:
            if at > start:
                parts.append((version, at - start))
            start, version = at, newer
        return [*parts, (version, end - start)]
