"""Read a dataset (.parquet or .jsonl files) into samples, and count the rows that had to be left out.

A row holds a problem (text, with `<image>` where an image goes, or chat messages), its answer, images and choices, in
the columns of `envs.row_columns`; or, for Sokoban, `extra_info.env_config`. An image is a data URI, base64, a file name
beside the dataset, an http(s) address, bytes, or {"bytes", "path"}. All other columns become the sample's metadata.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from envs.image_urls import ImageFolder
from envs.math_reward import label_problem
from envs.row_columns import BOARD, LAYOUTS, VIDEOS, Columns, columns_of, described, is_empty, value_at
from envs.row_files import DataSource, column_names, dataset_files, read_rows, share_names
from envs.row_prompts import BadImage, choices_of, prompt_of, repair, with_system_prompt
from shared.rgb_images import open_image, plain_file
from shared.types import Image, Sample, Sampling, Ticket, Tickets
from shared.wire.codec import encode
from shared.wire.frames import DEFAULT_LIMITS, Limits

MAX_PIXELS = 50_000_000
MAX_IMAGE_BYTES = 64 << 20
MAX_LISTED = 5
MAX_REPEATED = 50_000_000
AT_ONCE = 64  # rows whose images are downloaded together
LEFT_OUT = ("bad_rows", "empty", "duplicates", "bad_images", "too_long", "cannot_be_shown", "bad_labels")
MISTAKES = (*LEFT_OUT, "repaired")
ALARMING = 0.01
"""Share of rows left out (but for duplicates) or not used as they are, above which a person is warned."""
_URL = re.compile(r"([a-z][a-z0-9+]{1,9})://", re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{100,}={0,2}\s*")

Tick = Callable[[int], None]
"""Told how many rows are done, for a progress line."""


def no_tick(done: int) -> None:
    pass


@dataclass(slots=True)
class Report:
    """Counts of the rows read and left out; `examples` describe the first few rows of each kind of mistake."""

    rows: int = 0
    samples: int = 0
    bad_rows: int = 0
    empty: int = 0
    duplicates: int = 0
    bad_images: int = 0
    too_long: int = 0
    cannot_be_shown: int = 0
    bad_labels: int = 0
    repaired: int = 0
    unused: Counter[str] = field(default_factory=Counter)
    """Rows by the column, or the key of a message, that is filled and not used."""
    columns: str = ""  # which columns were read, if they are not problem and answer
    examples: list[str] = field(default_factory=list)

    def note(self, kind: str, row: int | str, reason: str) -> None:
        count = getattr(self, kind) + 1
        setattr(self, kind, count)
        if count <= MAX_LISTED:
            self.examples.append(f"row {row}: {reason}")

    def note_unused(self, column: str, row: int) -> None:
        self.unused[column] += 1
        if self.unused[column] <= MAX_LISTED:
            self.examples.append(f"row {row}: {column} is not used")

    @property
    def is_alarming(self) -> bool:
        """Tell whether so many rows were left out, or not used as they are, that a person is to look."""
        count = sum(getattr(self, kind) for kind in LEFT_OUT if kind != "duplicates") + sum(self.unused.values())
        return count > ALARMING * self.rows

    def add(self, other: Report, place: str = "") -> None:
        """Add the counts and examples of another file's report; `place` is put before each example."""
        for kind in ("rows", "samples", *MISTAKES):
            setattr(self, kind, getattr(self, kind) + getattr(other, kind))
        self.unused += other.unused
        self.columns = self.columns or other.columns
        self.examples += [f"{place}{example}" for example in other.examples]

    def summary(self) -> str:
        """Return the counts and examples as one line."""
        counts = ", ".join(
            f"{getattr(self, kind)} {kind.replace('_', ' ')}" for kind in MISTAKES if getattr(self, kind)
        )
        unused = ", ".join(f"{count} with unused {name}" for name, count in self.unused.items())
        examples = f" ({'; '.join(self.examples)})" if self.examples else ""
        parts = (f"{self.samples} samples of {self.rows} rows", self.columns, counts, unused)
        return ", ".join(filter(None, parts)) + examples


@dataclass(frozen=True, slots=True)
class Dataset:
    samples: list[Sample]
    report: Report


