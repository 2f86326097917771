r"""Read a dataset file (.parquet or .jsonl) into samples, counting what had to be left out.

A row holds `problem` (text, with `<image>` where an image goes), `answer` and `images` (or one `image`); or, for
Sokoban, `extra_info.env_config`. An image is a data URI, a file name beside the dataset, bytes, or {"bytes", "path"}.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image as PILImage

from envs.math_reward import label_problem
from envs.row_files import read_rows
from shared.codec import encode
from shared.frames import DEFAULT_LIMITS, Limits
from shared.types import Image, Sample, Sampling, Ticket, Tickets
from shared.vision import IMAGE_FORMATS

MAX_PIXELS = 50_000_000
MAX_IMAGE_BYTES = 64 << 20
MAX_LISTED = 5
MISTAKES = ("bad_rows", "empty", "duplicates", "bad_images", "bad_labels", "repaired")
_BROKEN_ESCAPES = (
    (re.compile("\x08(?=[a-z])"), r"\\b"),  # \boxed read as JSON's \b
    (re.compile("\x0c(?=[a-z])"), r"\\f"),  # \frac
    (re.compile("\t(?=ext\\{|imes|heta|an\\b|riangle)"), r"\\t"),  # \text, \times, …
)

Tick = Callable[[int], None]
"""Told how many rows are done, for a progress line."""


def no_tick(done: int) -> None:
    pass


@dataclass(slots=True)
class Report:
    """What was read and what was left out; `examples` name the first few rows of each kind."""

    rows: int = 0
    samples: int = 0
    bad_rows: int = 0
    empty: int = 0
    duplicates: int = 0
    bad_images: int = 0
    bad_labels: int = 0
    repaired: int = 0
    examples: list[str] = field(default_factory=list)

    def note(self, kind: str, row: int, reason: str) -> None:
        count = getattr(self, kind) + 1
        setattr(self, kind, count)
        if count <= MAX_LISTED:
            self.examples.append(f"row {row}: {reason}")

    def add(self, other: Report, place: str = "") -> None:
        """Add what was read of a further file; `place` comes before its examples."""
        for kind in ("rows", "samples", *MISTAKES):
            setattr(self, kind, getattr(self, kind) + getattr(other, kind))
        self.examples += [f"{place}{example}" for example in other.examples]

    def summary(self) -> str:
        """One line for the log."""
        counts = ", ".join(
            f"{getattr(self, kind)} {kind.replace('_', ' ')}" for kind in MISTAKES if getattr(self, kind)
        )
        examples = f" ({'; '.join(self.examples)})" if self.examples else ""
        return f"{self.samples} samples of {self.rows} rows{', ' if counts else ''}{counts}{examples}"


@dataclass(frozen=True, slots=True)
class Dataset:
    samples: list[Sample]
    report: Report


def load_dataset(
    path: str | Path,
    *,
    system_prompt: str = "",
    tick: Tick = no_tick,
    limits: Limits = DEFAULT_LIMITS,
    most: int | None = None,
) -> Dataset:
    """All usable rows of a file as samples; what a row does to its reader is counted in the report. `limits` are those
    of a message, in which each sample is to travel; `most` samples are read. ValueError for a missing file or column,
    or no sample."""
    path = Path(path)
    report = Report()
    samples: list[Sample] = []
    seen: set[bytes] = set()

    def refuse(number: int, reason: str) -> None:
        report.rows += 1
        report.note("bad_rows", number, reason)

    for number, row in read_rows(path, refuse):
        if most is not None and len(samples) >= most:
            break
        if report.rows == report.bad_rows and (missing := _missing_column(row)):
            raise ValueError(f"{path} has no column {missing!r}; it has: {', '.join(map(str, row))}")
        report.rows += 1
        tick(report.rows)
        try:
            sample = _sample(path, number, row, system_prompt, report, limits)
            digest = b"" if sample is None else _digest(sample)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other rows are read
            report.note("bad_rows", number, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
            continue
        if sample is None:
            continue
        if digest in seen:
            report.note("duplicates", number, "the same as an earlier row")
            continue
        seen.add(digest)
        samples.append(sample)
    report.samples = len(samples)
    if not samples:
        raise ValueError(f"{path} holds no usable sample: {report.summary()}")
    return Dataset(samples, report)


def with_images(sample: Sample) -> list[dict[str, Any]]:
    """The sample's prompt with its images put in, for showing it to a person."""
    images = iter(sample.images)
    messages = []
    for message in sample.prompt:
        content = message["content"]
        if not isinstance(content, str):
            content = [
                {"type": "image", "image": PILImage.open(io.BytesIO(next(images).data), formats=IMAGE_FORMATS)}
                if part["type"] == "image"
                else part
                for part in content
            ]
        messages.append({**message, "content": content})
    return messages


