"""Reading and writing the rows of dataset files, Parquet or JSON lines; invalid rows are reported and left out."""

from __future__ import annotations

import codecs
import glob
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shared.util.own_commands import command

SUFFIXES = (".parquet", ".jsonl")
_SPLIT = re.compile(r"(?<![a-z])(train|test|val|valid|validation|dev|heldout)(?![a-z])")
MAX_LINE_BYTES = 256 << 20
BATCH_ROWS = 256

Refuse = Callable[[int, str], None]
"""Told the number of a row that cannot be read, from 0, and why."""


DataSource = str | Path | Sequence[str]
"""A file, a folder, a pattern, or a list of these."""


def dataset_files(source: DataSource) -> list[Path]:
    """Return the files of a dataset, sorted: of a file itself, of a folder its .parquet and .jsonl files, of a pattern
    (such as data/train-*.parquet) those that match, of a list those of each, each file once. Raise ValueError if there
    are none, or if a folder has files of several splits."""
    if not isinstance(source, str | Path):
        return list(dict.fromkeys(file for each in source for file in dataset_files(each)))
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir() and path.name:
        names = {file.name: file for file in sorted(path.iterdir()) if file.suffix in SUFFIXES and file.is_file()}
        splits = sorted({match[0] for name in names if (match := _SPLIT.search(name.lower()))})
        if len(splits) > 1:
            raise ValueError(f"{path} has files of {' and '.join(splits)}: name one, such as {path}/{splits[-1]}*")
        if not names:
            raise ValueError(f"{path} is a folder without .parquet and .jsonl files")
        return list(names.values())
    files = sorted(map(Path, glob.glob(str(path)))) if glob.has_magic(str(path)) else []
    if not files and glob.has_magic(str(path)):
        raise ValueError(f"no dataset file matches {str(path)!r}, seen from {Path.cwd()}")
    if not files:
        raise ValueError(f"no dataset file {str(path)!r}: make it with {command('prepare')}, or give the path of one")
    return files


def share_names(files: Sequence[Path]) -> bool:
    """Tell whether two files have the same name, in different folders."""
    return len({file.stem for file in files}) < len(files)


