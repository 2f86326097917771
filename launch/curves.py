"""Draws the curves of one or several runs, live, finished or crashed:

    python launch/curves.py runs/sokoban_tiny --out curve.png
    python launch/curves.py "V-trace=runs/v0,runs/v1,runs/v2" "GRPO=runs/g0,runs/g1,runs/g2" --x minutes

A run is its folder. LABEL=RUN,RUN,RUN draws the mean of runs that differ in their seed, and their range.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse

from launch.plots.curve_data import AXES, read_run
from launch.plots.figure import FORMATS, PANELS, Curve, draw
from shared.config.recipe import fail


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        curves = [curve_of(word) for word in options.runs]
        title = options.title or (curves[0].label if len(curves) == 1 else "")
        drawn = {"metrics": options.metrics, "axis": options.x, "window": options.smooth, "title": title}
        draw(curves, options.out, **drawn)
    except (ValueError, OSError) as error:
        return fail(error)
    print(options.out)
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, or LABEL=RUN,RUN,RUN")
    made.add_argument("--out", type=Path, default=Path("curve.png"), help=f"the picture: {', '.join(FORMATS)}")
    made.add_argument("--x", choices=list(AXES), default="steps", help="what the curves are drawn against")
    made.add_argument(
        "--metrics", nargs="+", default=[], metavar="NAME", help=f"{', '.join(PANELS)} (all if none), or any metric"
    )
    made.add_argument("--smooth", type=positive, default=10, metavar="N", help="steps that are averaged; 1 = none")
    made.add_argument("--title", default="", help="above the picture")
    return made


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def curve_of(word: str) -> Curve:
    """Read one label's runs. An existing folder is a run, whatever its name. Raise ValueError if a label has no run, or
    a folder no metrics."""
    label, equals, folders = word.partition("=")
    if Path(word).is_dir() or not equals:
        run = read_run(word)
        return Curve(run.name, (run,))
    names = [name for name in folders.split(",") if name]
    if not (label and names):
        raise ValueError(f"{word!r} names no run; write LABEL=RUN,RUN,RUN")
    return Curve(label, tuple(map(read_run, names)))


if __name__ == "__main__":
    sys.exit(main())