def load_dataset(
    path: DataSource,
    *,
    system_prompt: str = "",
    tools: tuple[dict[str, Any], ...] = (),
    tick: Tick = no_tick,
    limits: Limits = DEFAULT_LIMITS,
    most: int | None = None,
    columns: Mapping[str, str] | None = None,
    is_mathematics: bool = False,
    image_cache: str = "",
    with_folders: bool = False,
) -> Dataset:
    """Return all usable rows of a file, or of a folder's, a pattern's or a list's files, as samples, at most `most`;
    rows that cannot be used are counted in the report. `tools` are the schemas of the environment's tools; `columns`
    names columns (`data.columns`). A sample must fit into a message with these `limits`. `is_mathematics`: answers are
    graded by `envs.math_reward`, so that rows whose label it cannot read are left out; else labels may have any form.
    `image_cache`: the folder for images of http(s) addresses; "" = these are not downloaded. `with_folders`: ids begin
    with the file's folder, for files of one name. Raise ValueError for a missing file or column, or if there is no
    sample."""
    files = dataset_files(path)
    total, samples, seen = Report(), list[Sample](), set[bytes]()
    folder = ImageFolder(image_cache) if image_cache else None
    with_folders = with_folders or share_names(files)
    for file in files:
        reader = _Reader(file, system_prompt, tools, limits, columns or {}, seen, folder, is_mathematics=is_mathematics)
        reader.id = f"{file.parent.name}/{file.stem}" if with_folders else file.stem
        room = None if most is None else most - len(samples)
        samples += reader.read(partial(_tick_from, tick, total.rows), room)
        total.add(reader.report, f"{file.name} " if len(files) > 1 else "")
        if most is not None and len(samples) >= most:
            break
    if not samples:
        raise ValueError(f"{path} holds no usable sample: {total.summary()}")
    return Dataset(samples, total)


def _tick_from(tick: Tick, earlier: int, rows: int) -> None:
    tick(earlier + rows)


