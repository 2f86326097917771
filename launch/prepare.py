"""Makes the files that `data.source` and `data.eval_source` read: OUT/train.parquet and OUT/heldout.parquet.

    python launch/prepare.py sokoban                                    # downloads the processed public dataset
    python launch/prepare.py sokoban --from raw.parquet                 # converts a raw one, or level files (XSB)
    python launch/prepare.py sokoban --make 2000 --sizes 6x6 7x7 --boxes 1 2 --min-solution 4
    python launch/prepare.py geo3k --from train.parquet --heldout-from test.parquet
    python launch/prepare.py geo3k_multi_turn --make 1000               # drawn triangle problems

No problem, and no board nor its mirror images and rotations, is in both files. The last line counts what was kept and
what was left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from envs import sokoban_data
from envs.boards.board import Board
from envs.boards.generate import BoardSpec
from envs.geometry import geometry_data as problem_data
from envs.geometry import triangles
from envs.geometry.geometry_data import listed
from envs.row_files import write_rows
from launch.hub import local_dataset
from shared.config.data_section import COLUMNS, OTHER_NAMES
from shared.config.recipe import fail

DATASETS = {
    "sokoban": "VeraIsHere/sokoban_processed",
    "geo3k": "chenhegu/geo3k_imgurl",
    "geo3k_multi_turn": "VeraIsHere/geo3k_imgurl_processed",
}
SPLITS = ("test.*", "val|valid|validation|dev")  # splits to hold out, the preferred one first
PROGRESS_S = 5.0


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    out = options.out or Path("data") / options.task
    try:
        check(options, out)
        train, heldout, counts = (boards if options.task == "sokoban" else problems)(options)
        write_all({out / f"heldout.{options.format}": heldout, out / f"train.{options.format}": train})
    except (ValueError, OSError) as error:
        return fail(error)
    print(f"{out}: {len(train)} to train on, {len(heldout)} held out, {counts}")
    return 0


def write_all(parts: Mapping[Path, Sequence[dict[str, Any]]]) -> None:
    """Write all files, in this order, or none."""
    written = {path.with_name(f".part-{path.name}"): path for path in parts}
    try:
        for part, path in written.items():
            write_rows(part, parts[path])
        for part, path in written.items():
            part.replace(path)
    finally:
        for part in written:
            part.unlink(missing_ok=True)


def boards(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Return rows to train on, held-out rows, and what was left out."""
    spec = BoardSpec(
        sizes=tuple(options.sizes),
        num_boxes=tuple(options.boxes),
        wall_chance=options.walls,
        min_solution=options.min_solution,
        max_solution=options.max_solution,
    )
    readings: list[list[sokoban_data.Reading]] = [[], []]
    if options.make:
        splits = [sokoban_data.make_boards(options.make, spec, options.seed, ReadProgress("boards made")), []]
    else:
        for files, part in zip(sources(options), readings, strict=True):
            part += [sokoban_data.read_boards(path, ReadProgress(f"rows of {path.name}")) for path in files]
        splits = [[board for reading in part for board in reading.boards] for part in readings]
    distinct, duplicates = sokoban_data.different([*splits[1], *splits[0]])
    rows = solved(distinct, options)
    fitting = {board: row for board, row in rows.items() if fits(row, spec)}
    if splits[1]:
        held_out = set(splits[1])
        held = [board for board in fitting if board in held_out]
        train = [board for board in fitting if board not in held_out]
    else:
        train, held = sokoban_data.split_boards(list(fitting), heldout_of(options, len(fitting)), options.seed)
    unreadable = sum(reading.unreadable for part in readings for reading in part)
    examples = [example for part in readings for reading in part for example in reading.examples]
    counts = f"{duplicates} duplicate, {unreadable} unreadable, {len(distinct) - len(rows)} without a solution found"
    counts += f", {len(rows) - len(fitting)} of another difficulty{listed(examples)}"
    return [fitting[board] for board in train], [fitting[board] for board in held], counts


