"""Says in words what a user's code raised and where, whatever that exception's own methods do."""

from __future__ import annotations

import logging
import re
import sysconfig
import traceback
from pathlib import Path
from typing import Any, cast

from shared.redaction import redact_text

ROOT = Path(__file__).resolve().parents[2]
MAX_TEXT = 1000  # characters of an exception's message
MAX_FRAMES = 4  # named in one line
MAX_PARTS = 3  # of a group of exceptions that are named
MAX_TRACEBACKS = 50  # logged in full by one process
# What calls the user's code; the modules of envs/ that are environments are like the user's own.
_CALLERS = tuple(str(ROOT / room) + "/" for room in ("actor", "envs/tools", "kernels", "launch", "learner", "shared"))
_CALLER_MODULES = {
    str(ROOT / "envs" / f"{name}.py")
    for name in (
        *("base", "check", "env_calls", "env_loops", "env_settings", "loader", "messages", "play", "show"),
        *("action_words", "env_server", "gymnasium", "remote", "remote_messages", "serve"),
        *("vagen", "verifiers"),
    )
}
_LIBRARIES = tuple({sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")  # of terminals, and of directions
# An exception's own facts, whatever its class makes of these names.
_CLASS_NAME: Any = type.__dict__["__name__"].__get__
_TRACEBACK: Any = BaseException.__dict__["__traceback__"].__get__
_CAUSE: Any = BaseException.__dict__["__cause__"].__get__
_CONTEXT: Any = BaseException.__dict__["__context__"].__get__
_GROUP_PARTS: Any = BaseExceptionGroup.__dict__["exceptions"].__get__


class RaisedElsewhere(Exception):
    """An exception of the user's code in another process. `place` names its frames, `trace` is its traceback."""

    def __init__(self, text: str = "", place: str = "", trace: str = "") -> None:
        super().__init__(text)
        self.place = place
        self.trace = trace


def text_of(error: BaseException) -> str:
    """Return the message of an exception in one line of valid UTF-8, at most MAX_TEXT characters; of a group with
    those of its parts. Its `__str__` may raise, or return anything."""
    try:
        text = str.encode(str(error), "utf-8", "replace")[: 4 * MAX_TEXT].decode("utf-8", "ignore")
    except BaseException as failure:  # noqa: BLE001 - __str__ is the user's code
        return f"(its message cannot be had: __str__ raised {name_of(failure)})"
    if parts := parts_of(error):
        more = f"; and {len(parts) - MAX_PARTS} more" if len(parts) > MAX_PARTS else ""
        text = f"{text}: {'; '.join(map(describe, parts[:MAX_PARTS]))}{more}"
    text = redact_text(_CONTROLS.sub("", " ".join(text.split())))
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"


class UserCodeExit(Exception):
    """User code raised an exception that would end a thread, a task or a future, such as `SystemExit`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{name_of(error)} {text_of(error)}".strip())
        self.__cause__ = error


def in_words(value: Any, most: int = 60) -> str:
    """Return the beginning of a value's `repr` in one line, whatever that method does."""
    try:
        words = str.encode(repr(value), "utf-8", "replace").decode()
    except BaseException:  # noqa: BLE001 - __repr__ is the user's code
        words = f"({_CLASS_NAME(type(value))} without a text)"
    return _CONTROLS.sub("", " ".join(words[: 4 * most].split()))[:most]


def name_of(error: BaseException) -> str:
    """Return the name of an exception's class, whatever its metaclass says."""
    return str(_CLASS_NAME(type(error)))


def parts_of(error: BaseException) -> list[BaseException]:
    """Return the exceptions of a group, those of inner groups too; [] for another exception."""
    if not issubclass(type(error), BaseExceptionGroup):
        return []
    parts: list[BaseException] = []
    waiting = [*_GROUP_PARTS(error)]
    while waiting and len(parts) <= MAX_TRACEBACKS:
        part = waiting.pop(0)
        waiting[:0] = _GROUP_PARTS(part) if issubclass(type(part), BaseExceptionGroup) else ()
        parts += [] if issubclass(type(part), BaseExceptionGroup) else [part]
    return parts


def describe(error: BaseException) -> str:
    """Return an exception's type, message and place in one line: "KeyError: 'x' (env.py:7 in helper, called at
    env.py:3 in step)". The place is missing if no code of the user's raised it."""
    text, place = text_of(error), place_of(error)
    return f"{name_of(error)}{': ' if text else ''}{text}{f' ({place})' if place else ''}"


def place_of(error: BaseException) -> str:
    """Return the innermost frames of the user's code, innermost first; "" if there are none."""
    if issubclass(type(error), RaisedElsewhere):
        return cast(RaisedElsewhere, error).place
    if issubclass(type(error), SyntaxError) and (place := _place_of_syntax(error)):
        return place
    frames = _frames(error)
    frames = ([frame for frame in frames if _is_users(frame.filename)] or frames)[-MAX_FRAMES:]
    return ", called at ".join(f"{_short(frame.filename)}:{frame.lineno} in {frame.name}" for frame in reversed(frames))


def trace_of(error: BaseException) -> str:
    """Return the traceback from the first frame of the user's code on, with its last line; "" if there is none."""
    if issubclass(type(error), RaisedElsewhere):
        return cast(RaisedElsewhere, error).trace
    frames = _frames(error)
    if not frames:
        return ""
    lines = "".join(traceback.format_list(frames[-50:]))
    text = text_of(error)
    return f"Traceback of the user's code:\n{lines}{name_of(error)}{': ' if text else ''}{text}"


class TracebackLog:
    """Logs each distinct error of the user's code once, with its traceback: its type and place make it distinct, or its
    text where it has no place, such as a server's that is gone."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged: set[tuple[str, str]] = set()

    def add(self, what: str, error: BaseException) -> None:
        """Log `error`, which `what` raised, unless it was logged before."""
        key = (name_of(error), place_of(error) or text_of(error))
        if key in self._logged or len(self._logged) >= MAX_TRACEBACKS:
            return
        self._logged.add(key)
        if trace := trace_of(error):
            self._log.error("%s raised an exception; each further one like it is only counted\n%s", what, trace)
        else:
            self._log.error("%s failed; each further failure like it is only counted: %s", what, describe(error))


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames from the first one that is the user's on, or those of a library that Pronk called; those of its
    cause if it has none itself."""
    seen: set[int] = set()
    current: BaseException | None = _CAUSE(error) if issubclass(type(error), UserCodeExit) else error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        frames = list(traceback.extract_tb(_TRACEBACK(current)))
        users = [index for index, frame in enumerate(frames) if _is_users(frame.filename)]
        callers = [index for index, frame in enumerate(frames) if _is_callers(frame.filename)]
        start = users[0] if users else callers[-1] + 1 if callers else 0
        if inner := [frame for frame in frames[start:] if not _is_callers(frame.filename)]:
            return inner
        cause = _CAUSE(current)
        current = _CONTEXT(current) if cause is None else cause
    return []


def _place_of_syntax(error: Any) -> str:
    try:
        return f"{_short(str(error.filename))}:{error.lineno}" if error.filename else ""
    except Exception:  # noqa: BLE001 - a class of the user's
        return ""


def _is_callers(filename: str) -> bool:
    return filename.startswith(_CALLERS) or filename in _CALLER_MODULES


def _is_users(filename: str) -> bool:
    return not _is_callers(filename) and not filename.startswith((*_LIBRARIES, "<frozen"))


def _short(filename: str) -> str:
    return filename.removeprefix(str(ROOT) + "/") if filename.startswith(str(ROOT)) else Path(filename).name
