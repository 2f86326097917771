"""How throughput and staleness go with the number of GPUs, by simulation: ours, a synchronous loop, one step off.

    python -m tests.bench.scale [--model Qwen3-VL-8B] [--gpus 8 32 128 1024] [--rows FILE] [--draw FILE]
    python -m tests.bench.scale validate --runs DIR

`validate` makes five short runs of the Sokoban task on this machine: distributions are measured in the first, and the
simulation is held against the other four. Runs that DIR holds already are not made again. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.bench.scale.picture import draw
from tests.bench.scale.sweep import sweep, tables
from tests.bench.scale.validate import validate


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("sweep", "validate"), default="sweep")
    parser.add_argument("--model", default="Qwen3-VL-8B")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 32, 128, 1024])
    parser.add_argument("--rows", type=Path, default=Path("build/scale.jsonl"), help="a line a simulation, made once")
    parser.add_argument("--draw", type=Path, help="a picture's file")
    parser.add_argument("--runs", type=Path, default=Path("runs/scale"), help="folder of the real runs")
    options = parser.parse_args(argv)
    if options.what == "validate":
        print(json.dumps(validate(options.runs), indent=1))
        return 0
    rows = sweep(options.model, options.gpus, options.rows)
    print(tables(rows))
    if options.draw:
        draw(rows, options.draw)
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
