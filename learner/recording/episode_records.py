"""Records of played episodes, with the text of their tokens and descriptions of their images."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image as PILImage

from learner.recording.column_names import as_arrays
from shared.metrics import ReportedMetrics
from shared.recordings.bounded_json import bounded_json
from shared.recordings.episode_format import Array, ImageRef, RecordedEpisode, RecordedTurn
from shared.types import Group, Image, Ticket, Trajectory, TurnNote
from shared.vision import IMAGE_FORMATS, VisionSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROMPT_CHARACTERS, METADATA_CHARACTERS, TEXT_CHARACTERS = 2**16, 2**14, 2**16
PIECE_CHARACTERS = 2**8
MAX_PIECES = 2**17  # tokens of an episode; with more, their texts are not recorded one by one


class TokenTexts:
    """Decodes a model's tokens, including special ones, each once. Without a tokenizer all texts are empty."""

    def __init__(self, model_path: str) -> None:
        from transformers import PreTrainedTokenizerFast  # imported here: an evaluation reports its errors before

        self._pieces: dict[int, str] = {}
        self._tokenizer: PreTrainedTokenizerFast | None = None
        try:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path)
        except Exception:  # noqa: BLE001 - with unreadable files, episodes are recorded without text
            self._tokenizer = None

    def text(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None or not len(ids):
            return ""
        try:
            decoded: Any = self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        except Exception:  # noqa: BLE001 - the tokenizer does not know some of the tokens
            return "".join(self.pieces(ids))
        return str(decoded)[:TEXT_CHARACTERS]

    def pieces(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Return the text of each token by itself; an incomplete character becomes a question mark."""
        if self._tokenizer is None or len(ids) > MAX_PIECES:
            return ()
        return tuple(self._pieces.get(token) or self._piece(token) for token in ids)

    def _piece(self, token: int) -> str:
        assert self._tokenizer is not None
        try:
            decoded: Any = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        except Exception:  # noqa: BLE001 - as above
            decoded = f"<{token}>"
        self._pieces[token] = str(decoded)[:PIECE_CHARACTERS]
        return self._pieces[token]


def image_ref(image: Image, spec: VisionSpec) -> ImageRef:
    """Return a description of an image, from the file's header only; an unreadable image has the format `bin`."""
    size = len(image.data)
    try:
        with PILImage.open(io.BytesIO(image.data), formats=IMAGE_FORMATS) as file:
            (width, height), kind = file.size, str(file.format).lower()
        _, rows, columns = spec.grid(width, height)
    except Exception:  # noqa: BLE001 - Pillow's decoders raise OSError, SyntaxError, struct.error and others
        return ImageRef(hash=image.content_hash, format="bin", bytes=size)
    tokens = rows * columns // spec.merge_size**2
    facts: dict[str, Any] = {"format": kind, "width": width, "height": height, "tokens": tokens}
    return ImageRef(hash=image.content_hash, bytes=size, **facts)


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """One episode of a group, with the learner's columns for it. `ticket` is None if groups come without tickets."""

    group: Group
    index: int
    ticket: Ticket | None = None
    columns: np.ndarray | None = None  # float32 [C,K]
    refused: str = ""
    metrics: dict[str, float] | None = None  # as they count; None: those that the actor sent

    @property
    def trajectory(self) -> Trajectory:
        return self.group.trajectories[self.index]


def worst_and_best(
    groups: Sequence[tuple[Ticket, Group]], most: int, reported: ReportedMetrics
) -> list[tuple[Ticket, Group]]:
    """Choose groups of an evaluation with up to `most` episodes, but at least one group, in their order.

    If not all fit, a quarter are those with the most success (and reward), the others those with the least.
    """
    count = max(1, most // len(groups[0][1].trajectories)) if groups else 0
    if len(groups) <= count:
        return list(groups)
    order = sorted(range(len(groups)), key=lambda i: _merit(*groups[i], reported))
    chosen = order[: count - count // 4] + order[len(order) - count // 4 :]
    return [groups[i] for i in sorted(chosen)]


def _merit(ticket: Ticket, group: Group, reported: ReportedMetrics) -> tuple[float, float]:
    success_of = reported.of(ticket.sample.task).success_of
    return sum(map(success_of, group.trajectories)), sum(t.reward for t in group.trajectories)


def evenly(count: int, of: int) -> set[int]:
    """Return `count` evenly spaced numbers below `of`; all of them if `count` is not smaller."""
    count = min(count, of)
    return {number * of // count for number in range(count)}


def record_of(played: PlayedEpisode, texts: TokenTexts, spec: VisionSpec, *, group_relative: bool) -> RecordedEpisode:
    t, ticket = played.trajectory, played.ticket
    images = tuple(image_ref(image, spec) for image in t.images)
    turns, tail = turns_of(t, texts, spec)
    sample: dict[str, Any] = {}
    if ticket is not None:
        sample = {
            "sample_id": ticket.sample.id,
            "task": ticket.sample.task,
            "seed": ticket.seed,
            "issue_version": ticket.version,
            "prompt": bounded_json(ticket.sample.prompt, PROMPT_CHARACTERS),
            "label": (ticket.sample.label or "")[:METADATA_CHARACTERS],
            "metadata": bounded_json(ticket.sample.metadata, METADATA_CHARACTERS),
        }
    columns = {}
    if played.columns is not None:
        found = as_arrays(played.columns, group_relative=group_relative)
        columns = {name: Array.of(values) for name, values in found.items()}
    return RecordedEpisode(
        ticket_id=played.group.ticket_id,
        index=played.index,
        group_size=len(played.group.trajectories),
        actor=played.group.actor,
        token_ids=Array.of(t.token_ids),
        loss_mask=Array.of(t.loss_mask),
        behaviour_logprobs=Array.of(t.behaviour_logprobs),
        policy_versions=Array.of(t.policy_versions),
        pieces=texts.pieces(t.token_ids.tolist()),
        turns=turns,
        segments=t.segments,
        tail=tail,
        images=images,
        weights=t.weights,
        reward=t.reward,
        metrics=t.metrics if played.metrics is None else played.metrics,
        ending=t.ending,
        error=t.error[:TEXT_CHARACTERS],
        refused=played.refused[:4096],
        started=t.started,
        group_s=played.group.played_s,
        columns=columns,
        **sample,
    )


def turns_of(t: Trajectory, texts: TokenTexts, spec: VisionSpec) -> tuple[tuple[RecordedTurn, ...], str]:
    """Return an episode's turns, and the text after the last turn."""
    ids = t.token_ids.tolist()
    seen_before = np.cumsum([0, *(t.token_ids == spec.image_token_id)])  # number of images before each token
    ends = [0, *(turn.end for turn in t.turns)]
    turns = []
    for turn, note, (before, _) in zip(t.turns, _notes(t), pairwise(ends), strict=True):
        turns.append(
            RecordedTurn(
                start=turn.start,
                end=turn.end,
                reward=turn.reward,
                seen=texts.text(ids[before : turn.start]),
                answer=texts.text(ids[turn.start : turn.end]),
                first_image=int(min(seen_before[before], len(t.images))),
                last_image=int(min(seen_before[turn.start], len(t.images))),
                begin_s=note.begin_s,
                generate_s=note.generate_s,
                wait_s=note.wait_s,
                env_s=note.env_s,
                info=note.info,
            )
        )
    return tuple(turns), texts.text(ids[ends[-1] :])


def _notes(t: Trajectory) -> list[TurnNote]:
    """Return a note for each turn; an empty one if there is none."""
    pairs = zip_longest(t.turns, t.notes[: len(t.turns)], fillvalue=None)
    return [note or TurnNote() for _, note in pairs]
