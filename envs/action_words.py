"""Names the actions of a gymnasium space in words, and reads them in an answer.

| space | an action is |
|---|---|
| Discrete | a word of `actions`, in the order of the actions' numbers |
| MultiDiscrete, MultiBinary | a word for each part |
| Box | a number for each part, within its bounds |
| Text | the whole answer |
| any | a word of `actions` as a dict of words and values |
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from envs.answer_tags import answer_in
from shared.families.marks import THOUGHT
from shared.util.user_errors import in_words

MAX_NUMBERS = 64  # parts of a Box that an answer can name
_THOUGHT = re.compile(f".*{THOUGHT.closing}", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_AROUND = " \t.!?\"'*`()[]"
_LEFT_RIGHT, _GRID = ["left", "right"], ["up", "right", "down", "left"]
USUAL_WORDS: dict[str, list[str]] = {  # by the name in the id, without its version
    "FrozenLake": ["left", "down", "right", "up"],
    "FrozenLake8x8": ["left", "down", "right", "up"],
    "CliffWalking": _GRID,
    "CliffWalkingSlippery": _GRID,
    "Taxi": ["south", "north", "east", "west", "pickup", "dropoff"],
    "Blackjack": ["stick", "hit"],
    "CartPole": _LEFT_RIGHT,
    "MountainCar": ["left", "wait", "right"],
    "Acrobot": ["left", "wait", "right"],
    "LunarLander": ["wait", "left", "main", "right"],
}


@dataclass(frozen=True, slots=True)
class ActionWords:
    """The words of a space's actions. `parts` has a mapping from words to values for each part of an action, None for a
    part that is a number from `low` to `high`; without parts the answer itself is the action. `is_vector` tells an
    action of several parts from a single value."""

    space: Any
    parts: tuple[Mapping[str, Any] | None, ...]
    is_vector: bool
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    def actions(self, text: str, pattern: str, most: int) -> list[Any]:
        """Return the first `most` actions that an answer names: in each match of `pattern`; without one in <answer>, or
        in what follows the thoughts. Raise ValueError, in words for the model, if something else stands there."""
        if not self.parts:
            return [self._checked(_said(text).strip(), text)]
        words = self._words(text, pattern)
        size = len(self.parts)
        if not words or len(words) % size:
            what = "no action" if not words else f"{len(words)} words, where an action has {size}"
            raise ValueError(f"Your answer holds {what}.")
        return [self._action(words[i : i + size]) for i in range(0, size * min(most, len(words) // size), size)]

    def hint(self) -> str:
        """Return what an action is, for the system prompt."""
        if not self.parts:
            return "a text"
        if None in self.parts:
            bounds = [f"from {low:g} to {high:g}" for low, high in zip(self.low, self.high, strict=True)]
            same = len(set(bounds)) == 1
            numbers = "a number" if len(bounds) == 1 else f"{len(bounds)} numbers"
            each = "each " if same and len(bounds) > 1 else ""
            return f"{numbers}, {each}{bounds[0] if same else ', '.join(bounds)}"
        if not self.is_vector:
            return f"one of: {', '.join(self.parts[0] or ())}"
        return "; then ".join(f"one of: {', '.join(part or ())}" for part in self.parts)

    def example(self, rng: Random) -> str:
        """Return an action in words, drawn at random."""
        if not self.parts:
            return str(self.space.sample())
        words = []
        for index, part in enumerate(self.parts):
            if part is not None:
                words.append(rng.choice(list(part)))
            else:
                low, high = max(self.low[index], -10.0), min(self.high[index], 10.0)
                words.append(f"{min(max(round(rng.uniform(low, high), 2), low), high):g}")
        return ", ".join(words)

    def _words(self, text: str, pattern: str) -> list[str]:
        if pattern:
            found = (match.group(match.re.groups and 1) or "" for match in re.finditer(pattern, text))
            return [word.strip(_AROUND).casefold() for word in found]
        named = [word for part in self.parts for word in part or ()]
        separators = r"[,;|\n]+" if any(" " in word for word in named) else r"[,;|\s]+"
        words = [
            word.strip(_AROUND if None not in self.parts else "\"'*`()[]") for word in re.split(separators, _said(text))
        ]
        return [word.casefold() for word in words if word]

    def _action(self, words: Sequence[str]) -> Any:
        values = []
        for index, (word, part) in enumerate(zip(words, self.parts, strict=True)):
            if part is None:
                values.append(self._number(word, index))
            elif word in part:
                values.append(part[word])
            else:
                raise ValueError(f"{word[:40]!r} is no action.")
        return self._checked(values if self.is_vector else values[0], ", ".join(words))

    def _number(self, word: str, index: int) -> float:
        if not _NUMBER.fullmatch(word):
            raise ValueError(f"{word[:40]!r} is no number.")
        number, low, high = float(word), self.low[index], self.high[index]
        if self.space.dtype.kind in "iu" and not number.is_integer():
            raise ValueError(f"{word[:40]} is no whole number.")
        if not low <= float(self.space.dtype.type(number)) <= high:
            raise ValueError(f"{word[:40]} is not from {low:g} to {high:g}.")
        return number

    def _checked(self, value: Any, word: str) -> Any:
        action = value_of(self.space, value)
        if not self.space.contains(action):
            raise ValueError(f"{word[:40]!r} is no action.")
        return action


def action_words(space: Any, actions: Any, name: str, meanings: Any = None) -> ActionWords:
    """Return the words of a space's actions: those of `actions`, or the usual ones of the environment `name`, or what
    the environment says that they mean, or numbers. Raise ValueError, which says what is needed, for a space that words
    cannot name and for words that do not fit it."""
    from gymnasium import spaces

    if isinstance(actions, dict):
        return _by_value(space, actions)
    if isinstance(space, spaces.Discrete):
        first, count = int(space.start), int(space.n)
        words = actions or (USUAL_WORDS.get(name) if meanings is None else [str(each).lower() for each in meanings])
        if words is None or (not actions and len(words) != count):
            words = [str(first + i) for i in range(count)]
        return ActionWords(space, (_numbered(words, count, first, "actions"),), False)
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        counts = np.atleast_1d(space.nvec if isinstance(space, spaces.MultiDiscrete) else np.full(space.shape, 2))
        firsts = np.broadcast_to(np.asarray(getattr(space, "start", 0)), counts.shape)
        counts, firsts = counts.ravel(), firsts.ravel()
        if actions is not None and len(actions) != len(counts):
            raise ValueError(
                f"actions has {len(actions)} lists, but {_told(space)} has {len(counts)} parts: one for each"
            )
        parts = []
        for index, (count, first) in enumerate(zip(counts, firsts, strict=True)):
            words = actions[index] if actions is not None else [str(first + i) for i in range(count)]
            parts.append(_numbered(words, int(count), int(first), f"actions[{index}]"))
        return ActionWords(space, tuple(parts), True)
    if isinstance(space, spaces.Box) and actions is None and space.low.size <= MAX_NUMBERS:
        low, high = (tuple(map(float, bound.ravel())) for bound in (space.low, space.high))
        return ActionWords(space, (None,) * len(low), True, low, high)
    if isinstance(space, spaces.Text) and actions is None:
        return ActionWords(space, (), False)
    raise ValueError(
        f"the action space {_told(space)} cannot be named by {'a list' if actions else 'words or numbers'}: give each "
        "action a word, actions = {word = value}, or wrap the environment so that its actions are Discrete"
    )


def value_of(space: Any, value: Any) -> Any:
    """Return a value as the space holds it: lists as arrays, dicts and tuples by their parts."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict) and isinstance(value, Mapping):
        return {name: value_of(space[name], inner) if name in space.spaces else inner for name, inner in value.items()}
    if isinstance(space, spaces.Tuple) and isinstance(value, list | tuple) and len(value) == len(space):
        return tuple(value_of(inner, each) for inner, each in zip(space, value, strict=True))
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        try:
            return np.asarray(value, dtype=space.dtype).reshape(space.shape)
        except (TypeError, ValueError):
            return value
    return int(value) if isinstance(space, spaces.Discrete) and isinstance(value, int | float) else value


