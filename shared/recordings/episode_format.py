"""The records of a recording, with types and bounds of their fields; `shared.recordings` describes the files.

Shape suffixes: T = tokens of one episode's compact stream (one placeholder per image), K = its sampled tokens, those
with loss mask 1, in order.
"""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct

from shared.types import TRAINABLE_ENDINGS, Ending, Finite, Id, Many, Natural, NonNegative, Text, WeightName

FORMAT_VERSION = 1
TOKENS = 2**20  # tokens of one episode, at most
ImageFormat = Literal["png", "jpeg", "webp", "bin"]  # bin: not a readable image
Json = Annotated[str, Meta(max_length=2**20)]
Short = Annotated[str, Meta(max_length=2**12)]
ColumnName = Literal["logprob", "entropy", "value", "target", "advantage", "ratio", "clipped", "masked"]
COLUMNS: dict[ColumnName, str] = {
    "logprob": "log probability of the token under the policy as its update began",
    "entropy": "of the distribution that the token was drawn from, nats",
    "value": "the critic's value before the token; absent without a critic",
    "target": "what the critic is to learn there; absent without a critic",
    "advantage": "of the token, before any scale and weight",
    "ratio": "rho: the policy's probability over the behaviour's",
    "clipped": "1 where the clip took the gradient away",
    "masked": "1 where the token was left out for its ratio or its episode's",
}


class Array(Struct, frozen=True, array_like=True, eq=False):
    """An array as raw little-endian bytes, which `numpy` reads without a copy."""

    dtype: Literal["<i4", "<f4", "|u1"]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=TOKENS)], ...], Meta(max_length=2)]
    data: memoryview

    @staticmethod
    def of(values: np.ndarray) -> Array:
        """Return an array's record."""
        values = np.ascontiguousarray(values)
        return Array(values.dtype.str, values.shape, memoryview(values.tobytes()))  # type: ignore[arg-type]

    def numpy(self) -> np.ndarray:
        """Return the values, read-only. Raise ValueError if the number of bytes does not match the shape."""
        dtype = np.dtype(self.dtype)
        if prod(self.shape) * dtype.itemsize != len(self.data):
            raise ValueError(f"an array of shape {list(self.shape)} and {dtype} has {len(self.data)} bytes")
        return np.frombuffer(self.data, dtype).reshape(self.shape)


class StoredRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A record in a file. Readers skip fields that they do not know, so that fields can be added without a new format
    version."""


class Tagged(StoredRecord, frozen=True, kw_only=True, tag_field="kind", tag=True):
    """A record that is stored by itself, with a `kind`: the name of its class, unless the class sets another tag."""


class ImageRef(StoredRecord, frozen=True, kw_only=True):
    """One image of an episode: its file is images/HASH.FORMAT, however many episodes and steps show it."""

    hash: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]  # XXH3, 128 bits, of the file's bytes
    format: ImageFormat
    width: Natural = 0
    height: Natural = 0
    bytes: Natural = 0
    tokens: Natural = 0  # visual tokens of the image

    @property
    def file_name(self) -> str:
        return f"{self.hash}.{self.format}"


class RecordedTurn(StoredRecord, frozen=True, kw_only=True):
    """One turn: the answer is tokens [start, end) of the compact stream. The text `seen` and the images [first_image,
    last_image) came right before it. Times are in seconds; a turn that was not timed has zeros."""

    start: Natural
    end: Natural
    reward: Finite
    seen: Text = ""  # text before the answer as the model reads it, from prompt, environment and chat template
    answer: Text = ""
    first_image: Natural = 0
    last_image: Natural = 0
    begin_s: NonNegative = 0.0  # start of the request to the engine, after the episode's start
    generate_s: NonNegative = 0.0  # from the request until the engine's answer
    wait_s: NonNegative = 0.0  # wait for a free thread of the environment
    env_s: NonNegative = 0.0  # time in the environment
    info: Json = ""  # what the environment's step reported about the answer, as bounded JSON


EvaluationName = Annotated[str, Meta(pattern="^[a-z0-9_]{0,64}$")]


class StepHeader(Tagged, frozen=True, kw_only=True):
    """The first record of every file."""

    step: Natural
    version: Natural  # policy version at the start of the step, or the evaluated one
    time: NonNegative  # seconds since 1970
    run: Short = ""
    task: Short = ""  # env.module
    recipe_hash: Short = ""
    objective: Json = "{}"  # the section learner.objective of the recipe, as JSON
    group_relative: bool = False
    model: Short = ""  # model.path; the next fields say how the model was used
    dtype: Short = "float32"
    min_pixels: Natural = 0
    max_pixels: Natural = 0
    temperature: NonNegative = 1.0
    columns: Annotated[tuple[ColumnName, ...], Meta(max_length=32)] = ()
    evaluation: EvaluationName = ""  # name of the evaluation after the step; "" = the step's own episodes
    played: Natural = 0  # number of episodes of the evaluation, recorded or not
    metrics: Annotated[dict[str, Finite], Meta(max_length=4096)] = {}  # metrics over all played episodes


class StepImages(Tagged, frozen=True, kw_only=True):
    """The distinct images of a step's episodes, by file name."""

    names: Many[Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\.(png|jpeg|webp|bin)$")]] = ()


class RecordedEpisode(Tagged, frozen=True, kw_only=True, tag="Episode"):
    """One episode with everything that is known about it. `columns` is empty if no update was computed on it."""

    ticket_id: Id
    index: Natural  # index of the episode in its group
    group_size: Natural = 1
    actor: Id = ""
    issue_version: Natural = 0  # policy version when the ticket was issued
    sample_id: Text = ""
    task: Id = ""  # "" in a run of one task
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    prompt: Json = ""  # prompt of the sample; prompt and metadata are bounded JSON, label is cut
    label: Text = ""
    metadata: Json = ""
    token_ids: Array  # int32 [T]
    loss_mask: Array  # uint8 [T], 1 = sampled by the policy
    behaviour_logprobs: Array  # float32 [T], 0 where the mask is 0
    policy_versions: Array  # int32 [T], -1 where the mask is 0
    pieces: Annotated[tuple[Short, ...], Meta(max_length=TOKENS)] = ()  # [T], each token as text; () = no tokenizer
    turns: Many[RecordedTurn] = ()
    segments: Many[Natural] = ()  # where the second and later segments begin in the compact stream
    tail: Text = ""  # text after the last answer
    images: Many[ImageRef] = ()
    weights: Many[WeightName] = ()
    reward: Finite = 0.0
    metrics: dict[str, Finite] = {}
    ending: Ending = Ending.COMPLETED
    error: Text = ""
    refused: Short = ""  # why the whole group was not trained on; "" = it was
    started: NonNegative = 0.0  # seconds since 1970, by the actor's clock; 0 = not known
    group_s: NonNegative = 0.0  # seconds that the whole group took to play
    columns: dict[ColumnName, Array] = {}

    @property
    def id(self) -> str:
        return f"{self.ticket_id}/{self.index}"

    @property
    def failed(self) -> bool:
        return bool(self.refused) or self.ending not in TRAINABLE_ENDINGS


class Summary(Tagged, frozen=True, kw_only=True):
    """The line of one episode in a list of episodes; the episode's record is at bytes [offset, offset + length) of the
    .rec file."""

    ticket_id: Id
    index: Natural
    offset: Annotated[int, Meta(ge=0)]
    length: Natural
    sample_id: Annotated[str, Meta(max_length=128)] = ""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    actor: Id = ""
    reward: Finite = 0.0
    success: Finite = 0.0  # the environment's metric; without one, 1 for a positive reward
    ending: Ending = Ending.COMPLETED
    error: Annotated[str, Meta(max_length=256)] = ""
    refused: Annotated[str, Meta(max_length=256)] = ""
    turns: Natural = 0
    tokens: Natural = 0  # sampled
    expanded: Natural = 0  # tokens of the episode with images expanded
    images: Natural = 0
    oldest: int = -1  # oldest version that sampled a token; -1 = none
    newest: int = -1
    trained: bool = False  # the episode has the learner's columns
    started: NonNegative = 0.0
    seconds: NonNegative = 0.0  # from its start to the end of its last turn
    generate_s: NonNegative = 0.0
    wait_s: NonNegative = 0.0
    env_s: NonNegative = 0.0
    mean_gap: NonNegative = 0.0  # |log ratio| between engine and learner, over its tokens
    max_gap: NonNegative = 0.0
    advantage: Finite = 0.0  # mean over its tokens

    @property
    def id(self) -> str:
        return f"{self.ticket_id}/{self.index}"

    @property
    def failed(self) -> bool:
        return bool(self.refused) or self.ending not in TRAINABLE_ENDINGS


AnyRecord = StepHeader | StepImages | RecordedEpisode | Summary


def summary_of(episode: RecordedEpisode, offset: int, length: int) -> Summary:
    """Return the summary of an episode at this position in its file. Raise ValueError if an array's bytes do not match
    its shape."""
    mask = episode.loss_mask.numpy() == 1
    versions = episode.policy_versions.numpy()
    columns = {name: array.numpy() for name, array in episode.columns.items()}
    gaps = np.zeros(0)
    if "logprob" in columns and len(columns["logprob"]) == mask.sum():
        gaps = np.abs(columns["logprob"] - episode.behaviour_logprobs.numpy()[mask])
    advantages = columns.get("advantage", np.zeros(0))
    turns = episode.turns
    sampled = versions[mask] if mask.any() else np.full(1, -1)
    last = max((turn.begin_s + turn.generate_s + turn.wait_s + turn.env_s for turn in turns), default=0.0)
    return Summary(
        ticket_id=episode.ticket_id,
        index=episode.index,
        offset=offset,
        length=length,
        sample_id=episode.sample_id[:128],
        seed=episode.seed,
        actor=episode.actor,
        reward=episode.reward,
        success=episode.metrics.get("success", float(episode.reward > 0)),
        ending=episode.ending,
        error=episode.error[:256],
        refused=episode.refused[:256],
        turns=len(turns),
        tokens=int(mask.sum()),
        expanded=len(mask) + sum(image.tokens - 1 for image in episode.images if image.tokens),
        images=len(episode.images),
        oldest=int(sampled.min()),
        newest=int(sampled.max()),
        trained=bool(episode.columns),
        started=episode.started,
        seconds=last,
        generate_s=sum(turn.generate_s for turn in turns),
        wait_s=sum(turn.wait_s for turn in turns),
        env_s=sum(turn.env_s for turn in turns),
        mean_gap=_finite(gaps.mean()) if len(gaps) else 0.0,
        max_gap=_finite(gaps.max()) if len(gaps) else 0.0,
        advantage=_finite(advantages.mean()) if len(advantages) else 0.0,
    )


def _finite(value: Any) -> float:
    """Return the value as a finite number. NaN becomes a very large number, so that it stands out."""
    return float(np.nan_to_num(value, nan=1e30, posinf=1e30, neginf=-1e30))
