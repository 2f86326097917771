"""Is this machine ready for a run? Looks at what is installed, at the hardware and at what a recipe names, then makes a
trial run in miniature through the real parts: an engine, an image, weights, a learner's step, a checkpoint.

    python launch/doctor.py [--config launch/recipes/R.toml] [--quick] [--json] [--section.key VALUE ...]

The exit code is 1 if something failed, else 0: what could not be checked is no failure.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import os
import tempfile
import time

from launch import catalog
from launch.doctor_checks import locations
from launch.doctor_checks.hardware import check_hardware, gpus_here
from launch.doctor_checks.software import check_software
from launch.doctor_checks.trial_recipe import make_trial_recipe
from launch.doctor_checks.trial_runner import run_trial
from launch.findings import Finding, as_json, exit_code, not_checked, ok, table
from launch.processes.children import Stopped, exit_at_once, raise_on_signals
from launch.processes.same_name import with_kernels
from shared.config.recipe import Recipe, load, recipe_parser

DEFAULT = "launch/recipes/colour_tiny.toml"


def main(argv: list[str] | None = None) -> int:
    started = time.monotonic()
    parser = recipe_parser(__doc__, required=False)
    parser.add_argument("--quick", action="store_true", help="without the trial: no process is started")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options, overrides = parser.parse_known_args(argv)
    config = options.config or DEFAULT
    recipe = load(config, overrides)
    raise_on_signals()
    try:
        findings = [ok("recipe", config), *examine(recipe, quick=options.quick)]
    except Stopped as signal:
        print(f"{signal}: stopped", file=sys.stderr)
        return 130
    print(table(findings), flush=True)
    if options.json:
        print(as_json(findings, time.monotonic() - started), flush=True)
    return exit_code(findings)


def examine(recipe: Recipe, *, quick: bool) -> list[Finding]:
    folder = catalog.model_folder(recipe.model.path)
    sizes = catalog.sizes_in(folder)
    findings = [*check_software(recipe), *check_hardware(recipe, sizes), *locations.check_places(recipe, folder)]
    if quick:
        return findings
    if any(each.name == "run folder" and each.state == "failed" for each in findings):
        return [*findings, not_checked("trial", "there is no folder to write its checkpoint to")]
    if with_kernels():
        return [*findings, not_checked("trial", "transformers could not be imported: see packages")]
    with locations.run_dir(recipe) as run_dir, tempfile.TemporaryDirectory(prefix="doctor-", dir=run_dir) as place:
        trial = make_trial_recipe(recipe, Path(place), folder, sizes, len(gpus_here()))
        return [*findings, *run_trial(trial, lambda stage: print(f"trial: {stage} ...", file=sys.stderr, flush=True))]


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    exit_at_once(main())