def _by_value(space: Any, actions: Mapping[str, Any]) -> ActionWords:
    named = _lower(list(actions), "actions")
    for word, value in actions.items():
        if not space.contains(value_of(space, value)):
            raise ValueError(f"actions: {word!r} = {in_words(value)} is no action of {_told(space)}")
    return ActionWords(space, (dict(zip(named, actions.values(), strict=True)),), False)


def _numbered(words: Any, count: int, first: int, field: str) -> dict[str, int]:
    if not isinstance(words, list) or len(words) != count:
        has = f"{len(words)} words" if isinstance(words, list) else in_words(words)
        raise ValueError(
            f"{field} is {has}, but the environment has {count} such actions: write a list of {count} words"
        )
    return {word: first + i for i, word in enumerate(_lower(words, field))}


def _lower(words: list[Any], field: str) -> list[str]:
    lower = [word.strip().casefold() if isinstance(word, str) else "" for word in words]
    if "" in lower or len(set(lower)) != len(lower):
        raise ValueError(f"{field} = {in_words(words)}: the words must be texts, no two of them alike")
    return lower


def _said(text: str) -> str:
    answer = answer_in(text)
    return _THOUGHT.sub("", text) if answer is None else answer


def _told(space: Any) -> str:
    return in_words(space, 100)