class _Reader:
    """Reads the samples of one file. `seen` holds the digests of the samples so far, also of other files."""

    def __init__(
        self,
        path: Path,
        system_prompt: str,
        tools: tuple[dict[str, Any], ...],
        limits: Limits,
        given: Mapping[str, str],
        seen: set[bytes],
        folder: ImageFolder | None,
        *,
        is_mathematics: bool,
    ) -> None:
        self._path = path
        self.id = path.stem
        self._folder = folder
        self._system_prompt = system_prompt
        self._tools = tools
        self._limits = limits
        self._given = given
        self._seen = seen
        self._is_mathematics = is_mathematics
        self.report = Report()

    def read(self, tick: Tick, most: int | None) -> list[Sample]:
        """Return the file's samples, at most `most`. Raise ValueError for a missing column."""
        report, samples = self.report, list[Sample]()
        columns = self._columns()
        names = None if columns is None else columns.names
        for number, row in self._with_images(read_rows(self._path, self._refuse, names, others=True), columns):
            if most is not None and len(samples) >= most:
                break
            report.rows += 1
            tick(report.rows)
            columns = columns or self._columns_of(row, list(row))
            try:
                sample = self._sample(number, row, columns)
                digest = b"" if sample is None else _digest(sample)
            except Exception as error:  # noqa: BLE001 - whatever fails here, the other rows are still read
                report.note("bad_rows", number, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
                continue
            if sample is None:
                continue
            if digest in self._seen:
                report.note("duplicates", number, "the same as an earlier row")
                continue
            self._seen.add(digest)
            samples.append(sample)
        report.samples = len(samples)
        return samples

    def _with_images(
        self, rows: Iterator[tuple[int, dict[str, Any]]], columns: Columns | None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the rows, those of `AT_ONCE` at a time when the images of their addresses are downloaded."""
        if self._folder is None:
            yield from rows
            return
        while some := list(islice(rows, AT_ONCE)):
            for _, row in some:
                columns = columns or self._columns_of(row, list(row))
            items = [item for _, row in some for item in _image_items(row, columns or Columns(*LAYOUTS[0]))[0]]
            self._folder.fetch(filter(None, map(_address_of, items)))
            yield from some

    def _refuse(self, number: int, reason: str) -> None:
        self.report.rows += 1
        self.report.note("bad_rows", number, reason)

    def _columns(self) -> Columns | None:
        """Return the columns of a Parquet file; None for others, of which the first row tells."""
        names = column_names(self._path) if self._path.suffix == ".parquet" else []
        return self._columns_of({}, names) if names else None

    def _columns_of(self, row: dict[str, Any], names: list[str]) -> Columns:
        try:
            columns = columns_of(names, self._given, self._path)
        except ValueError:
            if env_config(row) is None and not {BOARD, "env_config", "extra_info"} & {*names}:
                raise
            return Columns(*LAYOUTS[0])  # a file of boards, of which other rows may be problems
        if (columns.problem, columns.answer) != LAYOUTS[0] and env_config(row) is None:
            self.report.columns = f"read as problem = {columns.problem}, answer = {columns.answer}"
        return columns

    def _sample(self, number: int, row: dict[str, Any], columns: Columns) -> Sample | None:
        """Return the sample of a row; None for an unusable row, which is counted in the report. Raise WireError if it
        does not fit into a message."""
        config = env_config(row)
        if config is not None:
            messages = ({"role": "system", "content": self._system_prompt},) if self._system_prompt else ()
            sample: Sample | None = Sample(
                self._id(number), messages, metadata={"env_config": config}, tools=self._tools
            )
            drawn = "prompt" in row  # a row of Sokoban, whose prompt and image draw the same board
            for name in () if drawn else (columns.problem, columns.answer, *columns.images, *columns.choices):
                if not is_empty(value_at(row, name)):
                    self.report.note_unused(name, number)
        else:
            sample = self._problem_sample(number, row, columns)
        if sample is not None:
            encode(Tickets((Ticket("0-0", sample, 1, 0, Sampling(), 0.0),)), self._limits)
        return sample

    def _id(self, number: int) -> str:
        return f"{self.id}-{number}"

    def _problem_sample(self, number: int, row: dict[str, Any], columns: Columns) -> Sample | None:
        """Return the sample of a problem's row; None for an unusable row, which is counted in the report."""
        report, label = self.report, value_at(row, columns.answer)
        if isinstance(label, list | tuple | dict) or (isinstance(label, float) and not math.isfinite(label)):
            report.note("bad_labels", number, f"the answer is {label!r:.80}, and is to be a text or a number")
            return None
        answer, repaired = repair(str(label if label is not None else ""))
        items, unused = _image_items(row, columns)
        choices = choices_of(_first_value(row, columns.choices))
        try:
            prompt = prompt_of(value_at(row, columns.problem), choices, items, self._load)
        except BadImage as error:
            report.note("bad_images", number, str(error))
            return None
        if not prompt.question or not answer.strip():
            report.note("empty", number, "no problem or no answer")
            return None
        if self._is_mathematics and answer.strip() not in choices and (wrong := label_problem(answer)):
            report.note("bad_labels", number, wrong)
            return None
        if prompt.repaired or repaired:
            report.note("repaired", number, "control characters were turned back into LaTeX")
        unused += [name for name in VIDEOS if not is_empty(row.get(name))]
        for name in dict.fromkeys((*unused, *prompt.unused)):
            report.note_unused(name, number)
        messages = with_system_prompt(prompt.messages, "" if prompt.explains else self._system_prompt)
        metadata, left_out = described(row, columns)
        for name in left_out:
            report.note_unused(name, number)
        metadata |= {"row": number} | ({"choices": choices} if choices else {})
        images, label = tuple(prompt.images), answer.strip()
        return Sample(self._id(number), messages, images, label, metadata=metadata, tools=self._tools)

    def _load(self, item: Any) -> Image:
        return image_of(item, self._path.parent, self._folder)


def with_images(sample: Sample) -> list[dict[str, Any]]:
    """Return the sample's prompt with its images inserted, to show it to a person."""
    images = iter(sample.images)
    messages = []
    for message in sample.prompt:
        content = message["content"]
        if not isinstance(content, str):
            content = [
                {"type": "image", "image": open_image(next(images).data)} if part["type"] == "image" else part
                for part in content
            ]
        messages.append({**message, "content": content})
    return messages


def data_uri(data: bytes | memoryview, kind: str = "image/png") -> str:
    """Return an image file as a data URI, the form of a dataset's `images`."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def env_config(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the `env_config` of a Sokoban row, which describes its board; None for other rows."""
    extra = row.get("extra_info")
    if isinstance(extra, str):
        try:
            extra = json.loads(extra)
        except (ValueError, RecursionError):
            return None
    config = extra.get("env_config") if isinstance(extra, dict) else row.get("env_config")
    return config if isinstance(config, dict) else None


def check_columns(path: DataSource, boards: bool, *, raw: bool, columns: Mapping[str, str] | None = None) -> None:
    """Raise ValueError, which names the columns, if a dataset's first file lacks any. `boards`: the rows are Sokoban
    boards, else problems. `raw`: the file is not prepared yet, so that a board may be drawn as text in the prompt.
    `columns` names columns (`data.columns`)."""
    first = dataset_files(path)[0]
    names = column_names(first)
    if not boards:
        columns_of(names, columns or {}, first)
        return
    _, row = next(read_rows(first, lambda number, reason: None, (BOARD, "env_config", "prompt")), (0, {}))
    if env_config(row) is None and not (raw and "prompt" in names):
        has = ", ".join(names) or "no row"
        raise ValueError(f"{first} has no column {BOARD}: Sokoban needs a board; it has: {has}")


def _digest(sample: Sample) -> bytes:
    """Return a digest that is equal for samples that differ only in their position in the file."""
    images = [image.content_hash for image in sample.images]
    parts = (sample.prompt, sample.label, images, sample.metadata.get("env_config"))
    return hashlib.sha256(repr(parts).encode()).digest()


def _first_value(row: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((value for name in names if not is_empty(value := value_at(row, name))), None)


def _image_items(row: Mapping[str, Any], columns: Columns) -> tuple[list[Any], list[str]]:
    """Return the images of a row's first column that has any, and the names of other columns that have some."""
    filled = [name for name in columns.images if not is_empty(value_at(row, name))]
    if not filled:
        return [], []
    items = value_at(row, filled[0])
    unused = [] if filled[0] == "decoded_image" else filled[1:]  # beside its bytes an image has its file's name
    return (list(items) if isinstance(items, list | tuple) else [items]), unused


def weighted(groups: Sequence[Sequence[Sample]], weights: Sequence[float]) -> list[Sample]:
    """Return the samples of several sources in one list in which each source has the share of its weight: of the one
    that is largest for its weight each sample once, of the others each as often as it takes. Raise ValueError if that
    makes a list without measure."""
    if not weights:
        return [sample for group in groups for sample in group]
    unit = max(len(group) / weight for group, weight in zip(groups, weights, strict=True))
    counts = [round(unit * weight) for weight in weights]
    if sum(counts) > MAX_REPEATED:
        raise ValueError(f"data.weights = {list(weights)} repeat small sources beyond {MAX_REPEATED:,} samples in all")
    return [group[index % len(group)] for group, count in zip(groups, counts, strict=True) for index in range(count)]


def _address_of(item: Any) -> str:
    """Return the http(s) address that an image stands at; "" for others."""
    if isinstance(item, Mapping):
        item = item.get("bytes") or item.get("path") or item.get("url")
    return item if isinstance(item, str) and item[:8].lower().startswith(("http://", "https://")) else ""


def image_of(item: Any, folder: Path, downloaded: ImageFolder | None = None) -> Image:
    """Return the image of a row's item: a data URI, base64, bytes, a file's name beside those of the `folder`, or a
    dict with one of these. Raise ValueError or OSError if it cannot be read."""
    return Image.of(_image_bytes(item, folder, downloaded))


def _image_bytes(item: Any, folder: Path, downloaded: ImageFolder | None = None) -> bytes:
    """Return the bytes of a plain image file (see `shared.rgb_images`), after decoding it once as a check. Raise
    ValueError or OSError if it cannot be read."""
    if isinstance(item, dict):
        if not {"bytes", "path", "url"} & item.keys():
            raise ValueError(f"an image is a dict with {', '.join(map(str, item))}, not with bytes or path")
        item = item.get("bytes") or item.get("path") or item.get("url")
    if isinstance(item, str) and item.startswith("data:"):
        data = base64.b64decode(item.partition(",")[2], validate=True)
    elif downloaded is not None and (address := _address_of(item)):
        data = downloaded.read(address)
    elif isinstance(item, str) and (scheme := _URL.match(item)) and scheme[1].lower() != "file":
        cure = "set data.image_cache, or download the images before"
        raise ValueError(f"{item[:80]!r} is an address, and URLs are not fetched: {cure}")
    elif isinstance(item, str) and _BASE64.fullmatch(item):
        data = base64.b64decode(item)
    elif isinstance(item, str):
        data = _read_file(folder / item.removeprefix("file://"))
    elif isinstance(item, bytes):
        data = item
    else:
        raise ValueError(f"an image is {type(item).__name__}, not a data URI, file name or bytes")
    with open_image(data) as image:
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"an image of {image.width}x{image.height} is too large")
    return bytes(plain_file(data))


def _read_file(path: Path) -> bytes:
    """Read a regular file. Anything else is refused: a row may name any path, and reading a device or pipe might never
    end."""
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is no file")
    if path.stat().st_size > MAX_IMAGE_BYTES:
        raise ValueError(f"{str(path)!r} has more than {MAX_IMAGE_BYTES} bytes")
    return path.read_bytes()
