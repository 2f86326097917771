"""Geometry datasets: what `launch/prepare.py` keeps of a raw file, how it is split, and the rows it writes.

A written row has the columns of the public processed datasets: `problem` (with `<image>` marks), `answer` and `images`
(data URIs), so that the file needs nothing beside it.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image as PILImage

from envs.datasets import MAX_LISTED, Dataset, Report, Tick, data_uri, load_dataset, no_tick
from envs.math_reward import label_problem
from envs.row_files import read_rows
from shared.types import Sample
from shared.vision import IMAGE_FORMATS


def read_problems(paths: Iterable[Path], tick: Tick = no_tick) -> Dataset:
    """All rows with a readable image and a label that parses. ValueError for a missing file or column, or no row."""
    samples, total = [], Report()
    for path in paths:
        _, columns = next(read_rows(path, no_complaint), (0, {}))
        if columns and "problem" not in columns:
            raise ValueError(f"{path} has no column 'problem'; it has: {', '.join(map(str, columns))}")
        data = load_dataset(path, tick=tick)
        total.add(data.report, f"{path.name} ")
        samples += [sample for sample in data.samples if not label_problem(sample.label)]
    return Dataset(samples, total)


def no_complaint(number: int, reason: str) -> None:
    pass


def split_problems(samples: Iterable[Sample], num_heldout: int, seed: int = 0) -> tuple[list[Sample], list[Sample]]:
    """(train, held out) at random; problems with the same image stay together, so `num_heldout` may be passed by
    a few. ValueError if none is left to train on."""
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
    """The samples whose question is none of the others'."""
    taken = {_question(sample) for sample in others}
    return [sample for sample in samples if _question(sample) not in taken]


def row_of(sample: Sample) -> dict[str, Any]:
    """The sample as a dataset row."""
    content = sample.prompt[-1]["content"]
    text = "".join("<image>" if part["type"] == "image" else part["text"] for part in content)
    return {"problem": text, "answer": sample.label, "images": [_uri(image.data) for image in sample.images]}


def listed(examples: list[str]) -> str:
    """The first few examples in brackets, or nothing."""
    return f" ({'; '.join(examples[: 2 * MAX_LISTED])})" if examples else ""


def _family(sample: Sample) -> str:
    return sample.images[0].content_hash if sample.images else repr(sample.prompt)


def _question(sample: Sample) -> tuple[str, ...]:
    content = sample.prompt[-1]["content"]
    text = " ".join(" ".join(part.get("text", "") for part in content).split())
    return (text, *(image.content_hash for image in sample.images))


def _uri(data: bytes | memoryview) -> str:
    with PILImage.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
        kind = PILImage.MIME.get(image.format or "", "image/png")
    return data_uri(data, kind)
