"""Geometry datasets for `launch/prepare.py`: reading the usable rows of a raw file, splitting them, and making the rows
to write.

A written row has the columns of the public processed datasets: `problem` (with `<image>` marks), `answer` and `images`
(data URIs), so that the file needs nothing beside it.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image as PILImage

from envs.datasets import MAX_LISTED, Dataset, Report, Tick, data_uri, load_dataset, no_tick
from shared.types import Sample
from shared.vision import IMAGE_FORMATS


def read_problems(paths: Iterable[Path], tick: Tick = no_tick, columns: Mapping[str, str] | None = None) -> Dataset:
    """Return all rows with readable images and a label that parses. Raise ValueError for a missing file or column, or
    if there is no row."""
    samples, total = [], Report()
    for path in paths:
        data = load_dataset(path, tick=tick, columns=columns, is_mathematics=True)
        total.add(data.report, f"{path.name} ")
        samples += data.samples
    return Dataset(samples, total)


def split_problems(samples: Iterable[Sample], num_heldout: int, seed: int = 0) -> tuple[list[Sample], list[Sample]]:
    """Split problems into (train, held out) at random. Problems with the same image stay together, so there may be a
    few more than `num_heldout`. Raise ValueError if none is left to train on."""
    families: dict[str, list[Sample]] = {}
    for sample in samples:
        families.setdefault(_family(sample), []).append(sample)
    order = list(families.values())
    Random(seed).shuffle(order)
    heldout: list[Sample] = []
    while order and len(heldout) < num_heldout:
        heldout += order.pop()
    if not order:
        raise ValueError(f"{num_heldout} held-out problems of {len(heldout)} leave none to train on")
    return [sample for family in order for sample in family], heldout


def without(samples: Iterable[Sample], others: Iterable[Sample]) -> list[Sample]:
    """Return the samples whose question does not occur in `others`."""
    taken = {_question(sample) for sample in others}
    return [sample for sample in samples if _question(sample) not in taken]


def rows_of(samples: Iterable[Sample], *, as_messages: bool) -> list[dict[str, Any]]:
    """Return the samples as dataset rows. `as_messages`: problems are chat messages, not the user's text alone."""
    return [row_of(sample, as_messages=as_messages) for sample in samples]


def has_dialogue(samples: Iterable[Sample]) -> bool:
    """Tell whether any sample's prompt has more than the user's message."""
    return any(len(sample.prompt) > 1 for sample in samples)


def row_of(sample: Sample, *, as_messages: bool = False) -> dict[str, Any]:
    """Return the sample as a dataset row."""
    messages = [{"role": message["role"], "content": _marked(message["content"])} for message in sample.prompt]
    row = {"problem": messages if as_messages else messages[-1]["content"], "answer": sample.label}
    row["images"] = [_uri(image.data) for image in sample.images]
    return row | ({"choices": sample.metadata["choices"]} if "choices" in sample.metadata else {})


def _marked(content: Any) -> str:
    """Return a message's text with `<image>` marks."""
    if isinstance(content, str):
        return content
    return "".join("<image>" if part["type"] == "image" else part["text"] for part in content)


def listed(examples: list[str]) -> str:
    """Return the first few examples in brackets; "" if there are none."""
    return f" ({'; '.join(examples[: 2 * MAX_LISTED])})" if examples else ""


def _family(sample: Sample) -> str:
    return sample.images[0].content_hash if sample.images else repr(sample.prompt)


def _question(sample: Sample) -> tuple[str, ...]:
    text = " ".join(" ".join(_marked(message["content"]) for message in sample.prompt).split())
    return (text, *(image.content_hash for image in sample.images))


def _uri(data: bytes | memoryview) -> str:
    with PILImage.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
        kind = PILImage.MIME.get(image.format or "", "image/png")
    return data_uri(data, kind)
