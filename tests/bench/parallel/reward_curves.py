"""One task trained by ranks that share its work in different ways: are losses the same, and is the reward curve?

    python -m tests.bench.parallel.reward_curves OUT [--steps 50] [--skip-live]

The model is a mixture made of launch/models/colour_tiny, which names colours by chance. First its play is recorded, and
two ranks train on the recording with each of CUTS: on the same groups in the same order, so that loss, KL and gradient
norm can be compared step by step. Then two ranks learn the task live with each of LIVE. OUT/reward_curves.png shows
those runs. The last line is one JSON object: the largest difference of a step from plain FSDP by cut and metric, as it
is and over the metric's root mean square, and success on held-out samples before and after by live run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from launch.plots.curve_data import read_run
from launch.plots.figure import Curve, draw
from launch.tiny_models.mixture import mixture_of
from tests.support.runs import RECIPE, command, finished, metrics, places

CUTS: dict[str, dict[str, int]] = {
    "FSDP": {},
    "context 2": {"learner.parallel.context": 2},
    "expert 2": {"learner.parallel.expert": 2},
    "context 2, expert 2": {"learner.parallel.context": 2, "learner.parallel.expert": 2},
}
LIVE = ("FSDP", "context 2", "expert 2", "context 2, expert 2")
COMPARED = ("loss/policy", "behaviour/kl", "optim/grad_norm")
TORCHRUN = ("launch/processes/torchrun.py", "--standalone", "--nproc-per-node", "2")
LIMIT_S = 1800.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--skip-live", action="store_true")
    options = parser.parse_args()
    out: Path = options.out
    out.mkdir(parents=True)
    model = {"model.path": mixture_of("launch/models/colour_tiny", out / "mixture")}
    found: dict[str, Any] = {"differences": recorded(out, model, options.steps)}
    if not options.skip_live:
        found["success"] = {name: learned(out, name, model) for name in LIVE}
        curves = [Curve(name, (read_run(out / folder(name, "live")),)) for name in LIVE]
        title = "A small mixture learns to name colours on two ranks"
        draw(curves, out / "reward_curves.png", metrics=("success", "entropy"), title=title)
    print(json.dumps(found))
    return 0


def recorded(out: Path, model: dict[str, Path], steps: int) -> dict[str, dict[str, tuple[float, float]]]:
    length = {"learner.total_steps": steps, **model}
    finished([*command("actors", places(out, **length)), "--record", str(out / "groups")], LIMIT_S)
    rows: dict[str, list[dict[str, float]]] = {}
    for name, fields in CUTS.items():
        own = places(out, **length, **fields, **{"run.name": folder(name, "recorded")})
        arguments = ["launch/learner.py", "--config", RECIPE, *own, "--from-recording", str(out / "groups")]
        subprocess.run([sys.executable, *TORCHRUN, *arguments], check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
        rows[name] = metrics(out, folder(name, "recorded"))
        print(f"{name}: {len(rows[name])} steps", file=sys.stderr, flush=True)
    return {name: {key: farthest(rows[name], rows["FSDP"], key) for key in COMPARED} for name in CUTS if name != "FSDP"}


def farthest(rows: Sequence[dict[str, float]], plain: Sequence[dict[str, float]], key: str) -> tuple[float, float]:
    """The largest difference of a step, as it is and over the metric's root mean square in the plain run."""
    size = (sum(row[key] ** 2 for row in plain) / len(plain)) ** 0.5
    most = max(abs(row[key] - other[key]) for row, other in zip(rows, plain, strict=True))
    return most, most / size


def learned(out: Path, name: str, model: dict[str, Path]) -> dict[str, float]:
    arguments = places(out, **model, **CUTS[name], **{"run.name": folder(name, "live")})
    ended = json.loads(finished(command("local", [*arguments, "--ranks", "2"]), LIMIT_S).stdout.splitlines()[-1])
    return {key: ended[key] for key in ("success_before", "success_after", "optimizer_steps")}


def folder(name: str, kind: str) -> str:
    return f"{kind}_{name.replace(', ', '_').replace(' ', '_')}"


if __name__ == "__main__":
    sys.exit(main())
