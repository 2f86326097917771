"""A run's recordings as the pages show them: steps and evaluations, summaries, episodes with their tokens, images that
were checked."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np

from launch.dashboard_server.runs import Run, Unknown, modified, size_of
from launch.dashboard_server.series import clean, from_json
from learner.images import rgb_of
from shared.guards.kept import Kept
from shared.recordings.reading import (
    FOLDER,
    IMAGES,
    INDEX_SUFFIX,
    Place,
    RecordedStep,
    RecordingError,
    read_image,
    read_step,
    recordings,
)
from shared.recordings.records import COLUMNS, Episode, ImageRef, Summary
from shared.types import Image

IMAGE = re.compile(r"([0-9a-f]{32})\.(png|jpeg|webp)")
MAX_KEPT_BYTES = 32 << 20
MAX_SHOWN_TOKENS = 1 << 17
SUMMARY_BYTES = 2000  # that one takes in memory, about
_steps: Kept[tuple[str, object], RecordedStep] = Kept(
    MAX_KEPT_BYTES, lambda _, step: 1000 + SUMMARY_BYTES * len(step.summaries)
)
_checked: Kept[str, bool] = Kept(1 << 20, lambda _, __: 100)  # images that were decoded without a fault


def recorded(run: Run) -> list[Place]:
    """By step; those that cannot be read have none."""
    try:
        return recordings(run.inside(run.folder / FOLDER))
    except (OSError, Unknown):
        return []


def listed(places: list[Place]) -> dict[str, Any]:
    """As the pages name them: steps by their numbers, evaluations as `STEP-NAME`."""
    return {
        "steps": [place.step for place in places if not place.evaluation],
        "evaluations": [str(place) for place in places if place.evaluation],
    }


def opened(run: Run, place: Place) -> RecordedStep:
    """Unknown where there is no such recording; RecordingError where its file is none."""
    try:
        path = run.file(place.path(run.folder / FOLDER))
        state = tuple((modified(each), size_of(each)) for each in (path, path.with_suffix(INDEX_SUFFIX)))
    except (OSError, Unknown):
        raise Unknown(f"run {run.name} has no recording of step {place}") from None
    return _steps.get((str(path), state), lambda: read_step(path))


def step_page(run: Run, place: Place) -> dict[str, Any]:
    known = opened(run, place)
    return {
        "header": msgspec.structs.asdict(known.header),
        "episodes": [shown(summary) for summary in known.summaries],
        "damages": list(known.damages),
    }


def shown(summary: Summary) -> dict[str, Any]:
    values = {name: getattr(summary, name) for name in summary.__struct_fields__ if name not in ("offset", "length")}
    return {**values, "id": summary.id, "has_failed": summary.failed, "ending": str(summary.ending)}


def summary_of(run: Run, place: Place, episode_id: str) -> tuple[RecordedStep, Summary]:
    known = opened(run, place)
    for summary in known.summaries:
        if summary.id == episode_id:
            return known, summary
    raise Unknown(f"step {place} of run {run.name} has no episode {episode_id}")


def episode_page(run: Run, place: Place, episode_id: str) -> dict[str, Any]:
    known, summary = summary_of(run, place, episode_id)
    episode = known.episode(summary)
    return {
        "summary": shown(summary),
        "header": msgspec.structs.asdict(known.header),
        "columns": COLUMNS,
        "group": [shown(other) for other in known.summaries if other.ticket_id == episode.ticket_id],
        **episode_values(episode),
    }


def episode_values(episode: Episode) -> dict[str, Any]:
    """Columns stand at their tokens in the whole stream, null where a token was not sampled."""
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
    """The value of a recording's JSON; the text itself where it was cut off."""
    try:
        return from_json(text) if text else None
    except ValueError:
        return text


def image_file(run: Run, name: str) -> tuple[bytes, str]:
    """(content, media type) of a recorded image that decodes within the usual limits. Unknown, RecordingError."""
    if not (found := IMAGE.fullmatch(name)):
        raise Unknown(f"{name[:100]!r} is no name of a recorded image")
    run.file(run.folder / FOLDER / IMAGES / name)
    data = read_image(run.folder / FOLDER, ImageRef(hash=found[1], format=found[2]))  # type: ignore[arg-type]

    def check() -> bool:
        try:
            rgb_of(Image(data, found[1]))
        except ValueError as error:
            raise RecordingError(f"{name} is not shown: {error}") from error
        return True

    _checked.get(name, check)
    return data, f"image/{found[2]}"