def data_uri(data: bytes | memoryview, kind: str = "image/png") -> str:
    """An image file as the text that a dataset's `images` hold."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def repair(text: str) -> tuple[str, bool]:
    r"""`text` with control characters turned back into the LaTeX they came from (\b + oxed), and whether any were."""
    repaired = text
    for pattern, replacement in _BROKEN_ESCAPES:
        repaired = pattern.sub(replacement, repaired)
    return repaired, repaired != text


def env_config(row: dict[str, Any]) -> dict[str, Any] | None:
    """What a Sokoban row says about its board; None for other rows."""
    extra = row.get("extra_info")
    if isinstance(extra, str):
        try:
            extra = json.loads(extra)
        except (ValueError, RecursionError):
            return None
    config = extra.get("env_config") if isinstance(extra, dict) else row.get("env_config")
    return config if isinstance(config, dict) else None


def _digest(sample: Sample) -> bytes:
    """The same for samples that differ in their place only."""
    images = [image.content_hash for image in sample.images]
    parts = (sample.prompt, sample.label, images, sample.metadata.get("env_config"))
    return hashlib.sha256(repr(parts).encode()).digest()


def check_columns(path: str | Path, boards: bool, *, raw: bool) -> None:
    """ValueError, naming them, if the first row of a file lacks columns; `boards`: of Sokoban, else of problems;
    `raw`: it is not prepared yet, so that a board may be drawn in its prompt."""
    path = Path(path)
    _, row = next(read_rows(path, lambda number, reason: None), (0, {}))
    needed = ["problem", "answer"]
    if boards:
        drawn = raw and "prompt" in row
        needed = [] if drawn or env_config(row) is not None else ["extra_info.env_config"]
    if missing := [name for name in needed if name not in row]:
        what = "Sokoban needs a board" if boards else "the task needs problem, answer and images"
        has = ", ".join(map(str, row)) or "no row"
        raise ValueError(f"{path} has no column {' and no column '.join(missing)}: {what}; it has: {has}")


def _missing_column(row: dict[str, Any]) -> str:
    """Of a file's first row; "" for one that has all, or describes a board."""
    return "" if env_config(row) is not None else next((name for name in ("problem", "answer") if name not in row), "")


def _sample(
    path: Path, number: int, row: dict[str, Any], system_prompt: str, report: Report, limits: Limits
) -> Sample | None:
    """The sample of a row; None if the row is unusable, which is counted. WireError if no ticket can carry it."""
    config = env_config(row)
    if config is not None:
        prompt = ({"role": "system", "content": system_prompt},) if system_prompt else ()
        sample: Sample | None = Sample(f"{path.stem}-{number}", prompt, metadata={"env_config": config})
    else:
        sample = _problem_sample(path, number, row, system_prompt, report)
    if sample is not None:
        encode(Tickets((Ticket("0-0", sample, 1, 0, Sampling(), 0.0),)), limits)
    return sample


def _problem_sample(path: Path, number: int, row: dict[str, Any], system_prompt: str, report: Report) -> Sample | None:
    """The sample of a row; None if the row is unusable, which is counted."""
    problem, answer = row.get("problem"), row.get("answer")
    if isinstance(answer, list | tuple | dict) or (isinstance(answer, float) and not math.isfinite(answer)):
        report.note("bad_labels", number, f"the answer is {answer!r:.80}, and is to be a text or a number")
        return None
    if isinstance(problem, list):  # chat messages: the user's text
        problem = "\n".join(str(message.get("content", "")) for message in problem if message.get("role") == "user")
    problem, answer = str(problem if problem is not None else ""), str(answer if answer is not None else "")
    (problem, fixed), (answer, fixed_answer) = repair(problem), repair(answer)
    if not problem.replace("<image>", "").strip() or not answer.strip():
        report.note("empty", number, "no problem or no answer")
        return None
    try:
        images = tuple(Image.of(_image_bytes(item, path.parent)) for item in _image_items(row))
        content = _content(problem, len(images))
    except Exception as error:  # noqa: BLE001 - Pillow's decoders raise OSError, SyntaxError, struct.error and others
        report.note("bad_images", number, " ".join(str(error).split()))
        return None
    wrong = label_problem(answer)
    if wrong:
        report.note("bad_labels", number, wrong)
    if fixed or fixed_answer:
        report.note("repaired", number, "control characters were turned back into LaTeX")
    user = {"role": "user", "content": content}
    explained = "<tool_call>" in problem or r"\boxed" in problem
    system = ({"role": "system", "content": system_prompt},) if system_prompt and not explained else ()
    return Sample(f"{path.stem}-{number}", (*system, user), images, answer.strip(), metadata={"row": number})


def _image_items(row: dict[str, Any]) -> list[Any]:
    items = row.get("images", row.get("image"))
    if items is None:
        return []
    return list(items) if isinstance(items, (list, tuple)) else [items]


def _image_bytes(item: Any, folder: Path) -> bytes:
    """The bytes of an encoded image that can be read; ValueError or OSError otherwise."""
    if isinstance(item, dict):
        item = item.get("bytes") or item.get("path") or item.get("url")
    if isinstance(item, str) and item.startswith("data:"):
        data = base64.b64decode(item.partition(",")[2], validate=True)
    elif isinstance(item, str):
        data = _read_file(folder / item)
    elif isinstance(item, bytes):
        data = item
    else:
        raise ValueError(f"an image is {type(item).__name__}, not a data URI, file name or bytes")
    with PILImage.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"an image of {image.width}x{image.height} is too large")
        image.load()
    return data


def _read_file(path: Path) -> bytes:
    """A row may name any file of the user's: devices and pipes would never end."""
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is no file")
    if path.stat().st_size > MAX_IMAGE_BYTES:
        raise ValueError(f"{str(path)!r} has more than {MAX_IMAGE_BYTES} bytes")
    return path.read_bytes()


def _content(problem: str, num_images: int) -> list[dict[str, Any]]:
    """The user's content: images at their `<image>` marks, or all first where there are no marks."""
    pieces = problem.split("<image>")
    if len(pieces) == 1:
        pieces = [""] * num_images + [problem]
    if len(pieces) - 1 != num_images:
        raise ValueError(f"{len(pieces) - 1} <image> marks, but {num_images} images")
    content: list[dict[str, Any]] = []
    for index, piece in enumerate(pieces):
        if index:
            content.append({"type": "image"})
        if piece.strip():
            content.append({"type": "text", "text": piece.strip() if index == len(pieces) - 1 else piece})
    return content
