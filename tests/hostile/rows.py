"""Rows of a dataset: sound ones of the colour task, and hostile ones, with hostile images and labels among them."""

from __future__ import annotations

import base64
import io
import json
import random
import struct
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from envs.colour import COLOURS, PIXELS
from envs.datasets import load_dataset
from envs.math_reward import grade
from tests.hostile.attack import Kind
from tests.hostile.images import hostile

QUESTION = "<image>Which colour?"
LABELS = (
    "^" + " " * 16_000, "{" * 5000, "\\frac" * 1000, "9^9^9^9^9", "10000000!", "\\sum_{i=1}^{10^9} i", "x" * 100_000,
    "(" * 150 + "1" + ")" * 150, "1e999999", "\\boxed{\\boxed{\\boxed{", "\x00", "\ud7ff\U0010ffff", "1/0", "nan",
    "\\sqrt" * 60, "{{1}}^{{2}}^{{3}}", "__import__('os')", "$(reboot)", "%s%n%x", "-" * 200, "1" * 10_000,
    ",".join("1" * 90),
)  # fmt: skip


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def square(colour: str, number: int) -> bytes:
    """The square of a colour; `number` is one pixel's colour, so that no two rows are the same."""
    square, out = Image.new("RGB", (PIXELS, PIXELS), COLOURS[colour]), io.BytesIO()
    square.putpixel((0, 0), (number >> 16 & 255, number >> 8 & 255, number & 255))
    square.save(out, "PNG")
    return out.getvalue()


def sound(number: int) -> dict[str, Any]:
    colour = random.Random(number).choice(list(COLOURS))
    return {"problem": QUESTION, "answer": colour, "images": [uri(square(colour, number))]}


def label(rng: random.Random) -> str:
    """One of the known ones, or one of random pieces."""
    pieces = (
        "\\frac",
        "{",
        "}",
        "^",
        "_",
        "(",
        ")",
        "9" * 20,
        "\\sqrt",
        " ",
        "x",
        "!",
        "\\text{",
        "=",
        ",",
        "\\pi",
        "é",
    )
    return rng.choice(LABELS) if rng.random() < 0.5 else "".join(rng.choices(pieces, k=rng.randint(1, 60)))


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def hostile_line(rng: random.Random) -> str:
    """One line of a .jsonl file."""
    row = sound(rng.randrange(10**9))
    match rng.randrange(10):
        case 0:
            return rng.choice(
                (nested(5), nested(100_000), "17", '"text"', "null", "true", "9" * 5000, "1e400", "NaN", "[1, 2]")
            )
        case 1:
            return rng.choice(("{", '{"problem": ', "\x00", "}{", '{"a": "\\ud800"}', "x" * 100_000))
        case 2:
            row["images"] = [rng.choice(("/dev/zero", "/etc/passwd", "..", "http://127.0.0.1/", "\x00", "a" * 5000))]
        case 3:
            row["images"] = rng.choice(
                (5, None, {}, [[]], [{"bytes": 1}], [{"path": None}], "data:,", ["data:;base64,!"], [True])
            )
        case 4 | 5:
            row["images"] = [uri(hostile(rng))] * rng.choice((1, 1, 1, 3))
        case 6 | 7:
            row["answer"] = label(rng)
        case 8:
            odd: tuple[Any, ...] = (
                [],
                [{"role": 5}],
                [[]],
                {"a": 1},
                2**70,
                1e308,
                "<image>" * 1000,
                QUESTION * 50,
                "",
            )
            row[rng.choice(("problem", "answer"))] = rng.choice(odd)
        case _:
            row["extra_info"] = rng.choice(
                (nested(50_000), "{", 7, {"env_config": nested(5)}, '{"env_config": {"size": 1e99}}')
            )
    return json.dumps(row)


def write(path: Path, num_sound: int, num_hostile: int, seed: int) -> Counter[str]:
    """A .jsonl file of both, shuffled but for its first row, which is sound; how many were written."""
    rng = random.Random(seed)
    rest = [json.dumps(sound(number)) for number in range(seed + 1, seed + num_sound)]
    rest += [hostile_line(rng) for _ in range(num_hostile)]
    rng.shuffle(rest)
    path.write_text("\n".join([json.dumps(sound(seed)), *rest]) + "\n", encoding="utf-8", errors="surrogatepass")
    return Counter(sound=num_sound, hostile=num_hostile)


def read_lines(folder: Path, rng: random.Random) -> str | None:
    """Reads a new file of hostile rows. A file without a usable row is a ValueError."""
    path = folder / "rows.jsonl"
    write(path, 1, rng.randint(1, 5), rng.randrange(2**31))
    return _read(path)


def read_bytes(folder: Path, rng: random.Random) -> str | None:
    """Reads a file whose bytes are damaged, of either kind."""
    path = folder / rng.choice(("rows.parquet", "rows.jsonl"))
    data = bytearray(json.dumps(sound(1)).encode() + b"\n") * 2
    for _ in range(rng.randint(1, 20)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    footer = b"PAR1" + struct.pack("<I", rng.choice((0, 50, 2**31, 2**32 - 1)))
    path.write_bytes(bytes(data) if path.suffix == ".jsonl" else b"PAR1" + bytes(data) + footer[4:] + b"PAR1")
    return _read(path)


def _read(path: Path) -> str | None:
    try:
        report = load_dataset(path).report
    except ValueError:
        return "rows: the file is refused"
    return "rows: left out" if report.samples < report.rows else None


def graded(rng: random.Random) -> str | None:
    """Grades a hostile answer by a hostile label."""
    return None if grade(rf"so \boxed{{{label(rng)}}}", label(rng)) else "labels: not right"


def kinds(folder: Path) -> list[Kind]:
    folder.mkdir(parents=True, exist_ok=True)
    return [partial(read_lines, folder), partial(read_bytes, folder)]
