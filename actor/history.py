"""Windows of an episode's history: what of earlier turns and images the model still sees (`env.history`,
`env.keep_images`).

Where a window moves on, the context is no longer a continuation of what the model has read, and a segment begins: the
prompt, the observations in the window, and between them the model's answers, token for token as they were sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actor.render import Fragment, Renderer
from shared.types import Sample

NO_LONGER = "[image]"  # stands for an image that is no longer shown
Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Window:
    """How many observations, the present one among them, and how many images of observations the model sees; None =
    all. The images of the present observation are always shown, and so are the prompt's."""

    turns: int | None = None
    images: int | None = None

    @property
    def is_everything(self) -> bool:
        return self.turns is None and self.images is None


EVERYTHING = Window()


@dataclass(frozen=True, slots=True)
class Shown:
    """What the model is shown next: the observation's `fragment`; in a new segment, its parts from the prompt on."""

    fragment: Fragment
    segment: tuple[Fragment, ...] = ()

    @property
    def parts(self) -> tuple[Fragment, ...]:
        return self.segment or (self.fragment,)


class History:
    """The observations and answers of an episode, and the window in which the model sees them."""

    def __init__(self, renderer: Renderer, sample: Sample, window: Window) -> None:
        self._renderer, self._sample, self._window = renderer, sample, window
        self._observations: list[Messages] = []
        self._answers: list[Sequence[int]] = []
        self._seen_from = (0, 0)  # first observation of the segment, first one whose images it shows

    def start(self, messages: Messages, hint: str = "") -> Shown:
        """Return the beginning of the episode: the prompt and the first observation, if there is one. `hint`: what a
        teacher alone is told."""
        self._observations = [messages]
        fragment = self._start(messages)
        if hint:
            fragment = self._renderer.with_hint(fragment, self._start([*messages, told(hint)]))
        return Shown(fragment)

    def observe(self, answer: Sequence[int], messages: Messages, hint: str = "") -> Shown:
        """Return what follows the model's answer, tokens with the one that ended it. `hint`: as in `start`."""
        fragment = self._renderer.observation(*messages)
        if hint:
            fragment = self._renderer.with_hint(fragment, self._renderer.observation(*messages, told(hint)))
        fragment = after_answer(answer, fragment)
        if self._window.is_everything:
            return Shown(fragment)
        self._answers.append(tuple(answer))
        self._observations.append(messages)
        seen_from = first_shown(self._window, self._observations)
        if seen_from == self._seen_from:
            return Shown(fragment)
        self._seen_from = seen_from
        *parts, last = self._segment(*seen_from)
        return Shown(fragment, (*parts, replace(last, hint_ids=fragment.hint_ids, hint_back=fragment.hint_back)))

    def _segment(self, first: int, with_images: int) -> list[Fragment]:
        shown = [
            messages if number >= with_images else without_images(messages)
            for number, messages in enumerate(self._observations[first:], first)
        ]
        parts = [self._start(shown[0])]
        for answer, messages in zip(self._answers[first:], shown[1:], strict=True):
            parts.append(Fragment(tuple(answer)))
            parts.append(after_answer(answer, self._renderer.observation(*messages)))
        return parts

    def _start(self, messages: Messages) -> Fragment:
        return self._renderer.start([*self._sample.prompt, *messages], self._sample.images, self._sample.tools)


def told(hint: str) -> dict[str, Any]:
    """Return the message that tells a teacher a hint."""
    return {"role": "user", "content": [{"type": "text", "text": hint}]}


def first_shown(window: Window, observations: Sequence[Messages]) -> tuple[int, int]:
    """Return the numbers of the first observation that a window shows, and of the first whose images it shows."""
    count = len(observations)
    first = max(0, count - (window.turns or count))
    with_images, left = count - 1, window.images
    if left is None:
        return first, first
    left -= _num_images(observations[-1])
    while with_images > first and (left := left - _num_images(observations[with_images - 1])) >= 0:
        with_images -= 1
    return first, with_images


def after_answer(answer: Sequence[int], observation: Fragment) -> Fragment:
    """Return an observation as it follows an answer: with the template's own end token if another one ended it."""
    if answer[-1] == observation.end_id:
        return observation
    return replace(observation, token_ids=(observation.end_id, *observation.token_ids))


def _num_images(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(_is_image(part) for message in messages for part in _parts(message))


def without_images(messages: Messages) -> Messages:
    """Return an observation's messages with words in place of their images."""
    said = {"type": "text", "text": NO_LONGER}
    return [
        {**message, "content": [said if _is_image(part) else part for part in _parts(message)]}
        if _num_images([message])
        else message
        for message in messages
    ]


def _parts(message: Mapping[str, Any]) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, (list, tuple)) else ()


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"
