"""A run's recordings in the form that the pages need: steps and evaluations, summaries, episodes with their tokens, and
images that were checked."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np

from launch.dashboard_server.metric_columns import clean, from_json
from launch.dashboard_server.runs import Run, Unknown, modified, size_of
from learner.batch.image_decoder import rgb_of
from shared.recordings.episode_format import COLUMNS, ImageRef, RecordedEpisode, Summary
from shared.recordings.reader import (
    FOLDER,
    IMAGES,
    INDEX_SUFFIX,
    RecordedStep,
    RecordingError,
    RecordingId,
    read_image,
    read_step,
    recordings,
)
from shared.types import Image
from shared.util.lru_cache import LruCache

IMAGE = re.compile(r"([0-9a-f]{32})\.(png|jpeg|webp)")
MAX_KEPT_BYTES = 32 << 20
MAX_SHOWN_TOKENS = 1 << 17
SUMMARY_BYTES = 2000  # approximate memory of one summary
_steps: LruCache[tuple[str, object], RecordedStep] = LruCache(
    MAX_KEPT_BYTES, lambda _, step: 1000 + SUMMARY_BYTES * len(step.summaries)
)
_checked: LruCache[str, bool] = LruCache(1 << 20, lambda _, __: 100)  # images that were decoded without an error


def recorded(run: Run) -> list[RecordingId]:
    """Return the run's recordings by step; empty if they cannot be read."""
    try:
        return recordings(run.inside(run.folder / FOLDER))
    except (OSError, Unknown):
        return []


def listed(places: list[RecordingId]) -> dict[str, Any]:
    """Return the recordings by the pages' names: numbers for steps, `STEP-NAME` for evaluations."""
    return {
        "steps": [place.step for place in places if not place.evaluation],
        "evaluations": [str(place) for place in places if place.evaluation],
    }


def opened(run: Run, place: RecordingId) -> RecordedStep:
    """Open a recording. Raise Unknown if there is none, RecordingError if its file is not a valid recording."""
    try:
        path = run.file(place.path(run.folder / FOLDER))
        state = tuple((modified(each), size_of(each)) for each in (path, path.with_suffix(INDEX_SUFFIX)))
    except (OSError, Unknown):
        raise Unknown(f"run {run.name} has no recording of step {place}") from None
    return _steps.get((str(path), state), lambda: read_step(path))


def step_page(run: Run, place: RecordingId) -> dict[str, Any]:
    known = opened(run, place)
    return {
        "header": msgspec.structs.asdict(known.header),
        "episodes": [shown(summary) for summary in known.summaries],
        "damages": list(known.damages),
    }


def shown(summary: Summary) -> dict[str, Any]:
    values = {name: getattr(summary, name) for name in summary.__struct_fields__ if name not in ("offset", "length")}
    return {**values, "id": summary.id, "has_failed": summary.failed, "ending": str(summary.ending)}


def summary_of(run: Run, place: RecordingId, episode_id: str) -> tuple[RecordedStep, Summary]:
    known = opened(run, place)
    for summary in known.summaries:
        if summary.id == episode_id:
            return known, summary
    raise Unknown(f"step {place} of run {run.name} has no episode {episode_id}")


def episode_page(run: Run, place: RecordingId, episode_id: str) -> dict[str, Any]:
    known, summary = summary_of(run, place, episode_id)
    episode = known.episode(summary)
    return {
        "summary": shown(summary),
        "header": msgspec.structs.asdict(known.header),
        "columns": COLUMNS,
        "group": [shown(other) for other in known.summaries if other.ticket_id == episode.ticket_id],
        **episode_values(episode),
    }


def episode_values(episode: RecordedEpisode) -> dict[str, Any]:
    """Return an episode in the form that the pages need. Columns have one value per token of the whole stream, None
    where the token was not sampled."""
    mask = episode.loss_mask.numpy()
    if len(mask) > MAX_SHOWN_TOKENS:
        raise RecordingError(
            f"an episode of {len(mask)} tokens is too long to be shown; the limit is {MAX_SHOWN_TOKENS}"
        )
    sampled = np.flatnonzero(mask == 1)
    gap = None
    tokens: dict[str, list[float | None]] = {}
    for name, column in episode.columns.items():
        tokens[name] = spread(column.numpy(), sampled, len(mask))
        if name == "logprob":
            gap = column.numpy() - episode.behaviour_logprobs.numpy()[sampled]
    if gap is not None:
        tokens["gap"] = spread(np.abs(gap), sampled, len(mask))
    tokens["engine_logprob"] = spread(episode.behaviour_logprobs.numpy()[sampled], sampled, len(mask))
    tokens["version"] = spread(episode.policy_versions.numpy()[sampled], sampled, len(mask))
    return {
        "id": episode.id,
        "token_ids": episode.token_ids.numpy().tolist(),
        "mask": mask.tolist(),
        "pieces": list(episode.pieces),
        "tokens": tokens,
        "segments": episode.segments,
        "turns": [{**msgspec.structs.asdict(turn), "info": parsed(turn.info)} for turn in episode.turns],
        "tail": episode.tail,
        "images": [{**msgspec.structs.asdict(ref), "file": ref.file_name} for ref in episode.images],
        "metrics": episode.metrics,
        "error": episode.error,
        "prompt": parsed(episode.prompt),
        "label": episode.label,
        "metadata": parsed(episode.metadata),
        "issue_version": episode.issue_version,
        "weights": list(episode.weights),
        "group_s": episode.group_s,
    }


def spread(values: np.ndarray, places: np.ndarray, length: int) -> list[float | None]:
    whole: list[float | None] = [None] * length
    for place, value in zip(places.tolist(), values.tolist(), strict=True):
        whole[place] = clean(value)
    return whole


def parsed(text: str) -> Any:
    """Return the value of a recording's JSON; the text itself if it cannot be parsed, since it may be cut off."""
    try:
        return from_json(text) if text else None
    except ValueError:
        return text


def image_file(run: Run, name: str) -> tuple[bytes, str]:
    """Return (content, media type) of a recorded image, after decoding it within the usual limits. Raise Unknown or
    RecordingError."""
    if not (match := IMAGE.fullmatch(name)):
        raise Unknown(f"{name[:100]!r} is no name of a recorded image")
    run.file(run.folder / FOLDER / IMAGES / name)
    data = read_image(run.folder / FOLDER, ImageRef(hash=match[1], format=match[2]))  # type: ignore[arg-type]

    def check() -> bool:
        try:
            rgb_of(Image(data, match[1]))
        except ValueError as error:
            raise RecordingError(f"{name} is not shown: {error}") from error
        return True

    _checked.get(name, check)
    return data, f"image/{match[2]}"
