"""Which columns of a dataset hold the problem, the answer, the images and the choices: by the names that the recipe
gives, or by those of well-known layouts. The others describe a row for its environment."""

from __future__ import annotations

import datetime
import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

LAYOUTS = (
    ("problem", "answer"),
    ("problem", "solution"),
    ("prompt", "reward_model.ground_truth"),  # verl
    ("prompt", "answer"),
    ("prompt", "solution"),  # TRL
    ("question", "answer"),  # MATH-V, MathVista, MMK12, ViRL39K
    ("messages", "answer"),  # OpenAI
    ("messages", "solution"),  # ms-swift
    ("conversations", "answer"),  # ShareGPT, LLaMA-Factory
    ("conversations", "solution"),
)
"""The columns of (problem, answer), the preferred ones first."""

IMAGES = ("images", "decoded_image", "image")
CHOICES = ("choices", "options")
VIDEOS = ("videos", "video")
BOARD = "extra_info.env_config"
OUR_NAMES = ("row", "choices", "env_config", "seed", "split")
"""Entries of a sample's metadata that no other column may take."""
MAX_OTHER, MAX_OTHERS = 4096, 16_384


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a dataset's parts; of `images` the first that is not empty counts."""

    problem: str
    answer: str
    images: tuple[str, ...] = IMAGES
    choices: tuple[str, ...] = CHOICES

    @property
    def names(self) -> tuple[str, ...]:
        """All columns that are read."""
        return (self.problem, self.answer, *self.images, *self.choices, *VIDEOS, BOARD, "env_config")

    @property
    def roots(self) -> frozenset[str]:
        """The columns of which all or a field is read."""
        return frozenset(name.partition(".")[0] for name in self.names)


def columns_of(names: Iterable[str], given: Mapping[str, str], where: object) -> Columns:
    """Return the columns of a dataset with columns of these names. Raise ValueError, which says what to set, if one is
    missing."""
    names = list(names)
    roots = {name.partition(".")[0] for name in names}

    def is_there(column: str) -> bool:
        return column.partition(".")[0] in roots

    def refused(missing: str, cure: str) -> ValueError:
        near = difflib.get_close_matches(missing, names, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        return ValueError(f"{where} has no column {missing}; {meant}it has: {', '.join(names) or 'no row'}; {cure}")

    for key, column in given.items():
        if not is_there(column):
            raise refused(column, f"data.columns names it for the {key}")
    layout = next((pair for pair in LAYOUTS if all(map(is_there, pair))), None)
    problem, answer = given.get("problem"), given.get("answer")
    if problem is None:
        problem = (
            layout[0] if layout else _first(("problem", "question", "prompt", "messages", "conversations"), is_there)
        )
    if answer is None:
        answer = next((pair[1] for pair in LAYOUTS if pair[0] == problem and is_there(pair[1])), None)
        answer = answer or _first(("answer", "solution", "reward_model.ground_truth"), is_there)
    cure = (
        """name the columns, as in --data.columns '{"problem": "question", "answer": "reward_model.ground_truth"}' """
        "(of launch/prepare.py: --columns problem=question answer=reward_model.ground_truth)"
    )
    if problem is None or answer is None:
        missing = [name for name, column in (("problem", problem), ("answer", answer)) if column is None]
        raise refused(" and no column ".join(missing), cure)
    image, choices = given.get("image"), given.get("choices")
    return Columns(problem, answer, (image,) if image else IMAGES, (choices,) if choices else CHOICES)


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """Return a row's value in a column, or in a field of it by a dotted name; None if it is absent. A text with JSON is
    read for a field."""
    if column in row:
        return row[column]
    name, dot, rest = column.partition(".")
    value = row.get(name)
    if not dot:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value_at(value, rest) if isinstance(value, Mapping) else None


def described(row: Mapping[str, Any], columns: Columns) -> tuple[dict[str, Any], list[str]]:
    """Return the other columns of a row as plain data, and the names of those that are too large or have none: of 4,096
    characters of JSON each, 16,384 in all."""
    kept: dict[str, Any] = {}
    left_out, room = [], MAX_OTHERS
    for name, value in row.items():
        if name in columns.roots or name in OUR_NAMES or is_empty(value):
            continue
        try:
            plain = plain_value(value)
            size = len(name) + len(json.dumps(plain))
        except (TypeError, ValueError, RecursionError):
            left_out.append(name)
            continue
        if size > min(room, MAX_OTHER):
            left_out.append(name)
            continue
        kept[name], room = plain, room - size
    return kept, left_out


def plain_value(value: Any) -> Any:
    """Return a cell as plain data: dates, times and decimals as texts. Raise TypeError or ValueError for a cell that
    has no such form, such as bytes."""
    if value is None or isinstance(value, bool | str):
        return value.encode(errors="replace").decode() if isinstance(value, str) else value
    if isinstance(value, int | float):
        if not -(2**63) <= value < 2**63:
            raise ValueError("a number beyond 64 bits")  # NaN too
        return value
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | Decimal):
        return str(value)
    if isinstance(value, list | tuple):
        return [*map(plain_value, value)]
    if isinstance(value, Mapping):
        return {str(key): plain_value(each) for key, each in value.items()}
    raise TypeError(type(value).__name__)


def is_empty(value: Any) -> bool:
    """Tell whether a cell holds nothing: null, an empty text or list, or a struct of such."""
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    return value is None or (isinstance(value, str | bytes | list | tuple) and not len(value))


def _first(names: Iterable[str], is_there: Any) -> str | None:
    return next(filter(is_there, names), None)
