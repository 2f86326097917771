"""What a recording holds: typed records with the bounds of their fields; `shared.recordings` tells the layout.

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
TOKENS = 2**20  # of one episode
ImageFormat = Literal["png", "jpeg", "webp", "bin"]  # bin: no image that can be read
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
    """Raw little-endian values, which `numpy` reads in place."""

    dtype: Literal["<i4", "<f4", "|u1"]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=TOKENS)], ...], Meta(max_length=2)]
    data: memoryview

    @staticmethod
    def of(values: np.ndarray) -> Array:
        values = np.ascontiguousarray(values)
        return Array(values.dtype.str, values.shape, memoryview(values.tobytes()))  # type: ignore[arg-type]

    def numpy(self) -> np.ndarray:
        """Read-only. ValueError if its bytes are not as many as its shape says."""
        dtype = np.dtype(self.dtype)
        if prod(self.shape) * dtype.itemsize != len(self.data):
            raise ValueError(f"an array of shape {list(self.shape)} and {dtype} has {len(self.data)} bytes")
        return np.frombuffer(self.data, dtype).reshape(self.shape)


class Record(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields that a reader does not know are passed over: a format may gain some without a new version."""


class Tagged(Record, frozen=True, kw_only=True, tag_field="kind", tag=True):
    """A record that stands in a file by itself, with the name of its class as its `kind`."""


class ImageRef(Record, frozen=True, kw_only=True):
    """One image of an episode: its file is images/HASH.FORMAT, however many episodes and steps show it."""

    hash: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]  # XXH3, 128 bits, of the file's bytes
    format: ImageFormat
    width: Natural = 0
    height: Natural = 0
    bytes: Natural = 0
    tokens: Natural = 0  # that its placeholder expanded to

    @property
    def file_name(self) -> str:
        return f"{self.hash}.{self.format}"


class RecordedTurn(Record, frozen=True, kw_only=True):
    """Tokens [start, end) of the compact stream are the answer. Images [first_image, last_image) came before it, with
    the text `seen`. Seconds count from the episode's start; a turn that was not timed has zeros."""

    start: Natural
    end: Natural
    reward: Finite
    seen: Text = ""  # what prompt, environment and chat template put before the answer, as the model reads it
    answer: Text = ""
    first_image: Natural = 0
    last_image: Natural = 0
    begin_s: NonNegative = 0.0  # when the engine was asked
    generate_s: NonNegative = 0.0  # until its answer was there
    wait_s: NonNegative = 0.0  # for a free thread of the environment
    env_s: NonNegative = 0.0  # that the environment took
    info: Json = ""  # what the environment's step said of the answer, as bounded JSON


EvaluationName = Annotated[str, Meta(pattern="^[a-z0-9_]{0,64}$")]


class StepHeader(Tagged, frozen=True, kw_only=True):
    """The first record of every file."""

    step: Natural
    version: Natural  # of the policy that the step trained, as it began; or of the one that was evaluated
    time: NonNegative  # seconds since 1970
    run: Short = ""
    task: Short = ""  # env.module
    recipe_hash: Short = ""
    objective: Json = "{}"  # the recipe's section learner.objective
    group_relative: bool = False
    model: Short = ""  # model.path, and how it was used:
    dtype: Short = "float32"
    min_pixels: Natural = 0
    max_pixels: Natural = 0
    temperature: NonNegative = 1.0
    columns: Annotated[tuple[ColumnName, ...], Meta(max_length=32)] = ()
    evaluation: EvaluationName = ""  # its name, for episodes of an evaluation after the step; "" = the step's own
    played: Natural = 0  # episodes of the evaluation, of which some are recorded
    metrics: Annotated[dict[str, Finite], Meta(max_length=4096)] = {}  # of all of them


class StepImages(Tagged, frozen=True, kw_only=True):
    """The distinct images of a step's episodes, by file name."""

    names: Many[Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\.(png|jpeg|webp|bin)$")]] = ()


class Episode(Tagged, frozen=True, kw_only=True):
    """One episode with all that is known of it. `columns` is empty for one that no update was computed on."""

    ticket_id: Id
    index: Natural  # in its group
    group_size: Natural = 1
    actor: Id = ""
    issue_version: Natural = 0  # of the ticket
    sample_id: Text = ""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    prompt: Json = ""  # of the sample, as bounded JSON, as are the next two
    label: Text = ""
    metadata: Json = ""
    token_ids: Array  # int32 [T]
    loss_mask: Array  # uint8 [T], 1 = sampled by the policy
    behaviour_logprobs: Array  # float32 [T], 0 where the mask is 0
    policy_versions: Array  # int32 [T], -1 where the mask is 0
    pieces: Annotated[tuple[Short, ...], Meta(max_length=TOKENS)] = ()  # [T], each token as text; () = no tokenizer
    turns: Many[RecordedTurn] = ()
    tail: Text = ""  # what stands after the last answer
    images: Many[ImageRef] = ()
    weights: Many[WeightName] = ()
    reward: Finite = 0.0
    metrics: dict[str, Finite] = {}
    ending: Ending = Ending.COMPLETED
    error: Text = ""
    refused: Short = ""  # why its whole group was not trained on; "" = it was
    started: NonNegative = 0.0  # seconds since 1970, by the actor's clock; 0 = not known
    group_s: NonNegative = 0.0  # that its whole group took to play
    columns: dict[ColumnName, Array] = {}

    @property
    def id(self) -> str:
        return f"{self.ticket_id}/{self.index}"

    @property
    def failed(self) -> bool:
        return bool(self.refused) or self.ending not in TRAINABLE_ENDINGS


class Summary(Tagged, frozen=True, kw_only=True):
    """What a list of episodes shows of one; its record is at [offset, offset + length) of the .rec file."""

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
    expanded: Natural = 0  # tokens, images expanded
    images: Natural = 0
    oldest: int = -1  # version that sampled a token; -1 = none did
    newest: int = -1
    trained: bool = False  # it has the learner's columns
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


AnyRecord = StepHeader | StepImages | Episode | Summary


def summary_of(episode: Episode, offset: int, length: int) -> Summary:
    """ValueError if an array of the episode is not what it says."""
    mask, versions = episode.loss_mask.numpy() == 1, episode.policy_versions.numpy()
    known = {name: array.numpy() for name, array in episode.columns.items()}
    gaps = np.zeros(0)
    if "logprob" in known and len(known["logprob"]) == mask.sum():
        gaps = np.abs(known["logprob"] - episode.behaviour_logprobs.numpy()[mask])
    advantages, turns = known.get("advantage", np.zeros(0)), episode.turns
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
    """What is not a number counts as very large: it is nothing healthy."""
    return float(np.nan_to_num(value, nan=1e30, posinf=1e30, neginf=-1e30))