def problems(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Return rows to train on, held-out rows, and what was left out."""
    if options.make:
        held = heldout_of(options, options.make)
        parts = ((options.make - held, "train"), (held, "heldout"))
        train, heldout = (list(triangles.rows(n, split, options.seed)) for n, split in parts)
        return train, heldout, "all drawn"
    files, held_files = sources(options)
    columns = dict(options.columns)
    read = problem_data.read_problems(files, ReadProgress("rows"), columns)
    given = problem_data.read_problems(held_files, ReadProgress("held-out rows"), columns)
    if held_files:
        samples, held_samples = problem_data.without(read.samples, given.samples), given.samples
    else:
        held = heldout_of(options, len(read.samples))
        samples, held_samples = problem_data.split_problems(read.samples, held, options.seed)
    repeated = len(read.samples) + len(given.samples) - len(samples) - len(held_samples)
    total = read.report
    total.add(given.report)
    counts = f"{total.duplicates + repeated} duplicate, {total.bad_images} unreadable images, {total.empty} empty"
    counts += f", {total.bad_labels} labels that do not parse{listed(total.examples)}"
    counts += "".join(f", {count} with unused {name}" for name, count in total.unused.items())
    as_messages = problem_data.has_dialogue([*samples, *held_samples])
    train, heldout = (problem_data.rows_of(part, as_messages=as_messages) for part in (samples, held_samples))
    return train, heldout, counts


def solved(boards: Sequence[Board], options: argparse.Namespace) -> dict[Board, dict[str, Any]]:
    """Return the rows of the boards for which the solver finds a solution; solved in parallel."""
    tick, rows = ReadProgress(f"of {len(boards)} boards solved"), {}
    work = partial(sokoban_data.row_of, pixels_per_cell=options.pixels_per_cell, max_nodes=options.max_nodes)
    results: Iterable[dict[str, Any] | None]
    with ProcessPoolExecutor(options.jobs) as pool:
        results = pool.map(work, boards, chunksize=8) if options.jobs > 1 else map(work, boards)
        for number, (board, row) in enumerate(zip(boards, results, strict=True)):
            tick(number + 1)
            if row is not None:
                rows[board] = row
    return rows


def fits(row: dict[str, Any], spec: BoardSpec) -> bool:
    return bool(spec.min_solution <= row["extra_info"]["solution_length"] <= spec.max_solution)


def sources(options: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    """Return the training files and the held-out files (possibly none): those given, or the hub's, told apart by their
    names."""
    if options.source:
        return options.source, options.heldout_from
    name = options.dataset or DATASETS[options.task]
    files = local_dataset(name)
    shared = Path(os.path.commonpath([path.parent for path in files]))
    called = {path: str(path.relative_to(shared)) for path in files}
    parts = [[path for path in files if is_of(called[path], split)] for split in SPLITS]
    train = [path for path in files if not any(path in part for part in parts)]
    if not train:
        raise ValueError(f"dataset {name!r} has no training file: {', '.join(called.values())}")
    held = options.heldout_from or next(filter(None, parts), [])
    names = [", ".join(called.get(path, str(path)) for path in part) for part in (train, held)]
    print(f"{name}: {names[0]} to train on; held out: {names[1] or 'some of it'}", file=sys.stderr, flush=True)
    return train, held


def is_of(name: str, split: str) -> bool:
    """Tell whether a word in a file's path matches the split's pattern: "test" matches test/0000.parquet, but not
    latest.parquet."""
    return any(re.fullmatch(split, word) for word in re.split(r"[^a-z]+", name.lower()))


def heldout_of(options: argparse.Namespace, total: int) -> int:
    """Return the number of rows to hold out: `--heldout`, or a tenth, at most 500."""
    return options.heldout if options.heldout is not None else min(500, max(1, total // 10))


class ReadProgress:
    """Prints the progress of a long job on stderr every few seconds."""

    def __init__(self, what: str) -> None:
        self._what, self._next = what, time.monotonic() + PROGRESS_S

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + PROGRESS_S
            print(f"{done} {self._what}", file=sys.stderr, flush=True)


def size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write ROWSxCOLUMNS, such as 6x7")
    return int(match[1]), int(match[2] or match[1])


def column(text: str) -> tuple[str, str]:
    part, _, name = text.partition("=")
    part = OTHER_NAMES.get(part, part)
    if part not in COLUMNS or not name:
        raise argparse.ArgumentTypeError(f"{text!r}: write PART=COLUMN; PART is {', '.join(COLUMNS)}")
    return part, name


def check(options: argparse.Namespace, out: Path) -> None:
    """Raise ValueError for an invalid option, or for options that contradict each other."""
    if options.jobs < 1:
        raise ValueError(f"--jobs {options.jobs}: at least 1")
    if file := next((path for path in (out, *out.parents) if path.exists() and not path.is_dir()), None):
        raise ValueError(f"--out {out}: {file} is a file; name a folder")
    if options.make and (options.source or options.dataset or options.heldout_from):
        raise ValueError("--make makes its own data: leave out --from, --dataset and --heldout-from, or --make")
    if options.source and options.dataset:
        raise ValueError(f"--from and --dataset {options.dataset}: leave one of them out")
    if options.heldout_from and options.heldout is not None:
        raise ValueError(f"--heldout {options.heldout} and --heldout-from: leave one of them out")
    if options.make is not None and options.make < 2:
        raise ValueError(f"--make {options.make}: at least 2, one of them held out")
    if options.heldout is not None and options.heldout < 1:
        raise ValueError(f"--heldout {options.heldout}: at least 1, or leave it out")
    if options.make and options.heldout is not None and options.heldout >= options.make:
        raise ValueError(f"--heldout {options.heldout} of --make {options.make} leaves none to train on")


def parser() -> argparse.ArgumentParser:
    formatter: Callable[..., Any] = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    options.add_argument("task", choices=sorted(DATASETS))
    options.add_argument("--from", dest="source", type=Path, nargs="+", default=[], metavar="FILE", help="raw files")
    options.add_argument("--heldout-from", type=Path, nargs="+", default=[], metavar="FILE", help="held-out raw files")
    options.add_argument("--dataset", help="another dataset of the hub")
    options.add_argument(
        "--columns",
        type=column,
        nargs="+",
        default=[],
        metavar="PART=COLUMN",
        help="columns of raw problems, such as problem=question answer=reward_model.ground_truth; also image, choices",
    )
    options.add_argument("--make", type=int, metavar="N", help="make so many boards, or draw so many problems")
    options.add_argument("--heldout", type=int, metavar="N", help="rows to hold out; a tenth (at most 500) if not said")
    options.add_argument("--out", type=Path, help="folder to write; data/TASK if not said")
    options.add_argument("--format", choices=("parquet", "jsonl"), default="parquet")
    options.add_argument("--seed", type=int, default=0)
    boards = options.add_argument_group("sokoban")
    boards.add_argument("--sizes", type=size, nargs="+", default=[(6, 6)], metavar="ROWSxCOLUMNS", help="with --make")
    boards.add_argument("--boxes", type=int, nargs="+", default=[1], help="with --make: numbers of boxes")
    boards.add_argument("--walls", type=float, default=0.05, help="with --make: chance of an inner wall")
    boards.add_argument("--min-solution", type=int, default=1, help="moves of the shortest solution, at least")
    boards.add_argument("--max-solution", type=int, default=1_000_000, help="moves of the shortest solution, at most")
    boards.add_argument("--pixels-per-cell", type=int, default=64)
    boards.add_argument("--max-nodes", type=int, default=50_000, help="positions that the solver looks at")
    boards.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes that solve")
    return options


if __name__ == "__main__":
    sys.exit(main())
