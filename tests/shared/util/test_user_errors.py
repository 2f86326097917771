"""What a user's code raises becomes words with their place, whatever the exception does when it is asked for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from envs.loader import load_module
from shared.util.user_errors import MAX_TEXT, RaisedElsewhere, TracebackLog, describe, place_of, text_of, trace_of

MODULE = """
class Bad(Exception):
    def __str__(self):
        return self.args[5]

class Odd(Exception):
    def __str__(self):
        return 5

class Exits(Exception):
    def __str__(self):
        raise SystemExit(3)

def helper(what):
    if what == "divide":
        return 1 / 0
    if what == "library":
        import json
        return json.loads("{")
    if what == "cause":
        try:
            return {}["x"]
        except KeyError as error:
            raise RuntimeError("no x") from error
    raise {"bad": Bad(), "odd": Odd(), "exits": Exits(), "surrogate": ValueError("a\\ud800b"),
           "lines": ValueError("one\\n  two"), "long": ValueError("x" * 10**6), "empty": ValueError()}[what]

def step(what):
    return helper(what)
"""


@pytest.fixture
def raised(tmp_path: Path) -> Callable[[str], BaseException]:
    (tmp_path / "raises.py").write_text(MODULE)
    step = load_module(str(tmp_path / "raises.py")).step

    def raise_and_catch(what: str) -> BaseException:
        try:
            step(what)
        except Exception as error:  # noqa: BLE001 - whatever it is
            return error
        raise AssertionError

    return raise_and_catch


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("divide", "ZeroDivisionError: division by zero (raises.py:16 in helper, called at raises.py:29 in step"),
        (
            "library",
            "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1) (rai",
        ),
        ("cause", "RuntimeError: no x (raises.py:24 in helper, called at"),
        ("bad", "Bad: (its message cannot be had: __str__ raised IndexError) (raises.py:25 in helper"),
        ("odd", "Odd: (its message cannot be had: __str__ raised TypeError)"),
        ("exits", "Exits: (its message cannot be had: __str__ raised SystemExit)"),
        ("surrogate", "ValueError: a?b (raises.py"),
        ("lines", "ValueError: one two (raises.py"),
        ("empty", "ValueError (raises.py:25 in helper"),
    ],
)
def test_an_exception_is_told_in_one_line_with_its_place(raised, what: str, words: str) -> None:
    line = describe(raised(what))
    assert line.startswith(words) and "\n" not in line
    line.encode()


def test_a_message_is_bounded(raised) -> None:
    assert len(text_of(raised("long"))) == MAX_TEXT + 1


def test_a_traceback_begins_in_the_users_file_and_keeps_its_lines(raised) -> None:
    lines = trace_of(raised("divide")).splitlines()
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "return 1 / 0" in lines[-2].strip() or "return 1 / 0" in lines[-3]
    assert not any(
        'user_errors.py", line' in line.replace("test_user_errors", "") or "envs/loader" in line for line in lines
    )


def test_an_exception_from_another_process_keeps_the_place_that_it_was_raised_at() -> None:
    error = RaisedElsewhere("boom", "env.py:3 in step", "Traceback…")
    assert (place_of(error), trace_of(error)) == ("env.py:3 in step", "Traceback…")
    assert describe(error) == "RaisedElsewhere: boom (env.py:3 in step)"


def test_the_traceback_of_each_kind_of_error_is_logged_once(raised, caplog: pytest.LogCaptureFixture) -> None:
    tracebacks = TracebackLog(logging.getLogger("test"))
    for what in ("divide", "divide", "bad", "divide", "bad"):
        tracebacks.add("an environment", raised(what))
    messages = [record.getMessage() for record in caplog.records]
    assert [("ZeroDivisionError" in text, "Bad" in text) for text in messages] == [(True, False), (False, True)]
    assert all("raises.py" in text and "in helper" in text for text in messages)