def read_rows(
    path: Path, refuse: Refuse | None = None, columns: Collection[str] | None = None, *, others: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a .parquet or .jsonl file with their numbers from 0, in a .jsonl file those of its lines.

    Of Parquet only the given columns are read (dotted: a field of a struct), since others may hold values that Python
    has no type for. With `others` those that hold texts and numbers are read too, and a value that cannot be read is
    None. Raise ValueError if the file is missing, broken or of another kind; without `refuse` also for the first row
    that cannot be read.
    """
    if not path.is_file():
        raise ValueError(f"no dataset file {str(path)!r}: make it with {command('prepare')}, or give the path of one")
    if path.suffix == ".jsonl":
        rows = _json_lines(path)
    elif path.suffix == ".parquet":
        rows = _parquet(path, columns, others=others)
    else:
        raise ValueError(f"{path} is neither .parquet nor .jsonl: convert it")
    for number, row in enumerate(rows):
        if row is None:  # a blank line
            continue
        if isinstance(row, dict):
            yield number, row
        elif refuse is None:
            raise ValueError(f"{path}: {row}")
        else:
            refuse(number, row)


def column_names(path: Path) -> list[str]:
    """Return the names of a file's columns: of Parquet with the fields of its structs (dotted), of a .jsonl those of
    its first row; [] for a file without a row. Raise ValueError as `read_rows` does."""
    if path.suffix != ".parquet" or not path.is_file():
        return list(next(read_rows(path, lambda number, reason: None), (0, {}))[1])
    return _names_of(_opened(path))


def _names_of(file: Any) -> list[str]:
    """Return the names of an opened Parquet file's columns, with the fields of its structs (dotted)."""
    import pyarrow

    names = []
    for column in file.schema_arrow:
        names.append(column.name)
        if pyarrow.types.is_struct(column.type):
            names += [f"{column.name}.{part.name}" for part in column.type]
    return names


def count_rows(path: DataSource) -> int:
    """Count the rows of a dataset, without reading all of its Parquet files."""
    count = 0
    for file in dataset_files(path):
        if file.suffix == ".parquet":
            count += int(_opened(file).metadata.num_rows)
        else:
            count += sum(1 for _ in read_rows(file, lambda number, reason: None))
    return count


def write_rows(path: str | Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write rows to a .parquet or .jsonl file; return their number. Raise ValueError for another file name ending, or
    if there are no rows."""
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


def _json_lines(path: Path) -> Iterator[dict[str, Any] | str | None]:
    """Yield each row, or, as text, what is wrong with its line; None for a blank line."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):  # skip the rest of the line
                    line = file.readline(MAX_LINE_BYTES)
                yield f"line {number} has more than {MAX_LINE_BYTES} bytes"
            else:
                yield _row_of(line, number) if line.strip() else None


def _row_of(line: bytes, number: int) -> dict[str, Any] | str:
    try:
        row = json.loads(line.decode("utf-8"))
    except Exception as error:  # noqa: BLE001 - too deep nesting, too long numbers, invalid UTF-8
        return f"line {number} is no JSON: {' '.join(str(error).split())[:200]}"
    return row if isinstance(row, dict) else f"line {number} holds {type(row).__name__}, not an object with columns"


def _opened(path: Path) -> Any:
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no readable parquet file: {' '.join(str(error).split())}") from error


def _parquet(path: Path, columns: Collection[str] | None, *, others: bool) -> Iterator[dict[str, Any] | str]:
    """Yield each row, or, as text, what is wrong with it."""
    import pyarrow

    file = _opened(path)
    more: list[str] = []
    if columns is not None:
        names = _names_of(file)
        structs = {name.partition(".")[0] for name in names if "." in name}
        roots = {name.partition(".")[0] for name in columns} - structs  # a text that holds JSON
        columns = [name for name in names if name in columns or name in roots]
        if others:
            read = {name.partition(".")[0] for name in columns}
            more = [c.name for c in file.schema_arrow if c.name not in read and _is_plain(c.type)]
    try:
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns and [*columns, *more]):
            cells = {name: _cells(batch.column(name)) for name in more}
            if more:
                batch = batch.select([name for name in batch.schema.names if name not in cells])
            try:
                rows: list[Any] = batch.to_pylist() if batch.num_columns else [{} for _ in range(batch.num_rows)]
            except Exception:  # noqa: BLE001 - invalid text, a date out of range, an unknown time zone: in some rows
                rows = [_row_at(batch, index) for index in range(batch.num_rows)]
            for index, row in enumerate(rows):
                yield row | {name: values[index] for name, values in cells.items()} if isinstance(row, dict) else row
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no readable parquet file: {' '.join(str(error).split())}") from error


def _is_plain(kind: Any) -> bool:
    """Tell whether a column of this Arrow type holds texts and numbers, also in lists and structs."""
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_plain(kind.value_type)
    if types.is_struct(kind):
        return all(_is_plain(part.type) for part in kind)
    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_string, types.is_large_string)
    return any(test(kind) for test in (*tests, types.is_temporal, types.is_decimal))


def _cells(column: Any) -> list[Any]:
    """Return a column's values, None for one that cannot be read."""
    try:
        return column.to_pylist()
    except Exception:  # noqa: BLE001 - invalid text, a date out of range: in some rows
        return [*map(_cell, column)]


def _cell(value: Any) -> Any:
    try:
        return value.as_py()
    except Exception:  # noqa: BLE001 - as above
        return None


def _row_at(batch: Any, index: int) -> dict[str, Any] | str:
    try:
        return batch.slice(index, 1).to_pylist()[0]
    except Exception as error:  # noqa: BLE001 - as above
        return f"cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
