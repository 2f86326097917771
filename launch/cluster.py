"""A run on a cluster: its scripts or manifests, and what starts, shows and ends it there.

    python launch/cluster.py render --on {slurm,ray,kubernetes,skypilot} --config R.toml   # writes them, starts nothing
    python launch/cluster.py submit --on slurm --config R.toml [--section.key VALUE ...]
    python launch/cluster.py status --on slurm --config R.toml
    python launch/cluster.py stop   --on slurm --config R.toml

The [cluster] section of the recipe says how many hosts the run has, of what size.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import os

from launch.clusters import kubernetes, ray_cluster, skypilot, slurm
from launch.clusters.host_layout import CONTAINER, check_new, cluster_folder, layout, write
from shared.config.recipe import ConfigError, fail, parse, recipe_parser
from shared.util.own_commands import is_installed

BACKENDS = {"kubernetes": kubernetes, "ray": ray_cluster, "skypilot": skypilot, "slurm": slurm}
APART = ("kubernetes", "skypilot")  # their hosts do not share this host's file system


def main(argv: list[str] | None = None) -> int:
    parser = recipe_parser(__doc__)
    parser.add_argument("action", choices=("render", "submit", "status", "stop"))
    parser.add_argument("--on", required=True, choices=sorted(BACKENDS), help="the cluster's scheduler")
    parser.add_argument("--out", default="", metavar="DIR", help="for what is written (default: RUN.cluster)")
    recipe, options = parse(parser, argv)
    if is_installed():
        return fail(ConfigError("the hosts of a cluster run a clone: clone Pronk there, make env, and call this in it"))
    backend = BACKENDS[options.on]
    try:
        folder = Path(options.out).resolve() if options.out else cluster_folder(recipe)
        made = layout(recipe, folder, CONTAINER if options.on in APART else None)
        if options.action == "render":
            files = backend.render(made)
            write(files, made)
            print("\n".join(str(folder / name) for name in (*files, "recipe.toml")))
            return 0
        if options.action == "submit" and options.on not in APART:
            check_new(recipe)
        print(getattr(backend, options.action)(made))
    except ValueError as error:
        return fail(error)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
