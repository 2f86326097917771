"""The rows of dataset files, Parquet or JSON lines; a row that is none is told of and left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 256 << 20
BATCH_ROWS = 256

Refuse = Callable[[int, str], None]
"""Told the number of a row that cannot be read, from 0, and why."""


def read_rows(path: Path, refuse: Refuse | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a .parquet or .jsonl file with their numbers. ValueError if it is missing, broken or of another kind;
    without `refuse` also for the first row that cannot be read."""
    if not path.is_file():
        raise ValueError(f"no dataset file {str(path)!r}: make it with launch/prepare.py, or give the path of one")
    if path.suffix == ".jsonl":
        rows = _json_lines(path)
    elif path.suffix == ".parquet":
        rows = _parquet(path)
    else:
        raise ValueError(f"{path} is neither .parquet nor .jsonl: convert it")
    for number, row in enumerate(rows):
        if isinstance(row, dict):
            yield number, row
        elif refuse is None:
            raise ValueError(f"{path}: {row}")
        else:
            refuse(number, row)


def count_rows(path: str | Path) -> int:
    """Of a .parquet or .jsonl file, without reading all of a Parquet file."""
    path = Path(path)
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return int(pyarrow.parquet.read_metadata(path).num_rows)
    return sum(1 for _ in read_rows(path, lambda number, reason: None))


def write_rows(path: str | Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write rows to a .parquet or .jsonl file; how many there were. ValueError for another ending or no rows."""
    path = Path(path)
    rows = list(rows)
    if not rows:
        raise ValueError(f"there are no rows to write to {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    else:
        raise ValueError(f"{path} ends in neither .parquet nor .jsonl")
    return len(rows)


def _json_lines(path: Path) -> Iterator[dict[str, Any] | str]:
    """Each row, or what is wrong with its line."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):  # the rest of it
                    line = file.readline(MAX_LINE_BYTES)
                yield f"line {number} has more than {MAX_LINE_BYTES} bytes"
            elif line.strip():
                yield _row_of(line, number)


def _row_of(line: bytes, number: int) -> dict[str, Any] | str:
    try:
        row = json.loads(line.decode("utf-8"))
    except Exception as error:  # noqa: BLE001 - nesting, numbers of thousands of digits, bytes that are no text
        return f"line {number} is no JSON: {' '.join(str(error).split())[:200]}"
    return row if isinstance(row, dict) else f"line {number} holds {type(row).__name__}, not an object with columns"


def _parquet(path: Path) -> Iterator[dict[str, Any] | str]:
    """Each row, or what is wrong with it."""
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=BATCH_ROWS):
            try:
                yield from batch.to_pylist()
            except ValueError:  # text that is none: in one of its rows
                for place in range(batch.num_rows):
                    yield _row_at(batch, place)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is no readable parquet file: {' '.join(str(error).split())}") from error


def _row_at(batch: Any, place: int) -> dict[str, Any] | str:
    try:
        return batch.slice(place, 1).to_pylist()[0]
    except ValueError as error:
        return f"cannot be read: {' '.join(str(error).split())[:200]}"
