"""What a record says of turns beside tokens and rewards: where the time went, what the environment told."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from shared.recordings.bounded import bounded_json
from shared.types import INFO_CHARACTERS, TurnNote

T = TypeVar("T")


class Notes:
    """Of one episode, which begins now. All seconds are by this process's clock."""

    def __init__(self) -> None:
        self.started = time.time()
        self._began = time.monotonic()
        self._asked = (0.0, 0.0)  # when the engine was, and how long it took
        self._turns: list[list[float]] = []  # begin, generation, waiting, environment
        self._entered = 0.0  # when a thread of the environment began with the call

    def generated(self, asked: float, answered: float) -> None:
        """By the monotonic clock. The answer of a turn that `turn` begins, if it has any token."""
        self._asked = (asked - self._began, answered - asked)

    def turn(self) -> None:
        """The answer is a turn. One that no engine was asked for begins now."""
        begin, took = self._asked if any(self._asked) else (time.monotonic() - self._began, 0.0)
        self._turns.append([begin, took, 0.0, 0.0])
        self._asked = (0.0, 0.0)

    def timed(self, function: Callable[[], T]) -> Callable[[], T]:
        """The function, which notes when a thread begins with it."""
        self._entered = 0.0

        def run() -> T:
            self._entered = time.monotonic()
            return function()

        return run

    def called(self, asked: float, returned: float) -> None:
        """A call of the environment, `timed`, belongs to the turn before it."""
        if self._turns:
            entered = self._entered or returned
            self._turns[-1][2] += entered - asked
            self._turns[-1][3] += returned - entered

    def of_turns(self, infos: Sequence[Any]) -> tuple[TurnNote, ...]:
        """`infos`: what the environment said of the turns, as far as it was asked."""
        said = [bounded_json(info, INFO_CHARACTERS) for info in infos[: len(self._turns)]]
        said += [""] * (len(self._turns) - len(said))
        rows = zip(self._turns, said, strict=True)
        return tuple(TurnNote(begin, generate, wait, env, info) for (begin, generate, wait, env), info in rows)


class EnvMetrics:
    """What an environment reports: `turn_metrics` are averaged over the turns; of all others the last value counts."""

    def __init__(self) -> None:
        self._of_turns: dict[str, list[float]] = {}
        self._last: dict[str, float] = {}

    def note(self, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if name == "turn_metrics":
                for key, number in value.items():
                    self._of_turns.setdefault(key, []).append(float(number))
            elif isinstance(value, Mapping):
                self._last.update({key: float(number) for key, number in value.items()})
            else:
                self._last[name] = float(value)

    def values(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self._of_turns.items()} | self._last
