"""How throughput and staleness go with the number of GPUs, by simulation: ours, a synchronous loop, one step off.

    python -m tests.bench.scale [--model Qwen3-VL-8B] [--gpus 8 32 128 1024] [--rows FILE] [--draw FILE]
    python -m tests.bench.scale validate --runs DIR

`validate` makes five short runs of the Sokoban task on this machine: distributions are measured in the first, and the
simulation is held against the other four. Runs that DIR holds already are not made again. Rows that FILE holds of the
same code are not simulated again. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from shared.config.recipe import fail
from tests.bench.scale.options import file_to_write, picture_to_write
from tests.bench.scale.picture import draw
from tests.bench.scale.sweep import sweep
from tests.bench.scale.tables import tables
from tests.bench.scale.validate import validate


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("sweep", "validate"), default="sweep")
    parser.add_argument("--model", default="Qwen3-VL-8B")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 32, 128, 1024])
    rows_help = "a line a simulation, made once for each state of the code"
    parser.add_argument("--rows", type=file_to_write, default=Path("build/scale.jsonl"), help=rows_help)
    parser.add_argument("--draw", type=picture_to_write, help="a picture's file")
    parser.add_argument("--runs", type=Path, default=Path("runs/scale"), help="folder of the real runs")
    options = parser.parse_args(argv)
    if options.what == "validate":
        print(json.dumps({"benchmark": "validate", **validate(options.runs)}))
        return 0
    try:
        rows = sweep(options.model, options.gpus, options.rows)
    except ValueError as error:
        return fail(error)
    print(tables(rows))
    print(json.dumps({"benchmark": "scale", "rows": rows}), flush=True)
    if options.draw:
        draw(rows, options.draw)
    return 0
