"""What describes an episode and comes from user code: its metrics, texts and notes, in a form that can always be sent.

What has no such form is left out, counted and named in the log. It never costs the episode.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec
from msgspec.structs import replace

from envs.env_calls import NAME_CHARACTERS, is_metric_name, number_of
from shared.types import ITEMS, TEXT_CHARACTERS, Many, Trajectory, TurnNote
from shared.util.user_errors import in_words, name_of

MAX_NAMES = 256  # metrics of one episode
LOG_EVERY_S = 60.0
TURN_METRICS = "turn_metrics"
log = logging.getLogger("actor")


class EnvMetrics:
    """Collects the metrics that an environment reports: `turn_metrics` are averaged over the turns; for all others the
    last value counts. `left_out`: why a metric was left out at least once, by its name."""

    def __init__(self) -> None:
        self.left_out: dict[str, str] = {}
        self._of_turns: dict[str, list[float]] = {}
        self._last: dict[str, float] = {}

    def add(self, metrics: Any, *, is_turn: bool = True) -> None:
        """Add the metrics of one step or, with `is_turn` false, those of the start, which has no turn. Never raises."""
        if metrics is None:
            return
        try:
            for name, value, of_turn in islice(_flat(metrics), 4 * MAX_NAMES):
                self._add(name, value, of_turn=of_turn, is_turn=is_turn)
        except BaseException as error:  # noqa: BLE001 - a user's mapping may raise anything when it is read
            self._leave_out("metrics", f"unreadable ({name_of(error)})")

    def values(self) -> dict[str, float]:
        """Return the episode's metrics."""
        means = {name: _mean(values) for name, values in self._of_turns.items()}
        return means | self._last

    def _add(self, name: Any, value: Any, *, of_turn: bool, is_turn: bool) -> None:
        if not is_metric_name(name):
            reason = f"no printable name of at most {NAME_CHARACTERS} characters"
            self._leave_out(in_words(name, NAME_CHARACTERS), reason)
            return
        number = number_of(value)
        if isinstance(number, str):
            self._leave_out(name, number)
        elif len(self._of_turns.keys() | self._last.keys() | {name}) > MAX_NAMES:
            self._leave_out(name, f"one of more than {MAX_NAMES}")
        elif not of_turn:
            self._last[name] = number
        elif is_turn:
            self._of_turns.setdefault(name, []).append(number)

    def _leave_out(self, name: str, reason: str) -> None:
        if len(self.left_out) < MAX_NAMES:
            self.left_out.setdefault(name, reason)


def _flat(metrics: Any) -> Iterator[tuple[Any, Any, bool]]:
    """Yield (name, value, whether it is one of the turn's) of a step's metrics, which may hold one level of maps."""
    if not isinstance(metrics, Mapping):
        raise TypeError(type(metrics).__name__)
    for name, value in metrics.items():
        if issubclass(type(value), Mapping):  # isinstance would ask the value
            yield from ((key, each, name == TURN_METRICS) for key, each in value.items())
        else:
            yield name, value, False


def _mean(values: list[float]) -> float:
    """Return the mean of finite values, without an overflow."""
    return math.fsum(value / len(values) for value in values)


class LeftOutLog:
    """Names in the log, once a minute, what was left out of episodes, with the share of the episodes."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._episodes = 0
        self._counts: Counter[tuple[str, str]] = Counter()
        self._logged_at = -math.inf

    def add(self, left_out: Mapping[str, str]) -> None:
        """Count an episode, and what was left out of it: the reason by the metric's name."""
        self._episodes += 1
        for name, reason in left_out.items():
            if len(self._counts) < MAX_NAMES or (name, reason) in self._counts:
                self._counts[name, reason] += 1
        if self._counts and self._now() - self._logged_at >= LOG_EVERY_S:
            self._logged_at = self._now()
            parts = [
                f"{name!r} was {reason} in {100 * count / self._episodes:.0f} %"
                for (name, reason), count in self._counts.most_common(3)
            ]
            more = f", and {len(self._counts) - 3} more" if len(self._counts) > 3 else ""
            log.warning(
                "env metric %s of %d episodes%s: left out; the episodes count", ", ".join(parts), self._episodes, more
            )
            self._episodes = 0
            self._counts.clear()


def describable(t: Trajectory) -> tuple[Trajectory, dict[str, str]]:
    """Return the episode, which may be of a user's rollout function, with texts and notes that can be sent, and what
    was left out of it: the reason by name."""
    left_out = {}
    for name in ("text", "error"):
        if not isinstance(getattr(t, name), str):
            left_out[name] = "no text"
    if not _are_notes(t.notes):
        left_out["notes"] = "unreadable"
    started = number_of(t.started)
    return replace(
        t,
        text=_text(t.text),
        error=_text(t.error),
        notes=() if "notes" in left_out else tuple(t.notes),
        started=max(0.0, started) if isinstance(started, float) else 0.0,
    ), left_out


def _text(value: Any) -> str:
    """Return a text that can be sent: without its end if it is too long, without lone surrogates, "" for others."""
    return value[:TEXT_CHARACTERS].encode(errors="replace").decode() if isinstance(value, str) else ""


def _are_notes(notes: Any) -> bool:
    try:
        msgspec.convert(msgspec.to_builtins(notes), Many[TurnNote])
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return False
    return len(notes) <= ITEMS
